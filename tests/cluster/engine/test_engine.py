"""The engine in this process: the tokens it gives, however it is laid out, and what a client can do to it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.drafters.config import Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import PipelineConfig, PipelineName, SamplingConfig, SchedulerConfig, TargetConfig
from actors.protocol.membership import Ready
from actors.protocol.messages import Outputs, SamplingParams, VerdictBatch, VerifyBatch
from actors.transport.channel import CODEC, Link
from actors.transport.near import Exchange, NearLink
from cluster import engine as module
from cluster.client import Client, Connection
from cluster.completion import Completion
from cluster.config.jobs import GenerateConfig
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.engine import Engine, EngineError
from cluster.runtime import backend
from cluster.runtime.delay_proxy import Relay
from cluster.runtime.inprocess import InprocessBackend
from parallel.kernels.triton_launch import INTERPRETS, runs_on
from parallel.runtime import runner
from tests.matrices import in_turn

PROMPTS = ["def median(values):", "x", "class Stack:\n    def push", "for i in range(10): é😀"]
GREEDY = SamplingParams(max_tokens=24)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
EVERY_PROCESSOR = SamplingParams(
    temperature=0.8,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((70, 2.0), (71, -3.0)),
    bad_words=((80,), (81, 82)),
    min_tokens=6,
    max_tokens=16,
    seed=7,
)
LAYOUTS = {
    "model": dict(drafter="model"),
    "ngram": dict(drafter="ngram"),
    "model-tp2": dict(drafter="model", tp=2),
    "ngram-tp2": dict(drafter="ngram", tp=2),
    "tree": dict(drafter="tree"),
    "branches": dict(drafter="model", pipeline=PipelineConfig(PipelineName.branches, adaptive=False)),
    "pingpong": dict(drafter="ngram", pipeline=PipelineConfig(PipelineName.pingpong, adaptive=False)),
}


@pytest.fixture
def open_layout(open_engine, half_agreeing_drafter):
    def open_(name):
        choices = dict(LAYOUTS[name])
        if choices["drafter"] == "tree":
            choices["drafter"] = ModelDrafterConfig(
                path=str(half_agreeing_drafter),
                strategy=Strategy.tree,
                num_draft_tokens=8,
                depth=3,
                width=3,
                device="cpu",
            )
        return open_engine(**choices)

    return open_


def tokens_of(completions: list[Completion]) -> list[tuple[list[int], str | None]]:
    return [(completion.token_ids, completion.finish_reason) for completion in completions]


def test_a_target_that_makes_passes_ahead_of_their_batches_says_the_same(
    open_engine, half_agreeing_drafter, monkeypatch
):
    """Its rank is a thread that works as one of another process. Requests that join change the batch that is next."""

    def of_another_process(*arguments: Any) -> Any:
        return replace(rank_spec(*arguments), is_thread=False)

    rank_spec = backend.rank_spec
    monkeypatch.setattr(backend, "rank_spec", of_another_process)
    texts = [f"{name} = {name}({number})" for number, name in enumerate(["abs", "bin", "chr", "dir", "hex"] * 2)]
    places = SchedulerConfig(max_num_seqs=3)
    plain = tokens_of(open_engine("none", scheduler=places).generate(texts))
    drafting = ModelDrafterConfig(path=str(half_agreeing_drafter), device="cpu", placement=Placement.attached)
    engine = open_engine(drafting, scheduler=places, pipeline=PipelineConfig(PipelineName.sync, adaptive=False))
    assert tokens_of(engine.generate(texts)) == plain
    counters = engine.report().counters
    assert counters["num_passes_ahead"] > 0 and counters["num_accepted_tokens"] > 0


def collect(completion: Completion, most: int | None = None):
    """Iterate as a client would, over at most so many tokens."""

    async def iterate():
        tokens = []
        async for token in completion:
            tokens.append(token)
            if len(tokens) == most:
                break
        return tokens

    return asyncio.run(iterate())


@pytest.fixture(scope="module")
def expected_tokens(tiny_checkpoint):
    """What transformers decodes greedily for `PROMPTS`."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoint("Llama")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model: Any = AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        output = model.generate(ids, max_new_tokens=GREEDY.max_tokens, do_sample=False)
        tokens.append(output[0, ids.shape[1] :].tolist())
    return tokens


