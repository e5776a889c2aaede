"""`job=chat`: answers are those of plain decoding of the written chat; what Ctrl-C and a full context do."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal

import pytest
from rich.console import Console

from actors.options import SamplingConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.config.jobs import ChatConfig
from cluster.engine import Engine
from cluster.io.console import Terminal
from cluster.jobs.chat import Chat, converse, run
from cluster.serving.chat_template import ChatTemplate

SOURCE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}[assistant]"


@pytest.fixture
def launch(tiny_launch, tiny_checkpoint, tmp_path):
    """A launch whose target has a chat template."""
    path = tmp_path / "with-template"
    shutil.copytree(tiny_checkpoint("Llama"), path)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": SOURCE}))

    def make(*, system: str = "", pace_ms: float = 0.0, max_tokens: int = 13):
        target = TargetConfig(path=str(path), device="cpu", pace_ms=pace_ms, max_model_len=200)
        sampling = SamplingConfig(max_tokens=max_tokens, ignore_eos=True)
        return tiny_launch(ChatConfig(system=system), target=target, sampling=sampling)

    return make


def plain(engine: Engine, text: str, num: int) -> str:
    tokens = engine.tokenizer.encode(text, add_special_tokens=False).ids
    params = SamplingParams(max_tokens=num, ignore_eos=True)
    return engine.generate([tokens], params, drafter="none")[0].text


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_each_line_is_answered_after_those_before_it(launch, tmp_path, monkeypatch, capsys):
    typed(monkeypatch, "hi", "", "more", "/new", "hi")
    run(launch(system="be brief"), tmp_path)
    shown = capsys.readouterr().out
    with Engine(launch()) as engine:
        text = "[system]be brief\n[user]hi\n"
        first = plain(engine, f"{text}[assistant]", 13)
        second = plain(engine, f"{text}[assistant]{first}\n[user]more\n[assistant]", 13)
    note = r"\n\[13 tokens, length; first after [\d.]+ s; then [\d.]+ tokens/s; 4\.00 tokens per verified draft; "
    note += r"100% of draft tokens accepted\]\n\n"
    answers = [re.escape(f"> {line}\n{text}") for line, text in (("hi", first), ("more", second))]
    opening = re.escape("> \n")
    forgotten = re.escape("> /new\n")
    assert re.search(f"{answers[0]}{note}{opening}{answers[1]}{note}{forgotten}{answers[0]}{note}$", shown)


def test_bytes_that_are_no_text_are_shown_as_such(launch, tmp_path, monkeypatch, capsys):
    """Where the locale has Python read them as halves of surrogate pairs."""
    typed(monkeypatch, b"a\xffb".decode("utf-8", "surrogateescape"))
    run(launch(), tmp_path)
    assert capsys.readouterr().out.count("> a\ufffdb\n") == 1


class Interrupts(io.StringIO):
    """Sends Ctrl-C once the first part of an answer is written."""

    sent = False

    def write(self, text: str) -> int:
        if not self.sent and text.strip():
            self.sent = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.mark.extended
def test_ctrl_c_ends_the_answer_and_not_the_chat(launch, monkeypatch):
    shown = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    with Engine(launch(pace_ms=50, max_tokens=150)) as engine:
        chat = Chat(engine, ChatTemplate(SOURCE, {}))
        shown.sent = True  # not by the line that is read
        typed(monkeypatch, "a", "b")
        terminal = Terminal(Console(file=shown, width=500))
        ask = chat.ask

        def interrupted(text: str):
            shown.sent = text != "a"
            return ask(text)

        monkeypatch.setattr(chat, "ask", interrupted)
        converse(chat, terminal)
    notes = re.findall(r"\[(\d+) tokens, (\w+);", shown.getvalue())
    assert [reason for _, reason in notes] == ["abort", "length"]
    assert 0 < int(notes[0][0]) < 150
    assert signal.getsignal(signal.SIGINT) is before


def test_the_oldest_turns_are_forgotten_and_a_long_message_is_refused(launch):
    with Engine(launch(max_tokens=15)) as engine:
        chat = Chat(engine, ChatTemplate(SOURCE, {}), system="s")
        for number in range(8):
            chat.answered(chat.ask(f"turn {number}").result().text)
        last = chat.ask("last").result()
        written = engine.tokenizer.decode(last.prompt_token_ids)
        assert written.startswith("[system]s\n[user]turn ") and "turn 0" not in written
        assert len(last.token_ids) == 15
        chat.answered(last.text)
        with pytest.raises(ValueError, match=r"the message has \d+ tokens, the context 200; shorten it"):
            chat.ask("long " * 300)
        again = chat.ask("last").result()  # the chat is as it was
        assert engine.tokenizer.decode(again.prompt_token_ids).count("last") == 2
        near = chat.ask("x " * 80).result()  # alone, and with less room than an answer may take
        assert near.prompt_token_ids and len(near.prompt_token_ids) + len(near.token_ids) <= 200


def test_a_checkpoint_without_a_template_is_refused_before_the_engine_starts(tiny_launch, tmp_path):
    with pytest.raises(ValueError, match=r"has no chat template \(chat_template\.jinja or .*\); use job=generate"):
        run(tiny_launch(ChatConfig()), tmp_path)
