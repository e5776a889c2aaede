"""Rules replayed over recorded drafts, against a walk by hand, and the recording of the drafts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.interface import Context
from actors.drafters.model.chain_rules import ChainRule
from actors.protocol.messages import SamplingParams, TokenTree
from docs.measurements.lengths.chain_lengths import (
    Outcome,
    PassTimes,
    RecordedDraft,
    record_drafts,
    replay_fixed,
    replay_known,
    replay_ordered,
    replay_rule,
)

LONGEST = 4
TIMES = PassTimes(0.25, (1.0, 1.125, 1.5, 2.0, 3.0))


def texts(seed, num_texts=3, num_places=40):
    draw = random.Random(seed)
    return [
        [
            RecordedDraft(
                draw.randrange(LONGEST + 1),
                tuple(-draw.random() for _ in range(LONGEST)),
                tuple(draw.random() for _ in range(LONGEST)),
            )
            for _ in range(num_places)
        ]
        for _ in range(num_texts)
    ]


def walked(drafts, length_of) -> Outcome:
    """Draft, accept what the text has, go behind the token after it; `length_of` takes text, place and draft."""
    rounds = []
    for number, own in enumerate(drafts):
        place = 0
        while place < len(own):
            length = length_of(number, place, own[place])
            accepted = min(length, own[place].num_right)
            rounds.append((length, accepted))
            place += accepted + 1
    lengths = [length for length, _ in rounds]
    seconds: Any = pytest.approx(sum(0.25 * length + TIMES.verify_s[length] for length in lengths))
    return Outcome(
        tokens=sum(accepted + 1 for _, accepted in rounds),
        rounds=len(rounds),
        drafted=sum(lengths),
        accepted=sum(accepted for _, accepted in rounds),
        seconds=seconds,
        lengths={length: lengths.count(length) for length in dict.fromkeys(lengths)},
    )


@pytest.mark.parametrize("length", range(LONGEST + 1))
def test_a_fixed_length_is_drafted_in_every_round(length):
    assert replay_fixed(texts(1), TIMES, length) == walked(texts(1), lambda *_: length)


def test_a_known_draft_ends_where_the_text_leaves_it_if_it_pays_at_all():
    def length(_number, _place, draft):
        gain = (draft.num_right + 1) / (0.25 * draft.num_right + TIMES.verify_s[draft.num_right])
        return draft.num_right if draft.num_right and gain > 1.0 else 0

    found = replay_known(texts(2), TIMES, LONGEST)
    assert found == walked(texts(2), length) and set(found.lengths) == {0, 1, 2, 3, 4}
    dear = PassTimes(0.25, (1.0, 9.0, 9.0, 9.0, 9.0))
    assert set(replay_known(texts(2), dear, LONGEST).lengths) == {0}
    assert replay_known(texts(2), TIMES, 2) == walked(
        [[RecordedDraft(min(one.num_right, 2), (), ()) for one in own] for own in texts(2)], length
    )
    even = PassTimes(0.0, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert set(replay_known(texts(2), even, LONGEST).lengths) == {0}, "as fast as plain decoding does not pay"


class Below(ChainRule):
    """Ends a chain at the first token whose figure is below a half; notes what it is asked and given."""

    def __init__(self, *, reads_gaps: bool, least: float) -> None:
        self.reads_gaps = reads_gaps
        self._least = least
        self.asked: list[tuple[int, int]] = []
        self.updates: list[tuple[int, int]] = []

    def continues(self, request_id, step, log_probs):
        self.asked.append((request_id, step))
        return log_probs[-1] >= self._least

    def update(self, request_id, num_accepted):
        self.updates.append((request_id, num_accepted))

    def release(self, request_id):
        pass


@pytest.mark.parametrize("reads_gaps", [True, False])
def test_a_rule_ends_a_draft_behind_the_token_it_refuses_and_learns_what_was_accepted(reads_gaps):
    least = 0.5 if reads_gaps else -0.5
    rule = Below(reads_gaps=reads_gaps, least=least)
    visited, accepted = [], []

    def length(number, place, draft):
        seen = draft.gaps if reads_gaps else draft.log_probs
        refused = [i + 1 for i, value in enumerate(seen[:-1]) if value < least]
        visited.append((number, place))
        result = refused[0] if refused else LONGEST
        accepted.append((number, min(result, draft.num_right)))
        return result

    found = replay_rule(texts(3), TIMES, rule, LONGEST)
    assert found == walked(texts(3), length) and set(found.lengths) == {1, 2, 3, 4}
    assert rule.updates == accepted and list(dict.fromkeys(rule.asked)) == visited


def test_ordered_lengths_see_their_own_times_and_outcomes(monkeypatch):
    """The policy gets each round's seconds, its tokens, and the outcome, and its order is what is drafted."""
    seen: list[Any] = []

    class Policy:
        def __init__(self, *arguments):
            assert arguments == ("sync", 1, LONGEST)

        def draft_length(self, request_id, room):
            assert room == LONGEST + 1
            return (len(seen) + request_id) % (LONGEST + 1)

        def update(self, observation):
            seen.append(observation)

    monkeypatch.setattr("docs.measurements.lengths.chain_lengths.AdaptivePolicy", Policy)
    expected: list[Any] = []

    def length(number, _place, draft):
        result = (len(expected) + number) % (LONGEST + 1)
        accepted = min(result, draft.num_right)
        drafted_s, verify_s = 0.25 * result, TIMES.verify_s[result]
        expected.append((drafted_s + verify_s, verify_s, drafted_s, accepted + 1, number, result, accepted))
        return result

    assert replay_ordered(texts(4), TIMES, LONGEST) == walked(texts(4), length)
    found = []
    for one in seen:
        (outcome,) = one.outcomes
        assert outcome.num_tokens == len(outcome.path) + 1
        assert list(outcome.path) == list(range(1, outcome.num_tokens)), "nodes of a chain"
        assert (one.num_running, one.num_may_speculate, one.num_prompt_rows) == (1, 1, 0)
        times = (one.seconds, one.verify_s, one.draft_s, outcome.num_tokens)
        found.append((*times, outcome.request_id, outcome.num_ordered, len(outcome.path)))
    assert found == expected