def test_an_engine_says_what_it_starts_waits_as_its_weights_need_and_closes_what_it_opened(
    tiny_launch, tmp_path, monkeypatch
):
    said, waits, closed = list[str](), dict[str, float](), list[Any]()

    class Watching(module.Supervisor):
        def __init__(self, backend, limits, **listeners):
            waits["startup"] = limits.startup_timeout_s
            super().__init__(backend, limits, **listeners)

    def connected(client, *arguments, silence_s):
        waits["silence"] = silence_s
        right(client, *arguments, silence_s=silence_s)

    right, close = Client.__init__, Connection.close
    monkeypatch.setattr(Client, "__init__", connected)
    monkeypatch.setattr(Connection, "close", lambda connection: closed.append(connection) or close(connection))
    monkeypatch.setattr(module, "Supervisor", Watching)
    monkeypatch.setattr(module, "load_allowance_s", lambda places, sizes: 7.0 * len(places) * len(sizes))
    cluster = ClusterConfig(ClusterName.inprocess, oversubscribe=True, startup_timeout_s=50.0, wait_s=30.0)
    separate = NgramDrafterConfig(placement=Placement.separate)
    config = tiny_launch(GenerateConfig(), drafter=separate, cluster=cluster)
    begun = set(threading.enumerate())
    with Engine(config, progress=said.append, log_dir=tmp_path) as engine:
        assert waits == {"startup": 64.0, "silence": 94.0}, "14 s for the weights of the target, beside two ranks"
        names = [place.identity for place in engine.places]
        assert engine.config is config and names == ["target-0", "draft-0"]
        assert said[0].startswith("layout\n  target-0") and "\nmemory\n  target: " in said[0]
        key = tmp_path / "secret"
        assert said[1:3] == [
            "starting target-0, draft-0",
            f"listening at {engine.address}, secret in {key}",
        ]
        loading = {f"importing libraries, loading weights ({count} of 2 ranks are ready)" for count in range(3)}
        assert set(said[3:]) <= loading | set(module.slow_kernels(engine.ready))
        assert key.read_text() == engine.secret
        assert list(engine.startup.seconds()) == ["imports", "cluster", "processes", "loading", "total"]
        while "coordinator" not in engine.pids():
            assert engine._reader.is_alive()
        assert engine.pids() == dict.fromkeys(["coordinator", *names], os.getpid())
        engine.wind_down(1e6)
        assert all(thread.daemon for thread in set(threading.enumerate()) - begun), "none keeps the process alive"
    assert closed == [engine._connection] and not key.exists()
    for thread in set(threading.enumerate()) - begun:
        thread.join(5.0)
        assert not thread.is_alive(), thread.name


def test_an_engine_that_cannot_write_its_key_leaves_nothing_behind(tiny_launch, tmp_path):
    (tmp_path / "file").touch()
    config = tiny_launch(GenerateConfig(), cluster=ClusterConfig(ClusterName.inprocess, oversubscribe=True))
    begun = set(threading.enumerate())
    with pytest.raises(OSError, match="file"):
        Engine(config, log_dir=tmp_path / "file" / "logs")
    assert not [thread.name for thread in set(threading.enumerate()) - begun]


def test_ranks_without_compiled_kernels_are_named_with_the_reason():
    facts = {"target-1": {"no_kernels": "no g++"}, "draft-0": {"no_kernels": "no rights"}, "draft2-0": {}}
    ready = {name: Ready(*identity_parts(name), facts[name]) for name in facts}
    ready["target-0"] = Ready("target", 0, {"no_kernels": "no g++"})
    said = "no compiled kernels, so passes take several times longer"
    assert module.slow_kernels(ready) == [f"target-0, target-1: {said}\n  no g++", f"draft-0: {said}\n  no rights"]
    assert module.slow_kernels({"draft2-0": ready["draft2-0"]}) == []


