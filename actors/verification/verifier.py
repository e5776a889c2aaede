"""A verifying pass: one model reads committed text and the proposals after it, and one rule accepts nodes.

The target verifies with this, and so does every level of a cascade that has a child level. A `Verifier` keeps no text
and commits nothing; the caller does both. Knows one runner and one rule, not the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from actors.protocol.logprobs import Logprobs, PromptLogprobs
from actors.protocol.messages import Proposal, SamplingParams, SparseDistribution, TokenTree, TopTokens
from actors.sampling.logits import LogitRows, choose_batch, choose_split, is_plain
from actors.verification.coupled import verify_coupled
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import Runner

if TYPE_CHECKING:
    from actors.verification.by_ratio import RatioTest
    from actors.verification.features import FeatureReader
    from actors.verification.logprobs import LogprobReader
    from actors.verification.random_source import RandomSource
    from actors.verification.top_tokens import TopTokensReader


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """One sequence of a pass: `num_fed` tokens of its uncached suffix are fed and, once the root is, the proposal. With
    `drafts_follow`, features of this pass are drafted from; one that `is_masked` needs whole rows. `logprobs` asks for
    log-probabilities of the tokens that follow and of so many others, `prompt_logprobs` for those of the prompt's
    tokens; None for none."""

    seq_id: int
    token_ids: Sequence[int]
    prompt_len: int
    sampling: SamplingParams
    num_fed: int
    proposal: Proposal | None = None
    drafts_follow: bool = True
    scope: int = 0
    is_masked: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def tree(self) -> TokenTree:
        return self.proposal.tree if self.proposal is not None else TokenTree.root(self.token_ids[-1])


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The accepted `path` and the model's own `next_token`, `NO_TOKEN` if its distribution there is impossible.

    `distributions` are those of all these tokens, where the model's distributions were cut, and `logprobs` their
    log-probabilities, where the input asks for them.
    """

    path: tuple[int, ...]
    next_token: int
    distributions: tuple[SparseDistribution, ...] = ()
    logprobs: Logprobs | None = None