def test_speed_is_tokens_over_seconds():
    outcome = Outcome()
    for length, accepted, seconds in ((2, 1, 0.5), (0, 0, 0.25), (2, 2, 1.25)):
        outcome.add(length, accepted, seconds)
    assert outcome == Outcome(6, 3, 4, 3, 2.0, {2: 2, 0: 1}) and outcome.tokens_per_s == 3.0


def test_recorded_drafts_are_those_after_every_token_of_the_texts():
    """A drafter that proposes successors: in the texts a jump ends what is right, and rules saw the chain's figures."""
    whole = [[1, 2, 3, 4, 9, 10, 11, 12, 13], [5, 6, 7, 20, 21, 22, 23, 24, 25]]
    contexts = [Context(i, 0, own[:2], 2, SamplingParams()) for i, own in enumerate(whole)]
    log: list[Any] = []
    rules: list[Any] = []

    def propose(live, budgets):
        assert budgets == [3, 3]
        drafts = []
        for context in live:
            last = context.token_ids[-1]
            for i in range(1, 4):
                assert rules[0].continues(context.request_id, len(context.token_ids), (-last / 100,) * i)
            drafts.append(SimpleNamespace(tree=TokenTree.chain(last, [last + 1, last + 2, last + 3])))
        log.append(("propose", [list(context.token_ids) for context in live]))
        return drafts

    drafter: Any = SimpleNamespace(
        end_chains_by=rules.append,
        open=lambda context: log.append(("open", context.request_id)),
        propose=propose,
        observe=lambda context, commit: log.append(("observe", context.request_id, len(context.token_ids), commit)),
        release=lambda request_id: log.append(("release", request_id)),
    )
    read = [len(contexts[0].token_ids)]
    found = record_drafts(
        drafter, contexts, whole, 3, lambda live: read.append(len(live[0].token_ids)), reads_gaps=True
    )
    right = [[2, 1, 0, 3], [1, 0, 3, 3]]
    assert [[number for number, _ in own] for own in found] == right
    assert [[seen for _, seen in own] for own in found] == [
        [(-own[place] / 100,) * 3 for place in range(1, 5)] for own in whole
    ]
    assert rules[0].reads_gaps is True and read == [2, 2, 3, 4, 5], "the target reads what the drafts start from"
    assert [context.token_ids for context in contexts] == [own[:6] for own in whole]
    assert log[:2] == [("open", 0), ("open", 1)] and log[-2:] == [("release", 0), ("release", 1)]
    commits = [(one[1], one[2], one[3].prefix_len, one[3].token_ids, one[3].path) for one in log if one[0] == "observe"]
    assert commits == [(i, n, n, (whole[i][n],), ()) for n in range(2, 6) for i in (0, 1)]
