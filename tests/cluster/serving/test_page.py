"""The page at `/`, its script in Node where there is one, and what it reads: who proposed each token of a stream."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any

import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from tests.cluster.serving.conftest import KEY, NUM_DRAFT_TOKENS, RunningServer, serving

BODY = {"model": "tiny-chat", "prompt": "def é(", "max_tokens": 40, "temperature": 0, "stream": True}
OPTIONS = {"include_usage": True, "include_proposers": True}


def sources(choice) -> list[tuple[str, str]]:
    return [(one["text"], one["by"]) for one in choice.proposers]


@pytest.mark.extended
@pytest.mark.parametrize("options", [{}, {"stop": ["é"]}, {"logit_bias": {"65": 20}}, {"n": 3, "temperature": 0.8}])
def test_a_stream_says_who_proposed_its_tokens(client, options):
    body = {**BODY, **options, "extra_body": {"ignore_eos": True}}
    chunks = list(client.completions.create(**body, stream_options=OPTIONS))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for choice in choices:
        assert "".join(text for text, _ in sources(choice)) == choice.text
    proposed = [by for choice in choices for _, by in sources(choice)]
    assert set(proposed) <= {"drafter", "target"}
    if "n" not in options:
        found = chunks[-1].metrics["speculative_decoding"]
        num_rounds = chunks[-1].usage.completion_tokens - found["num_accepted_draft_tokens"]
        if "stop" not in options:  # its last tokens were generated and not said
            assert proposed.count("drafter") == found["num_accepted_draft_tokens"] > 0
            assert proposed.count("target") == num_rounds > 40 / (NUM_DRAFT_TOKENS + 1)


@pytest.mark.extended
def test_without_a_draft_all_tokens_are_the_targets(client):
    chunks = client.completions.create(**BODY, stream_options=OPTIONS, extra_body={"speculative": {"enabled": False}})
    assert {by for chunk in chunks for choice in chunk.choices for _, by in sources(choice)} == {"target"}


@pytest.mark.extended
def test_several_drafters_are_named(chat_checkpoint, half_agreeing_drafter):
    drafter = AutoDrafterConfig(
        drafters=[
            NgramDrafterConfig(min_ngram=1, num_draft_tokens=NUM_DRAFT_TOKENS),
            ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=NUM_DRAFT_TOKENS, device="cpu"),
        ],
        num_draft_tokens=NUM_DRAFT_TOKENS,
    )
    with serving(chat_checkpoint, drafter) as server:
        client, named = server.client(), {}
        repetitive = {"logit_bias": {"65": 20}}  # which a lookup needs
        for name, more in (("ngram", repetitive), ("model", {})):
            options = {"ignore_eos": True, "speculative": {"drafter": name}}
            body: Any = {**BODY, **more, "stream_options": OPTIONS, "extra_body": options}
            chunks = list(client.completions.create(**body))
            tokens = [token for chunk in chunks for choice in chunk.choices for token in choice.proposers]
            named[name] = {(token["by"], token.get("level", "")) for token in tokens}
    assert named["model"] == {("drafter", "model"), ("target", "")}
    assert named["ngram"] == {("drafter", "ngram"), ("target", "")}


def test_a_chat_says_it_too_and_others_hear_nothing(client):
    chat = {"model": "tiny-chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "stream": True}
    chunks = list(client.chat.completions.create(**chat, stream_options=OPTIONS))
    named = [choice for chunk in chunks for choice in chunk.choices if hasattr(choice, "proposers")]
    assert named and all("".join(t for t, _ in sources(one)) == (one.delta.content or "") for one in named)
    silent = list(client.chat.completions.create(**chat))
    assert not any(hasattr(choice, "proposers") for chunk in silent for choice in chunk.choices)


def test_the_page_needs_nothing_else(server: RunningServer):
    status, headers, page = server.ask("/", key=None)
    assert status == 200 and headers.get_content_type() == "text/html"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(|innerHTML", page)
    assert server.ask("//", key=None)[0] == 401


STUB = """
const nodes = {};
const make = () => ({ value: "", checked: true, disabled: false, children: [], listeners: {}, className: "",
  append(...more) { this.children.push(...more); }, replaceChildren(...more) { this.children = more; },
  style: {}, attributes: {}, setAttribute(name, value) { this.attributes[name] = value; },
  addEventListener(name, act) { this.listeners[name] = act; } });
globalThis.document = { getElementById: (id) => (nodes[id] ??= make()), createElement: make,
  createElementNS: (_, kind) => Object.assign(make(), { kind }) };
const ask = globalThis.fetch;
globalThis.fetch = (path, options) => ask(`${process.argv[2]}/${path}`, options);
"""
RUN = """
Object.assign(nodes.prompt ??= make(), { value: process.argv[4] });
for (const [id, value] of Object.entries({ route: process.argv[5], max_tokens: "30", temperature: "0" }))
  document.getElementById(id).value = value;
document.getElementById("key").value = process.argv[3];
nodes.form.listeners.submit({ preventDefault() {} }).then(() => console.log(JSON.stringify({
  tokens: nodes.text.children.map((one) => [one.textContent, one.className]),
  figures: nodes.figures.textContent, kind: nodes.figures.className, send: nodes.send.disabled })));
