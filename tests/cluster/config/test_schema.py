"""The command line's names, the composition of every choice, and what is refused before anything starts."""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.config import NoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import PipelineName, SamplingConfig, SchedulerConfig, VerifyRule
from cluster.config import compose as config_module
from cluster.config.compose import load_config, typed_record
from cluster.config.jobs import BenchConfig, TrainConfig
from cluster.config.options_page import groups_help
from cluster.config.schema import CHOICES, LaunchConfig, PlacementName
from cluster.observability.report import Circumstances, RunFigures
from cluster.tools.bench.plan import expand
from parallel.ranges import check_ranges
from tests.cluster.config.quick_loading import composed, composed_by_hydra, each_complaint_once, load_quickly
from tests.matrices import in_turn

PUBLIC_CHOICES = {
    "target": {"pocket", "hf"},
    "drafter": {"none", "model", "ngram", "suffix", "maxgram", "copy", "recycling", "aded", "rest", "jacobi"}
    | {"lookahead", "cascade", "auto", "speculator", "self", "pool", "routed"},
    "verify": {"coupled", "rejection", "block", "traversal", "kseq", "transport", "auto"},
    "pipeline": {"plain", "sync", "pearl", "branches", "tree", "pingpong"},
    "placement": {"separate", "colocated"},
    "cluster": {"local", "inprocess", "existing", "slurm"},
    "job": {
        "generate",
        "serve",
        "chat",
        "bench",
        "certify",
        "drill",
        "plan",
        "datastore",
        "vocabulary",
        "tree",
        "search",
        "train",
        "pool",
    },
}

PUBLIC_KEYS = {
    "target": "name path tp dtype weights attention device all_reduce stretch max_model_len kv_slots kv_dtype pace_ms "
    "decoder num_states unmask_threshold numerics",
    **{"drafter=none": "name", "drafter=maxgram": "name num_draft_tokens max_places shared_bigrams share placement"},
    "drafter=pool": "name pools key_files num_draft_tokens at_once",
    "job=pool": "name listen secret_file max_leases leases_per_key lease_s metrics_host metrics_port",
    "drafter=ngram": "name num_draft_tokens max_ngram min_ngram placement",
    "drafter=suffix": "name num_draft_tokens min_match tokens_per_match min_probability width shared_tokens corpus "
    "tokenizer share placement",
    "drafter=recycling": "name num_draft_tokens width reads_prompts share placement",
    "drafter=aded": "name num_draft_tokens construction min_probability iterations width max_pairs learns "
    "reads_prompts corpus tokenizer share placement",
    "drafter=jacobi": "name num_draft_tokens width placement",
    "drafter=lookahead": "name num_draft_tokens window ngram guesses reads_text placement",
    "drafter=cascade": "name levels num_draft_tokens tails lengths merge placement",
    "drafter=auto": "name drafters path num_draft_tokens placement",
    "drafter=routed": "name drafters path num_draft_tokens placement",
    "drafter=model": "name path ranks kv_dtype num_threads parallel layer_group strategy num_draft_tokens depth width "
    "branching draws tree min_gain merge_ngram fan_out ahead_width batch_nodes dtype weights device layer_partition "
    "mlp_parallel calibration calibration_policy calibrate_every kv_slots vocabulary vocabulary_size translate "
    "tokenizer length_rule rejection_threshold least_probability placement attention prefixes "
    "prefix_confidence online online_rate online_strength online_budget "
    "online_memory online_state pace_ms rows sinks window chunk_size num_chunks choose_every mask_steps mask_drafts",
    "drafter=speculator": "name path ranks num_threads strategy num_draft_tokens depth width branching draws tree "
    "min_gain merge_ngram fan_out ahead_width batch_nodes dtype weights device calibration_policy calibrate_every "
    "kv_slots length_rule rejection_threshold least_probability placement attention prune_below online online_rate "
    "online_strength online_budget online_memory online_state pace_ms rows sinks window chunk_size num_chunks "
    "choose_every",
    "drafter=self": "name exit skip resume strategy num_draft_tokens depth width branching draws tree min_gain "
    "merge_ngram fan_out ahead_width batch_nodes dtype weights calibration_policy calibrate_every kv_slots length_rule "
    "rejection_threshold least_probability placement attention layers search skip_share search_every search_window "
    "search_trials least_cosine pace_ms rows sinks window chunk_size num_chunks choose_every",
    "verify": "rule law_size",
    "pipeline": "name adaptive min_draft_tokens local_drafter",
    "placement": "name nodes",
    "cluster": "name address nodes wait_s interface num_cpus oversubscribe dashboard port link_delay_ms "
    "startup_timeout_s namespace max_restarts silence_s log_level",
    "scheduler": "max_num_seqs max_num_batched_tokens prefill_chunk prefix_cache text_pass_ms",
    "sampling": "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias "
    "bad_words allowed_token_ids stop stop_token_ids min_tokens max_tokens ignore_eos seed no_repeat_ngram_size",
    "server": "host port model_name api_key api_key_file metrics_alias traces_endpoint max_body_mb max_waiting "
    "max_queue_s timeout_s drain_s cors_origins",
    "job=serve": "name",
    "job=chat": "name system",
    "job=generate": "name prompts workload limit concurrency baseline resume trace",
    "job=certify": "name prompts workload limit concurrency temperatures seeds contexts draws always_draft "
    "significance power",
    "job=bench": "name prompts workload workloads limit repeats warmup drafters pipelines temperatures batches "
    "draft_lengths contexts peers parallels",
    "job=plan": "name costs prompts limit batch draft_lengths target_ranks draft_ranks parallels layer_groups "
    "pipelines seconds trials repeats ablation context fleet pool_targets",
    "job=drill": "name prompts workload limit concurrency faults pairs signals spacing_s seed",
    "job=search": "name prompts workload limit methods evaluations seed out",
    "job=tree": "name prompts workload limit nodes depth width out",
    "job=vocabulary": "name prompts workload limit concurrency files size out",
}
"""Names that scripts of users rely on: add to these, rename or remove none."""