class Verifier:
    """`law_size`: keep only that many of the likeliest tokens of each distribution. Set for a level of a cascade, whose
    tokens are tested by ratio against the distribution that it sends; None for the target. `top_tokens` reads the
    likeliest tokens at the rows of each pass, `features` its hidden states. `splits_choice`: the
    ranks of a split model, which all call `forward`, choose among their own tokens where nothing needs whole rows."""

    def __init__(
        self,
        runner: Runner,
        rule: str,
        eos_token_ids: Sequence[int],
        *,
        law_size: int | None = None,
        top_tokens: TopTokensReader | None = None,
        features: FeatureReader | None = None,
        splits_choice: bool = False,
    ) -> None:
        self.runner = runner
        self._eos_token_ids = tuple(eos_token_ids)
        self._ratio_test: RatioTest | None = None
        if rule != "coupled":
            from actors.verification.by_ratio import RatioTest  # for ratio rules alone

            self._ratio_test = RatioTest(rule, self._eos_token_ids, law_size)
        self._reader = top_tokens
        self._features = features
        self._logprobs: LogprobReader | None = None  # from the first pass with a request that asks for them
        self._hidden: Tensor | None = None  # of the pass, until what is asked of it was read
        may_split = splits_choice and rule == "coupled" and top_tokens is None
        self._split_head = runner.split_head if may_split else None

    @property
    def splits_choice(self) -> bool:
        """Whether ranks choose among their own tokens where nothing needs whole rows."""
        return self._split_head is not None

    def reaches_root(self, verified: VerifyInput) -> bool:
        """Whether the pass, whose rows are still pending, feeds or fed the last token of the text."""
        return self.runner.cached_len(verified.seq_id) + verified.num_fed == len(verified.token_ids)

    def forward(self, inputs: Sequence[VerifyInput], *, keeps_top_tokens: bool = True) -> tuple[Tensor, int]:
        """One pass: logits [N, V] at all nodes of inputs whose root is reached, or the tokens [N] that the ranks chose
        together, and the number of rows fed."""
        spans, token_ids = [], []
        for verified in inputs:
            cached_len = self.runner.cached_len(verified.seq_id)
            end = cached_len + verified.num_fed
            fed, reaches_root = verified.token_ids[cached_len:end], end == len(verified.token_ids)
            tree = None if verified.proposal is None else verified.proposal.tree
            if tree is None or not tree.num_draft_tokens:
                spans.append(Span(verified.seq_id, len(fed), None, int(reaches_root), verified.drafts_follow))
                token_ids += fed
                continue
            assert reaches_root, "a proposal needs the logits of the root"
            parents = None
            if not tree.is_chain:
                root_row = len(fed) - 1
                parents = [*range(-1, root_row), *(root_row + parent for parent in tree.parents[1:])]
            num_nodes = len(tree.parents)
            num_rows = len(fed) + num_nodes - 1
            spans.append(Span(verified.seq_id, num_rows, parents, num_nodes, verified.drafts_follow))
            token_ids += [*fed, *tree.token_ids[1:]]
        head, reached = self._split_head, ()
        if head is not None:
            reached = [one for one, span in zip(inputs, spans, strict=True) if span.num_logits]
        if head is not None and reached and all(is_plain(one.sampling) and not one.is_masked for one in reached):
            with head.ungathered():
                logits = self._pass(inputs, spans, token_ids, keeps_top_tokens=False)
            logits = choose_split(logits, _logit_rows(reached), head.first, head.group)
        else:
            logits = self._pass(inputs, spans, token_ids, keeps_top_tokens=keeps_top_tokens)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        if self._logprobs is None and any(
            one.logprobs is not None or one.prompt_logprobs is not None for one in inputs
        ):
            from actors.verification.logprobs import LogprobReader  # for requests that ask for them alone

            self._logprobs = LogprobReader(self.runner)
        if self._logprobs is not None:
            self._logprobs.keep(inputs, spans, hidden, logits)
        return logits, len(token_ids)

    def _pass(
        self, inputs: Sequence[VerifyInput], spans: list[Span], token_ids: list[int], *, keeps_top_tokens: bool
    ) -> Tensor:
        if self._reader is not None and keeps_top_tokens:
            return self._reader.forward(self.runner, self._run, spans, token_ids, inputs)
        return self._run(spans, token_ids)

    def _run(self, spans: Sequence[Span], token_ids: Sequence[int]) -> Tensor:
        if self._features is not None:
            output = self._features.forward(self.runner, spans, token_ids)
        else:
            output = self.runner.forward(spans, token_ids)
        self._hidden = output.hidden
        return output.logits

    def top_tokens(self) -> TopTokens | None:
        """Those of the last pass, computed here if they were asked for."""
        return self._reader.read() if self._reader is not None else None

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """Those of the prompts that the last pass read, where they are asked for."""
        return [] if self._logprobs is None else self._logprobs.prompts()

    def verify(
        self,
        inputs: Sequence[VerifyInput],
        logits: Tensor,
        make_random_source: Callable[[VerifyInput], RandomSource] | None = None,
    ) -> list[VerifyResult]:
        """Results of inputs whose root was reached; `make_random_source` gives the ratio rule of a level its
        randomness."""
        results = self._judge(inputs, logits, make_random_source)
        return results if self._logprobs is None else self._logprobs.attached(inputs, results)

    def _judge(
        self,
        inputs: Sequence[VerifyInput],
        logits: Tensor,
        make_random_source: Callable[[VerifyInput], RandomSource] | None,
    ) -> list[VerifyResult]:
        if not inputs:
            return []
        rows, parts, start = _logit_rows(inputs), [], 0
        for own in rows:
            stop = start + len(own.tree.parents)
            parts.append(slice(start, stop))
            start = stop
        if self._ratio_test is None:
            choices = logits if logits.dim() == 1 else choose_batch(logits, rows, self._eos_token_ids)
            choices = choices.tolist()
            pruned = () if self._features is None else self._features.pruned
            results: list[VerifyResult] = []
            for own, part in zip(rows, parts, strict=True):
                cut = pruned and [row - part.start for row in pruned if row >= part.start]
                results.append(VerifyResult(*verify_coupled(own.tree, choices[part], cut)))
            return results
        return [VerifyResult(*one) for one in self._ratio_test.judge(inputs, rows, parts, logits, make_random_source)]


def _logit_rows(inputs: Sequence[VerifyInput]) -> list[LogitRows]:
    return [LogitRows(one.sampling, one.prompt_len, one.token_ids, one.tree) for one in inputs]
