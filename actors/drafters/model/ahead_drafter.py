"""`drafter=model` under an asynchronous pipeline: the same draft model, which also works while the target verifies.

Every request has one `DraftTree`. The pipeline's policy in `tree.py` chooses the nodes to feed next, one pass at a
time, until a record arrives. A verdict re-roots the tree: rows of the accepted path become committed and rows below the
new root stay pending, by table edits only. After a hit the next proposal is read off the tree; after a miss it is
drafted from the root. Under a ratio rule proposals are the likeliest tokens and are tested as deterministic ones. Where
passes are fuzzy, calibration drops the rows of accepted tokens; the first step of draft-ahead is then one exact pass
over those tokens and the proposal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from actors.drafters.config import ModelOptions
from actors.drafters.draft_ahead.confidence import ConfidenceCalibration
from actors.drafters.draft_ahead.tree import AHEAD, AHEAD_WORTH, num_chained, redraft
from actors.drafters.draft_ahead.width import Step, WidthChooser
from actors.drafters.interface import Capabilities, Context, Draft
from actors.drafters.model.config import PassDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter, node_rows
from actors.protocol.draft_tree import DraftTree
from actors.protocol.messages import Commit, DraftPreview, TokenTree
from actors.sampling.logits import ChildrenAhead, is_unedited, process_batch, top_children
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import Runner
from parallel.transfers import to_host

MAX_ROWS_AHEAD = 192
"""Pending rows of one request, at most; further rows would hardly add to the tokens accepted by one verdict."""


@dataclass(slots=True)
class _AheadState:
    """The draft tree of one request; its nodes' KV rows are pending after `num_suffix` rows of committed text."""

    context: Context
    tree: DraftTree
    num_suffix: int = 0
    num_rows: int = 0  # pending rows in all
    budget: int = 0  # draft tokens of the last order, 0 before the first; an estimate of the next
    may_extend: bool = False  # a verdict is awaited and draft-ahead has something left to do
    num_shown: int = 0  # nodes of the tree in the last preview
    is_in_turn: bool = False  # the pending draft is no tree: it was made as where nothing works ahead
    depth: int = 0  # up to which `advance` drafts while the target waits, 0: it does not


