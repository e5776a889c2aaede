"""`drafter=lookahead`: n-grams that the target made ahead of the text, as guesses for what follows the last token.

No model, no device. Each round the target also continues a window of guessed positions, and every column of the window
leaves an n-gram in a pool; of the pool, those that begin with the last token of the text are proposed. Source: Fu et
al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv 2402.02057).

Both branches are one token tree. Row 0 of the window is a chain below the root, which is column 0; row r > 0 of a
column hangs below row r - 1 of the same column, so that a node sees row 0 up to its column and its own column, as in
the paper's mask. Guesses hang below the root. Paths that agree are merged, so that the window is verified as well. The
target's likeliest token after the last row of each column is the next row; the first row is dropped.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.drafters.jacobi.config import LookaheadDrafterConfig
from actors.drafters.jacobi.proposed_rows import ProposedRows
from actors.drafters.path_tree import PathTree
from actors.protocol.messages import Commit, TokenTree, TopTokens


class NgramPool:
    """Keeps at most `num_kept` continuations of each token, the latest last."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._guesses: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, token: int, continuation: tuple[int, ...]) -> None:
        """Now the latest of this token; the oldest is dropped if there are too many."""
        guesses = self._guesses.setdefault(token, {})
        guesses.pop(continuation, None)
        guesses[continuation] = None
        if len(guesses) > self._num_kept:
            del guesses[next(iter(guesses))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Continuations of this token, the latest first."""
        return list(reversed(self._guesses.get(token, {})))


class Window:
    """Rows of guessed tokens; column i of row r stands r + i positions after the root, and column 0 of row 0 is it.

    `rows[0]` begins with column 1. A row is added each round until there are `ngram - 1`; meanwhile the window loses a
    column a round, of those that it has more at first.
    """

    def __init__(self, window: int, ngram: int, prompt: Sequence[int], seed: int, ends: Collection[int]) -> None:
        self._num_rows = ngram - 1
        self._choose, self._prompt, self._ends = random.Random(seed), prompt, ends
        self.rows = [[self._any_token() for _ in range(window + ngram - 3)]]

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.rows))

    def place(self, tree: PathTree) -> list[int]:
        """Enter the window into the tree; returns the nodes of its last row by column, the root for row 0's first."""
        nodes = [0]
        for token in self.rows[0]:
            nodes.append(tree.add(nodes[-1], token))
        for row in self.rows[1:]:
            nodes = [tree.add(node, token) for node, token in zip(nodes, row, strict=True)]
        return nodes

    def advance(self, root: int, answers: Sequence[int], pool: NgramPool) -> None:
        """The target's tokens after the last row are the next row; a full column leaves its n-gram in the pool.

        The window advances by one position however many were accepted, as published: what trajectories were made of
        matters more than that their positions are those at which they began.
        """
        added = [self._any_token() if token in self._ends else token for token in answers]
        if len(self.rows) < self._num_rows:
            self.rows = [*(row[1:] for row in self.rows), added[1:]]
            return
        for first, *column in zip([root, *self.rows[0]], *self.rows[1:], answers, strict=True):
            pool.add(first, tuple(column))
        self.rows = [*self.rows[1:], added]
        self.rows[0] = self.rows[0][1:]

    def _any_token(self) -> int:
        """What the window begins with, and what replaces an end token: nothing follows one."""
        return self._choose.choice(self._prompt)


class _Lookahead:
    """A window and a pool; `last_row` are the nodes of the window in the latest draft, empty if it had none."""

    def __init__(self, config: LookaheadDrafterConfig, context: Context, ends: Collection[int]) -> None:
        self.window = Window(config.window, config.ngram, context.prompt, context.sampling.seed, ends)
        self.pool = NgramPool(config.guesses)
        self.num_read = 0
        self.last_row: list[int] = []


class LookaheadDrafter(RequestwiseDrafter):
    """Keeps a window and a pool for each request; n-grams of text that is taken back stay in the pool."""

    def __init__(self, config: LookaheadDrafterConfig, eos_token_ids: Sequence[int]) -> None:
        self.capabilities = Capabilities(prefills=self, truncates=self, reads_top_tokens=self)
        self._config = config
        self._ends = frozenset(eos_token_ids)
        self._rows = ProposedRows()
        self._requests: dict[int, _Lookahead] = {}

    def open(self, context: Context) -> None:
        """A request arrived; its prompt is read in `prefill`, or at the first proposal if that comes earlier."""
        self.release(context.request_id)
        self._requests[context.request_id] = _Lookahead(self._config, context, self._ends)

    def observe(self, context: Context, commit: Commit) -> None:
        """The rows of the window in the last draft have come, or were lost: then the window stays."""
        rows, request = self._rows.take(context), self._requests[context.request_id]
        if rows is not None and request.last_row:
            answers = rows.token_ids[request.last_row, 0].tolist()
            request.window.advance(context.token_ids[-1], answers, request.pool)
        request.last_row = []

    def truncate(self, context: Context) -> None:
        """Text was taken back."""
        request = self._requests[context.request_id]
        request.num_read = min(request.num_read, len(context.token_ids))
        request.last_row = []

    def release(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        self._rows.release(request_id)

    def read_top_tokens(self, top_tokens: TopTokens) -> None:
        self._rows.read(top_tokens)

    def _propose(self, context: Context, budget: int) -> Draft:
        """Guesses first, which a rule that tests siblings in turn then meets first; the window if it fits as well."""
        config, request = self._config, self._requests[context.request_id]
        self._read(context)
        root, window = context.token_ids[-1], request.window
        runs_window = budget >= window.num_nodes + config.ngram - 1
        most = budget - window.num_nodes if runs_window else budget
        tree = PathTree(TokenTree.root(root))
        for guess in request.pool.after(root):
            node = 0
            for token in guess[: most + 1 - len(tree.token_ids)]:
                node = tree.add(node, token)
        request.last_row = window.place(tree) if runs_window else []
        proposed = tree.tree()
        self._rows.proposed(context, proposed)
        return Draft.chosen(proposed)

    def _read(self, context: Context) -> None:
        """Enter the n-grams that end in tokens that came since the last time, if text is read."""
        if not self._config.reads_text:
            return
        request, token_ids, size = self._requests[context.request_id], context.token_ids, self._config.ngram
        start = max(0, request.num_read - size + 1)
        for ngram in zip(*(token_ids[start + i :] for i in range(size)), strict=False):
            request.pool.add(ngram[0], ngram[1:])
        request.num_read = len(token_ids)
