"""A process loads the modules of the drafter that it runs, and of no other: they cost start-up time, memory, and a
mistake in one of them would reach every rank."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actors.drafters.adjacency.config import RecyclingDrafterConfig
from actors.drafters.config import Placement
from actors.drafters.jacobi.config import JacobiDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from parallel.kernels.attention import has_attention

ROOT = Path(__file__).parents[3]
SERVER = """
import os, pickle, sys
import hydra, numpy, tokenizers, torch  # of others, and loaded by most probes: once for all of them
while request := sys.stdin.buffer.readline():
    probe, argument = pickle.loads(bytes.fromhex(request.decode()))
    if not os.fork():
        exec(probe, {"argument": argument})
        print(*sys.modules, flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("the probe failed", flush=True)
"""
"""Runs each probe in a process forked from one that has loaded none of our modules, and prints what it loaded."""
BUILD = """
import pickle
from actors.worker.factory import build_role
from parallel.comm.group import SINGLE
build_role(pickle.loads(argument), SINGLE)
"""
DRIVER = """
import cluster.engine
from cluster.config.compose import load_config
load_config(f"drafter={argument}".split())
"""
LAUNCHER = DRIVER + "import cluster.runtime.ray_backend\n"
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
"""
CHECK = """
from cluster.config.compose import load_config
from cluster.io.checkpoints import check_checkpoints
target, path = argument
chosen = ["target=hf", f"target.path={target}", "drafter=speculator", f"drafter.path={path}"]
config = load_config(chosen)
check_checkpoints(target, config.drafter)
config.drafter.memory(config.target, 1, "cpu")
"""
RUN = """
from cluster.config.compose import load_config
from cluster.engine import Engine
with Engine(load_config(["drafter=" + argument, "cluster=inprocess", "sampling.max_tokens=8"])) as engine:
    assert list(engine.generate(["def f("]))
"""
OURS = ("actors.", "parallel.", "cluster.")


@pytest.fixture(scope="module")
def loaded():
    """Our modules in a new process that ran a probe; none trains."""
    call = [sys.executable, "-c", SERVER]
    with subprocess.Popen(call, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        there, back = server.stdin, server.stdout
        assert there is not None and back is not None

        def ask(probe, argument):
            there.write(pickle.dumps((probe, argument)).hex() + "\n")
            there.flush()
            modules = {name for name in back.readline().split() if name.startswith(OURS)}
            assert modules, "the probe failed: its traceback is on stderr"
            assert not {name for name in modules if "training" in name}
            return modules

        yield ask
        there.close()


def rooms(modules):
    """The folders and files of `actors/drafters` among them."""
    return {module.split(".")[2] for module in modules if module.startswith("actors.drafters.")}


DRAFTERS = {
    "ngram": (NgramDrafterConfig(), {"lookup"}, 45),
    "suffix": (SuffixDrafterConfig(), {"lookup", "corpus", "scoped"}, 50),
    "jacobi": (JacobiDrafterConfig(), {"jacobi"}, 55),
    "recycling": (RecyclingDrafterConfig(), {"adjacency", "corpus", "scoped"}, 49),
    "model": (ModelDrafterConfig(), {"model"}, 112),
}
"""Record, rooms of its own, and modules of its rank at most."""
SHARED = {"config", "interface", "draft_ahead"}
"""The port of all drafters: records, the contract, how far ahead of a verdict to draft."""


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "jacobi")), "suffix", "recycling", "model"],
)
def test_a_draft_rank_loads_no_other_method(loaded, spec, models, name):
    drafter, own, most = DRAFTERS[name]
    drafter = replace(drafter, path=str(models["drafter"])) if isinstance(drafter, ModelDrafterConfig) else drafter
    modules = loaded(BUILD, pickle.dumps(replace(spec, drafter=drafter, role="draft")))
    assert rooms(modules) <= SHARED | own
    assert len(modules - WITHOUT_COMPILER - SUFFIX_KERNEL) <= most
    assert bool(SUFFIX_KERNEL & modules) == (name == "suffix" and has_attention())
    assert not {one for one in modules if one.startswith("actors.roles.target")}
    if not drafter.models():
        assert not {one for one in modules if one.startswith(("parallel.model", "parallel.speculators"))}
    assert "parallel.speculators.pard" not in modules, "of this checkpoint none is trained to fill masks"


def test_a_target_rank_loads_no_method(loaded, spec):
    """All that it has of a drafter on ranks of its own is the record."""
    separate = NgramDrafterConfig(placement=Placement.separate)
    modules = loaded(BUILD, pickle.dumps(replace(spec, drafter=separate)))
    assert rooms(modules) <= SHARED | {"lookup"} and "actors.drafters.lookup.suffix" not in modules
    elsewhere = ("parallel.self_speculation", "actors.roles.attached", "actors.roles.draft", "actors.worker.draft")
    assert not {one for one in modules if one.startswith(elsewhere)}
    assert not {one for one in modules if one.startswith("parallel.speculators")}


