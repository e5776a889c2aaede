"""PARD (arXiv 2504.18583): a plain draft model that fills mask tokens behind the text, one per further draft token.

One pass feeds the text that is not cached yet and the masks; the logits at the root and at every draft token are those
of the row at their depth, so draft tokens are never fed, and the rows of masks are given back at once. Accepted tokens
are fed as text by the next draft. Knows no requests and no rounds.

Masks see those before them. With `pard_mutual` in its config.json they all see each other, as in the non-autoregressive
drafter of SpecDec (arXiv 2203.16487), in whose released code, however, rows of text see the masks too, so that none can
be kept.

With several steps the masks are filled as a masked-diffusion model fills them (SpecDiff, arXiv 2408.05636): after each
pass the surest of them become the likeliest tokens, and the next pass reads the others again. The logits of a depth are
those of the pass after which its token was filled in. From the second pass on several drafts may be made side by side,
as copies of the block, each behind another of the likeliest first tokens: a draft token behind the root has the logits
of the draft that begins as its path does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from parallel.kv.pass_plan import BlockCopies, Span, TextThenBlock
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.config_fields import MASK_FIELD, read_config_file
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.interface import PassOutput, RunnerAround
from parallel.transfers import upload

DEPTH_FIELD, MUTUAL_FIELD, STEPS_FIELD = "pard_depth", "pard_mutual", "pard_steps"
"""Fields of config.json beside `MASK_FIELD`. They are ours: a published checkpoint leaves the depth to the engine."""
DEPTH = 8
"""That of published checkpoints."""


@dataclass(frozen=True, slots=True, eq=False)
class _MaskNode:
    """A row `depth` below a root whose pass gave `logits` [depths, vocabulary]. A root has those of all its drafts
    [drafts, depths, vocabulary], and the tokens that they begin with [drafts], where there are several."""

    logits: Tensor
    depth: int
    drafts: Tensor | None = None
    firsts: Tensor | None = None

    def below(self, token: Tensor) -> _MaskNode:
        """The node of a draft token [1] below this one; below a root, of the draft that begins with it, else of the
        first."""
        if self.drafts is None:
            return _MaskNode(self.logits, self.depth + 1)
        chosen = (self.firsts == token).int().argmax(keepdim=True)
        return _MaskNode(self.drafts.index_select(0, chosen)[0], self.depth + 1)


@dataclass(slots=True)
class _MaskedText:
    """What the drafter thinks is in the pool: `length` committed rows, then `nodes`, of which text before a root is
    None. `last` is the row after which the nodes begin; `is_drafted` that a draft token was committed, which has no
    row."""

    length: int = 0
    nodes: list[_MaskNode | None] = field(default_factory=list)
    last: _MaskNode | None = None
    is_drafted: bool = False


class PardRunner(RunnerAround):
    """Passes of such a model, of which `runner` has the rows of text and masks; a node below its deepest mask has
    logits of minus infinity."""

    runner: DecoderRunner

    def __init__(
        self,
        runner: DecoderRunner,
        mask_token: int,
        depth: int,
        *,
        is_mutual: bool = False,
        num_steps: int = 1,
        num_drafts: int = 1,
    ) -> None:
        super().__init__(runner)
        self._is_mutual = is_mutual
        self.num_steps, self.num_drafts = num_steps, num_drafts
        self._mask_token, self._depth = mask_token, depth
        self._texts: dict[SeqId, _MaskedText] = {}

    @property
    def longest_draft(self) -> int:
        return self._depth

    @property
    def reads_drafts(self) -> bool:
        """The first token says which of several drafts goes on."""
        return self.num_drafts > 1

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        """Opens without known rows: those of masks stand between them."""
        self.runner.open(seq_id)
        self._texts[seq_id] = _MaskedText()

    def set_source(self, seq_id: SeqId, token_ids: Sequence[int]) -> None:
        self.runner.set_source(seq_id, token_ids)

    def close(self, seq_id: SeqId) -> None:
        self.runner.close(seq_id)
        del self._texts[seq_id]

    def cached_len(self, seq_id: SeqId) -> int:
        return self._texts[seq_id].length

    def can_reserve(self, num_rows: int) -> bool:
        """Every open sequence may have masks in the pass."""
        return self.runner.can_reserve(num_rows + (self._depth - 1) * self.num_drafts * len(self._texts))

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        text = self._texts[seq_id]
        kept = [text.nodes[row] for row in keep]
        drafted = [node for node in kept if node is not None and node.depth]
        text.length += len(kept) - len(drafted)
        text.is_drafted |= bool(drafted)
        text.last = kept[-1] if kept else text.last
        text.nodes = [text.nodes[row] for row in retain]

    def truncate(self, seq_id: SeqId, length: int) -> None:
        self.runner.truncate(seq_id, min(length, self.runner.cached_len(seq_id)))
        self._texts[seq_id] = _MaskedText(min(length, self._texts[seq_id].length))

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        """Forget the pass that drafted tokens which are text by now."""
        text = self._texts[seq_id]
        if text.is_drafted:
            self._texts[seq_id] = _MaskedText(text.length)
        return text.is_drafted

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput:
        """The pass: in a span of an exact pass that asks for logits, the first row that has them is the root, and those
        after it are draft tokens; a fuzzy pass feeds draft tokens alone."""
        assert not taps, "a draft model has no taps"
        tokens = upload(token_ids, self.decoder.device)
        roots = {} if fuzzy else self._fill_masks(spans, tokens)
        nodes, first = list[_MaskNode](), 0
        for span in spans:
            own = tokens[first : first + span.num_tokens]
            added = self._append(span, own, roots.get(span.seq_id), fuzzy=fuzzy)
            nodes += added[len(added) - span.num_logits :]
            first += span.num_tokens
        silent = torch.full((1, self.config.num_logits), -torch.inf, device=self.decoder.device)
        rows = [node.logits[node.depth : node.depth + 1] if node.depth < self._depth else silent for node in nodes]
        logits = torch.cat(rows) if rows else silent[:0]
        return PassOutput(logits, logits.new_empty(0, self.decoder.config.hidden_size), ())

    def _fill_masks(self, spans: Sequence[Span], token_ids: Tensor) -> dict[SeqId, _MaskNode]:
        """Write the text's rows, with masks behind every root; returns the roots."""
        fed, parts, first = list[Span](), list[Tensor](), 0
        masks = token_ids.new_full((self._depth - 1,), self._mask_token)
        for span in spans:
            num_text = span.num_text
            has_root = span.num_logits > 0
            parts += [token_ids[first : first + num_text], masks[: len(masks) * has_root]]
            fed.append(Span(span.seq_id, num_text + len(masks) * has_root, None, self._depth * has_root))
            if self._is_mutual and has_root:  # nothing is pending between two passes
                self.runner.sequences.pending[span.seq_id] = TextThenBlock(num_text)
            first += span.num_tokens
        output = self.runner.forward(fed, torch.cat(parts))
        for span in spans:
            self.runner.commit(span.seq_id, range(span.num_text))
        rooted = [span.seq_id for span in spans if span.num_logits]
        if not rooted:
            return {}
        logits = output.logits.view(len(rooted), self._depth, -1)
        if not len(masks) or self.num_steps == 1:
            return {seq_id: _MaskNode(own, 0) for seq_id, own in zip(rooted, logits, strict=True)}
        firsts = logits[:, 0].topk(self.num_drafts).indices
        filled = self._denoised(rooted, logits, firsts).unflatten(0, firsts.shape)
        if self.num_drafts == 1:
            return {seq_id: _MaskNode(own[0], 0) for seq_id, own in zip(rooted, filled, strict=True)}
        rows = zip(rooted, filled, firsts, strict=True)
        return {seq_id: _MaskNode(own[0], 0, own, first) for seq_id, own, first in rows}

    def _denoised(self, seq_ids: Sequence[SeqId], logits: Tensor, firsts: Tensor) -> Tensor:
        """Logits [sequences, depth, V] of the first step -> those of all steps, of the drafts of each sequence
        [sequences * drafts, depth, V]; several begin with the tokens `firsts` [sequences, drafts]. The token of depth k
        is what mask k + 1 is filled with; that of the last depth is no mask's."""
        num_masks, num_drafts = self._depth - 1, self.num_drafts
        logits = logits.repeat_interleave(num_drafts, 0)
        filled = torch.full(logits[:, 1:, 0].shape, self._mask_token, dtype=torch.int64, device=logits.device)
        is_filled = torch.zeros_like(filled, dtype=torch.bool)
        num_filled = 0
        for step in range(1, self.num_steps):
            count, num_filled = num_masks * step // self.num_steps - num_filled, num_masks * step // self.num_steps
            if step == 1 and num_drafts > 1:
                filled[:, 0], is_filled[:, 0], num_filled = firsts.flatten(), True, 1
            elif count > 0:
                sure, likeliest = logits[:, :-1].softmax(-1).max(-1)
                surest = sure.masked_fill(is_filled, -1.0).topk(count).indices
                filled = filled.scatter(1, surest, likeliest.gather(1, surest))
                is_filled = is_filled.scatter(1, surest, value=True)
            else:
                num_filled -= count
                continue
            again = self._read_again(seq_ids, filled)
            is_kept = torch.cat((is_filled[:, 1:], torch.zeros_like(is_filled[:, :1])), 1)
            logits = torch.cat((logits[:, :1], torch.where(is_kept[..., None], logits[:, 1:], again)), 1)
        return logits

    def _read_again(self, seq_ids: Sequence[SeqId], filled: Tensor) -> Tensor:
        """Logits [sequences * drafts, masks, V] of a pass over the blocks with these tokens, whose rows are given
        back."""
        num_masks, num_rows = filled.shape[1], filled.numel() // len(seq_ids)
        parents = None
        if self._is_mutual:
            for seq_id in seq_ids:
                copies = BlockCopies(0, [num_masks] * self.num_drafts, num_masks)
                self.runner.sequences.pending[seq_id] = copies
        else:
            parents = [row - 1 if row % num_masks else -1 for row in range(num_rows)]
        fed = [Span(seq_id, num_rows, parents, num_rows) for seq_id in seq_ids]
        logits = self.runner.forward(fed, filled.flatten()).logits.view(*filled.shape, -1)
        for seq_id in seq_ids:
            self.runner.commit(seq_id, ())
        return logits

    def _append(self, span: Span, tokens: Tensor, root: _MaskNode | None, *, fuzzy: bool) -> list[_MaskNode]:
        """Make the span's rows, of these tokens, pending; returns its nodes."""
        text, added = self._texts[span.seq_id], list[_MaskNode]()
        num_text = 0 if fuzzy else span.num_text
        for row in range(span.num_tokens):
            node = root if row == num_text - 1 else None
            if row >= num_text:
                parent = len(text.nodes) - 1 if span.parents is None else span.parents[row]
                above = text.nodes[parent] if parent >= 0 else text.last
                assert above is not None, "a draft token follows a root"
                node = above.below(tokens[row : row + 1])
            text.nodes.append(node)
            if node is not None:
                added.append(node)
        return added


def filling_masks(runner: DecoderRunner, path: str | Path, num_steps: int = 0, num_drafts: int = 1) -> PardRunner:
    """The runner of the checkpoint at `path`, which is trained to fill masks (`fills_masks`), as one that fills them;
    in so many steps, 0 for what its config.json says, and of so many drafts."""
    hf = read_config_file(resolve_checkpoint(str(path)))
    is_mutual, depth = bool(hf.get(MUTUAL_FIELD)), int(hf.get(DEPTH_FIELD, DEPTH))
    num_steps = num_steps or max(int(hf.get(STEPS_FIELD, 1)), 1 + (num_drafts > 1))
    options = {"is_mutual": is_mutual, "num_steps": num_steps, "num_drafts": num_drafts}
    return PardRunner(runner, int(hf[MASK_FIELD]), depth, **options)