PUBLIC_FIGURES = (
    "tokens wall_s tokens_per_s plain_tokens_per_s speedup_vs_ar mean_acceptance_length acceptance_histogram "
    "num_spec_steps num_draft_tokens num_accepted_tokens branch_hit_rate draft_busy target_busy round_overhead_ms "
    "draft_lengths fallback_s num_probes num_trials waits bound_by bytes_per_role drafter_bytes layout versions config"
)
"""Fields of `report.json`, likewise."""


# these need files: tests/cluster/jobs/test_datastore_job.py
NEED_FILES = ("rest",)


@pytest.fixture(autouse=True)
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the bundled pair: composing reads no weights."""
    pair = SimpleNamespace(PROMPTS=tmp_path / "prompts.jsonl")
    for name in ("TARGET", "DRAFTER", "DEEP_DRAFTER", "SPECULATOR"):
        real = getattr(config_module.pocket, name)
        setattr(pair, name, tmp_path / real.name)
        (tmp_path / real.name).mkdir()
        shutil.copy(real / "config.json", tmp_path / real.name)
    pair.PROMPTS.write_text('{"prompt": "def f():"}\n')
    monkeypatch.setattr(config_module, "pocket", pair)
    return pair


def required(group: str, choice: str) -> list[str]:
    """Overrides without which a choice is incomplete."""
    return {
        ("target", "hf"): [f"target.path={config_module.pocket.TARGET}"],
        ("job", "datastore"): ["job.files=[texts]"],
        ("job", "search"): ["drafter=self"],
        ("drafter", "pool"): ["drafter.pools=[tcp://h:1]", "drafter.key_files=[pyproject.toml]"],
        ("verify", "kseq"): ["drafter=model"],
        ("verify", "transport"): ["drafter=model"],
        ("cluster", "existing"): ["cluster.address=auto"],
        ("cluster", "slurm"): ["cluster.address=n1:6379"],
    }.get((group, choice), [])


@cache
def loaded(*overrides: str) -> LaunchConfig:
    return load_quickly(overrides)


def refusal(overrides: Sequence[str], load: Callable[[Sequence[str]], LaunchConfig] = load_config) -> str:
    with pytest.raises(ValueError) as caught:
        load(overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- names ----------------------------------------------------------------------------------------------------------


def test_groups_and_choices_are_the_public_ones():
    assert CHOICES.keys() == PUBLIC_CHOICES.keys()
    lost = {f"{group}={name}" for group, names in PUBLIC_CHOICES.items() for name in names - CHOICES[group].keys()}
    assert not lost, "scripts of users rely on these: keep them"
    added = {f"{group}={name}" for group, names in CHOICES.items() for name in names.keys() - PUBLIC_CHOICES[group]}
    assert not added, "from now on scripts of users may rely on these: add them to PUBLIC_CHOICES in this file"


def test_help_lists_every_choice():
    listed = {line.split()[0]: line for line in groups_help().splitlines() if line[:1].isalpha()}
    for group, choices in PUBLIC_CHOICES.items():
        assert {word.strip(",") for word in listed[group].split()} >= choices


@pytest.mark.parametrize("where", PUBLIC_KEYS)
def test_keys_are_the_public_ones(where: str):
    section, _, choice = where.partition("=")
    record = CHOICES[section][choice] if choice in NEED_FILES else None
    record = record or getattr(loaded(where, *required(section, choice)) if choice else loaded(), section)
    assert {item.name for item in fields(record)} == set(PUBLIC_KEYS[where].split())


EVERY_CHOICE = [(group, choice) for group in CHOICES for choice in CHOICES[group] if choice not in NEED_FILES]


@pytest.mark.parametrize(("group", "choice"), EVERY_CHOICE)
def test_every_choice_composes(group: str, choice: str):
    section = getattr(loaded(f"{group}={choice}", *required(group, choice)), group)
    assert type(section) is type(CHOICES[group][choice])
    # verify=auto becomes the rule that it stands for: see below
    assert (section.rule if group == "verify" else section.name) == (
        "coupled" if (group, choice) == ("verify", "auto") else choice
    )


TOGETHER = list(zip_longest(*([f"{group}={choice}" for choice in choices] for group, choices in CHOICES.items())))
"""A choice of each group, as long as it has any left."""


@pytest.mark.parametrize(
    "choices", [pytest.param(row, marks=pytest.mark.slow if i > 5 else []) for i, row in enumerate(TOGETHER)], ids=str
)
def test_hydra_composes_the_record_of_every_choice(choices: tuple[str | None, ...]):
    """By default of every group but drafters and jobs: their stores are of one class."""
    chosen = tuple(choice for choice in choices if choice is not None)
    assert composed_by_hydra(chosen) == composed(chosen)


def test_report_fields_are_the_public_ones():
    assert RunFigures.__annotations__.keys() | Circumstances.__annotations__.keys() >= set(PUBLIC_FIGURES.split())


def test_every_key_is_explained():
    records = {type(record) for choices in CHOICES.values() for record in choices.values()}
    for record in records | {SchedulerConfig, SamplingConfig}:
        body = inspect.getsource(record).splitlines()
        for item in fields(record):
            if any(item.name in base.__annotations__ for base in record.__mro__[1:-1]):
                continue  # inherited, and explained there
            line = next((i for i, text in enumerate(body) if text.startswith(f"    {item.name}:")), None)
            if line is not None:
                assert body[line + 1].startswith('    """'), f"{record.__name__}.{item.name}"


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize(
    "overrides, rule",
    [
        (["sampling.temperature=0.6"], "block"),
        (["job=certify"], "block"),  # its temperatures are 0 and 1
        (["job=certify", "job.temperatures=[0]"], "coupled"),
        ([], "coupled"),
        (["drafter=model", "sampling.temperature=0.6", "drafter.strategy=tree"], "coupled"),
        (["sampling.temperature=0.6", "drafter=suffix"], "coupled"),
        (["sampling.temperature=0.6", "drafter=none"], "coupled"),
        (["sampling.temperature=0.6", "pipeline=branches"], "coupled"),  # its drafts are the likeliest tokens
        (["sampling.temperature=0.6", "drafter=cascade"], "block"),
        (["sampling.temperature=0.6", "drafter=cascade", "drafter.merge=2"], "coupled"),
        (["sampling.temperature=0.6", "drafter=auto"], "block"),
    ],
)
def test_the_rule_auto_is_chosen_by_drafter_pipeline_and_temperature(overrides, rule):
    assert load_quickly(["verify=auto", *overrides]).verify.rule == rule


