"""Texts whose end repeats what stands far before it, the pair that looks it up, and what drafts see of it."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from docs.measurements.recall import ASKED, GIVEN, differing, recall_text, table, tokens_a_pass
from docs.measurements.recall_pair import HEAD_DIM, constructed, constructed_longspec, save
from docs.measurements.recall_texts import SEPARATOR, Words, block_of
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.kv.row_limits import ChunkLimits, RowLimits
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.row_policies import ChunkRows, PartialRows, RecentRows, StreamingRows
from parallel.runtime.runner import ModelRunner, open_model
from parallel.self_speculation.runner import SelfDraftRunner
from parallel.speculators.opening import open_speculator
from parallel.speculators.place import SpeculatorPlace

pytestmark = pytest.mark.extended

LENGTH, NEAR, FAR = 700, 12, 400
LIMITS, CHUNKS = RowLimits(2, 256), ChunkLimits(4, 64, 64)
DRAFTED = 5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recall") / "target"
    save(constructed(48, 0), folder)
    return folder


def opened(path: Path) -> ModelRunner:
    return open_model(str(path), num_slots=2048)


def asked(kind: str, distance: int) -> tuple[list[int], list[int]]:
    """A text with the beginning of the question behind it, and the answer."""
    text, placed = recall_text(0, LENGTH, [NEAR, FAR])
    (block,) = (block for at, block in placed if (at, block.kind) == (distance, kind))
    return [*text, *block.question[:GIVEN]], block.question[GIVEN:]


def accepted(target: ModelRunner, policy: PartialRows, kind: str, distance: int) -> list[int]:
    """Draft tokens of each round of an answer that are right, where the target's own layers draft."""
    known, answer = asked(kind, distance)
    target.open("a")
    target.forward([Span("a", len(known) - 1, num_logits=0)], known[:-1])
    target.commit("a", range(len(known) - 1))
    drafts = SelfDraftRunner(target, LayerPlan.whole(target.config.num_layers))
    drafts.keep_rows_by(policy)
    counts = []
    while len(answer) > DRAFTED:
        draft = [known[-1]]
        for i in range(DRAFTED):
            draft.append(int(drafts.forward([Span("a", 1)], draft[-1:], fuzzy=i > 0).logits.argmax()))
        drafts.release_rows()
        right = [one == other for one, other in zip(draft[1:], answer, strict=False)]
        counts.append([*right, False].index(False))
        new, answer = answer[: counts[-1] + 1], answer[counts[-1] + 1 :]
        target.forward([Span("a", len(new), num_logits=0)], [known[-1], *new[:-1]])
        target.commit("a", range(len(new)))
        known += new
    drafts.close("a")
    target.close("a")
    return counts


# --- texts ------------------------------------------------------------------------------------------------------------


def test_an_answer_stands_in_one_place_at_its_distance():
    text, placed = recall_text(3, 4096, [64, 512, 2048, 30_000])
    assert len(text) == 4096 and [distance for distance, _ in placed] == [64, 64, 512, 512, 2048, 2048]
    assert recall_text(3, 4096, [64, 512, 2048]) == (text, placed) != recall_text(4, 4096, [64, 512, 2048])
    for distance, block in placed:
        end = len(text) - distance - (ASKED if block.kind == "records" else 0)
        assert text[end - len(block.tokens) : end] == block.tokens
        assert len(block.question) == ASKED
        for token in block.question:
            assert text.count(token) == block.tokens.count(token) > 0


def test_records_tell_of_each_token_of_their_question_the_next():
    tokens = list(range(10, 20))
    block = block_of("records", tokens, random.Random(0))
    parts = [block.tokens[first : first + 3] for first in range(0, len(block.tokens), 3)]
    assert all(part[0] == SEPARATOR for part in parts)
    assert sorted(tuple(part[1:]) for part in parts) == list(pairwise(tokens)) and block.question == tokens
    assert [part[1] for part in parts] != tokens[:-1], "they stand in another order"
    with pytest.raises(ValueError, match="too few"):
        Words(random.Random(0)).block("span", 2000)