def identity_parts(identity: str) -> tuple[str, int]:
    role, _, rank = identity.partition("-")
    return role, int(rank)


LIKE_OTHERS = "ngram", "model-tp2"
"""Layouts whose parts others have too."""


@pytest.mark.parametrize("layout", list(in_turn(LAYOUTS, times=dict.fromkeys(LIKE_OTHERS, 0))))
def test_greedy_tokens_are_those_of_transformers_in_any_layout(open_layout, expected_tokens, layout):
    engine = open_layout(layout)
    assert [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)] == expected_tokens
    counters = engine.report().counters
    assert counters["num_spec_steps"] > 0
    may_be_none = LAYOUTS[layout]["drafter"] == "ngram" or layout == "branches"  # a miss may not be worth the wait
    assert counters["num_accepted_tokens"] > 0 or may_be_none, "the test shows nothing"
    assert counters["num_tokens"] == sum(map(len, expected_tokens))
    assert counters["num_stale"] == 0 or layout == "branches", "answers are late only where the target does not wait"


def in_fp8(source: Path, path: Path) -> Path:
    """A copy of a checkpoint with a scale for every output of its linear layers."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors[name.replace("weight", "weight_scale")] = scale
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    return path


@pytest.mark.extended
def test_tokens_are_the_same_on_the_kernels_of_cuda(
    open_engine, tiny_checkpoint, half_agreeing_drafter, tmp_path, monkeypatch
):
    """Which run in Triton's interpreter without a GPU; what they do not compute is PyTorch's. Of an FP8 target,
    dequantised at the start or packed: in float32 the sums differ in their last bits only."""
    device = "cpu" if INTERPRETS or not torch.cuda.is_available() else "cuda"
    if not runs_on(torch.device(device)):
        pytest.skip("needs triton (pip install triton), and its interpreter (TRITON_INTERPRET=1) or a CUDA device")
    monkeypatch.setattr(runner, "_WARM_ROWS", 2)  # the interpreter would take most of its time for them
    monkeypatch.setattr(runner, "_WARM_STEPS", 1)
    path, tokens = str(in_fp8(tiny_checkpoint("Llama"), tmp_path / "fp8")), []
    for attention, weights in (("sdpa", "auto"), ("triton", "packed")):
        target = TargetConfig(path=path, device=device, attention=attention, weights=weights)
        drafter = ModelDrafterConfig(
            path=str(half_agreeing_drafter), num_draft_tokens=2, device=device, attention=attention
        )
        engine = open_engine(drafter, target=target)
        tokens.append(tokens_of(engine.generate(["ab"], SamplingParams(max_tokens=3, ignore_eos=True))))
        assert engine.report().counters["num_spec_steps"] > 0
    assert tokens[1] == tokens[0]


@pytest.fixture(scope="module")
def sampled():
    """Tokens per sampling and prompt, as the first engine that was asked gave them."""
    return {}


def samplings_of_layouts():
    """Each layout with two samplings; by default with one, in turn, and not where others have the same parts."""
    for i, layout in enumerate(["plain", *LAYOUTS]):
        for j, sampling in enumerate((EVERY_PROCESSOR, SamplingParams(temperature=1.0, max_tokens=16, seed=3))):
            by_default = layout == "plain" or (i % 2 == j and layout not in (*LIKE_OTHERS, "model"))
            yield pytest.param(layout, sampling, marks=[] if by_default else pytest.mark.slow)


@pytest.mark.parametrize(("layout", "sampling"), list(samplings_of_layouts()))
def test_sampled_tokens_depend_on_neither_layout_nor_batch(open_layout, open_engine, sampled, layout, sampling):
    engine = open_engine("none") if layout == "plain" else open_layout(layout)
    for size in (1, 3, 8):
        asked = [engine.submit(f"{PROMPTS[i % 4]} {i}", replace(sampling, seed=sampling.seed + i)) for i in range(size)]
        for i, (tokens, reason) in enumerate(tokens_of([completion.result() for completion in asked])):
            assert (tokens, reason) == sampled.setdefault((sampling, i), (tokens, reason)), f"{i} of {size}"


def test_plain_and_speculating_requests_share_a_batch(open_engine):
    engine = open_engine()
    alone = tokens_of(engine.generate(PROMPTS, GREEDY))
    asked = [engine.submit(prompt, GREEDY, drafter=None if i % 2 else "none") for i, prompt in enumerate(PROMPTS * 2)]
    assert tokens_of([completion.result() for completion in asked]) == alone * 2
    assert [completion.stats.num_spec_steps > 0 for completion in asked] == [bool(i % 2) for i in range(8)]


class TestText:
    def test_iterating_gives_the_same_tokens_and_text(self, open_engine):
        engine = open_engine()
        waited = engine.generate(PROMPTS, GREEDY)

        async def iterate(completion):
            return [token async for token in completion]

        async def iterate_all():
            return await asyncio.gather(*(iterate(engine.submit(prompt, GREEDY)) for prompt in PROMPTS))

        for completion, tokens in zip(waited, asyncio.run(iterate_all()), strict=True):
            assert [token.id for token in tokens] == completion.token_ids
            assert [token.index for token in tokens] == list(range(len(tokens)))
            assert "".join(token.text for token in tokens) == completion.text
            assert completion.submitted_at <= completion.first_token_at <= completion.finished_at

    def test_an_ended_request_can_still_be_iterated_over(self, open_engine):
        (completion,) = open_engine().generate(PROMPTS[:1], GREEDY)
        assert (
            [token.id for token in collect(completion)] == completion.token_ids == [t.id for t in collect(completion)]
        )

    @pytest.mark.parametrize("drafter", [None, "none"])
    def test_a_stop_string_inside_a_draft(self, open_engine, tiny_checkpoint, drafter):
        """The drafter is the target itself, so the stop string lies in the middle of what was accepted."""
        drafter_config = ModelDrafterConfig(path=str(tiny_checkpoint("Llama")), num_draft_tokens=5, device="cpu")
        engine = open_engine(drafter_config, pace_ms=10)  # or all tokens may be there before the abort
        (whole,) = engine.generate([PROMPTS[0]], replace(LONG, max_tokens=40))
        stop, length = whole.text[7:10], 1
        while stop not in engine.tokenizer.decode(whole.token_ids[:length]):
            length += 1
        completion = engine.submit(PROMPTS[0], replace(LONG, stop=("never seen", stop)), drafter=drafter)
        tokens = collect(completion)
        assert completion.finish_reason == "stop" and completion.text == whole.text[: whole.text.index(stop)]
        assert "".join(token.text for token in tokens) == completion.text
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)], "a beginning of the same tokens"
        assert len(completion.token_ids) in (length, length + 1), "a character may wait for what follows it"
        assert completion.stats.num_spec_steps > 0 or drafter == "none"
        assert engine.report().counters["num_tokens"] < LONG.max_tokens, "the coordinator received the abort"

    def test_tokens_can_be_given_instead_of_text(self, open_engine):
        engine = open_engine("ngram")
        ids = engine.tokenizer.encode(PROMPTS[0]).ids
        text, tokens = engine.generate([PROMPTS[0], ids], GREEDY)
        assert text.token_ids == tokens.token_ids and tokens.prompt_token_ids == ids == text.prompt_token_ids

    def test_without_sampling_the_configured_one_holds(self, open_engine):
        engine = open_engine("ngram")
        (completion,) = engine.generate(PROMPTS[:1])
        assert completion.sampling == engine.config.sampling_params(engine.tokenizer)
        assert len(completion.token_ids) == engine.config.sampling.max_tokens


class TestRefusals:
    def test_a_prompt_that_is_too_long_ends_alone(self, open_engine):
        engine = open_engine()
        good = engine.submit(PROMPTS[0], GREEDY)
        bad = engine.submit([5] * 600, GREEDY)
        with pytest.raises(EngineError, match="600 tokens do not fit the context of 512; shorten it or raise target"):
            bad.result()
        with pytest.raises(EngineError, match="do not fit the context"):
            collect(bad)
        assert bad.finish_reason == "error" and good.result().finish_reason in ("stop", "length")

    @pytest.mark.parametrize(
        ("prompt", "sampling", "field"),
        [
            ([5, 257], GREEDY, "prompt"),
            ("x", replace(GREEDY, temperature=-1.0), "sampling.temperature"),
            ("x", replace(GREEDY, logit_bias=((300, 1.0),)), "sampling.logit_bias"),
        ],
    )
    def test_what_makes_no_sense_is_refused_at_once(self, open_engine, prompt, sampling, field):
        engine = open_engine("ngram")
        with pytest.raises(ValueError, match=f"^{field}"):
            engine.submit(prompt, sampling)
        assert engine.generate(["x"], GREEDY)[0].finish_reason, "other requests are not affected"

    def test_tokens_that_the_target_lacks_are_refused_before_anything_starts(self, open_engine, tiny_checkpoint):
        before = threading.enumerate()
        other = tiny_checkpoint("Llama", vocab_size=300, num_hidden_layers=1)
        with pytest.raises(ValueError, match=r"^drafter\.path: .* has 300 tokens, the target .* 257; use a drafter of"):
            open_engine(ModelDrafterConfig(path=str(other), device="cpu"))
        with pytest.raises(ValueError, match=r"^sampling\.logit_bias: names token 257, but the target has 257 tokens"):
            open_engine(sampling=SamplingConfig(logit_bias={257: 1.0}))
        assert threading.enumerate() == before


class TestLeaving:
    def test_an_aborted_request_ends_and_the_others_go_on(self, open_engine):
        engine = open_engine(pace_ms=10)
        plain = tokens_of(engine.generate(PROMPTS, GREEDY))
        victim = engine.submit(PROMPTS[0], LONG)
        others = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        victim.abort()
        assert victim.result(30).finish_reason == "abort" and len(victim.token_ids) < LONG.max_tokens
        assert tokens_of([completion.result() for completion in others]) == plain
        victim.abort()  # once more changes nothing
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain

    def test_leaving_the_iterator_early_aborts_the_request(self, open_engine):
        engine = open_engine(pace_ms=10)
        completion = engine.submit(PROMPTS[0], LONG)
        tokens = collect(completion, most=3)
        assert completion.result(30).finish_reason == "abort"
        assert [token.id for token in tokens] == completion.token_ids[:3] and len(completion.token_ids) < 400

    def test_a_loop_that_was_closed_over_an_iterator_harms_no_request(self, open_engine):
        engine = open_engine()
        loop = asyncio.new_event_loop()
        completion = engine.submit(PROMPTS[0], replace(LONG, max_tokens=60))
        left = aiter(completion)
        loop.run_until_complete(anext(left))
        loop.close()
        assert completion.result(30).finish_reason == "length"
        assert engine.generate(["x"], GREEDY)[0].finish_reason

    def test_waiting_may_be_bounded(self, open_engine):
        completion = open_engine().submit(PROMPTS[0], replace(LONG, max_tokens=60))
        with pytest.raises(TimeoutError, match="still running"):
            completion.result(timeout_s=0)
        assert len(completion.result().token_ids) == 60


def test_ranks_of_one_process_compute_with_the_threads_of_their_places(tiny_launch):
    with Engine(tiny_launch(GenerateConfig(), drafter=NgramDrafterConfig())) as engine:
        placed = {place.identity: place.num_threads for place in engine.places}
        assert {identity: ready.facts["num_threads"] for identity, ready in engine.ready.items()} == placed


def test_reports_are_windows(open_engine):
    engine = open_engine("ngram")
    engine.report(reset=True)
    (completion,) = engine.generate(PROMPTS[:1], GREEDY)
    assert engine.report().counters["num_tokens"] == len(completion.token_ids), "a look ends no window"
    report = engine.report(reset=True)
    assert report.counters["num_tokens"] == len(completion.token_ids)
    assert report.counters["num_requests_finished"] == 1 and report.spans
    assert engine.report().counters["num_tokens"] == 0


def test_processes_are_ended_once_the_coordinator_has_stopped_them(open_engine, monkeypatch):
    engine, how = open_engine("none"), []
    monkeypatch.setattr(engine._backend, "publish", how.append)
    engine.publish("report.html")
    assert how.pop() == "report.html"
    close = engine._backend.close
    monkeypatch.setattr(engine._backend, "close", lambda **options: how.append(options) or close(**options))
    engine.close()
    engine.close()
    assert how == [{"graceful": True}]


def test_ranks_that_are_not_ready_are_not_waited_for(open_engine, monkeypatch):
    """As where Ctrl-C interrupts the start: they import libraries, load weights, and answer nothing."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    observe, close, how = Engine._on_record, InprocessBackend.close, []
    monkeypatch.setattr(Engine, "_await_ranks", interrupted)
    monkeypatch.setattr(Engine, "_on_record", lambda self, one: None if type(one) is Ready else observe(self, one))
    monkeypatch.setattr(
        InprocessBackend, "close", lambda self, **options: how.append(options) or close(self, **options)
    )
    with pytest.raises(KeyboardInterrupt):
        open_engine("none")
    assert how == [{"graceful": False}]


