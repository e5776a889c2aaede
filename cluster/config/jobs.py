"""The configuration record of every job: what `job=NAME` runs, its options, and what their values may be.

Loads no PyTorch. A record must not know how its job is run; what it needs of the rest of the configuration is checked
in `validation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from actors.options import MAX_RANKS, Parallel, PipelineName
from actors.protocol.sampling_params import TEMPERATURE
from parallel.ranges import Choice, OneOf, Range, require

DATA = ("target", "fixed", "on_policy", "mixed")
"""Kinds of text that `job=train` takes a drafter's loss on."""

AVERAGES = ("all", "participants")
"""Whose gradients of a parameter several ranks of `job=train` average."""

SIGNALS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM", "SIGABRT")
PARALLELS, PIPELINES = tuple(map(str, Parallel)), tuple(map(str, PipelineName))


@dataclass(frozen=True, slots=True)
class JobConfig(Choice):
    """Base of every job's record."""

    name: str = ""
    """Set by the choice `job=`."""


@dataclass(frozen=True, slots=True)
class PromptsJobConfig(JobConfig):
    """Base of the jobs that complete prompts."""

    prompts: str = ""
    """JSONL file with a `prompt` field or Spec-Bench `turns` per line, of which the first is taken, or a folder of such
    files, of which `job.workload` names one; empty = bundled prompts. A line may also have `category`, `source`,
    `question_id` or `task_id`, and the `drafter` of its prompt; `sampling.*` hold for all of them."""
    workload: str = "completion"
    """Bundled prompts: completion (held-out code), editing (answers copy from the prompt), or agent (sessions whose
    prompts repeat each other); of a folder, the file NAME.jsonl or NAME/question.jsonl."""
    limit: Annotated[int, Range(0, zero="all prompts")] = 8
    """Prompts of the file at most, in its order and spread evenly over its categories; 0 = all."""


@dataclass(frozen=True, slots=True)
class GenerateConfig(PromptsJobConfig):
    """Complete prompts and report how speculation went."""

    name: str = "generate"
    concurrency: Annotated[int, Range(0, zero="all at once")] = 1
    """Requests in flight; 0 = all at once. The default measures the latency of a single request."""
    baseline: bool = True
    """Also time plain decoding of the same prompts, for `speedup_vs_ar`, with all cores that the target has alone."""
    resume: bool = False
    """Continue from `completions.jsonl` in the run directory: prompts that are finished there are not run again.
    Refused if `report.json` there tells of another target or other sampling."""
    trace: bool = True
    """Record both lanes and write `timeline.json` and `timeline.png`."""


@dataclass(frozen=True, slots=True)
class BenchConfig(PromptsJobConfig):
    """Measure configurations against plain decoding in one run. An axis that is empty stays as configured."""

    name: str = "bench"
    repeats: Annotated[int, Range(1)] = 3
    """Measured runs of each configuration; medians are reported."""
    warmup: Annotated[int, Range(0)] = 1
    """Unmeasured runs before them, over as many prompts as are in flight."""
    workloads: list[str] = field(default_factory=list)
    """Axis: `job.workload`."""
    drafters: list[Any] = field(default_factory=list)
    """Axis: choices of `drafter=`, or their keys as `{name: model, path: DIR}`, or a cascade's levels as
    `[ngram,model]`."""
    pipelines: list[str] = field(default_factory=list)
    """Axis: choices of `pipeline=`."""
    temperatures: Annotated[list[float], TEMPERATURE] = field(default_factory=list)
    """Axis: `sampling.temperature`."""
    batches: Annotated[list[int], Range(1)] = field(default_factory=list)
    """Axis: requests in flight; one if empty."""
    draft_lengths: Annotated[list[int], Range(1)] = field(default_factory=list)
    """Axis: `drafter.num_draft_tokens`, each kept whatever it costs, as with pipeline.adaptive=false."""
    parallels: list[str] = field(default_factory=list)
    """Axis: `drafter.parallel`; single takes one rank, the others `drafter.ranks`."""
    contexts: Annotated[list[int], Range(1)] = field(default_factory=list)
    """Axis: prompt lengths in tokens: each prompt, the texts that follow it in the file, then modules of Python's
    library, cut to the length; no text comes twice. The prompts as they are if empty."""
    peers: list[str] = field(default_factory=list)
    """Other engines to time on the same prompts, plain and by their own speculation, in the number types they choose
    and in ours: transformers, openvino-genai, llama-cpp, vllm. All but the first are installed by the user, run on a
    CPU and decode greedily; vllm alone takes several requests at a time, from the environment whose interpreter the
    variable SPECDEC_VLLM_PYTHON names."""


