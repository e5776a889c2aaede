"""Every key of the command line: its range, its docstring, its entry in docs/options.md and in `--help`."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.routed.config import RoutedDrafterConfig
from actors.options import SamplingConfig, SchedulerConfig
from cluster.config import options_page
from cluster.config.compose import load_config
from cluster.config.options_page import SECTIONS, help_text, page
from cluster.config.schema import CHOICES, ServerConfig
from parallel.ranges import LARGEST, OneOf, Range, Section, bound_of

ROOT = Path(options_page.__file__).parents[2]

TYPED = {
    CascadeDrafterConfig: CascadeDrafterConfig(levels=(NgramDrafterConfig(), ModelDrafterConfig())),
    AutoDrafterConfig: AutoDrafterConfig(drafters=(NgramDrafterConfig(), ModelDrafterConfig())),
    RoutedDrafterConfig: RoutedDrafterConfig(drafters=(ModelDrafterConfig(), ModelDrafterConfig())),
}
"""Records whose defaults are completed when they are composed."""

RECORDS: dict[type[Section], tuple[str, Any]] = {
    type(record): (section, TYPED.get(type(record), record))
    for section, choices in {
        **CHOICES,
        "scheduler": {"": SchedulerConfig()},
        "server": {"": ServerConfig()},
        "sampling": {"": SamplingConfig()},
    }.items()
    for record in choices.values()
}
"""Record -> its section and its defaults."""

EVERY_RECORD = pytest.mark.parametrize(
    "record",
    [pytest.param(record, id=f"{section}={getattr(record, 'name', '')}") for section, record in RECORDS.values()],
)


def knobs(record: Section) -> list[str]:
    """The keys of a record that a user may set."""
    return [item.name for item in fields(record) if item.name != "name"]


EDGES = (
    -LARGEST - 1,
    -3,
    -1,
    0,
    1,
    2,
    3,
    64,
    100,
    1024,
    65_536,
    LARGEST,
    LARGEST + 1,
    10**30,
    math.nan,
    math.inf,
    -0.5,
    0.5,
)


def kinds(record: type, name: str) -> set[type]:
    """The types that a field's values consist of."""
    hint = get_type_hints(record)[name]
    return set(get_args(hint) or (hint,))


@pytest.mark.extended
@EVERY_RECORD
def test_every_number_is_in_its_range_or_refused_by_name(record):
    """Whatever the value: it is inside the declared range, or one line that names the field refuses it."""
    for name in knobs(record):
        check_edges(record, name)


def check_edges(record: Section, name: str) -> None:
    numbers = kinds(type(record), name) & {int, float}
    bound = bound_of(type(record), name)
    if not numbers or not isinstance(getattr(record, name), int | float | list | type(None)):
        assert bound is None or isinstance(bound, OneOf), name
        return
    assert isinstance(bound, Range), f"{name}: a number without a declared range"
    section = RECORDS[type(record)][0]
    is_list = isinstance(getattr(record, name), list)
    for value in EDGES:
        if isinstance(value, int) or float in numbers:
            line = refusal(replace(record, **{name: [value] if is_list else value}), section)
            assert "\n" not in line
            if not bound.accepts(value):
                assert line.startswith(f"{section}.{name}=")
            elif not line:
                assert math.isfinite(value) and (abs(value) <= LARGEST or name in ("seed", "seeds")), name


def refusal(record: Section, section: str) -> str:
    """The line with which a record refuses its own values; empty if it accepts them."""
    try:
        record.check(section)
    except ValueError as error:
        return str(error)
    return ""


def test_the_page_is_up_to_date():
    """If not: python -m cluster.config.options_page > docs/options.md"""
    assert (ROOT / "docs" / "options.md").read_text() == page()


@EVERY_RECORD
def test_help_explains_every_key(record):
    section = RECORDS[type(record)][0]
    whole = help_text(section)
    for key in [f"{section}.{name}" for name in knobs(record)]:
        text = help_text(key)
        assert f"{key}=" in text and len(text.splitlines()) >= 3
        assert key in whole


def test_help_of_a_key_names_type_default_range_and_meaning():
    assert help_text("scheduler.max_num_seqs").splitlines() == [
        "scheduler.max_num_seqs=64",
        "    whole number, at least 1",
        "    Sequences that run at a time.",
    ]
    by_drafter = help_text("drafter.num_draft_tokens")
    assert (
        "drafter=model, drafter=speculator, drafter=self, drafter=ngram, drafter=maxgram: drafter.num_draft_tokens=5"
        in by_drafter
    )
    assert "drafter=suffix: drafter.num_draft_tokens=8" in by_drafter


def test_help_of_a_group_has_its_choices_and_every_key():
    assert help_text("placement").splitlines() == [
        "placement: Whether target and drafter have devices of their own.",
        "choices: placement=separate|colocated",
        "",
        "The devices of the roles.",
        "",
        "placement.nodes={}",
        "    mapping of text to list of text",
        "    Role -> names or addresses of the nodes it may use, as {target:[n1,n2],draft:[n3]}; a role not",
        "    named: any.",
    ]
    assert "choices" not in help_text("sampling") and "== drafter=ngram ==\n" in help_text("drafter")