@pytest.mark.extended
def test_two_engines_side_by_side(open_engine):
    engines = [open_engine("model"), open_engine("ngram")]
    asked = [[engine.submit(prompt, GREEDY) for prompt in PROMPTS] for engine in engines]
    first, second = ([completion.result() for completion in completions] for completions in asked)
    assert tokens_of(first) == tokens_of(second)
    assert all(isinstance(engine._connection._receiver, NearLink) for engine in engines), "no network"
    engines[0].close()
    assert tokens_of(engines[1].generate(PROMPTS, GREEDY)) == tokens_of(first)


def test_of_the_requests_that_wait_the_longest_begins_first(open_engine, monkeypatch):
    monkeypatch.setattr("actors.coordinator.sequence.LONGER_S", 1000.0)  # whenever they come
    engine = open_engine("none", scheduler=SchedulerConfig(max_num_seqs=1), pace_ms=30)
    running = engine.submit("a", LONG)
    known = {tokens: engine.submit("b", SamplingParams(max_tokens=3), expected_tokens=tokens) for tokens in (0, 1, 3)}
    engine.report()  # which is sent behind them
    running.abort()
    began = {tokens: completion.result().first_token_at for tokens, completion in known.items()}
    assert sorted(began, key=began.__getitem__) == [3, 1, 0]


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_what_threads_hand_over_is_what_other_processes_would_read(open_engine, monkeypatch, drafter):
    """No list where the reader of bytes has a tuple, which a thread could change later."""
    seen = []
    for name in ("send", "put"):
        method = getattr(Exchange, name)
        monkeypatch.setattr(Exchange, name, lambda *args, method=method: seen.append(args[-1]) or method(*args))
    open_engine(drafter).generate(PROMPTS, GREEDY)
    assert {VerifyBatch, VerdictBatch, Outputs} <= {type(record) for record in seen}
    for record in seen:
        assert CODEC.decode(CODEC.encode(record)) == record


def test_a_request_that_cannot_go_out_at_once_goes_out_as_soon_as_it_can(open_engine, monkeypatch):
    """The engine does not ask for it again: while no process listens, the link keeps it."""
    monkeypatch.setattr("cluster.client._RESUME_S", 10_000.0)
    engine = open_engine("none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    engine._connection._sender.close()
    engine._connection._sender = Link(address, "client/out", engine._backend.keys.of("client"))
    completion = engine.submit("x", SamplingParams(max_tokens=4, ignore_eos=True))
    relay = Relay(engine._backend._hub.address, 0.0, address)
    assert len(completion.result().token_ids) == 4
    engine.close()
    relay.close()