@dataclass(frozen=True, slots=True)
class ServeConfig(JobConfig):
    """Serve the target over HTTP, to clients of OpenAI's API; `server.*` has the options."""

    name: str = "serve"


@dataclass(frozen=True, slots=True)
class ChatConfig(JobConfig):
    """Chat with the target in the terminal, by its checkpoint's chat template and as `sampling.*` say."""

    name: str = "chat"
    system: str = ""
    """Message of the role `system` before the chat; empty = none."""


@dataclass(frozen=True, slots=True)
class CertifyConfig(PromptsJobConfig):
    """Prove that speculation leaves the output of this target unchanged."""

    name: str = "certify"
    limit: Annotated[int, Range(0, zero="all prompts")] = 6
    concurrency: Annotated[int, Range(0, zero="all at once")] = 4
    """Requests in flight; 0 = all at once."""
    temperatures: Annotated[list[float], replace(TEMPERATURE, filled=True)] = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures to certify, in place of `sampling.temperature`; 0 = greedy."""
    seeds: Annotated[list[int], Range(-(2**63), 2**64 - 1, filled=True)] = field(default_factory=lambda: [0, 1])
    """Seeds of sampled outputs, in place of `sampling.seed`."""
    contexts: Annotated[int, Range(1)] = 3
    """Prompts after which the next token is drawn `job.draws` times."""
    draws: Annotated[int, Range(100, remedy="fewer show nothing")] = 4000
    """Draws after each of them, at every temperature above 0; more draws detect a smaller bias."""
    always_draft: bool = True
    """Ask for a draft in every round, as `pipeline.min_draft_tokens=1` does: a round without one tests nothing. false =
    only while drafting measures faster than plain decoding, as the configured pipeline decides."""
    significance: Annotated[float, Range(above=0, below=1)] = 0.001
    """Probability that an exact rule fails by chance, over all comparisons of distributions together."""
    power: Annotated[float, Range(above=0, below=1)] = 0.99
    """Probability with which a bias of the reported size would have been detected."""


@dataclass(frozen=True, slots=True)
class DrillConfig(PromptsJobConfig):
    """Kill and freeze processes at random moments under load, and verify that every request survives."""

    name: str = "drill"
    concurrency: Annotated[int, Range(1)] = 4
    """Requests in flight."""
    faults: Annotated[int, Range(1)] = 8
    """Faults, one after the other: a process of every role is sent every signal, in random order."""
    pairs: Annotated[float, Range(0, 1)] = 0.0
    """Share of the faults that strike two processes of different roles at the same moment, from 0 to 1."""
    signals: Annotated[list[str], OneOf(SIGNALS, filled=True)] = field(default_factory=lambda: ["SIGKILL", "SIGSTOP"])
    """Signals to send: SIGKILL ends a process, SIGSTOP freezes it."""
    spacing_s: Annotated[float, Range(0)] = 1.0
    """Mean seconds from one recovery to the next fault."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of the order of the faults and the times between them."""


