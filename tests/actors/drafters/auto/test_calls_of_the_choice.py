"""How many functions the choice among drafters calls in a round, beside what the drafters themselves do.

A round is a few milliseconds, in which the caches lose this code, so most of what the choice takes is its calls. Run as
`pytest -s tests/actors/drafters/auto/test_calls_of_the_choice.py` it prints the counts.
"""

from __future__ import annotations

import random
import sys

import pytest

from actors.drafters.auto.drafter import AutoDrafter
from actors.drafters.auto.members import Member
from actors.drafters.interface import Capabilities, Context, Draft
from actors.protocol.messages import Admit, Commit, MeasuredCosts, SamplingParams, TokenTree

PROMPT = 20
TEXT = [random.Random(1).randrange(10, 1000) for _ in range(4000)]
WRONG = 7


class Calls:
    """Python functions that this thread calls inside the block, but for drafters and what these call."""

    def __init__(self):
        self.count, self._depth = 0, 0

    def __enter__(self):
        sys.setprofile(self._saw)
        return self

    def __exit__(self, *exception):
        sys.setprofile(None)

    def _saw(self, frame, event, _):
        if event not in ("call", "return"):
            return
        if frame.f_code.co_filename == __file__:
            self._depth += 1 if event == "call" else -1
        elif event == "call" and self._depth <= 0:
            self.count += 1


class Guessing:
    """Each token of its drafts is that of the text with this chance; drafts have one of these lengths."""

    def __init__(self, chance, lengths):
        self.capabilities = Capabilities(prefills=self)
        self._chance, self._lengths, self._draw = chance, lengths, random.Random(2)

    def open(self, context):
        pass

    def prefill(self, contexts):
        pass

    def observe(self, context, commit):
        pass

    def release(self, request_id):
        pass

    def propose(self, contexts, budgets):
        return [self._draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _draft(self, context, budget):
        start, length = len(context.token_ids), min(budget, self._draw.choice(self._lengths))
        tokens = [one if self._draw.random() < self._chance else WRONG for one in TEXT[start : start + length]]
        return Draft.chosen(TokenTree.chain(context.token_ids[-1], tokens))


def calls_per_request(num_requests: int, num_rounds: int = 60) -> float:
    """The mean of the second half of these rounds."""
    lookup, model = Guessing(0.6, [0, 2, 4, 8]), Guessing(0.75, [5])
    members = [
        Member("lookup", lookup, 8, is_shown=True, is_chain=True),
        Member("model", model, 5, is_shown=False, is_chain=True),
    ]
    ticks = iter(range(10**9))
    drafter = AutoDrafter(members, clock=lambda: 3e-4 * next(ticks))
    admits = [Admit(i, 0, tuple(TEXT[:PROMPT]), PROMPT, SamplingParams()) for i in range(num_requests)]
    contexts = [Context.admitted(admit, None) for admit in admits]
    for context in contexts:
        drafter.open(context)
    drafter.prefill(contexts)
    counts, used = [], set()
    for _ in range(num_rounds):
        for context in contexts:
            context.costs = MeasuredCosts(0.002 * (1 + num_requests / 8), 0.00015)
        with Calls() as calls:
            drafts = drafter.propose(contexts, [8] * num_requests)
        counts.append(calls.count)
        for context, draft in zip(contexts, drafts, strict=True):
            start, depth = len(context.token_ids), draft.tree.agreed_depth(TEXT[len(context.token_ids) :])
            tokens = tuple(TEXT[start : start + depth + 1])
            used |= {name for name, _ in draft.parts}
            with Calls() as calls:
                drafter.observe(context, Commit(context.request_id, 0, start, tuple(range(1, depth + 1)), tokens))
            counts[-1] += calls.count
            context.extend(tokens)
    assert used == {"lookup", "model"}
    late = counts[num_rounds // 2 :]
    return sum(late) / len(late) / num_requests


@pytest.mark.parametrize(("num_requests", "most"), [(1, 100), (16, 57)])
def test_a_round_calls_few_functions(num_requests, most):
    found = calls_per_request(num_requests)
    print(f"\n{num_requests} requests: {found:.0f} calls for each, at most {most}")
    assert found <= most
