"""A target that is a function of the text: verifies trees greedily and hands over the rows of every node."""

from __future__ import annotations

import numpy as np

from actors.drafters.interface import Context
from actors.protocol.messages import Commit, SamplingParams, TopTokens
from actors.verification.coupled import verify_coupled


class ScriptedTarget:
    """One request on one drafter. `rounds` has the tokens of each round; `loses` says which rounds' rows are lost."""

    def __init__(self, drafter, next_token, prompt, *, loses=lambda number: False, **sampling):
        self.drafter, self.next_token, self._loses = drafter, next_token, loses
        self.context = Context(1, 0, list(prompt), len(prompt), SamplingParams(**sampling))
        self.rounds: list[tuple[int, ...]] = []
        drafter.open(self.context)

    def round(self, budget):
        """Draft, verify, hand over rows, commit; returns the tree."""
        context, drafter = self.context, self.drafter
        (draft,) = drafter.propose([context], [budget])
        tree = draft.tree
        tree.check()
        assert tree.num_draft_tokens <= budget and tree.token_ids[0] == context.token_ids[-1]
        paths = [[tree.token_ids[i] for i in tree.path_to(node)] for node in range(len(tree.token_ids))]
        answers = [self.next_token((*context.token_ids, *path)) for path in paths]
        path, last = verify_coupled(tree, answers)
        token_ids = (*(tree.token_ids[node] for node in path), last)
        if not self._loses(len(self.rounds)):
            drafter.read_top_tokens(rows_of(1, len(context.token_ids), tree.token_ids, answers))
        drafter.observe(context, Commit(1, 0, len(context.token_ids), path, token_ids))
        context.extend(token_ids)
        self.rounds.append(token_ids)
        return tree


def rows_of(request_id, prefix_len, token_ids, answers):
    """The top tokens of a pass over one tree, beside a row of another request before it."""
    contexts = [(0, 3), *((0, token) for token in token_ids)]
    tokens, probs = np.array([9, *answers], np.int32), np.ones(len(contexts), np.float32)
    spans = ((request_id + 1, 4, 1), (request_id, prefix_len, len(token_ids)))
    return TopTokens(1, np.array(contexts, np.int32).tobytes(), tokens.tobytes(), probs.tobytes(), spans)