def test_help_fills_lines_of_a_hundred_characters_and_breaks_none_at_a_hyphen():
    lines = [line for section in SECTIONS for line in help_text(section).splitlines() if line.startswith("    ")]
    # The first line of a key names what it accepts, however long; texts follow.
    texts = [(line, after) for line, after in pairwise(lines) if not after[4:5].isupper()]
    broken = [(line, after) for line, after in texts if len(line) <= 100 < len(line) + 1 + len(after.split()[0])]
    assert len(broken) > 100 and max(len(line) for line, _ in broken) == 100
    assert not any(line.endswith("-") for line, _ in broken)


def test_groups_are_listed_in_columns(monkeypatch):
    columns = {"verify": dict.fromkeys(["v" * 46]), "pipeline": dict.fromkeys(["p" * 40, "p" * 5])}
    monkeypatch.setattr(options_page, "CHOICES", columns)
    assert options_page.groups_help().splitlines() == [
        f"verify      {'v' * 46} The rule that decides which draft tokens stand.",
        f"pipeline    {'p' * 40}, {'p' * 5}",
        f"{' ' * 59}The order of drafting and verification; plain = no speculation.",
    ]


def test_help_of_a_launch_shows_what_is_set_most_often_and_the_keys_of_what_is_chosen():
    config: dict[str, dict[str, Any]] = {
        section: {item.name: getattr(record, item.name) for item in fields(record)}
        for section, record in (
            ("target", replace(CHOICES["target"]["pocket"], tp=2)),
            *((name, next(iter(CHOICES[name].values()))) for name in ("verify", "pipeline", "placement", "cluster")),
            ("drafter", NgramDrafterConfig(max_ngram=7)),
            ("job", CHOICES["job"]["generate"]),
            ("sampling", SamplingConfig()),
            ("scheduler", SchedulerConfig()),
            ("server", ServerConfig()),
        )
    }
    lines = options_page.config_help(config).splitlines()
    assert lines[1] == "target.tp=2                  Tensor-parallel ranks, each on a device of its own."
    most, rest = lines[: lines.index("")], lines[lines.index("") :]
    assert [line.partition("=")[0] for line in most] == list(options_page.MOST_SET)
    texts = [line[29:] for line in most]
    assert all(len(text) <= 90 and line[28] == " " for text, line in zip(texts, most, strict=True))
    assert [text for text in texts if text.endswith(" ...")] and not [text for text in texts if "[...]" in text]
    assert rest[:2] == ["", "of drafter=ngram:"] and set(rest[2:6]) == {
        "  drafter.num_draft_tokens=5",
        "  drafter.placement=auto",
        "  drafter.max_ngram=7",
        "  drafter.min_ngram=2",
    }
    assert rest[6:8] == ["", "of job=generate:"]
    assert {line.strip().partition("=")[0] for line in rest[8:]} == {
        f"job.{name}" for name in ("workload", "concurrency", "baseline", "resume", "trace")
    }
    assert "  job.resume=false" in rest


@pytest.mark.extended
@pytest.mark.parametrize(
    ("keys", "shown", "hidden"),
    [
        ([], "length_rule path", "width branching tree fan_out rejection_threshold online_rate layer_group"),
        (["drafter.strategy=tree"], "width branching tree merge_ngram", "length_rule batch_nodes min_gain"),
        (["drafter.length_rule=gap"], "rejection_threshold", "least_probability"),
        (["pipeline=branches"], "fan_out ahead_width", "length_rule"),
        (["drafter.online=true", "drafter.placement=separate"], "online_rate online_state", "layer_group"),
    ],
)
def test_help_shows_the_keys_of_what_is_chosen(keys, shown, hidden):
    """Those whose text begins with a condition that does not hold are counted alone."""
    config = asdict(load_config(["drafter=model", *keys]))
    lines = options_page.config_help(config).splitlines()
    own = {line.strip().partition("=")[0].removeprefix("drafter.") for line in lines if line.startswith("  drafter.")}
    assert set(shown.split()) <= own and own.isdisjoint(hidden.split())
    (more,) = (line for line in lines if line.startswith("  and "))
    count = sum(option.key.startswith("drafter.") for option in options_page._chosen("drafter", "model"))
    assert more == f"  and {count - len(own)} for other values of these, by --help drafter"


@pytest.mark.parametrize("section", SECTIONS)
def test_help_of_a_group_lists_its_choices(section):
    assert all(choice in help_text(section) for choice in CHOICES.get(section, ()))


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("drafter.widht", "drafter.widht: no such key; did you mean drafter.width"),
        ("kv_slots", "kv_slots: no such key; did you mean drafter.kv_slots or target.kv_slots?"),
        ("zzzz", "zzzz: no such key; choose one of target, drafter"),
    ],
)
def test_help_of_an_unknown_key_suggests_near_names(key, line):
    with pytest.raises(ValueError) as caught:
        help_text(key)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
