"""A request's committed text: where a commit is cut, what is counted, and which proposals are stale."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.coordinator.sequence import Sequence
from actors.protocol.messages import (
    HASH_SEED,
    Proposal,
    Request,
    SamplingParams,
    TokenTree,
    Verdict,
    extend_hash,
)

EOS = frozenset({1})


def start(prompt=(5, 6, 7), max_model_len=100, **sampling) -> Sequence:
    sequence = Sequence.start(
        Request(4, tuple(prompt), SamplingParams(**{"max_tokens": 20, **sampling})), max_model_len, EOS
    )
    sequence.cached_len = len(prompt) - 1
    return sequence


def propose(sequence: Sequence, draft, parents=None) -> Proposal:
    root = sequence.token_ids[-1]
    tree = TokenTree.chain(root, draft) if parents is None else TokenTree((root, *draft), (-1, *parents))
    return Proposal(sequence.request_id, sequence.epoch, sequence.prefix_len, sequence.prefix_hash, tree)


def commit(sequence: Sequence, path, next_token: int | list[int], proposal=None, *, none_follows=False):
    own = (next_token,) if isinstance(next_token, int) else tuple(next_token)
    verdict = Verdict(4, sequence.epoch, sequence.prefix_len, tuple(path), own, none_follows)
    return sequence.commit(verdict, proposal)


def test_a_commit_appends_the_path_and_the_target_s_own_token():
    sequence = start()
    proposal = propose(sequence, [10, 11, 12, 13], parents=[0, 0, 2, 2])
    record = commit(sequence, [2, 4], 20, proposal)
    assert (record.request_id, record.epoch, record.prefix_len) == (4, 0, 3)
    assert (record.path, record.token_ids) == ((2, 4), (11, 13, 20))
    assert sequence.token_ids == [5, 6, 7, 11, 13, 20]
    assert sequence.cached_len == 5 and sequence.uncached_len == 1, "all but the root is cached"
    assert sequence.prefix_hash == extend_hash(HASH_SEED, sequence.token_ids)
    assert sequence.finish_reason is None and sequence.num_generated == 3 and sequence.remaining == 17


@pytest.mark.parametrize(
    ("draft", "emitted", "reason"),
    [([], (), "error"), ([10, 11], (10, 11), "error"), ([10, 1], (10, 1), "stop"), ([10] * 20, (10,) * 20, "length")],
    ids=["at the root", "after a path", "after its end", "after its last token"],
)
def test_where_no_token_can_follow_the_path_stands_and_the_request_ends(draft, emitted, reason):
    """As in plain decoding, which would not have asked for a token after the end."""
    sequence = start()
    record = commit(sequence, range(1, len(draft) + 1), [], propose(sequence, draft), none_follows=True)
    assert (record.token_ids, sequence.finish_reason) == (emitted, reason)


def test_a_verdict_may_bring_several_tokens_or_none_yet():
    """A target writes in blocks: what has no row is fed with the next pass, the root always."""
    sequence = start()
    record = commit(sequence, [1], [20, 21, 22], propose(sequence, [10, 11]))
    assert record.token_ids == (10, 20, 21, 22) and (sequence.cached_len, sequence.uncached_len) == (4, 3)
    before = sequence.prefix_hash
    assert commit(sequence, [], []).token_ids == () and sequence.finish_reason is None
    assert (sequence.cached_len, sequence.uncached_len, sequence.prefix_hash) == (6, 1, before)
    commit(sequence, [], [23, 1, 24])
    assert sequence.token_ids[-2:] == [23, 1] and sequence.finish_reason == "stop"


def test_an_empty_proposal_commits_one_token_and_counts_no_speculation():
    for proposal in (None, propose(start(), [])):
        sequence = start()
        assert commit(sequence, [], 20, proposal).token_ids == (20,)
        assert sequence.stats().num_spec_steps == 0 and sequence.stats().acceptance_histogram == ()


@pytest.mark.parametrize(
    ("sampling", "emitted", "reason"),
    [
        ({}, (1,), "stop"),
        (dict(ignore_eos=True), (1, 12, 30), None),
        (dict(ignore_eos=True, stop_token_ids=(12,)), (1, 12), "stop"),
        (dict(ignore_eos=True, stop_token_ids=(30,)), (1, 12, 30), "stop"),
        (dict(ignore_eos=True, max_tokens=2), (1, 12), "length"),
        (dict(ignore_eos=True, max_tokens=3), (1, 12, 30), "length"),
        (dict(max_tokens=1), (1,), "stop"),
        (dict(ignore_eos=True, max_tokens=2, stop_token_ids=(12,)), (1, 12), "stop"),
    ],
)
def test_a_commit_is_cut_where_the_request_ends(sampling, emitted, reason):
    sequence = start(**sampling)
    record = commit(sequence, [1, 2], 30, propose(sequence, [1, 12, 13]))
    assert record.token_ids == emitted and sequence.token_ids[3:] == list(emitted)
    assert sequence.finish_reason == reason


@pytest.mark.parametrize(("max_model_len", "emitted"), [(4, (10,)), (5, (10, 11)), (6, (10, 11, 12))])
def test_a_commit_is_cut_at_the_models_context(max_model_len, emitted):
    sequence = start(max_model_len=max_model_len)
    assert commit(sequence, [1, 2, 3], 30, propose(sequence, [10, 11, 12])).token_ids == emitted
    assert sequence.finish_reason == "length" and sequence.remaining == 0


def test_statistics_count_what_was_kept():
    sequence = start(max_tokens=9)
    for path in ([1, 2], [], [1, 2, 3], [1]):  # emits 3, 1, 4, and of the last 2 only one
        commit(sequence, path, 30, propose(sequence, [10, 11, 12]))
    stats = sequence.stats()
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 12, 6)
    assert stats.acceptance_histogram == (1, 1, 1, 1)
    assert sequence.finish_reason == "length"


def test_a_cut_path_counts_only_what_was_emitted():
    sequence = start(max_tokens=2)
    commit(sequence, [1, 2, 3], 30, propose(sequence, [10, 11, 12]))
    assert sequence.counts.num_accepted_tokens == 2 and sequence.counts.acceptance_histogram == [0, 0, 1]


def test_only_a_proposal_for_this_very_prefix_is_accepted():
    sequence = start()
    commit(sequence, [], 20)
    fresh = propose(sequence, [10, 11])
    assert sequence.is_current(fresh)
    stale = {
        "epoch": replace(fresh, epoch=1),
        "prefix_len": replace(fresh, prefix_len=3),
        "prefix_hash": replace(fresh, prefix_hash=extend_hash(HASH_SEED, [5, 6, 7, 21])),
        "root": replace(fresh, tree=TokenTree.chain(21, [10, 11])),
    }
    assert not [name for name, proposal in stale.items() if sequence.is_current(proposal)]
    commit(sequence, [1], 30, fresh)
    assert not sequence.is_current(fresh), "the text went on"


def test_preemption_forgets_rows_keeps_text_and_makes_records_stale():
    sequence = start()
    commit(sequence, [], 20)
    proposal = propose(sequence, [10])
    sequence.preempt()
    assert sequence.token_ids == [5, 6, 7, 20] and sequence.cached_len == 0 and sequence.uncached_len == 4
    assert not sequence.is_current(proposal) and sequence.stats().num_preemptions == 1
    assert sequence.is_current(propose(sequence, [10]))


@pytest.mark.parametrize("wrong", [dict(epoch=1), dict(prefix_len=2)])
def test_a_verdict_on_another_prefix_is_a_broken_invariant(wrong):
    sequence = start()
    with pytest.raises(AssertionError):
        sequence.commit(replace(Verdict(4, 0, 3, (), (20,)), **wrong), None)


@pytest.mark.extended
@given(st.data())
def test_lengths_and_digest_hold_over_any_run(data):
    sequence = start(max_tokens=15, max_model_len=data.draw(st.integers(4, 20)))
    emitted = []
    while sequence.finish_reason is None:
        if data.draw(st.booleans()):
            sequence.preempt()
            sequence.cached_len = sequence.prefix_len - 1
        draft = data.draw(st.lists(st.integers(0, 4), max_size=4))
        path = range(1, data.draw(st.integers(0, len(draft))) + 1)
        num_own, before = data.draw(st.sampled_from([1, 2, 3, 0])), sequence.prefix_len
        own = [data.draw(st.integers(0, 4)) for _ in range(num_own)]
        record = commit(sequence, path, own, propose(sequence, draft))
        emitted += record.token_ids
        assert len(record.token_ids) <= len(path) + len(own)
        if sequence.finish_reason is None:
            assert len(record.token_ids) == len(path) + num_own
            assert sequence.uncached_len == max(1, num_own) and sequence.cached_len <= before + len(path)
        assert sequence.token_ids == [5, 6, 7, *emitted] and sequence.prefix_len <= sequence.max_len
        assert sequence.prefix_hash == extend_hash(HASH_SEED, sequence.token_ids)
    assert (sequence.finish_reason == "stop") == (emitted[-1] == 1)
    assert 1 not in emitted[:-1]
    assert sum(sequence.counts.acceptance_histogram) == sequence.counts.num_spec_steps
    assert sum(i * n for i, n in enumerate(sequence.counts.acceptance_histogram)) == sequence.counts.num_accepted_tokens