def test_a_bench_chooses_the_rule_auto_for_each_of_its_drafters():
    config = load_config(["verify=auto", "job=bench", "job.drafters=[ngram,[ngram,model]]", "job.temperatures=[0,1]"])
    assert config.verify.rule is VerifyRule.auto
    chosen = {setting.drafter.name: str(setting.configure(config).verify.rule) for setting in expand(config)}
    assert chosen == {"ngram": "coupled", "cascade": "block"}


def test_defaults(bundled: SimpleNamespace):
    config = load_config()
    assert config.target.path == str(bundled.TARGET)
    assert isinstance(config.drafter, AutoDrafterConfig) and config.drafter.is_attached("sync")
    lookup, model = config.drafter.drafters
    assert isinstance(lookup, SuffixDrafterConfig) and isinstance(model, ModelDrafterConfig)
    assert (model.path, model.num_draft_tokens, model.strategy) == (str(bundled.DRAFTER), 5, Strategy.chain)
    assert config.verify.rule is VerifyRule.coupled
    assert config.pipeline.name is PipelineName.sync
    assert config.placement.name is PlacementName.separate
    assert (config.cluster.name, config.job.name) == ("local", "generate")
    assert config.job.prompts == str(bundled.PROMPTS)
    assert load_quickly(["drafter.path=pocket-deep"]).drafter.models() == [str(bundled.DEEP_DRAFTER)]
    assert (config.sampling.temperature, config.sampling.max_tokens) == (0.0, 128)