@dataclass(frozen=True, slots=True)
class PlanConfig(JobConfig):
    """Predict the speed of every layout, here or on a described cluster, and try the best of them."""

    name: str = "plan"
    costs: str = ""
    """YAML file with the pass costs of a cluster to plan for; empty = measure this machine."""
    prompts: str = ""
    """JSONL file with a `prompt` field or Spec-Bench `turns` per line; empty = the held-out prompts of the bundled
    pair."""
    limit: Annotated[int, Range(0, zero="all prompts")] = 4
    """Prompts of the file at most, in its order and spread evenly over its categories; 0 = all."""
    batch: Annotated[int, Range(1)] = 1
    """Requests in flight."""
    draft_lengths: Annotated[list[int], Range(1, filled=True)] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8])
    """`drafter.num_draft_tokens` to choose from."""
    target_ranks: Annotated[list[int], Range(1)] = field(default_factory=list)
    """`target.tp` to choose from; empty = every power of two that fits."""
    draft_ranks: Annotated[list[int], Range(1)] = field(default_factory=list)
    """`drafter.ranks` to choose from; empty = every power of two that fits."""
    parallels: Annotated[list[str], OneOf(PARALLELS)] = field(default_factory=lambda: list(PARALLELS))
    """`drafter.parallel` to choose from."""
    layer_groups: Annotated[list[int], Range(1)] = field(default_factory=lambda: [2, 3, 4])
    """`drafter.layer_group` to choose from."""
    pipelines: Annotated[list[str], OneOf(PIPELINES)] = field(default_factory=lambda: list(PIPELINES[1:]))
    """`pipeline` to choose from; plain decoding is always among them."""
    seconds: Annotated[float, Range(above=0)] = 1.5
    """Seconds to measure every role in every shape."""
    trials: Annotated[int, Range(0, zero="none")] = 2
    """Layouts, the best first, that are run and compared with their predictions; 0 = none."""
    repeats: Annotated[int, Range(1)] = 3
    """Measured runs of each; medians are reported."""
    ablation: bool = False
    """Also measure what running layers side by side costs in acceptance, by calibration policy."""
    context: Annotated[int, Range(0, cap=1_000_000)] = 0
    """Tokens of text before the output, with `costs` that say what they take (`context_ms`)."""
    fleet: str = ""
    """YAML file with regions, prices, load and losses, in place of `costs`: how many draft pools, where, for how many
    targets each, and what a million tokens costs (docs/fleet.md)."""
    pool_targets: Annotated[list[int], Range(1, filled=True)] = field(default_factory=lambda: [2, 4, 8])
    """Targets that a draft pool serves, about, to choose from; a drafter for each target is always a layout."""

    def check_fields(self, where: str) -> None:
        require(not (self.costs and self.fleet), f"{where}.fleet", self.fleet, "replaces job.costs; give one of them")
        remedy = "is read with a cost file; add job.costs=FILE, or give prompts of that length"
        require(bool(self.costs) or not self.context, f"{where}.context", self.context, remedy)


@dataclass(frozen=True, slots=True)
class DatastoreConfig(JobConfig):
    """Make the datastore file of `drafter=rest` from text files, in the target's tokens."""

    name: str = "datastore"
    files: list[str] = field(default_factory=list)
    """Text files, or JSONL with a `text` or `prompt` field: paths or patterns such as `texts/**/*.txt`."""
    out: str = ""
    """File to write, 8 bytes per token; empty = `datastore` in the run directory."""

    def check_fields(self, where: str) -> None:
        require(bool(self.files), f"{where}.files", self.files, "must name at least one file or pattern")


@dataclass(frozen=True, slots=True)
class VocabularyConfig(PromptsJobConfig):
    """Count the tokens that the target writes, or those of text files, into a token list for `drafter.vocabulary`."""

    name: str = "vocabulary"
    limit: Annotated[int, Range(0, zero="all prompts")] = 0
    concurrency: Annotated[int, Range(0, zero="all at once")] = 4
    """Requests in flight; 0 = all at once."""
    files: list[str] = field(default_factory=list)
    """Count these texts instead of completing prompts: paths or patterns, as of job=datastore."""
    size: Annotated[int, Range(0, zero="every token that occurred")] = 0
    """Tokens to list, at most; 0 = every token that occurred."""
    out: str = ""
    """File to write; empty = `vocabulary.json` in the run directory."""