SPECULATORS = {"pard"} | {file.parent.name for file in ROOT.glob("parallel/speculators/*/__init__.py")}


@pytest.mark.extended
def test_a_speculator_loads_no_other_familys_runner(loaded, spec, speculator):
    drafter = SpeculatorDrafterConfig(path=str(speculator("medusa")))
    modules = loaded(BUILD, pickle.dumps(replace(spec, drafter=drafter, role="draft")))
    folders = {module.split(".")[2] for module in modules if module.startswith("parallel.speculators.")}
    assert "parallel.speculators.heads.runner" in modules
    assert not folders & (SPECULATORS - {"heads"}), "of the layouts of checkpoints one is loaded"
    assert rooms(modules) <= SHARED | {"speculator", "model"}


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param("ngram", marks=pytest.mark.slow), "jacobi"])
def test_an_engine_loads_the_record_of_its_drafter_alone(loaded, name):
    _, own, _ = DRAFTERS[name]
    found = rooms(loaded(DRIVER, name))
    assert found <= SHARED | own | {"registry", "vocabulary"}, "the tokenizer's file is everyone's"


LAYER_PARALLEL = "model drafter.path=pocket-deep drafter.parallel=layer drafter.ranks=2"
MOST_OF_A_LAUNCHER = {"ngram": 79, "model": 80, LAYER_PARALLEL: 82, "cascade": 89}


@pytest.mark.extended
@pytest.mark.parametrize("name", [*MOST_OF_A_LAUNCHER])
def test_a_launcher_of_actors_loads_neither_coordinator_nor_policy(loaded, name):
    """It sends its specification to another process. Nor PyTorch, which takes as long to load as all the rest."""
    modules = loaded(WITHOUT_TORCH + LAUNCHER, name)
    found = {module for module in modules if module.startswith(("actors.coordinator.", "actors.policy"))}
    assert found == {"actors.coordinator.spec"}
    assert len(modules) <= MOST_OF_A_LAUNCHER[name]


@pytest.mark.extended
@pytest.mark.parametrize(
    "recipe", ["eagle3", "chimera", "glide", "gloeckle", "kangaroo", "medusa", "dspark", "streaming"]
)
def test_what_is_to_know_of_a_speculator_before_a_start_needs_no_tensor(loaded, models, speculator, recipe):
    """A launcher reads the record and the headers of the checkpoint, and loads no PyTorch."""
    modules = loaded(WITHOUT_TORCH + CHECK, (models["target"], speculator(recipe)))
    assert "parallel.speculators.registry" in modules
    assert not {one for one in modules if one.endswith((".runner", ".layers", ".cells", ".decoder", "comm.group"))}


UNUSED = (
    "actors.coordinator.bridging",
    "actors.coordinator.separate_port",
    "actors.drafters.draft_ahead",
    "actors.grammars",
    "actors.protocol.draft_tree",
    "actors.protocol.leases",
    "actors.roles.bridge",
    "actors.sampling.edits",
    "actors.transport.local",
    "actors.transport.mailbox",
    "actors.verification.by_ratio",
    "actors.coordinator.request_logprobs",
    "actors.verification.features",
    "actors.verification.logprobs",
    "actors.verification.top_tokens",
    "cluster.config.errors",
    "cluster.io.prompts",
    "cluster.keys",
    "parallel.comm.rendezvous",
    "parallel.comm.symmetric",
    "parallel.kernels.experts",
    "parallel.kernels.mixtures",
    "parallel.kernels.packed_products",
    "parallel.kernels.packing",
    "parallel.kernels.suffixes",
    "parallel.model.encoder",
    "parallel.model.layers.padded",
    "parallel.model.layers.sdpa",
    "parallel.model.layers.split_kv",
    "parallel.runtime.cuda_graphs",
    "parallel.speculators",
)
"""What other drafters, rules, models, devices and requests need."""
WITHOUT_COMPILER = {"parallel.model.layers.sdpa", "parallel.model.layers.score_bias"}
"""What a machine needs whose products and attention are PyTorch's."""
SUFFIX_KERNEL = {"parallel.kernels.suffixes"}
"""What `drafter=suffix` needs where there is a compiler."""


@pytest.mark.extended
def test_a_run_of_a_lookup_loads_little(loaded):
    """One row is loaded of each table of families, rules, ports and backends: what is imported without use shows in the
    count, which is that of an engine and its ranks, in one process, after a request."""
    modules = loaded(RUN, "ngram")
    fallback = set() if has_attention() else WITHOUT_COMPILER
    found = sorted(modules & ({*UNUSED} - fallback))
    assert not found, found
    families = {name.rpartition(".")[2] for name in modules if name.startswith("parallel.model.families.")}
    assert families == {"registry", "fields", "llama"}
    assert len(modules - fallback) <= 151