def test_a_choice_brings_its_own_type():
    assert isinstance(load_quickly(["drafter=ngram", "drafter.max_ngram=3"]).drafter, NgramDrafterConfig)
    assert isinstance(load_quickly(["drafter=none"]).drafter, NoDrafterConfig)
    assert isinstance(load_quickly(["job=train"]).job, TrainConfig)
    bench = load_quickly(["job=bench", "job.temperatures=[0,0.7]", "job.drafters=[model,ngram]"]).job
    assert bench == BenchConfig(prompts=bench.prompts, temperatures=[0.0, 0.7], drafters=["model", "ngram"])


def test_records_are_frozen():
    target: Any = load_quickly([]).target
    with pytest.raises(FrozenInstanceError):
        target.tp = 2


@pytest.mark.extended
def test_loading_twice_is_independent():
    """Hydra's global state is left as it was found."""
    assert load_config(["target.tp=2"]).target.tp == 2
    assert load_config().target.tp == 1


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = load_quickly(["target=hf", "target.path=target", "job.prompts=prompts.jsonl"])
    assert config.target.path == str(tmp_path / "target")
    assert config.job.prompts == str(tmp_path / "prompts.jsonl")


def test_sampling_reaches_the_engine_in_its_words():
    overrides = [
        "sampling.temperature=0.7",
        "sampling.top_k=5",
        "sampling.stop=[end,'a b']",
        "sampling.logit_bias={42:-5,7:1}",
        "sampling.stop_token_ids=[3]",
        "sampling.allowed_token_ids=[3,5]",
        "sampling.ignore_eos=true",
        "sampling.seed=9",
    ]
    params = load_config(overrides).sampling.params()
    assert (params.temperature, params.top_k, params.seed, params.ignore_eos) == (0.7, 5, 9, True)
    assert params.stop == ("end", "a b")
    assert params.logit_bias == ((42, -5.0), (7, 1.0))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3,), (3, 5))
    assert isinstance(hash(params), int)  # no list is left in it


def test_bad_words_are_banned_with_and_without_a_space_before():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "foo": 1, "▁foo": 2, "bar": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    assert load_quickly(["sampling.bad_words=[foo]"]).sampling_params(tokenizer).bad_words == ((1,), (2,))


@pytest.mark.parametrize(
    ("plain", "spaced", "banned"),
    [
        ([1], [2], ((1,), (2,))),
        ([1, 5], [2, 5], ((1, 5), (2, 5))),
        ([1], [9, 1], ((1,),)),  # the space is a token of its own
        ([1, 5], [1, 5], ((1, 5),)),  # the tokenizer drops it
        ([1, 5], [2], ((1, 5),)),
    ],
)
def test_a_spaced_word_is_banned_where_the_space_is_part_of_its_first_token(plain, spaced, banned):
    ids = {"foo": plain, " foo": spaced}
    tokenizer: Any = SimpleNamespace(encode=lambda text, add_special_tokens: SimpleNamespace(ids=ids[text]))
    config = load_quickly(["sampling.bad_words=[foo]"])
    assert config.sampling_params(tokenizer).bad_words == banned


# --- refusals: field, what is wrong, remedy -------------------------------------------------------------------------


NOT_UNDERSTOOD = [
    (["drafter=model", "drafter.widht=3"], "drafter.widht: no such key; did you mean drafter.width?"),
    (["drafter=ngram", "drafter.pth=x"], "drafter.pth: no such key; choose one of name, placement"),
    (
        ["drafter=ngram", "drafter.path=x"],
        "drafter.path: no such key; it is one of drafter=model, speculator, auto",
    ),
    (["+drafter.extra=3"], "drafter.extra: no such key; choose one of name, placement"),
    (["+spare=3"], "spare: no such key; choose one of target, drafter"),
    (["dorp=5"], "dorp: no such key; choose one of target, drafter"),
    (["drafter=eagle"], "drafter=eagle: no such choice; choose one of aded, auto, "),
    (["drafter=4"], "a group takes the name of one of its choices"),
    (["drafter=[model,ngram]"], "a group takes one choice"),
    (
        ["drafter=model", "drafter.strategy=bush"],
        "drafter.strategy: invalid value 'bush', expected one of [chain, tree, beam, best_first, dynamic, cape]",
    ),
    (["target.tp=two"], "target.tp: value 'two' of type 'str' could not be converted to Integer; the default is 1"),
    (["target.tp=null"], "target.tp: field 'target.tp' is not Optional; the default is 1"),
    (["sampling.stop=end"], "sampling.stop: invalid value assigned: str is not a ListConfig"),
    (["sampling.logit_bias={x:1}"], "sampling.logit_bias.x: Key x (str) is incompatible with (int)"),
    (["sampling=3"], "sampling: is a section, not a value; set its keys"),
    (["scheduler=${target}"], "scheduler: must be object, got TargetConfig; set its keys"),
    (["nonsense"], "nonsense: is no override; write key=value"),
    (["sampling.stop=[a"], "sampling.stop=[a: is no override; quote lists, and special characters in them, as "),
    (["job.prompts=~/a b"], "job.prompts=~/a b: is no override; quote special characters, also from the shell: 'job."),
    (
        ["job.prompts=~/a job.limit=2"],
        "job.prompts=~/a job.limit=2: is no override; give each KEY=VALUE to the shell as",
    ),
    (
        ["sampling.stop=a,b"],
        "sampling.stop=a,b: has several values; write -m for a run with each, 'sampling.stop=[a,b]'",
    ),
    (["temperature=1"], "temperature: no such key; did you mean sampling.temperature?"),
    (["path=1"], "path: no such key; did you mean target.path or drafter.path?"),
]