"""


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("node") is None, reason="no Node on this machine")
@pytest.mark.parametrize(
    ("key", "route", "fails"), [(KEY, "completions", False), (KEY, "chat", False), ("wrong", "chat", True)]
)
def test_the_pages_script_shows_a_stream(server: RunningServer, tmp_path, key, route, fails):
    """The script runs in Node, over a document of stubs; the server is real."""
    script = re.search(r"<script>(.*)</script>", server.ask("/")[2], re.DOTALL)
    assert script is not None
    (tmp_path / "page.js").write_text(STUB + script[1] + RUN)
    command = ["node", str(tmp_path / "page.js"), server.url, key, "def f(", route]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert shown["send"] is False
    if fails:
        assert shown["kind"] == "error" and "no valid API key" in shown["figures"] and not shown["tokens"]
        return
    body = {"max_tokens": 30, "temperature": 0}
    asked = {"prompt": "def f("} if route == "completions" else {"messages": [{"role": "user", "content": "def f("}]}
    path = "/v1/completions" if route == "completions" else "/v1/chat/completions"
    _, _, reply = server.ask(path, {**body, **asked})
    choice = reply["choices"][0]
    text = choice["text"] if route == "completions" else choice["message"]["content"]
    assert "".join(one for one, _ in shown["tokens"]) == text
    assert {kind for _, kind in shown["tokens"]} == {"drafter", "target"}
    assert re.search(r"tokens, first after .* of them drafted, .* of draft tokens accepted", shown["figures"])


def test_the_timeline_has_the_lanes_of_the_latest_rounds(server: RunningServer):
    server.ask("/v1/completions", {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "ignore_eos": True})
    status, _, found = server.ask("/timeline")
    assert status == 200 and found["lanes"] == ["target", "draft"] and found["spans"][0]["start_ms"] == 0
    assert all(span["lane"] in found["lanes"] and 0 <= span["start_ms"] <= span["end_ms"] for span in found["spans"])
    verified = [span for span in found["spans"] if (span["lane"], span["name"]) == ("target", "verify")]
    assert 1 <= len(verified) <= 12 and found["names"]["verify"]["meaning"] == "target pass with drafts"
    assert server.ask("/timeline", key=None)[0] == 401


class Browser:
    """Headless Chromium, driven by its DevTools protocol over a pipe."""

    def __init__(self, program: str, folder) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        # the browser reads descriptor 3 and writes 4; the shell puts them there
        command = f'exec "$0" "$@" 3<&{orders} 4>&{answers}'
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *options, "about:blank"],
            pass_fds=(orders, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(orders)
        os.close(answers)
        self._number, self._read = 0, b""

    def ask(self, method: str, session: str | None = None, **params):
        self._number += 1
        order = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                part = os.read(self._answers, 1 << 16)
                assert part, "the browser has ended"
                self._read += part
            record, _, self._read = self._read.partition(b"\0")
            answer = json.loads(record)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> str:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.navigate", session, url=url)  # answered once the page has taken the place of the blank one
        return session

    def run(self, session: str, script: str):
        """The value of a script, once its promise is fulfilled."""
        options = {"expression": script, "awaitPromise": True, "returnByValue": True}
        result = self.ask("Runtime.evaluate", session, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def close(self) -> None:
        os.close(self._orders)
        os.close(self._answers)
        self._process.kill()
        self._process.wait()


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SEND = f"""
(async () => {{
  while (!document.getElementById("names")) await new Promise((done) => setTimeout(done, 20));
  document.getElementById("key").value = {json.dumps(KEY)};
  document.getElementById("prompt").value = "def f(";
  document.getElementById("max_tokens").value = "30";
  document.getElementById("send").click();
  do await new Promise((done) => setTimeout(done, 20)); while (document.getElementById("send").disabled);
  const tokens = [...document.getElementById("text").children];
  return {{
    text: document.getElementById("text").textContent,
    kinds: [...new Set(tokens.map((one) => one.className))].sort(),
    colours: [...new Set(tokens.map((one) => getComputedStyle(one).backgroundColor))].length,
    figures: document.getElementById("figures").textContent,
    lanes: [...document.querySelectorAll("#lanes text")].map((one) => one.textContent),
    bars: document.querySelectorAll("#lanes rect").length,
    widths: [...document.querySelectorAll("#lanes rect")].every((one) => one.getBoundingClientRect().width > 0),
    meanings: document.getElementById("names").textContent,
  }};
}})()
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_the_page_in_a_browser(server: RunningServer, tmp_path):
    """Its policy of content permits what it does, tokens are coloured, and the lanes are drawn."""
    assert CHROMIUM is not None
    browser = Browser(CHROMIUM, tmp_path)
    try:
        shown = browser.run(browser.open(server.url), SEND)
    finally:
        browser.close()
    _, _, reply = server.ask("/v1/completions", {"prompt": "def f(", "max_tokens": 30, "temperature": 0})
    assert shown["text"] == reply["choices"][0]["text"]
    assert shown["kinds"] == ["drafter", "target"] and shown["colours"] == 2
    assert "draft tokens accepted" in shown["figures"]
    assert shown["lanes"][:2] == ["target", "draft"] and shown["bars"] > 4 and shown["widths"]
    assert "target pass with drafts" in shown["meanings"]
