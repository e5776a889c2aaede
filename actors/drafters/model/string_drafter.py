"""`drafter.translate=strings`: a draft model with a tokenizer of its own drafts text, encoded for the target.

String-level exact match (SLEM, arXiv 2502.05202): the likeliest tokens of the draft model are written out and encoded
again together with the last tokens of the text. So the draft may hold any token of the target. It is one chain, chosen
without randomness. After a verdict the text is encoded in the draft model's tokens again, and its KV rows stay up to
the first token that came out otherwise. Knows no verification rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from actors.drafters.interface import Capabilities, Context, Draft
from actors.drafters.model.prefill import prefill
from actors.drafters.vocabulary.retokenized import RetokenizedText
from actors.drafters.vocabulary.token_pieces import TokenPieces
from actors.protocol.messages import Commit, TokenTree
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import Runner


@dataclass(slots=True)
class _DraftedText:
    """The text in the draft model's tokens, and the draft after it: rows of both are pending from `cached_len` on."""

    text: RetokenizedText
    drafted: list[int] = field(default_factory=list)
    is_fed: bool = False


class StringDrafter:
    """Drafts with `runner`, whose tokenizer is `draft`, for a target with the tokenizer `target`."""

    def __init__(self, runner: Runner, target: TokenPieces, draft: TokenPieces, prefill_chunk: int) -> None:
        self.runner = runner
        self.capabilities = Capabilities(prefills=self, truncates=self)
        self._target = target
        self._draft = draft
        self._prefill_chunk = prefill_chunk
        self._texts: dict[int, _DraftedText] = {}

    def open(self, context: Context) -> None:
        self.runner.open(context.request_id)
        text = RetokenizedText(self._target, self._draft)
        text.extend(context.token_ids)
        self._texts[context.request_id] = _DraftedText(text)

    def prefill(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._prefill(context.request_id, leave=1)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        able, needed = [], 0
        for context, budget in zip(contexts, budgets, strict=True):
            state = self._texts[context.request_id]
            length = len(state.text.token_ids) + budget
            more = length - self.runner.cached_len(context.request_id)
            fits = state.text.is_whole and length <= self.runner.longest_text
            if fits and self.runner.can_reserve(needed + more):
                able.append((context.request_id, budget))
                needed += more
        for request_id, _ in able:
            self._prefill(request_id, leave=self._prefill_chunk)
        if able:
            self._continue(able)
        return [self._spell(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: Context, commit: Commit) -> None:
        request_id, state = context.request_id, self._texts[context.request_id]
        read = [*state.text.token_ids, *state.drafted]
        state.text.extend(commit.token_ids)
        self._keep(request_id, read)

    def truncate(self, context: Context) -> None:
        state = self._texts[context.request_id]
        read = [*state.text.token_ids, *state.drafted]
        state.text.cut(len(context.token_ids))
        self._keep(context.request_id, read)

    def release(self, request_id: int) -> None:
        del self._texts[request_id]
        self.runner.close(request_id)

    def _keep(self, request_id: int, read: Sequence[int]) -> None:
        """Keep the rows of `read` whose tokens the text still has, but not that of its last token."""
        state, cached = self._texts[request_id], self.runner.cached_len(request_id)
        now = state.text.token_ids
        most = min(len(read) - 1 if state.is_fed else cached, len(now) - 1)  # the last drafted token is not fed
        same = next((i for i in range(most) if read[i] != now[i]), most)
        if same > cached:
            self.runner.commit(request_id, range(same - cached))
        else:
            self.runner.truncate(request_id, same)
        state.drafted, state.is_fed = [], False

    def _prefill(self, request_id: int, leave: int) -> None:
        token_ids = self._texts[request_id].text.token_ids
        prefill(self.runner, request_id, token_ids, leave=leave, chunk=self._prefill_chunk)

    def _continue(self, able: Sequence[tuple[int, int]]) -> None:
        """Feed the text and draft as many of the model's likeliest tokens as there are target tokens wanted."""
        spans, fed = [], []
        for request_id, _ in able:
            state, cached = self._texts[request_id], self.runner.cached_len(request_id)
            suffix = state.text.token_ids[cached:]
            state.is_fed = True
            spans.append(Span(request_id, len(suffix)))
            fed += suffix
        logits = self.runner.forward(spans, fed).logits
        live = list(able)
        for depth in range(1, max(budget for _, budget in able) + 1):
            chosen = self._add_likeliest(live, logits)
            going = [i for i, (_, budget) in enumerate(live) if budget > depth]
            if not going:
                return
            live, fed = [live[i] for i in going], [chosen[i] for i in going]
            logits = self.runner.forward([Span(request_id, 1) for request_id, _ in live], fed).logits

    def _add_likeliest(self, live: Sequence[tuple[int, int]], logits: Tensor) -> list[int]:
        chosen = logits.max(dim=-1).indices.tolist()
        for (request_id, _), token in zip(live, chosen, strict=True):
            self._texts[request_id].drafted.append(token)
        return chosen

    def _spell(self, context: Context, budget: int) -> Draft:
        """The draft in the target's tokens, up to a special token or a piece of a character."""
        drafted = self._texts[context.request_id].drafted
        written = self._draft.text_of(drafted)
        token_ids = self._target.continued(context.token_ids, written)[:budget] if written else []
        return Draft.chosen(TokenTree.chain(context.token_ids[-1], token_ids))