@pytest.mark.parametrize(("overrides", "line"), list(each_complaint_once(NOT_UNDERSTOOD)))
def test_overrides_that_cannot_be_understood(overrides: list[str], line: str):
    assert refusal(overrides).startswith(line)


OF_A_WRONG_TYPE = [
    (["target.path=???"], "target.path: has no value; give target.path=..."),
    (["target.path=${nope}"], "target.path: Interpolation key 'nope' not found"),
    (
        ["drafter=model", "drafter.rows=streaming", "drafter.window=9000"],
        "drafter.rows=streaming: 10128 rows are more than the model's 8192 positions; lower sinks and window",
    ),
    (
        ["drafter=model", "drafter.rows=chunks", "drafter.prefixes=[1]"],
        "drafter.rows=chunks: contradicts drafter.prefixes",
    ),
    (
        ["drafter=model", "drafter.rows=chunks", "drafter.parallel=layer", "drafter.ranks=2"],
        "drafter.rows=chunks: has layers side by side",
    ),
    (["drafter=speculator", "drafter.rows=streaming"], "drafter.rows=streaming: is for models whose rows follow"),
    (["job=plan", "job.context=4096"], "job.context=4096: is read with a cost file; add job.costs=FILE"),
    (
        ["job=plan", "job.layer_groups=${.name}"],
        "job.layer_groups: must be array, got str; the default is [2, 3, 4]",
    ),
    (["sampling.stop=${target}"], "sampling.stop: must be array, got TargetConfig; the default is []"),
    (["sampling.stop=['${target}']"], "sampling.stop[0]: "),
    (
        ["job=plan", "job.layer_groups=[{a: 1}]"],
        "job.layer_groups[0]={'a': 1}: must be int; the default is [2, 3, 4]",
    ),
    (["sampling.logit_bias=${target}"], "sampling.logit_bias: must be object, got TargetConfig; the default is {}"),
    (["sampling.logit_bias={1: {a: 1}}"], "sampling.logit_bias[...]: must be float, got object; the default is {}"),
    (
        ["drafter=cascade", "drafter.levels=[{name: model, branching: [{a: 1}]},ngram]"],
        "drafter.levels[0].branching[0]={'a': 1}: must be int; the default is []",
    ),
    (["drafter=cascade", "drafter.levels=[{name: model, branching: {a: 1}},ngram]"], "drafter.levels[0]: "),
]


@pytest.mark.parametrize(("overrides", "line"), list(each_complaint_once(OF_A_WRONG_TYPE)))
def test_what_hydra_composes_may_be_of_a_wrong_type(overrides: list[str], line: str):
    assert refusal(overrides, load_quickly).startswith(line)