@dataclass(frozen=True, slots=True)
class TreeConfig(PromptsJobConfig):
    """Measure acceptance by rank and write the best fixed trees for it into a file for `drafter.tree`."""

    name: str = "tree"
    limit: Annotated[int, Range(0, zero="all prompts")] = 16
    nodes: Annotated[int, Range(1, cap=1024)] = 31
    """Draft tokens of the largest tree; smaller ones are written too."""
    depth: Annotated[int, Range(1, cap=128)] = 8
    """Levels of a tree, at most: one pass of the draft model for each."""
    width: Annotated[int, Range(1, cap=64)] = 8
    """Children of a node, at most."""
    out: str = ""
    """File to write; empty = `trees.json` in the run directory."""


SEARCHES = ("bayesian", "random", "swift")
"""Ways in which `job=search` looks for layers to draft with."""


@dataclass(frozen=True, slots=True)
class SearchConfig(PromptsJobConfig):
    """Search the sublayers that drafts of the target by itself leave out, for `drafter.layers` of drafter=self."""

    name: str = "search"
    methods: Annotated[list[str], OneOf(SEARCHES, filled=True)] = field(default_factory=lambda: ["bayesian"])
    """bayesian: by a Gaussian process over all masks of sublayers (Draft & Verify); random: masks drawn at random, to
    compare with; swift: the search of drafter.search=swift, while it completes the prompts."""
    evaluations: Annotated[int, Range(2)] = 150
    """Masks that bayesian and random try, each."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of the masks."""
    out: str = ""
    """File to write, for `drafter.layers`; empty = `layers.json` in the run directory."""


@dataclass(frozen=True, slots=True)
class TrainConfig(JobConfig):
    """Train a drafter for `target.path` by a recipe."""

    name: str = "train"
    recipe: str = "distill"
    """What to train, as docs/recipes.md lists it; distill = a plain draft model, specdec = one that fills blocks, for a
    target with an encoder."""
    options: dict[str, Any] = field(default_factory=dict)
    """The recipe's own settings, as `{divergence: tvd}`; docs/recipes.md lists them."""
    minutes: Annotated[float, Range(above=0)] = 5.0
    """Minutes to train, at most; the first of minutes and steps that is spent ends the training, and the learning rate
    falls towards it."""
    steps: Annotated[int, Range(0, zero="minutes alone decide")] = 0
    """Optimizer steps, at most; 0 = minutes alone decide."""
    data: Annotated[str, OneOf(DATA)] = "target"
    """Text to train on: target = what the target writes after the prompts, fixed = the text that the prompts are cut
    from, on_policy = what the drafter itself writes after them, mixed = half of it the target's, half its own. The
    last two are for distill."""
    temperatures: Annotated[list[float], replace(TEMPERATURE, filled=True)] = field(default_factory=lambda: [0.0, 0.8])
    """The target continues every prompt once at each; 0 = greedy. Held-out acceptance is measured at each."""
    text: str = ""
    """Text of your own to train on instead of the standard library: a text file, JSONL with a `prompt` or `text` field,
    or a folder of such files. A twentieth of its prompts is held out."""
    prompts: str = ""
    """JSONL file of prompts on whose continuations acceptance is measured; empty = the bundled prompts, or those held
    out of `job.text`."""
    rate: Annotated[float, Range(above=0)] = 1.0
    """Factor on the recipe's learning rates."""
    ranks: Annotated[int, Range(1, cap=MAX_RANKS)] = 1
    """Processes that train one drafter together, each on its share of every batch, started by Ray Train
    (`pip install specdec[train]`)."""
    average: Annotated[str, OneOf(AVERAGES)] = "all"
    """How several ranks join their gradients: all = the mean over all ranks, of which each trains the whole drafter;
    participants = ranks train parts of it, those of job.recipe=sorted a prefix each, in turn from the whole model on,
    and the gradient of a layer is the mean over the ranks that trained it (Fed-EE)."""
    cache_mb: Annotated[int, Range(0)] = 1024
    """Memory of each rank for what the target computed for rows; rows that do not fit are computed again when drawn."""
    evaluation_minutes: Annotated[float, Range(above=0)] = 1.0
    """Minutes between two measurements of held-out acceptance."""
    resume: bool = False
    """Go on with a training that was killed, from the state in `job.work`."""
    out: str | None = None
    """Directory for `drafter/` and the report; null = the run directory."""
    work: str | None = None
    """Directory for loss logs, state and continuations; null = `work` in the run directory. Name it to share the
    target's text between recipes, or to resume."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of the order of sources, the weights and the batches."""
    threads: Annotated[int, Range(0, zero="PyTorch's choice")] = 0
    """CPU threads; 0 = PyTorch's choice."""
    device: str = "cpu"
    """PyTorch device of target and drafter."""
    batch_tokens: Annotated[int, Range(1)] = 6144
    """Tokens per optimizer step."""
    continuation_prompts: Annotated[int, Range(1)] = 1536
    """Prompts cut from training sources, at most, that the target continues."""
    continuation_length: Annotated[int, Range(2)] = 256
    """Length of prompt and continuation together, in tokens."""