class AheadDrafter(ModelDrafter):
    """`pipeline` names a policy of `tree.AHEAD`."""

    waits_for_child = False
    may_work_ahead = True

    def __init__(self, runner: Runner, config: PassDrafterConfig, options: ModelOptions, pipeline: str) -> None:
        super().__init__(runner, config, options)
        self.capabilities = Capabilities(
            runner.config.vocab_size,
            prefills=self,
            truncates=self,
            works_ahead=self,
            sends_previews=self,
            drafts_by_pass=self,
        )
        self._pipeline = pipeline
        self._choose = AHEAD[pipeline]
        self._length = config.num_draft_tokens
        self._width = config.ahead_width
        self._fan_out = config.fan_out
        self._proposes_tree = config.strategy is not Strategy.chain
        self._redraft_width = config.width if self._proposes_tree else 1
        self._states: dict[int, _AheadState] = {}
        self._confidence = ConfidenceCalibration()

    def _restart(self, context: Context) -> None:
        super()._restart(context)
        self._states[context.request_id] = _AheadState(context, DraftTree(context.token_ids[-1]))

    def prepared(self, context: Context) -> bool:
        return bool(self._states[context.request_id].tree.root.children)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        missed = [(one, budget) for one, budget in zip(contexts, budgets, strict=True) if not self.prepared(one)]
        if missed and not self.may_work_ahead:
            return self._propose_in_turn(contexts, budgets)
        able = self._with_room([context for context, _ in missed], [budget for _, budget in missed])
        for context, _ in able:
            self._prefill(context, leave=self._options.prefill_chunk)
        if able:
            self._draft([self._states[context.request_id] for context, _ in able], [budget for _, budget in able])
        return [self._take_proposal(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _propose_in_turn(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """Drafts of full length without trees; requests whose trees hold something still draw on those."""
        fresh = [not self._states[context.request_id].num_rows and not self.prepared(context) for context in contexts]
        orders = list(zip(contexts, budgets, fresh, strict=True))
        in_turn = [(context, budget) for context, budget, is_fresh in orders if is_fresh]
        drafts = iter(super().propose([one for one, _ in in_turn], [budget for _, budget in in_turn]))
        for context, _ in in_turn:
            self._states[context.request_id].is_in_turn = True
        return [
            next(drafts) if is_fresh else self._take_proposal(context, budget) for context, budget, is_fresh in orders
        ]

    def observe(self, context: Context, commit: Commit) -> None:
        state, request_id = self._states[context.request_id], context.request_id
        if state.is_in_turn:
            super().observe(context, commit)
            self._states[request_id] = _AheadState(context, DraftTree(commit.token_ids[-1]))
            return
        tree = state.tree
        found = self._walk(tree, commit.token_ids)
        if len(found) > len(commit.token_ids):
            fresh, retain = tree.reroot(found[-1])
        else:
            fresh, retain = DraftTree(commit.token_ids[-1]), []
        if state.num_rows:
            rows = takewhile(lambda row: row >= 0, (tree.nodes[node].row for node in found[1:]))
            self.runner.commit(request_id, [*range(state.num_suffix), *rows], retain)
        offered = max((tree.nodes[node].depth for node in tree.offered), default=0)
        due = self._calibration.is_due(request_id, rejected=len(commit.path) < offered)
        if due and self.runner.drop_fuzzy(request_id):
            fresh.clear_rows()
            retain = []
        self._states[request_id] = _AheadState(context, fresh, num_rows=len(retain))

    def _walk(self, tree: DraftTree, token_ids: Sequence[int]) -> list[int]:
        """The nodes along committed text from the root on, as far as the tree has them; the target's choices tell what
        the estimates of first choices were worth."""
        found = [0]
        for token in token_ids:
            node = tree.nodes[found[-1]]
            if node.children:
                first = tree.nodes[node.children[0]]
                self._confidence.update(math.exp(first.value - node.value), kept=first.token == token)
            child = tree.child(found[-1], token)
            if child is None:
                break
            found.append(child)
        return found

    def previews(self) -> list[DraftPreview]:
        previews = []
        for state in self._states.values():
            context, tree = state.context, state.tree
            if not state.budget or len(tree.nodes) == state.num_shown:
                continue
            state.num_shown = len(tree.nodes)
            written, values = tree.written(self._fan_out if self._proposes_tree else 1)
            previews.append(
                DraftPreview(
                    context.request_id,
                    context.epoch,
                    len(context.token_ids),
                    context.prefix_hash,
                    written,
                    tuple(values) if self._proposes_tree else (),
                )
            )
        return previews

    def prefetched(self, context: Context, budget: int, tree: TokenTree) -> None:
        state = self._states[context.request_id]
        self._await_verdict(state, state.tree.places(tree), budget)
        state.may_extend = len(context.token_ids) < self.runner.longest_text  # also where nothing was prepared

    def release(self, request_id: int) -> None:
        del self._states[request_id]
        super().release(request_id)

    @property
    def wants_work(self) -> bool:
        return self.may_work_ahead and any(state.may_extend for state in self._states.values())

    def width(self, width_chooser: WidthChooser, time_s: float) -> int:
        busy = [state for state in self._states.values() if state.may_extend]
        outcomes = [state.tree.outcomes() for state in busy]
        length = max(state.budget for state in busy)
        return width_chooser.width(outcomes, length, time_s, self._width)

    def work(self, width: int = 0, num_passes: int = 1) -> Step:
        """One pass over all requests whose verdict is awaited, an exact one over committed text where rows were
        dropped; or several that continue the same chains, after which the host waits once."""
        busy = [state for state in self._states.values() if state.may_extend]
        width = width or max(1, self._width // len(busy))
        uncalibrated = [state for state in busy if self._lacks_rows(state)]
        if uncalibrated:
            return Step(self._feed_again(uncalibrated, width), refreshed=True)
        chosen = self._fitting((one, self._choose(one.tree, width, one.budget)) for one in busy)
        self._goes_on(busy, chosen)
        num_passes = self._num_chained(chosen, num_passes) if num_passes > 1 else 1
        if chosen:
            self._feed(chosen, num_passes=num_passes)
        return Step(sum(len(nodes) for _, nodes in chosen), num_passes=num_passes)

    def _num_chained(self, chosen: list[tuple[_AheadState, list[int]]], most: int) -> int:
        """Passes, at most `most`, in which these nodes and their likeliest children are fed: as many as the policy
        would make of them for every request, as are worth it, and as have room."""
        for state, nodes in chosen:
            tree, context = state.tree, state.context
            last = len(context.token_ids) + max(tree.nodes[node].depth for node in nodes)
            room = min((MAX_ROWS_AHEAD - state.num_rows) // len(nodes), self.runner.longest_text - last)
            length = state.budget
            wanted = num_chained(self._pipeline, tree, nodes, length) if is_unedited(context.sampling) else 1
            most = min(most, room, wanted)
        num_rows = sum(len(nodes) for _, nodes in chosen)
        while most > 1 and (_worth(chosen, most - 1) < AHEAD_WORTH or not self.runner.can_reserve(most * num_rows)):
            most -= 1
        return max(1, most)

    def _goes_on(self, busy: list[_AheadState], chosen: list[tuple[_AheadState, list[int]]]) -> None:
        """Draft-ahead goes on with the chosen nodes; with none of them if they are worth too little."""
        if _worth(chosen) < AHEAD_WORTH:
            chosen.clear()
        going = {state.context.request_id for state, _ in chosen}
        for state in busy:
            state.may_extend = state.context.request_id in going

    # --- drafts that are made pass by pass ----------------------------------------------------------------------------

    def begin(self, contexts: Sequence[Context], budgets: Sequence[int]) -> None:
        if not self.may_work_ahead:
            return
        missed = [(one, budget) for one, budget in zip(contexts, budgets, strict=True) if not self.prepared(one)]
        for context, budget in self._with_room([one for one, _ in missed], [budget for _, budget in missed]):
            self._prefill(context, leave=self._options.prefill_chunk)
            self._states[context.request_id].depth = self._growth.max_depth(budget)

    def is_drafting(self, request_id: int) -> bool:
        return self._states[request_id].depth > 0

    def advance(self, width: int | None) -> Step:
        drafting = [state for state in self._states.values() if state.depth]
        fresh, num_fresh = self._behind_text([(state, []) for state in drafting if not state.tree.root.expanded])
        begun = [state for state in drafting if state.tree.root.expanded]
        on_demand = self._fitting([(state, self._redrafted(state)) for state in begun], num_fresh)
        ahead: list[tuple[_AheadState, list[int]]] = []
        busy = [state for state in self._states.values() if state.may_extend and not self._lacks_rows(state)]
        if width is not None and busy:
            num_rows = num_fresh + sum(len(nodes) for _, nodes in on_demand)
            wide = width or max(1, self._width // len(busy))
            ahead = self._fitting(((one, self._choose(one.tree, wide, one.budget)) for one in busy), num_rows)
            self._goes_on(busy, ahead)
        if chosen := [*fresh, *on_demand, *ahead]:
            self._feed(chosen, after_text={state.context.request_id for state, _ in fresh})
        going = {state.context.request_id for state, _ in (*fresh, *on_demand)}
        for state in drafting:
            if state.context.request_id not in going or not self._redrafted(state):
                state.depth = 0
        return Step(sum(len(nodes) for _, nodes in ahead), refreshed=bool(fresh or on_demand))

    def _behind_text(
        self, wanted: Sequence[tuple[_AheadState, list[int]]]
    ) -> tuple[list[tuple[_AheadState, list[int]]], int]:
        """Those, in order, whose unread text and nodes the pool has room for, and the rows of these: what was free as
        a draft was begun may be taken by another since. Nothing more is drafted for the others."""
        fitting, num_rows = list[tuple[_AheadState, list[int]]](), 0
        for state, nodes in wanted:
            context = state.context
            needed = len(context.token_ids) - self.runner.cached_len(context.request_id) + len(nodes)
            if self.runner.can_reserve(num_rows + needed):
                fitting.append((state, nodes))
                num_rows += needed
            else:
                state.may_extend = False
        return fitting, num_rows

    def _redrafted(self, state: _AheadState) -> list[int]:
        return redraft(state.tree, self._redraft_width, state.depth)

    # --- passes -------------------------------------------------------------------------------------------------------

    def _draft(self, states: list[_AheadState], budgets: list[int]) -> None:
        """Draft for trees whose root was not expected, as far as it is worth the time for which the target waits."""
        unfed: list[tuple[_AheadState, list[int]]] = [(state, []) for state in states if not state.tree.root.expanded]
        if unfed:
            self._feed(unfed, after_text={state.context.request_id for state, _ in unfed})
        depths = [self._growth.max_depth(budget) for budget in budgets]
        while chosen := self._fitting(
            (state, redraft(state.tree, self._redraft_width, depth))
            for state, depth in zip(states, depths, strict=True)
        ):
            self._feed(chosen)

    def _fitting(
        self, chosen: Iterable[tuple[_AheadState, list[int]]], num_rows: int = 0
    ) -> list[tuple[_AheadState, list[int]]]:
        """The requests, in order, whose chosen nodes fit the model's context and, with `num_rows` others, the pool."""
        fitting = []
        for state, nodes in chosen:
            last = len(state.context.token_ids) + max((state.tree.nodes[node].depth for node in nodes), default=0)
            fits = state.num_rows + len(nodes) <= MAX_ROWS_AHEAD and last < self.runner.longest_text
            if nodes and fits and self.runner.can_reserve(num_rows + len(nodes)):
                fitting.append((state, nodes))
                num_rows += len(nodes)
        return fitting

    def _lacks_rows(self, state: _AheadState) -> bool:
        """Whether calibration dropped rows of the text before the tree's root."""
        uncached = self.runner.cached_len(state.context.request_id) < len(state.context.token_ids)
        return uncached and not state.num_rows

    def _feed_again(self, states: list[_AheadState], width: int) -> int:
        """Calibrate: an exact pass over the tokens without rows and then over the trees' best nodes; returns its
        rows."""
        for state in states:
            self._prefill(state.context, leave=self._options.prefill_chunk)
        wanted = []
        for state in states:
            room = self.runner.longest_text - len(state.context.token_ids)
            refreshed = state.tree.nodes_to_refresh(width)
            wanted.append((state, [node for node in refreshed if state.tree.nodes[node].depth <= room]))
        fed, num_rows = self._behind_text(wanted)
        if fed:
            self._feed(fed, after_text={state.context.request_id for state, _ in fed})
        return num_rows

    def _feed(
        self, chosen: list[tuple[_AheadState, list[int]]], after_text: Collection[int] = (), num_passes: int = 1
    ) -> None:
        """One pass over nodes; of the requests `after_text` over the uncached text and then the nodes. It is exact if
        there is text. Further passes are over the likeliest children of the nodes, then over theirs."""
        spans, token_ids, expanded = [], [], []
        for state, nodes in chosen:
            request_id, hypotheses = state.context.request_id, state.tree.nodes
            text, reads = list[int](), request_id in after_text
            if reads:
                text = state.context.token_ids[self.runner.cached_len(request_id) :]
                state.num_suffix = state.num_rows = len(text)
            parents = list(range(-1, len(text) - 1))
            for node in nodes:
                parent = hypotheses[node].parent
                parents.append(hypotheses[parent].row if parent else state.num_suffix - 1)
                hypotheses[node].row = state.num_rows
                state.num_rows += 1
            spans.append(Span(request_id, len(parents), parents if nodes else None, len(nodes) + reads))
            token_ids += [*text, *(hypotheses[node].token for node in nodes)]
            expanded.append((state, [0, *nodes] if reads else nodes))
        logits = self.runner.forward(spans, token_ids, fuzzy=not after_text).logits
        if num_passes > 1:
            self._feed_chains(logits, expanded, num_passes)
        else:
            self._expand(logits, expanded)

    def _feed_chains(self, logits: Tensor, fed: list[tuple[_AheadState, list[int]]], num_passes: int) -> None:
        """Passes over the likeliest children of the nodes that were fed, over theirs, and so on; tokens stay on the
        device, which the host waits for once."""
        choices = self._choices(fed, num_passes, logits.device)
        children, rows = [choices.best(logits, 0, self._fan_out)], list[list[int]]()
        ends = [(state, [state.tree.nodes[node].row for node in nodes]) for state, nodes in fed]
        for step in range(1, num_passes):
            spans = [Span(state.context.request_id, len(above), above, len(above)) for state, above in ends]
            for i, (state, above) in enumerate(ends):
                ends[i] = state, [*range(state.num_rows, state.num_rows + len(above))]
                state.num_rows += len(above)
            rows.append([row for _, own in ends for row in own])
            logits = self.runner.forward(spans, children[-1][0][:, 0], fuzzy=True).logits
            children.append(choices.best(logits, step, self._fan_out))
        token_ids, log_probs = (torch.cat(parts) for parts in zip(*children, strict=True))
        found = [values.tolist() for values in to_host([token_ids, log_probs])]
        nodes: list[tuple[DraftTree, int]] = [(state.tree, node) for state, chosen in fed for node in chosen]
        each = iter(zip(*found, strict=True))
        for below in (*rows, [-1] * len(nodes)):
            self._add_children(nodes, [next(each) for _ in nodes])
            for place, ((tree, node), row) in enumerate(zip(nodes, below, strict=True)):
                first = tree.nodes[node].children[:1] if node >= 0 else []
                nodes[place] = tree, first[0] if first else -1  # -1: a row that continues nothing
                if first and row >= 0:
                    tree.nodes[first[0]].row = row

    def _choices(
        self, fed: list[tuple[_AheadState, list[int]]], num_passes: int, device: torch.device
    ) -> ChildrenAhead:
        """How the children of nodes are chosen, and in further passes those of their likeliest."""
        params = [state.context.sampling for state, nodes in fed for _ in nodes]
        return ChildrenAhead.of(params, _positions(fed), num_passes, device, draws=self._coupled)

    def _expand(self, logits: Tensor, fed: list[tuple[_AheadState, list[int]]]) -> None:
        """Children of every node that was fed; `logits` has one row per node, in order."""
        if all(is_unedited(state.context.sampling) for state, _ in fed):
            ranked = self._choices(fed, 1, logits.device).best(logits, 0, self._fan_out)
        else:
            ranked = self._edited_children(logits, fed)
        nodes = [(state.tree, node) for state, nodes in fed for node in nodes]
        self._add_children(nodes, zip(*(values.tolist() for values in to_host(ranked)), strict=True))

    def _edited_children(self, logits: Tensor, fed: list[tuple[_AheadState, list[int]]]) -> tuple[Tensor, Tensor]:
        """The same where what is chosen depends on the text."""
        batch, params = [], []
        for state, nodes in fed:
            context, hypotheses = state.context, state.tree.nodes
            token_ids, parents = (node.token for node in hypotheses), (node.parent for node in hypotheses)
            batch.append(node_rows(context, token_ids, parents, nodes))
            params += [self._drawing_params(context.sampling)] * len(nodes)
        scores = process_batch(logits, batch, self._options.eos_token_ids)
        return top_children(scores, params, _positions(fed), self._fan_out, given_noise=True)

    def _add_children(
        self, nodes: Sequence[tuple[DraftTree, int]], children: Iterable[tuple[list[int], list[float]]]
    ) -> None:
        """The children of nodes that were fed, (token ids, log-probabilities) best first."""
        for (tree, node), (token_ids, log_probs) in zip(nodes, children, strict=True):
            if node < 0:
                continue
            # a row below the longest path that the runner has logits for: it holds -inf, and all that follows is NaN
            is_silent = not log_probs[0] > -math.inf
            tree.expand(node, *(((), ()) if is_silent else (token_ids, self._confidence.adjust(log_probs))))

    def _take_proposal(self, context: Context, budget: int) -> Draft:
        """The best proposal of the tree; its verdict is awaited from now on."""
        state = self._states[context.request_id]
        tree = state.tree
        nodes = tree.best_nodes(budget) if self._proposes_tree else tree.best_chain(budget)
        self._await_verdict(state, nodes, min(budget, self._length))
        offered = tree.proposal(nodes)
        return Draft(offered) if self._coupled else Draft.chosen(offered)

    def _await_verdict(self, state: _AheadState, nodes: Sequence[int], budget: int) -> None:
        """These nodes go to the target: draft-ahead may begin."""
        state.tree.offer(nodes)
        state.may_extend, state.budget = state.tree.root.expanded, budget


def _worth(chosen: list[tuple[_AheadState, list[int]]], further: int = 0) -> float:
    """Accepted tokens that a pass over these nodes is expected to add, or that after so many `further` ones."""
    return sum(state.tree.worth(nodes, further) for state, nodes in chosen)


def _positions(fed: list[tuple[_AheadState, list[int]]]) -> list[int]:
    """Index in the text of the children of every node."""
    return [len(state.context.token_ids) + state.tree.nodes[node].depth for state, nodes in fed for node in nodes]