NONSENSE = [
    (["target.tp=0"], "target.tp=0: must be at least 1"),
    (["target.dtype=fp8"], "target.dtype=fp8: is unknown; choose one of auto, float32"),
    (["target.device=tpu"], "target.device=tpu: is unknown; choose one of auto, cpu, cuda"),
    (
        ["target.all_reduce=symmetric", "target.device=cpu"],
        "target.all_reduce=symmetric: needs GPUs; set target.device=cuda or drop it",
    ),
    (["target.weights=int4"], "target.weights=int4: is unknown; choose one of auto, packed, bfloat16, int8, w8a8"),
    (
        ["target.weights=int8", "target.device=cuda"],
        "target.weights=int8: needs target.device=cpu and target.dtype=float32; set them or drop it",
    ),
    (["target.weights=bfloat16", "target.device=cuda", "target.dtype=float16"], "target.weights=bfloat16: needs"),
    *(
        (
            ["target.weights=w8a8", beside],
            "target.weights=w8a8: needs target.device=cpu and target.dtype=float32 or bfloat16; set them or drop it",
        )
        for beside in ("target.dtype=float16", "target.device=cuda")
    ),
    (
        ["drafter=model", "drafter.weights=int8", "drafter.dtype=bfloat16"],
        "drafter.weights=int8: needs drafter.device=cpu and drafter.dtype=float32",
    ),
    (["target.stretch=-1"], "target.stretch=-1: must be 0 (off) or above"),
    *(
        (
            [f"target.pace_ms={given}"],
            f"target.pace_ms={shown}: must be milliseconds from 0 (off) to 1000, or a table by rows, as {{1: 15.0,",
        )
        for given, shown in (
            ("-1", "-1"),
            ("1001", "1001"),
            ("nan", "nan"),
            ("fast", "fast"),
            ("true", "True"),
            ("null", "None"),
            ("[15]", "[15]"),
            ("{}", "{}"),
            ("{0: 15.0}", "{0: 15.0}"),
            ("{2: 15, 1: 16}", "{2: 15, 1: 16}"),
            ("{1: fast}", "{1: 'fast'}"),
            ("{one: 15}", "{'one': 15}"),
        )
    ),
    (["drafter=model", "drafter.pace_ms=-1"], "drafter.pace_ms=-1: must be milliseconds"),
    (["drafter=speculator", "drafter.pace_ms=-1"], "drafter.pace_ms=-1: must be milliseconds"),
    (["drafter=self", "drafter.pace_ms=-1"], "drafter.pace_ms=-1: must be milliseconds"),
    (
        ["drafter=cascade", "drafter.levels=[ngram,{name: model, pace_ms: x}]"],
        "drafter.levels[1].pace_ms=x: must be milliseconds",
    ),
    (["target.kv_slots=-1"], "target.kv_slots=-1: must be 0"),
    (["target.max_model_len=-1"], "target.max_model_len=-1: must be 0"),
    (["target.name=other"], "target.name=other: is set by target=pocket or target=hf"),
    (["target=hf"], "target.path='': give a directory"),
    (["drafter=model", "drafter.name=ngram"], "drafter.name=ngram: is set by drafter=model; write drafter=ngram"),
    (
        ["drafter=model", "drafter.num_draft_tokens=0"],
        "drafter.num_draft_tokens=0: must be at least 1; for none write drafter=none",
    ),
    (["drafter=ngram", "drafter.min_ngram=0"], "drafter.min_ngram=0: must be at least 1"),
    (["drafter=ngram", "drafter.max_ngram=1"], "drafter.max_ngram=1: must not be below drafter.min_ngram"),
    (["drafter=model", "drafter.ranks=0"], "drafter.ranks=0: must be at least 1"),
    (
        ["drafter=model", "drafter.ranks=2"],
        "drafter.ranks=2: needs a way to share the model; add drafter.parallel=tensor or",
    ),
    (
        ["drafter=model", "drafter.layer_group=2"],
        "drafter.layer_group=2: is for layers that run side by side; add drafter.parallel",
    ),
    (
        ["target.tp=7"],
        "target.tp=7: ranks cannot share num_attention_heads=8, num_key_value_heads=4 and intermediate_size=896 "
        "evenly; use one of 1, 2, 4, 8",
    ),
    (
        ["drafter=model", "drafter.ranks=3", "drafter.parallel=tensor"],
        "drafter.ranks=3: ranks cannot share num_attention_heads=",
    ),
    (
        ["drafter=cascade", "drafter.levels=[ngram,{name: model, ranks: 3, parallel: tensor}]"],
        "drafter.levels[1].ranks=3: ranks cannot share num_attention_heads=",
    ),
    (["drafter=model", "drafter.fan_out=0"], "drafter.fan_out=0: must be at least 1"),
    (
        ["drafter=model", "drafter.length_rule=threshold", "pipeline=branches"],
        "drafter.length_rule=threshold: cannot end what",
    ),
    (
        ["drafter=model", "drafter.length_rule=thompson", "drafter.strategy=tree"],
        "drafter.length_rule=thompson: ends chains; leave",
    ),
    *(
        (["drafter=self", *overrides], f"drafter{line}")
        for overrides, line in (
            (["pipeline=pearl"], "=self: runs the target's own layers, which are busy while it verifies; use pip"),
            (["drafter.placement=separate"], ".placement=separate: drafts with the target's own layers"),
            (
                ["drafter.calibration_policy=never"],
                ".calibration_policy=never: there is nothing to calibrate",
            ),
            (["drafter.exit=6"], ".exit=6: leaves no layer out: the target has 6; give at most 5"),
            (
                ["drafter.exit=9", "target.stretch=3"],
                ".exit=9: leaves no layer out: the target has 9",
            ),
            (
                ["drafter.skip=[3x]"],
                ".skip=3x: names no sublayer; write 3a for the attention of layer 3",
            ),
            (["drafter.skip=[1,6m]"], ".skip=6m: the target has layers 0 to 5; give one of them"),
            (
                ["drafter.exit=1", "drafter.skip=[0]"],
                ".skip=[0]: leaves no sublayer to draft with; drop some",
            ),
            (["drafter.kv_slots=9"], ".kv_slots=9: is the target's own, target.kv_slots; drop it"),
            (
                ["drafter.weights=int8"],
                ".weights=int8: is the target's own, target.weights; drop it",
            ),
            (
                ["drafter.attention=sdpa"],
                ".attention=sdpa: is the target's own, target.attention; drop it",
            ),
        )
    ),
    *(
        (["drafter=cascade", f"drafter.levels={levels}", *overrides], f"drafter{line}")
        for levels, overrides, line in (
            ("[self,model]", [], ".levels[0]=self: runs the target's own layers; put it last"),
            (
                "[{name: model, num_threads: 1},self]",
                [],
                ".levels[0]=model: is below drafter=self, on the target's",
            ),
            ("[ngram,self]", ["drafter.placement=separate"], ".placement=separate: has a level on the target's"),
            ("[ngram,{name: self, search: swift}]", [], ".levels[1].search=swift: is for drafter=self by itself"),
            ("[ngram,self]", ["pipeline=pearl"], ".levels[1]=self: runs the target's own layers, which are busy"),
            ("[speculator,self]", [], ".levels[0]=speculator: is no level; give a name or"),
        )
    ),
    (
        ["drafter=auto", "drafter.drafters=[suffix,[ngram,self]]", "pipeline=branches"],
        "drafter.drafters[1].levels[1]=self: runs the target's own layers, which are busy while it verifies",
    ),
    (
        ["drafter=speculator", "drafter.prune_below=0.02", "verify=coupled"],
        "drafter.prune_below=0.02: its checkpoint has no early logits; train with",
    ),
    (
        ["drafter=auto", "drafter.drafters=[self,suffix]", "drafter.placement=separate"],
        "drafter.drafters[0].placement=separate: drafts with the target's own layers, on its ranks",
    ),
    (
        ["drafter=model", "drafter.least_probability=0.6"],
        "drafter.least_probability=0.6: is the threshold of drafter.length_rule=",
    ),
    (
        ["drafter=model", "drafter.rejection_threshold=1"],
        "drafter.rejection_threshold=1.0: must be 0 (as published) or between 0",
    ),
    (["drafter=model", "drafter.kv_slots=-1"], "drafter.kv_slots=-1: must be 0 (sized automatically) or above"),
    (["drafter=model", "drafter.ahead_width=-3"], "drafter.ahead_width=-3: must be at least 1"),
    (["sampling.seed=18446744073709551616"], "sampling.seed=18446744073709551616: must be between"),
    (["drafter=model", "drafter.depth=0"], "drafter.depth=0: must be at least 1"),
    (["drafter=model", "drafter.width=0"], "drafter.width=0: must be at least 1"),
    (["verify.law_size=0"], "verify.law_size=0: must be at least 1"),
    (
        ["verify=kseq", "drafter=ngram"],
        "verify.rule=kseq would bias the output of a drafter that chooses its tokens and draws none",
    ),
    (["drafter=model", "verify=kseq", "drafter.strategy=best_first"], "verify.rule=kseq would bias the output"),
    *(
        (["verify=block", *tree], "verify.rule=block is for chains, not for drafts that branch; use coupled, rej")
        for tree in (
            ["drafter=model", "drafter.strategy=tree"],
            ["drafter=recycling"],
            ["drafter=suffix", "drafter.width=2"],
        )
    ),
    (["scheduler.max_num_seqs=0"], "scheduler.max_num_seqs=0: must be at least 1"),
    (["scheduler.prefill_chunk=0"], "scheduler.prefill_chunk=0: must be at least 1"),
    (
        ["scheduler.max_num_batched_tokens=5"],
        "scheduler.max_num_batched_tokens=5: cannot hold one sequence's root and 8 draft tokens; raise it to at",
    ),
    (["cluster=existing"], "cluster.address='': give HOST:PORT"),
    (["cluster.address=auto"], "cluster.address=auto: is only for cluster=existing"),
    (["cluster.num_cpus=0"], "cluster.num_cpus=0: must be at least 1"),
    (["cluster.startup_timeout_s=0"], "cluster.startup_timeout_s=0.0: must be above 0"),
    (["job.name=bench"], "job.name=bench: is set by job=generate; write job=bench"),
    (["sampling.temperature=-1"], "sampling.temperature=-1.0: must be 0 (greedy) or between 1e-05 and 1000"),
    (["sampling.top_p=0"], "sampling.top_p=0.0: must be above 0 and at most 1"),
    (
        ["sampling.min_tokens=9", "sampling.max_tokens=8"],
        "sampling.min_tokens=9: must be between 0 and sampling.max_tokens=8",
    ),
    (["target.path=/no/such/place"], "target.path=/no/such/place: no such directory; give a directory with a"),
    (["drafter.path=/no/such/place"], "drafter.path=/no/such/place: no such directory; give a directory with a"),
    (["job.prompts=/no/such.jsonl"], "job.prompts=/no/such.jsonl: no such file; give a JSONL file"),
]