@dataclass(frozen=True, slots=True)
class PoolConfig(JobConfig):
    """Lend the drafter to the targets of other engines, until SIGTERM or Ctrl-C."""

    name: str = "pool"
    listen: str = "tcp://127.0.0.1:9700"
    """Address for the engines that use the pool, tcp://HOST:PORT; port * = any that is free."""
    secret_file: str = ""
    """File with the pool's secret, which is made where there is none, so that engines know a pool that was started
    again; the keys of engines are beside it, in the folder `FILE.keys`. Empty = a new secret, keys in `keys` of the
    run's directory."""
    max_leases: Annotated[int, Range(1)] = 8
    """Engines at a time; the KV slots of the drafter are divided between those that there are."""
    leases_per_key: Annotated[int, Range(0, zero="max_leases")] = 0
    """Engines at a time with one key; 0 = `max_leases`."""
    lease_s: Annotated[float, Range(2)] = 10.0
    """Seconds without a sign of life after which an engine's lease ends and its KV rows are free."""
    metrics_host: str = "127.0.0.1"
    """Address of /metrics, for Prometheus: this machine alone by default, 0.0.0.0 for every network."""
    metrics_port: Annotated[int, Range(0, 65535, zero="none")] = 0
    """Its TCP port; 0 = none."""

    def check_fields(self, where: str) -> None:
        good = self.listen.startswith("tcp://") and self.listen.count(":") >= 2
        require(good, f"{where}.listen", self.listen, "is no address; give tcp://HOST:PORT")


JOBS: tuple[JobConfig, ...] = (
    GenerateConfig(),
    BenchConfig(),
    ServeConfig(),
    ChatConfig(),
    CertifyConfig(),
    DrillConfig(),
    PlanConfig(),
    DatastoreConfig(),
    VocabularyConfig(),
    TreeConfig(),
    SearchConfig(),
    TrainConfig(),
    PoolConfig(),
)
"""The jobs with their defaults; the job's name is that of its module in `cluster/jobs`."""
WITH_ENCODER = ("generate", "bench", "serve", "drill", "datastore")
"""Those that may have a target with an encoder; `job=train` may with the recipe `SPECDEC`."""
WITH_DIFFUSION = ("generate", "serve", "chat", "drill")
"""Those that may have a target that fills masks."""
SPECDEC = "specdec"
"""The recipe for targets with an encoder."""