# --- the pair ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["span", "records"])
def test_the_constructed_target_answers_from_afar(path: Path, kind: str):
    target = opened(path)
    known, answer = asked(kind, FAR)
    target.open("a")
    logits = target.forward([Span("a", len(known) + len(answer), num_logits=len(answer) + 1)], [*known, *answer]).logits
    assert logits[:-1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("kind", ["span", "records"])
def test_the_constructed_layer_of_longspec_asks_what_the_target_asks(path: Path, tmp_path: Path, kind: str):
    """In place, behind a text that is longer than the window of its own rows."""
    constructed_longspec(constructed(48, 0)).save(tmp_path)
    target = opened(path)
    drafter = open_speculator(
        tmp_path, SpeculatorPlace(target.decoder, SINGLE, "cpu", torch.float32, 2048, target=target)
    )
    known, answer = asked(kind, FAR)
    for runner in (target, drafter):
        runner.open("a")
    target.forward([Span("a", len(known) - 1, num_logits=0)], known[:-1])
    target.commit("a", range(len(known) - 1))
    drafter.read_features("a", 0, torch.zeros(len(known) - 1, 2 * HEAD_DIM))
    logits = drafter.forward(
        [Span("a", len(known) + DRAFTED, num_logits=DRAFTED + 1)], [*known, *answer[:DRAFTED]]
    ).logits
    assert logits.argmax(-1).tolist() == answer[: DRAFTED + 1]


# --- what drafts see --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["span", "records"])
def test_windows_of_the_newest_rows_do_not_hold_what_is_far(path: Path, kind: str):
    target = opened(path)
    assert min(accepted(target, RecentRows(LIMITS), kind, NEAR)) == DRAFTED
    assert max(accepted(target, RecentRows(LIMITS), kind, FAR)) == 0
    for distance, holds in ((NEAR, True), (FAR, False)):
        drafter, (known, answer) = opened(path), asked(kind, distance)
        drafter.keep_rows_by(StreamingRows(drafter.decoder, drafter.pool, LIMITS))
        drafter.open("a")
        for first in range(0, len(known), 64):
            part = known[first : first + 64]
            logits = drafter.forward([Span("a", len(part))], part).logits
            drafter.commit("a", range(len(part)))
        assert (int(logits.argmax()) == answer[0]) is holds


@pytest.mark.parametrize("kind", ["span", "records"])
def test_chunks_are_chosen_so_that_what_is_needed_next_is_among_them(path: Path, kind: str):
    target = opened(path)
    counts = accepted(target, ChunkRows(target.decoder, target.pool, CHUNKS), kind, FAR)
    if kind == "span":
        assert counts == [DRAFTED] * len(counts), "one choice is enough for what follows in the text"
    else:
        assert sum(counts) / len(counts) > 3, counts


def test_chunks_without_those_around_them_would_show(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Choices of the newest row alone, held for 64 tokens: the answer leaves the chunk."""
    target = opened(path)
    monkeypatch.setattr(ChunkLimits, "reach", 0)
    monkeypatch.setattr(ChunkRows, "began", PartialRows.began)
    counts = accepted(target, ChunkRows(target.decoder, target.pool, CHUNKS), "span", FAR)
    assert 0 in counts and sum(counts) / len(counts) < 2


def test_a_draft_that_failed_brings_a_new_choice(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Chunks chosen in noise, just before the question: without the rule they stay for 64 tokens."""
    target, limits = opened(path), dataclasses.replace(CHUNKS, every=64)

    def counts() -> list[int]:
        known, answer = asked("span", FAR)
        policy = ChunkRows(target.decoder, target.pool, limits)
        target.open("a")
        target.forward([Span("a", len(known) - 3, num_logits=0)], known[:-3])
        target.commit("a", range(len(known) - 3))
        drafts, found = SelfDraftRunner(target, LayerPlan.whole(target.config.num_layers)), []
        drafts.keep_rows_by(policy)
        for token, wanted in zip(known[-3:] + answer[:6], [*known[-2:], *answer], strict=False):
            found.append(int(drafts.forward([Span("a", 1)], [token]).logits.argmax()) == wanted)
            drafts.release_rows()
            target.forward([Span("a", 1, num_logits=0)], [token])
            target.commit("a", [0])
        drafts.close("a")
        target.close("a")
        return found

    assert sum(counts()[2:]) >= 5
    monkeypatch.setattr(ChunkRows, "began", PartialRows.began)
    assert sum(counts()[2:]) == 0


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_tokens_a_pass_and_counts_what_differs():
    line = {"setting": "plain", "length": 1024, "text": 0, "kind": "span", "distance": 64, "passes": 0, "accepted": 0}
    line |= {"right": True, "digest": "a", "kv_bytes": 2**20}
    other = line | {"setting": "self", "passes": 10, "accepted": 40}
    assert tokens_a_pass([line]) == 1.0 and tokens_a_pass([other, other | {"accepted": 0}]) == 3.0
    assert differing([line, other]) == 0 and differing([line, other | {"digest": "b"}]) == 1
    rows = table([line, other]).splitlines()
    assert rows[0] == "| span | 1,024: 64 | draft rows, MiB |"
    assert rows[2:4] == ["| plain | 1.0 | 1.0 |", "| self | 5.0 | 1.0 |"]
    assert rows[-1] == "2 of 2 answers right; 0 questions answered differently"