@pytest.mark.parametrize(("overrides", "line"), list(each_complaint_once(NONSENSE)))
def test_values_that_make_no_sense(overrides: list[str], line: str):
    assert refusal(overrides, load_quickly).startswith(line)


@pytest.mark.extended
def test_no_value_of_another_type_gets_into_a_list_or_a_mapping():
    """A value has the right type, or there is one line: in every such field of every choice whose items have a type.

    Fields of one name and type are tried in one choice; beside the first of a type, with every third value.
    """
    values = [{"a": 1}, [{"a": 1}], [[[1]]], [None], {1: {"a": 1}}, [1.5], [10**30], [math.nan]]
    tried, types = set[tuple[str, str]](), set[str]()
    for group, choices in CHOICES.items():
        for record in choices.values():
            kinds = {name: str(kind) for name, kind in get_type_hints(type(record)).items() if get_args(kind)}
            fresh = [name for name, kind in kinds.items() if "Any" not in kind and (name, kind) not in tried]
            for name in fresh:
                some = values[len(tried) % 3 :: 3] if kinds[name] in types else values
                tried.add((name, kinds[name]))
                types.add(kinds[name])
                for value in some:
                    with suppress(ValueError):
                        check_ranges(typed_record(record, {name: value}, group), group)


@pytest.mark.parametrize(
    ("value", "where"),
    list(
        in_turn(
            ["[{a: 1}]", "[[1],[2]]", "[null,null]", "[{name: [1]}]", "['${target}',1.5]", "[[[a]]]"],
            ["cascade levels", "auto drafters", "self skip", "model layer_partition"],
        )
    ),
)
def test_lists_of_several_types_are_understood_or_refused(value: str, where: str):
    choice, key = (f"drafter{mark}{word}" for mark, word in zip("=.", where.split(), strict=True))
    with pytest.raises(ValueError, match=key.partition(".")[2]):
        load_quickly([choice, f"{key}={value}"])


