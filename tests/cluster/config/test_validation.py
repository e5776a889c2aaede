"""What the machines, the lengths and the jobs need of the rest: refused in one line, and accepted at the very bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import pocket
from cluster.config.compose import load_config
from tests.cluster.config.quick_loading import each_complaint_once, load_quickly

LOCAL = "use cluster=local or cluster=inprocess, or drop it"
NEAR = "pipeline.local_drafter=ngram: is for"
PLAIN = "cluster.link_delay_ms=1.0: is for one machine, where there is no network; " + LOCAL


UNFIT = [
    (
        ["target.numerics=invariant", "target.attention=sdpa"],
        "target.numerics=invariant: has no target.attention=sdpa, which computes rows together; drop one of them",
    ),
    (
        ["target.numerics=invariant", "target.kv_dtype=fp8", "target.device=cpu"],
        "target.numerics=invariant: target.kv_dtype=fp8 is read on a CPU by kernels that compute rows together",
    ),
    (
        ["target.numerics=invariant", "target.all_reduce=symmetric", "target.device=cuda"],
        "target.numerics=invariant: adds in rank order, and target.all_reduce=symmetric by sizes; drop one of them",
    ),
    *(
        (
            ["drafter=model", "pipeline.local_drafter=ngram", f"pipeline={pipeline}"],
            f"{NEAR} a drafter that works a",
        )
        for pipeline in ("sync", "pingpong", "plain")
    ),
    *(
        (
            ["pipeline.local_drafter=ngram", "pipeline=tree", f"drafter={drafter}"],
            f"{NEAR} a draft model far away; ",
        )
        for drafter in ("auto", "ngram", "cascade", "none", "routed")
    ),
    (
        [
            *("pipeline.local_drafter=ngram", "pipeline=tree", "drafter=pool", "drafter.at_once=2"),
            *("drafter.pools=[tcp://h:1,tcp://h:2]", f"drafter.key_files=[{__file__}]"),
        ],
        f"{NEAR} a draft model far away; use drafter=model, or drafter=pool for one at a time",
    ),
    *(
        (
            ["drafter=pool", f"drafter.pools=['{address}']", f"drafter.key_files=[{__file__}]"],
            f"drafter.pools={address}: is no address; give tcp://HOST:PORT",
        )
        for address in ("tcp://h:0", "tcp://h:65536", "tcp://:9700", "h:9700")
    ),
    (
        ["drafter=pool", "drafter.pools=[tcp://h:1]"],
        "drafter.key_files=[]: give the file with the key of each pool, or one for all",
    ),
    (
        ["pipeline.local_drafter=ngram", "pipeline=tree", "drafter=model", "verify=kseq"],
        "verify.rule=kseq would bias the output of a drafter that chooses its tokens and draws none; use ",
    ),
    (["cluster.nodes=2"], "cluster.nodes=2: is only for clusters of several nodes; drop it"),
    (["cluster=inprocess", "cluster.nodes=2"], "cluster.nodes=2: is only for clusters of several nodes; drop it"),
    (["cluster=inprocess", "cluster.interface=ib0"], "cluster.interface=ib0: is for processes; with cluster=inprocess"),
    (["cluster=inprocess", "cluster.address=a:1"], "cluster.address=a:1: is only for cluster=existing; add that"),
    (["cluster=existing"], "cluster.address='': give HOST:PORT of the Ray cluster, or auto"),
    (["cluster=slurm"], "cluster.address='': give HOST:PORT of the Ray cluster, or submit the job with `sbatch "),
    *(([f"cluster={name}", "cluster.address=a:1", "cluster.link_delay_ms=1"], PLAIN) for name in ("existing", "slurm")),
    (["placement.nodes={target:[a]}"], "placement.nodes={'target': ['a']}: is only for clusters of several node"),
    (["cluster=inprocess", "job=drill"], "cluster=inprocess: has no processes of this machine to kill; use clus"),
    (["job=drill", "cluster.silence_s=0"], "cluster.silence_s=0.0: must be above 0 for job=drill"),
    (["job=plan", "drafter=self"], "drafter.name=self: has no ranks to lay out; a plan needs drafter=model"),
    (["job=plan", "job.costs=/no.yaml"], "job.costs=/no.yaml: no such file; give the YAML of docs/planning.md, "),
    (["job=plan", "job.prompts=/no.jsonl"], "job.prompts=/no.jsonl: no such file; give a JSONL file with a `pro"),
    (["job=tree", "drafter=ngram"], "drafter.name=ngram: has no tree of a fixed shape; job=tree needs drafter=m"),
    (["job=tree", "verify=block"], "verify.rule=block: is for chains; measure with coupled, rejection, traversa"),
    (["job=search"], "drafter.name=auto: is not drafted by the target's own layers; job=search needs drafter=s"),
    (["job=datastore", "job.files=[]"], "job.files=[]: must name at least one file or pattern"),
    (["pipeline.min_draft_tokens=9"], "pipeline.min_draft_tokens=9: must be from 0 to drafter.num_draft_tokens="),
    (
        ["scheduler.max_num_batched_tokens=5"],
        "scheduler.max_num_batched_tokens=5: cannot hold one sequence's root and 8 draft tokens; raise it to at "
        "least 9",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), list(each_complaint_once(UNFIT)))
def test_what_does_not_fit_together_is_refused(overrides, line):
    with pytest.raises(ValueError) as caught:
        load_quickly(overrides)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.nodes=1"],
        ["cluster=inprocess", "cluster.link_delay_ms=1", "cluster.nodes=1"],
        ["cluster=existing", "cluster.address=auto", "cluster.nodes=5", "placement.nodes={target:[a]}"],
        ["cluster=slurm", "cluster.address=a:1", "placement.nodes={target:[a]}"],
        ["job=drill", "cluster.silence_s=1"],
        ["job=plan"],
        ["job=tree", "drafter=speculator"],
        ["drafter=model", "job=tree", "verify=kseq", "drafter.strategy=tree"],
        ["drafter=model", "job=tree", "verify=transport", "drafter.strategy=tree"],
        ["job=search", "drafter=self"],
        ["pipeline.min_draft_tokens=5"],
        ["drafter=none", "pipeline.min_draft_tokens=1"],
        ["scheduler.max_num_batched_tokens=9"],
    ],
)
def test_what_fits_together_is_accepted(overrides):
    load_quickly(overrides)


@pytest.mark.extended
def test_a_plan_reads_its_files_wherever_it_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("costs.yaml", "own.jsonl"):
        Path(name).touch()
    job = load_config(["job=plan"]).job
    assert (job.prompts, job.costs) == (str(pocket.PROMPTS.absolute()), "")
    job = load_config(["job=plan", "job.costs=costs.yaml", "job.prompts=own.jsonl"]).job
    assert (job.prompts, job.costs) == (str(tmp_path / "own.jsonl"), str(tmp_path / "costs.yaml"))


@pytest.mark.extended
def test_several_workloads_are_named_by_their_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").touch()
    here = load_config(["job=bench", f"job.prompts={tmp_path}", "job.workloads=[b,a]"]).job
    assert (here.prompts, here.workloads) == (str(tmp_path), ["b", "a"])
    assert load_config(["job=bench", "job.workloads=[completion,agent]"]).job.prompts == ""
    with pytest.raises(ValueError, match=r"^job.workload=c: is unknown; choose one of a, b$"):
        load_config(["job=bench", f"job.prompts={tmp_path}", "job.workloads=[a,c]"])


def test_a_folder_without_prompts_is_refused_by_its_own_name(tmp_path):
    with pytest.raises(ValueError, match=f"^job.prompts={tmp_path}: a folder without NAME.jsonl; give a JSONL file"):
        load_config(["cluster=inprocess", f"job.prompts={tmp_path}"])
