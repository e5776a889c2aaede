"""`job=drill` on an engine in this process: it passes what is right, and fails with code 1 whatever differs.

The processes that it kills stand beside the engine. That real ones recover is shown in `tools/chaos/test_drill.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from actors.verification.rules import RULES
from cluster import launch
from cluster.completion import Completion, EngineError
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.engine import Engine
from cluster.jobs import drill
from cluster.runtime.supervisor import Incident
from cluster.tools.chaos import drill as chaos

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
NUM_PROMPTS, NUM_FAULTS = 3, 2


class StruckEngine(Engine):
    """An engine in this process, with two processes beside it that are replaced when they end."""

    replaces = True

    def __init__(self, config, **options):
        super().__init__(replace(config, cluster=ClusterConfig(ClusterName.inprocess)), **options)
        self.beside = {name: subprocess.Popen(SLEEP) for name in ("draft-0", "target-0")}
        self.ended = threading.Event()
        self.watch = threading.Thread(target=self.replace_all)
        self.watch.start()

    def replace_all(self):
        while not self.ended.wait(0.01):
            for name, process in self.beside.items():
                if process.poll() is not None and self.replaces:
                    self.supervisor.incidents.append(Incident(name, 0, "ended", time.monotonic()))
                    self.beside[name] = subprocess.Popen(SLEEP)

    def pids(self):
        return {name: process.pid for name, process in self.beside.items()}

    def close(self):
        self.ended.set()
        self.watch.join()
        for process in self.beside.values():
            process.kill()
            process.wait()
        super().close()


@pytest.fixture
def run_drill(tiny_checkpoint, half_agreeing_drafter, write_prompts, one_free_thread, entered, monkeypatch, tmp_path):
    """The command line with `job=drill`; returns its exit code, `drill.json` and the last line on stderr."""
    monkeypatch.setattr(drill, "Engine", StruckEngine)
    prompts = write_prompts(*({"prompt": text} for text in ("Name a bird.", "abab" * 8, "def f():")))
    arguments = [
        "drafter=model",
        "job=drill",
        f"job.prompts={prompts}",
        f"job.faults={NUM_FAULTS}",
        "job.concurrency=2",
        "job.spacing_s=0.1",
        "job.signals=[SIGKILL]",
        f"target.path={tiny_checkpoint('Llama')}",
        f"drafter.path={half_agreeing_drafter}",
        "target.device=cpu",
        "drafter.device=cpu",
        "cluster=local",
        "verify=rejection",
        "pipeline.adaptive=false",
        "sampling.max_tokens=12",
        "sampling.ignore_eos=true",
        f"hydra.run.dir={tmp_path}/run",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]

    def run():
        code, _, err = entered(*arguments)
        return code, json.loads((tmp_path / "run" / "drill.json").read_text()), err.splitlines()

    return run


def is_of_the_drill() -> bool:
    """Whether this is a client of the drill, not the plain decoding before it."""
    return threading.current_thread().name.startswith("client-")


def test_a_drill_whose_requests_keep_their_tokens_passes(run_drill):
    code, report, lines = run_drill()
    assert (code, report["passed"], lines) == (launch.SUCCESS, True, [])
    assert report["num_faults"] == NUM_FAULTS and report["num_requests"] > 0 and report["tokens"] > 0
    assert (report["num_unequal_requests"], report["unequal_prompts"]) == (0, [])
    assert (report["num_failed"], report["failures"]) == (0, [])
    assert report["counters"]["num_accepted_tokens"] > 0, "the requests that were compared were drafted for"


@pytest.mark.slow
def test_a_drill_under_a_rule_that_accepts_whatever_was_drafted_fails(run_drill, monkeypatch):
    """By default the tokens of one request differ (below), and such a rule fails certificates (`test_certify.py`)."""

    def accept_always(draft, target_row, random_source):
        tree = draft.tree
        leaf = len(tree.parents) - 1
        return tuple(tree.path_to(leaf)), random_source.sample(target_row(leaf), leaf)

    monkeypatch.setitem(RULES, "rejection", accept_always)
    code, report, (line,) = run_drill()
    assert (code, report["passed"]) == (launch.FAILURE, False)
    assert report["num_unequal_requests"] > 0 and report["unequal_prompts"]
    assert "have other tokens than plain decoding; see drill.json" in line


@pytest.mark.extended
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda tokens: [*tokens[:-1], tokens[-1] + 1], id="the last token"),
        pytest.param(lambda tokens: tokens[:-1], id="one missing", marks=pytest.mark.slow),
        pytest.param(lambda tokens: [*tokens, tokens[-1]], id="one more", marks=pytest.mark.slow),
        pytest.param(lambda tokens: tokens[::-1], id="their order", marks=pytest.mark.slow),
    ],
)
def test_a_drill_fails_if_the_tokens_of_a_single_request_differ(run_drill, monkeypatch, edit):
    """The second prompt's, once; all others are right."""
    result, submit, number = Completion.result, Engine.submit, []

    def submitted(engine, content, *arguments, **options):
        completion = submit(engine, content, *arguments, **options)
        if content.startswith("abab") and is_of_the_drill() and not number:
            number.append(completion.request_id)
        return completion

    def edited(completion, *arguments):
        done = result(completion, *arguments)
        if completion.request_id in number:
            done.token_ids = edit(done.token_ids)
        return done

    monkeypatch.setattr(Engine, "submit", submitted)
    monkeypatch.setattr(Completion, "result", edited)
    code, report, (line,) = run_drill()
    assert len(number) == 1 and (code, report["passed"]) == (launch.FAILURE, False)
    assert (report["num_unequal_requests"], report["unequal_prompts"], report["num_failed"]) == (1, [2], 0)
    assert f"1 of {report['num_requests']} have other tokens than plain decoding; see drill.json" in line


@pytest.mark.extended
@pytest.mark.parametrize(
    "error",
    [pytest.param(EngineError("the target ended"), marks=pytest.mark.slow), KeyError("a defect of the client")],
)
def test_a_drill_fails_if_a_request_fails(run_drill, monkeypatch, error):
    submit, raised = Engine.submit, []

    def submitted(engine, *arguments, **options):
        if is_of_the_drill() and not raised:
            raised.append(error)
            raise error
        return submit(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "submit", submitted)
    code, report, (line,) = run_drill()
    assert (code, report["passed"], report["num_failed"]) == (launch.FAILURE, False, 1)
    assert report["failures"][0] in (str(error), repr(error)) and "job=drill: " in line


@pytest.mark.extended
def test_a_drill_fails_if_a_process_is_not_replaced(run_drill, monkeypatch):
    monkeypatch.setattr(StruckEngine, "replaces", False)
    monkeypatch.setattr(chaos, "_LIMIT_S", 0.5)
    code, report, (line,) = run_drill()
    assert (code, report["passed"], report["num_faults"]) == (launch.FAILURE, False, 0)
    assert "no recovery after" in line and report["num_unequal_requests"] == 0


@pytest.mark.extended
def test_a_drill_in_which_no_request_ended_fails(run_drill, monkeypatch):
    monkeypatch.setattr(chaos.Drill, "_submit_all", lambda drill: None)
    monkeypatch.setattr(chaos.Drill, "_inflict", lambda drill, strikes: chaos.Fault(strikes, 0.1, 0.1, 0.1))
    code, report, (line,) = run_drill()
    assert (code, report["passed"], report["num_requests"]) == (launch.FAILURE, False, 0)
    assert "job=drill: no request ended" in line