@pytest.mark.parametrize(
    ("key", "value"),
    list(
        in_turn(
            ["stop", "stop_token_ids", "logit_bias", "temperature"],
            ["${target}", "['${target}']", "${scheduler.max_num_seqs}"],
        )
    ),
)
def test_an_interpolation_is_of_the_right_type_or_refused(key: str, value: str):
    with suppress(ValueError):
        load_quickly([f"sampling.{key}={value}"])


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path):
    override = f"target.path={tmp_path}"
    assert refusal([override], load_quickly).startswith(f"{override}: {tmp_path}/config.json: no such file; save")
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert refusal([override], load_quickly).startswith(f"{override}: architecture 'BertModel' is not supported; use")


@pytest.mark.extended
@pytest.mark.parametrize(
    "overrides",
    [
        ["pipeline=sync", "drafter=none"],
        ["drafter=model", "drafter.ranks=2", "drafter.parallel=tensor"],
        ["drafter=model", "verify=kseq", "drafter.strategy=tree"],
        ["verify=traversal", "drafter=ngram"],
        ["drafter=model", "verify=rejection", "drafter.strategy=best_first"],
        ["verify=kseq", "drafter=none"],
        ["verify=block", "drafter=suffix"],
        ["verify=block", "drafter=copy", "pipeline=pearl"],
        ["verify=block", "drafter=cascade"],
        ["cluster=existing", "cluster.address=10.0.0.1:6379"],
        ["scheduler.max_num_batched_tokens=9"],
        ["job.limit=0"],
        ["sampling.seed=-1"],
    ],
)
def test_combinations_that_are_allowed(overrides: list[str]):
    load_quickly(overrides)
