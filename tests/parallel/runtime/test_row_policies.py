"""Rows that a draft model keeps or sees: passes against transformers' layers over the very rows, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.kv.pool import FP8
from parallel.kv.row_limits import ChunkLimits, RowLimits, check_partial
from parallel.model.families.registry import read_config
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.row_policies import ChunkRows, RecentRows, StreamingRows
from parallel.runtime.runner import ModelRunner, open_model
from parallel.self_speculation.runner import SelfDraftRunner
from tests.parallel.backends import EVERY_BACKEND
from tests.parallel.conftest import Checkpoint

TEXT = [(7 * i * i + 3 * i) % 97 for i in range(60)]
LIMITS = RowLimits(3, 16)
CHUNKS = ChunkLimits(4, 4, 10)


class Moved:
    """A Llama of transformers that keeps keys unrotated and turns them, at every token, to their places in its cache:
    what TriForce's small model does."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model: Any = checkpoint.model
        self.cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.model.model.layers]

    @torch.no_grad()
    def feed(self, token: int) -> Tensor:
        inner = self.model.model
        x = inner.embed_tokens(torch.tensor([[token]]))
        length = len(self.cache[0]) + 1
        cos, sin = inner.rotary_emb(x, torch.arange(length)[None])
        for layer, rows in zip(inner.layers, self.cache, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(normed).view(1, 1, -1, attention.head_dim).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            rows.append((k, v))
            keys, values = (torch.cat(parts, 2) for parts in zip(*rows, strict=True))
            q, _ = apply_rotary_pos_emb(q, q, cos[:, -1:], sin[:, -1:])
            keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
            group = q.shape[1] // keys.shape[1]
            keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
            weights = (q @ keys.transpose(2, 3) * attention.scaling).softmax(-1)
            x = x + attention.o_proj((weights @ values).transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(inner.norm(x))[0, 0]

    def evict(self, limits: RowLimits) -> None:
        for rows in self.cache:
            excess = len(rows) - limits.sinks - limits.window
            if excess >= limits.page:
                del rows[limits.sinks : limits.sinks + excess]


def opened(checkpoint: Checkpoint, backend: str | None = None, group: Group = SINGLE) -> ModelRunner:
    return open_model(checkpoint.path, group, num_slots=300, backend=backend)


def streaming(runner: ModelRunner, limits: RowLimits = LIMITS) -> ModelRunner:
    runner.keep_rows_by(StreamingRows(runner.decoder, runner.pool, limits))
    return runner


def read(runner: ModelRunner, text: Sequence[int], step: int = 1) -> Tensor:
    """Logits of every row, fed and committed `step` at a time."""
    runner.open("a")
    rows = []
    for start in range(0, len(text), step):
        part = list(text[start : start + step])
        rows.append(runner.forward([Span("a", len(part), num_logits=len(part))], part).logits)
        runner.commit("a", range(len(part)))
    return torch.cat(rows)


@pytest.mark.extended
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_kept_rows_stand_at_their_places_in_the_cache(llama: Checkpoint, backend: str) -> None:
    found, oracle = read(streaming(opened(llama, backend)), TEXT), Moved(llama)
    for token, logits in zip(TEXT, found, strict=True):
        torch.testing.assert_close(logits, oracle.feed(token), atol=2e-4, rtol=1e-3)
        oracle.evict(LIMITS)


def test_rows_that_were_not_moved_would_show(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    right = read(streaming(opened(llama)), TEXT)
    monkeypatch.setattr(StreamingRows, "_move_back", lambda *_: None)
    wrong = read(streaming(opened(llama)), TEXT)
    assert torch.equal(wrong[: LIMITS.sinks + LIMITS.window], right[: LIMITS.sinks + LIMITS.window])
    assert (wrong[-1] - right[-1]).abs().max() > 1e-2


def test_a_text_within_the_window_is_read_as_by_the_whole_model(llama: Checkpoint) -> None:
    assert torch.equal(read(streaming(opened(llama), RowLimits(2, len(TEXT))), TEXT, 7), read(opened(llama), TEXT, 7))


@pytest.mark.extended
def test_memory_does_not_grow_with_the_text(llama: Checkpoint) -> None:
    """Nor is the text bounded by the model's positions; what is taken back is read again."""
    runner = streaming(opened(llama))
    used = set()
    assert runner.longest_text > runner.config.max_positions
    runner.open("a")
    for i in range(700):
        runner.forward([Span("a", 1)], [TEXT[i % 60]])
        runner.commit("a", [0])
        used.add(runner.pool.num_slots - runner.pool.num_free)
        assert runner.cached_len("a") == i + 1
    runner.pool.check()
    assert max(used) == LIMITS.most < runner.config.max_positions < 700
    runner.truncate("a", 695)
    assert runner.cached_len("a") == 695
    runner.truncate("a", 600)
    assert runner.cached_len("a") == LIMITS.sinks, "rows in front of the gap alone are those of a shorter text"
    runner.pool.check()


def test_pending_rows_are_moved_with_the_committed_ones(llama: Checkpoint) -> None:
    """A tree of which a part is kept while rows before it leave: its keys in the first layer, which follow from token
    and position alone, are those of rows that are fed afterwards."""
    keys = []
    for keeps in (True, False):
        runner = streaming(opened(llama))
        read(runner, TEXT[: LIMITS.most])
        runner.forward([Span("a", 3, [-1, 0, 0])], [5, 6, 7])
        runner.commit("a", [0], [1, 2] if keeps else [])
        if not keeps:
            runner.forward([Span("a", 2, [-1, -1])], [6, 7])
        assert runner.pool.skipped("a") == 0 and runner.pool.pending_len("a") == 2
        keys.append(runner.pool.keys[0, runner.pool.slots("a")[-2:].copy()])
    torch.testing.assert_close(*keys, atol=1e-5, rtol=1e-5)


def test_quantised_rows_are_moved_too(llama: Checkpoint) -> None:
    """Keys of the first layer, which follow from tokens and positions alone, but for the rounding of eight moves."""
    keys = []
    for stored in (FP8, None):
        runner = streaming(open_model(llama.path, num_slots=300, backend="sdpa", kv_dtype=stored))
        read(runner, TEXT, 5)
        assert runner.pool.text_len("a") - runner.pool.cached_len("a") > LIMITS.window
        keys.append(runner.pool.read(0, torch.from_numpy(runner.pool.slots("a").copy()))[0])
    difference = (keys[0] - keys[1]).norm() / keys[1].norm()
    assert 0 < difference < 0.08, "e4m3 rounds to a sixteenth"


# --- parts of rows that stay ------------------------------------------------------------------------------------------


@torch.no_grad()
def masked(checkpoint: Checkpoint, seen: Sequence[int], num_last: int) -> tuple[Tensor, Tensor]:
    """The result of transformers: logits of the last rows of TEXT, which see the rows `seen` of the others, and the sum
    of the last row's weights over heads and layers if it saw all."""
    model: Any = checkpoint.model
    length = len(TEXT)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    hidden = sorted(set(range(length - num_last)) - set(seen))
    mask[length - num_last :, hidden] = False
    additive = torch.zeros(length, length).masked_fill_(~mask, -torch.inf)[None, None]
    model.set_attn_implementation("eager")
    output = model(torch.tensor([TEXT]), attention_mask=additive, output_attentions=True)
    return output.logits[0, length - num_last :], _weights(output)


def _weights(output: Any) -> Tensor:
    return torch.stack([layer[0, :, -1, :-1].sum(0) for layer in output.attentions]).sum(0)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_drafts_of_the_target_see_its_newest_rows_at_their_positions(llama: Checkpoint, backend: str) -> None:
    target = opened(llama, backend)
    read(target, TEXT[:-2], 20)
    drafts = SelfDraftRunner(target, LayerPlan.whole(target.config.num_layers))
    drafts.keep_rows_by(RecentRows(LIMITS))
    found = [drafts.forward([Span("a", 1)], [token], fuzzy=i > 0).logits for i, token in enumerate(TEXT[-2:])]
    seen = LIMITS.recent(len(TEXT) - 2).tolist()
    assert seen == [0, 1, 2, *range(len(TEXT) - 18, len(TEXT) - 2)]
    expected, _ = masked(llama, seen, 2)
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-4, rtol=1e-3)
    drafts.release_rows()
    target.pool.check()
    everything, _ = masked(llama, range(len(TEXT)), 2)
    assert (everything - expected).abs().max() > 1e-2, "the test shows nothing"


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_chunks_are_those_that_the_newest_row_attends_to(llama: Checkpoint, backend: str) -> None:
    """The pass that chooses sees all rows; those after it see the chunks, and rows that came since."""
    target = opened(llama, backend)
    policy = ChunkRows(target.decoder, target.pool, CHUNKS)
    target.keep_rows_by(policy)
    target.open("a")
    target.forward([Span("a", 57, num_logits=0)], TEXT[:57])
    target.commit("a", range(57))
    whole = target.forward([Span("a", 2, num_logits=2)], TEXT[57:59]).logits
    target.commit("a", [0, 1])
    narrow = target.forward([Span("a", 1)], TEXT[59:]).logits
    target.commit("a", [0])
    _, weights = masked_until(llama, 58)
    sums = [float(weights[start : start + 4].sum()) for start in range(0, 57, 4)]
    best = sorted(range(1, len(sums) - 1), key=lambda chunk: -sums[chunk])[:2]
    chosen = [row for chunk in sorted([0, *best, len(sums) - 1]) for row in range(4 * chunk, min(57, 4 * chunk + 4))]
    assert policy._chosen["a"].rows.tolist() == chosen
    expected, _ = masked(llama, [*chosen, 57, 58], 1)
    torch.testing.assert_close(narrow, expected, atol=2e-4, rtol=1e-3)
    everything, _ = masked(llama, range(60), 3)
    torch.testing.assert_close(whole, everything[:2], atol=2e-4, rtol=1e-3)
    assert (everything[2:] - expected).abs().max() > 1e-3, "the test shows nothing"
    target.close("a")
    assert not policy._chosen
    target.pool.check()


def masked_until(checkpoint: Checkpoint, length: int) -> tuple[Tensor, Tensor]:
    """As `masked`, of the first tokens, where every row sees all before it."""
    output = attentions_until(checkpoint, length)
    return output.logits[0], _weights(output)


@torch.no_grad()
def attentions_until(checkpoint: Checkpoint, length: int) -> Any:
    model: Any = checkpoint.model
    model.set_attn_implementation("eager")
    return model(torch.tensor([TEXT[:length]]), output_attentions=True)


def test_chunks_for_the_whole_text_are_the_whole_text(llama: Checkpoint) -> None:
    target = opened(llama)
    target.keep_rows_by(ChunkRows(target.decoder, target.pool, ChunkLimits(8, 8, 4)))
    assert torch.equal(read(target, TEXT, 4), read(opened(llama), TEXT, 4))


def test_chunks_are_chosen_again(llama: Checkpoint) -> None:
    target = opened(llama)
    policy = ChunkRows(target.decoder, target.pool, CHUNKS)
    target.keep_rows_by(policy)
    read(target, TEXT, 3)
    target.forward([Span("a", 1)], [3])
    assert policy._chosen["a"].context == 54, "after 18, 30 and 42 rows"
    target.truncate("a", 20)
    target.forward([Span("a", 1)], [3])
    target.commit("a", [0])
    target.forward([Span("a", 1)], [3])
    assert policy._chosen["a"].context == 20, "chunks of text that was taken back are not seen"


def best(sums: dict[int, float], every: int = 8, num_chunks: int = 8) -> list[int]:
    """The chunks of 2 rows that are chosen of 40 with these sums; the others have 0.01."""
    policy = ChunkRows(None, None, ChunkLimits(2, num_chunks, every))  # type: ignore[arg-type]  # ranks alone
    values = np.array([sums.get(chunk, 0.01) for chunk in range(40)])
    rows = policy._best(values, 79)
    assert rows.tolist() == [row for chunk in rows[::2] // 2 for row in (2 * chunk, 2 * chunk + 1) if row < 79]
    return (rows[::2] // 2).tolist()


def test_chunks_around_those_that_are_attended_to_are_chosen_with_them() -> None:
    """As far as is read until the next choice, and half as much for each chunk between."""
    assert best({10: 1.0}) == [0, 7, 8, 9, 10, 11, 12, 39]
    assert best({10: 1.0}, every=4) == [0, 1, 8, 9, 10, 11, 12, 39]
    assert best({10: 1.0, 20: 0.3}) == [0, 8, 9, 10, 11, 12, 20, 39]
    assert best({10: 1.0, **dict.fromkeys(range(20, 25), 0.6)}) == [0, 10, 20, 21, 22, 23, 24, 39]


def test_the_first_and_the_newest_chunks_bring_no_others() -> None:
    assert best({0: 9.0, 10: 1.0, 39: 9.0}) == best({10: 1.0})


def test_rows_of_drafts_choose_nothing(llama: Checkpoint) -> None:
    """A pass that verifies drafts of another model: what is behind the text's last token may be wrong."""
    found = []
    for behind in ([], [3, 4, 5], [6]):
        target = opened(llama)
        target.open("a")
        target.forward([Span("a", 40, num_logits=0)], TEXT[:40])
        target.commit("a", range(40))
        drafts = SelfDraftRunner(target, LayerPlan.whole(target.config.num_layers))
        policy = ChunkRows(target.decoder, target.pool, CHUNKS)
        drafts.keep_rows_by(policy)
        drafts.forward([Span("a", 2 + len(behind), num_logits=1 + len(behind))], [*TEXT[40:42], *behind])
        drafts.forward([Span("a", 1)], [7], fuzzy=True)
        (chosen,) = policy._chosen.values()
        found.append(chosen.sums)
    for sums in found[1:]:
        np.testing.assert_allclose(sums, found[0], rtol=1e-4)


def test_earlier_choices_count_half_as_much(llama: Checkpoint) -> None:
    target = opened(llama)
    target.open("a")
    drafts = SelfDraftRunner(target, LayerPlan.whole(target.config.num_layers))
    policy = ChunkRows(target.decoder, target.pool, CHUNKS)
    drafts.keep_rows_by(policy)
    expected, fed = np.zeros(0), 0
    for context in (30, 45):
        target.forward([Span("a", context - fed, num_logits=0)], TEXT[fed:context])
        target.commit("a", range(context - fed))
        fed = context
        for i in range(2):
            drafts.forward([Span("a", 1)], [TEXT[context]], fuzzy=i > 0)
        drafts.release_rows()
        shares = [layer[0, :, -1, :-1] for layer in attentions_until(llama, context + 1).attentions]
        weights = torch.stack([(share / share.sum(-1, keepdim=True)).sum(0) for share in shares]).sum(0)
        sums = np.add.reduceat(weights.numpy(), np.arange(0, context, CHUNKS.size))
        sums[: len(expected)] += expected / 2
        expected = sums
        (chosen,) = policy._chosen.values()
        np.testing.assert_allclose(chosen.sums, expected, rtol=1e-3)
    target.truncate("a", 24)
    for i in range(2):
        drafts.forward([Span("a", 1)], [3], fuzzy=i > 0)
    (chosen,) = policy._chosen.values()
    assert chosen.context == 24 and len(chosen.sums) == 6, "chunks of text that was taken back count no more"


CHOSEN_BY_ACCEPTED = [(0, [0, 1, 2, 4, 8]), (1, [0, 5]), (9, [0, 1, 2, 3])]
"""Accepted tokens of each draft, and the drafts that choose."""


@pytest.mark.parametrize(("accepted", "chosen"), CHOSEN_BY_ACCEPTED)
def test_a_draft_model_chooses_again_after_a_draft_without_an_accepted_token(
    llama: Checkpoint, accepted: int, chosen: list[int]
) -> None:
    """A draft begins where nothing of the one before is pending."""
    model = opened(llama)
    policy = ChunkRows(model.decoder, model.pool, CHUNKS)
    model.keep_rows_by(policy)
    model.open("a")
    model.forward([Span("a", 20, num_logits=0)], TEXT[:20])
    model.commit("a", range(20))
    found, context = list[int](), 20
    while context + accepted < len(TEXT) and len(found) < 10:
        for i in range(accepted + 2):
            model.forward([Span("a", 1)], [TEXT[(context + i) % len(TEXT)]])
        found.append(policy._chosen["a"].context)
        model.commit("a", range(accepted + 1))
        context += accepted + 1
    assert [i for i, one in enumerate(found) if i == 0 or one != found[i - 1]] == [i for i in chosen if i < len(found)]


@pytest.mark.parametrize(("accepted", "chosen"), CHOSEN_BY_ACCEPTED)
def test_a_draft_without_an_accepted_token_brings_a_new_choice(
    llama: Checkpoint, accepted: int, chosen: list[int]
) -> None:
    """The first, second, fourth and so on in a row; otherwise one after `every` tokens."""
    target = opened(llama)
    target.open("a")
    target.forward([Span("a", 20, num_logits=0)], TEXT[:20])
    target.commit("a", range(20))
    drafts = SelfDraftRunner(target, LayerPlan.whole(target.config.num_layers))
    policy = ChunkRows(target.decoder, target.pool, CHUNKS)
    drafts.keep_rows_by(policy)
    found, context = list[int](), 20
    while context + accepted < len(TEXT) and len(found) < 10:
        for i in range(2):
            drafts.forward([Span("a", 1)], [TEXT[context]], fuzzy=i > 0)
        drafts.forward([Span("a", 1)], [3], fuzzy=True)
        (one,) = policy._chosen.values()
        found.append(one.context)
        drafts.release_rows()
        new = TEXT[context : context + accepted + 1]
        target.forward([Span("a", len(new), num_logits=0)], new)
        target.commit("a", range(len(new)))
        context += len(new)
    assert [i for i, one in enumerate(found) if i == 0 or one != found[i - 1]] == [i for i in chosen if i < len(found)]


def test_ranks_choose_the_same_chunks(
    llama: Checkpoint, on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]]
) -> None:
    def logits(group: Group) -> Tensor:
        target = opened(llama, group=group)
        target.keep_rows_by(ChunkRows(target.decoder, target.pool, CHUNKS))
        return read(target, TEXT, 3)

    alone = logits(SINGLE)
    for shared in on_ranks(2, logits):
        torch.testing.assert_close(shared, alone, atol=2e-4, rtol=1e-3)


def test_closing_a_sequence_asks_no_other_rank_and_leaves_the_choice_of_others(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rank has died all sequences are closed behind a group that is closed already."""
    found = []
    for closes in (False, True):
        target = opened(llama)
        policy = ChunkRows(target.decoder, target.pool, CHUNKS)
        target.keep_rows_by(policy)
        for name, text in (("a", TEXT[::-1]), ("b", TEXT)):
            target.open(name)
            target.forward([Span(name, 57, num_logits=0)], text[:57])
            target.commit(name, range(57))
        target.forward([Span("a", 1), Span("b", 1)], [5, TEXT[57]])
        if closes:
            with monkeypatch.context() as patch:
                patch.setattr(ChunkRows, "_choose", lambda _: pytest.fail("weights were summed over ranks"))
                target.close("a")
        else:
            target.truncate("a", 0)
        target.commit("b", [0])
        target.forward([Span("b", 1)], [TEXT[58]])
        assert policy._chosen.keys() == ({"b"} if closes else {"a", "b"})
        found.append(policy._chosen["b"].rows.tolist())
    assert found[0] == found[1]


def test_models_whose_rows_cannot_be_moved_or_skipped_are_refused(make_checkpoint: Callable[..., Checkpoint]) -> None:
    learned, windowed = (
        read_config(make_checkpoint(name, **more).path)
        for name, more in (("OPT", {}), ("Mistral", {"sliding_window": 9}))
    )
    assert learned.rope is None and windowed.windowed
    check_partial(windowed, LIMITS)
    check_partial(learned)
    for config, limits, reason in (
        (learned, LIMITS, "learned positions"),
        (windowed, None, "sliding window"),
        (windowed, RowLimits(4, 100_000), "more than the model's"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_partial(config, limits)
