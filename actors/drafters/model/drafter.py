"""`drafter=model`: a smaller language model of the same vocabulary drafts chains and trees.

Under the coupled rule it draws with the target's own noise, so its arg-max is its best guess of the target's draw;
under a ratio rule it samples from a truncated distribution, which travels with the proposal. One loop drafts trees
level by level for the whole batch; plain chains take a shorter one in which tokens stay on the device, and chains of a
model that fills blocks are chosen in one call. Every draft starts by feeding the uncached suffix of the text, however
long. Passes over draft tokens may be fuzzy: when calibration is due, the fuzzy rows of accepted tokens are dropped and
so become part of that suffix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from actors.drafters.config import ModelOptions
from actors.drafters.draft_ahead.width import Step
from actors.drafters.interface import Capabilities, Context, Draft
from actors.drafters.model.budgeted_growth import DynamicGrowth, PassPrice
from actors.drafters.model.calibration import CalibrationSchedule
from actors.drafters.model.confidence_growth import ConfidenceGrowth
from actors.drafters.model.config import DRAWN, LearningDrafterConfig, LengthRule, PassDrafterConfig, Strategy
from actors.drafters.model.merging import leaders
from actors.drafters.model.prefill import prefill
from actors.drafters.model.tree_growth import (
    BeamGrowth,
    BestFirstGrowth,
    Candidate,
    GrowingTree,
    Growth,
    StaticGrowth,
)
from actors.protocol.messages import NO_TOKEN, Commit, SamplingKind, SamplingParams, SparseDistribution, TokenTree
from actors.sampling.draft_sampling import DrawnChildren, draw_beam, draw_iid, draw_without_replacement
from actors.sampling.edits import edits_by_text
from actors.sampling.logits import (
    ChoicesAhead,
    LogitRows,
    choose_batch,
    is_greedy,
    is_plain,
    process_batch,
    top_children,
)
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import PassOutput, Runner
from parallel.transfers import to_host, upload

if TYPE_CHECKING:
    from actors.drafters.model.chain_rules import ChainRule


@dataclass(slots=True)
class _Rows:
    """Pending KV rows of one request: first the uncached suffix, then the nodes that were fed.

    A merged node has the row of another in `shared`: later nodes are fed after it, but it is none of the node's text.
    """

    num_suffix: int = 0
    of_node: dict[int, int] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)
    depth: int = 0  # of the draft

    def of(self, node: int) -> int:
        """The row after which a child of this node is fed."""
        return self.of_node[node] if node in self.of_node else self.shared[node]


@dataclass(slots=True, eq=False)
class _Growing:
    """A draft that is being made: its tree up to `level`, and the nodes of that level to feed next. At level 0 the text
    is fed."""

    context: Context
    budget: int
    tree: GrowingTree
    frontier: list[int] = field(default_factory=lambda: [0])
    level: int = 0
    distributions: dict[int, SparseDistribution] = field(default_factory=dict)
    predicted: list[float] = field(default_factory=list)

    @classmethod
    def begun(cls, context: Context, budget: int) -> _Growing:
        return cls(context, budget, GrowingTree(context.token_ids[-1]))


class ModelDrafter:
    """Drafts with `runner`; the verification rule decides how tokens are drawn."""

    def __init__(self, runner: Runner, config: PassDrafterConfig, options: ModelOptions) -> None:
        self.runner = runner
        self._options = options
        self._coupled = options.rule == "coupled"
        self._kind = config.draw_kind(options.rule)
        self._is_chain = config.strategy is Strategy.chain
        self._is_beam = config.strategy is Strategy.beam
        self._is_dynamic = config.strategy is Strategy.dynamic
        self._may_sample = config.strategy in DRAWN
        by_chance = config.strategy not in (Strategy.chain, Strategy.tree)
        reads_chances = config.length_rule in (LengthRule.threshold, LengthRule.probability, LengthRule.priced)
        self._ranks_given_noise = by_chance or reads_chances
        self._price = PassPrice()
        self._price_share = 0.0
        self._growth = self._make_growth(config)
        self._chain_rule = _chain_rule(config)
        self._rows: dict[int, _Rows] = {}
        self._growing: dict[int, _Growing] = {}  # drafts that are made pass by pass
        learns = isinstance(config, LearningDrafterConfig) and config.online
        self._shares_rows = not learns  # those of older weights are not to be found
        self._calibration = CalibrationSchedule(config)
        self._merge_ngram = config.merge_ngram
        self.num_fed_nodes = 0
        """Draft tokens that were fed, in all."""
        self.num_merged_nodes = 0
        """Draft tokens that were not, since another was fed in their place."""
        # trees that compete for one budget are begun together, and draws of ratio rules are equally deep
        by_pass = self if self._coupled and not self._is_dynamic else None
        self.capabilities = Capabilities(
            runner.config.vocab_size, prefills=self, truncates=self, drafts_by_pass=by_pass
        )

    def end_chains_by(self, rule: ChainRule) -> None:
        """Let this rule decide in place of the configured one."""
        self._chain_rule = rule

    def open(self, context: Context) -> None:
        self.runner.open(context.request_id, context.text if self._shares_rows else None)
        if context.source:
            self.runner.set_source(context.request_id, context.source)
        self._restart(context)

    def prefill(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._prefill(context, leave=1)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        left = contexts
        if self._growing:
            made = [self._growing.pop(one.request_id) for one in contexts if one.request_id in self._growing]
            drafts |= self._finished(made)
            orders = [order for order in zip(contexts, budgets, strict=True) if order[0].request_id not in drafts]
            left, budgets = [context for context, _ in orders], [budget for _, budget in orders]
        able = self._with_room(left, budgets)
        for context, _ in able:
            self._prefill(context, leave=self._options.prefill_chunk)
        if able:
            if self._chooses_at_once(able):
                grow = self._blocks
            else:
                grow = self._chains if self._keeps_tokens_on_device(able) else self._trees
            drafts |= grow([context for context, _ in able], [budget for _, budget in able])
        for request_id, draft in drafts.items():
            self._rows[request_id].depth = draft.tree.depth
        return [drafts[one.request_id] if one.request_id in drafts else Draft.nothing(one) for one in contexts]

    def observe(self, context: Context, commit: Commit) -> None:
        if self._chain_rule is not None:
            self._chain_rule.update(context.request_id, min(len(commit.path), len(commit.token_ids)))
        rows = self._rows[context.request_id]
        keep = list(range(rows.num_suffix))
        for node in commit.path:
            if node not in rows.of_node:
                break  # the deepest node of a draft is never fed, nor a merged one
            keep.append(rows.of_node[node])
        if rows.num_suffix:
            self.runner.commit(context.request_id, keep)
            if self._calibration.is_due(context.request_id, rejected=len(commit.path) < rows.depth):
                self.runner.drop_fuzzy(context.request_id)
        self._rows[context.request_id] = _Rows()

    def truncate(self, context: Context) -> None:
        cached_len = self.runner.cached_len(context.request_id)
        kept = max(0, min(cached_len, len(context.token_ids) - 1))  # the row of the new root is computed again
        self.runner.truncate(context.request_id, kept)
        self._restart(context)

    def release(self, request_id: int) -> None:
        self._rows.pop(request_id, None)
        self._growing.pop(request_id, None)
        self._calibration.release(request_id)
        if self._chain_rule is not None:
            self._chain_rule.release(request_id)
        self.runner.close(request_id)

    def _restart(self, context: Context) -> None:
        """No draft is pending for this request."""
        self._rows[context.request_id] = _Rows()

    def _make_growth(self, config: PassDrafterConfig) -> Growth:
        longest, width = self.runner.longest_draft, config.width
        depth = min(config.depth, longest)
        match config.strategy:
            case Strategy.chain:
                growth = StaticGrowth([1] * min(config.num_draft_tokens, longest))
            case Strategy.tree if config.tree:
                from actors.drafters.model.fixed_trees import FixedTreeGrowth, read_trees

                growth = FixedTreeGrowth(read_trees(Path(config.tree)), longest)
            case Strategy.tree:
                growth = StaticGrowth(config.branching[:longest] or [width, *[1] * (depth - 1)])
            case Strategy.beam:
                growth = BeamGrowth(depth, width)
            case Strategy.best_first:
                growth = BestFirstGrowth(depth, width, config.min_gain)
            case Strategy.dynamic:
                growth = DynamicGrowth(depth, width, config.batch_nodes, lambda: self._price_share)
            case Strategy.cape:
                growth = ConfidenceGrowth(depth)
        return growth

    def _agree_on_price(self) -> None:
        """All ranks take the price measured by rank 0: their clocks differ, and their trees must not."""
        self._price.draft_ordered()
        decoder = self.runner.decoder
        (self._price_share,) = decoder.group.agree([self._price.share], decoder.device)

    # --- drafts that are made pass by pass ----------------------------------------------------------------------------

    def begin(self, contexts: Sequence[Context], budgets: Sequence[int]) -> None:
        for context, budget in self._with_room(contexts, budgets):
            self._prefill(context, leave=self._options.prefill_chunk)
            self._growing[context.request_id] = self._begun(context, budget)

    def is_drafting(self, request_id: int) -> bool:
        return request_id in self._growing and bool(self._growing[request_id].frontier)

    def advance(self, width: int | None) -> Step:
        drafts, num_rows = list[_Growing](), 0
        for one in [one for one in self._growing.values() if one.frontier]:
            request_id, needed = one.context.request_id, len(one.frontier)
            if not one.level:
                needed = len(one.context.token_ids) - self.runner.cached_len(request_id)
            if self.runner.can_reserve(num_rows + needed):
                drafts.append(one)
                num_rows += needed
            else:
                one.frontier = []  # its draft ends here
        if drafts:
            self._grow(drafts, self._feed_frontiers(drafts))
        return Step(0)

    # --- committed text -----------------------------------------------------------------------------------------------

    def _with_room(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[tuple[Context, int]]:
        """The requests, in order, whose drafts fit the model's context and together the pool."""
        able, rows = [], 0
        for context, budget in zip(contexts, budgets, strict=True):
            suffix = len(context.token_ids) - self.runner.cached_len(context.request_id)
            if self.runner.drops_rows:
                suffix = min(suffix, self._options.prefill_chunk)
            needed = suffix + self._growth.max_fed(budget)
            fits = len(context.token_ids) + self._growth.max_depth(budget) <= self.runner.longest_text
            if fits and self.runner.can_reserve(rows + needed):
                able.append((context, budget))
                rows += needed
        return able

    def _prefill(self, context: Context, leave: int) -> None:
        chunk = self._options.prefill_chunk
        prefill(self.runner, context.request_id, context.token_ids, leave=leave, chunk=chunk)

    def _suffix(self, context: Context) -> tuple[Span, list[int]]:
        """The rows of the text that is uncached, and its tokens; a draft begins with them."""
        tokens = context.token_ids[self.runner.cached_len(context.request_id) :]
        self._rows[context.request_id] = _Rows(len(tokens), {0: len(tokens) - 1})
        return Span(context.request_id, len(tokens)), tokens

    # --- chains: tokens stay on the device ----------------------------------------------------------------------------

    def _keeps_tokens_on_device(self, able: list[tuple[Context, int]]) -> bool:
        device = self.runner.decoder.device
        return self._chooses_chains(able) and all(ChoicesAhead.can_choose(one.sampling, device) for one, _ in able)

    def _chooses_chains(self, able: list[tuple[Context, int]]) -> bool:
        """Whether drafts are chains of the ordered length whose tokens are chosen, not drawn."""
        is_chosen = self._coupled or all(is_greedy(context.sampling) for context, _ in able)
        return self._is_chain and self._chain_rule is None and is_chosen

    def _chains(self, contexts: list[Context], budgets: list[int]) -> dict[int, Draft]:
        budgets = [max(1, min(budget, self._growth.depth)) for budget in budgets]
        lengths, params = [len(context.token_ids) for context in contexts], [context.sampling for context in contexts]
        fed = [self._suffix(context) for context in contexts]
        spans, token_ids = [span for span, _ in fed], [token for _, tokens in fed for token in tokens]
        live, depth, device = list(range(len(contexts))), 0, self.runner.decoder.device
        chunks: list[tuple[list[int], int, Tensor]] = []
        last: Tensor | list[int] = token_ids
        while live:
            num_steps = min(budgets[i] for i in live) - depth
            choices = ChoicesAhead.of([params[i] for i in live], [lengths[i] + depth for i in live], num_steps, device)
            steps = self.runner.extend(spans, last, choices, fuzzy=depth > 0)
            chunks.append((live, num_steps, steps))
            depth += num_steps
            going = [i for i in live if budgets[i] > depth]
            if going:
                last, spans = steps[-1], [Span(contexts[i].request_id, 1) for i in going]
                if len(going) < len(live):
                    last = last.index_select(0, upload([live.index(i) for i in going], device))
            live = going
        # the one host sync of the draft
        if len(chunks) == 1:
            drawn = [token for step in chunks[0][2].tolist() for token in step]
        else:
            drawn = torch.cat([steps.flatten() for _, _, steps in chunks]).tolist()
        tokens: list[list[int]] = [[] for _ in contexts]
        first = 0
        for rows, num_steps, _ in chunks:
            stop, count = first + num_steps * len(rows), len(rows)
            for place, i in enumerate(rows, first):
                tokens[i] += drawn[place:stop:count]
            first = stop
        return {one.request_id: self._chain_of(one, draft) for one, draft in zip(contexts, tokens, strict=True)}

    def _chain_of(self, context: Context, token_ids: list[int]) -> Draft:
        """The draft of these tokens, of which all but the last were fed behind the text."""
        rows = self._rows[context.request_id]
        rows.of_node |= {node: rows.num_suffix + node - 1 for node in range(1, len(token_ids))}
        tree = TokenTree.chain(context.token_ids[-1], token_ids)
        return Draft(tree) if self._coupled else Draft.chosen(tree)

    # --- blocks: all tokens of a draft in one call --------------------------------------------------------------------

    def _chooses_at_once(self, able: list[tuple[Context, int]]) -> bool:
        """Whether neither the model nor the edits of its scores ask which draft tokens stand before a place."""
        if self.runner.reads_drafts or not self._chooses_chains(able):
            return False
        return not any(edits_by_text(context.sampling) for context, _ in able)

    def _blocks(self, contexts: list[Context], budgets: list[int]) -> dict[int, Draft]:
        budgets = [min(budget, self._growth.depth) for budget in budgets]
        spans, token_ids, batch = list[Span](), list[int](), list[LogitRows]()
        for context, budget in zip(contexts, budgets, strict=True):
            span, text = self._suffix(context)
            places = TokenTree.chain(text[-1], [text[-1]] * (budget - 1))  # any tokens: they are only counted
            token_ids += [*text, *places.token_ids[1:]]
            spans.append(Span(context.request_id, span.num_tokens + budget - 1, None, budget))
            batch.append(LogitRows(context.sampling, context.prompt_len, context.token_ids, places))
        logits = self.runner.forward(spans, token_ids).logits
        chosen = choose_batch(logits, batch, self._options.eos_token_ids).tolist()
        drafts, first = {}, 0
        for context, budget in zip(contexts, budgets, strict=True):
            own = chosen[first : first + budget]
            draft = own[: own.index(NO_TOKEN)] if NO_TOKEN in own else own
            drafts[context.request_id] = self._chain_of(context, draft)
            first += budget
        return drafts

    # --- trees: one level after the other -----------------------------------------------------------------------------

    def _trees(self, contexts: list[Context], budgets: list[int]) -> dict[int, Draft]:
        if self._is_dynamic:
            self._agree_on_price()
        drafts = [self._begun(*order) for order in zip(contexts, budgets, strict=True)]
        output = self._feed_frontiers(drafts)
        self._price.draft_started()
        self._grow(drafts, output)
        while any(one.frontier for one in drafts):
            output = self._feed_frontiers(drafts)
            self._price.pass_done()
            self._grow(drafts, output)
        return self._finished(drafts)

    def _begun(self, context: Context, budget: int) -> _Growing:
        if self._chain_rule is not None:
            samples, least_chance = not is_greedy(context.sampling), context.costs.least_chance
            self._chain_rule.begin(context.request_id, samples=samples, least_chance=least_chance)
        return _Growing.begun(context, budget)

    def _grow(self, drafts: list[_Growing], output: PassOutput) -> None:
        """Add a level to each, by the logits at its frontier."""
        offered = self._draw_candidates(drafts, output.logits)
        if self._chain_rule is not None and (seen := _seen_before_drawing(self._chain_rule, output)) is not None:
            for one in drafts:
                one.predicted += [next(seen) for _ in one.frontier]
        trees, budgets = [one.tree for one in drafts], [one.budget for one in drafts]
        frontiers = self._growth.extend_all(trees, offered, budgets)
        if self._chain_rule is not None:
            frontiers = self._chains_to_extend(self._chain_rule, drafts, frontiers)
        for one, frontier in zip(drafts, frontiers, strict=True):
            one.frontier, one.level = frontier, one.level + 1

    def _finished(self, drafts: list[_Growing]) -> dict[int, Draft]:
        grown = self._growth.finish_all([one.tree for one in drafts], [one.budget for one in drafts])
        return {
            one.context.request_id: self._finish(one.context, one.distributions, *tree)
            for one, tree in zip(drafts, grown, strict=True)
        }

    def _chains_to_extend(self, rule: ChainRule, drafts: list[_Growing], frontiers: list[list[int]]) -> list[list[int]]:
        """The frontiers without those of chains that end here; the last token of a chain stays."""
        chains = [
            one.predicted[: len(one.tree.values) - 1] or [after - before for before, after in pairwise(one.tree.values)]
            for one in drafts
        ]
        goes_on = [
            bool(chain)
            and rule.continues(one.context.request_id, one.context.step, chain)  # empty: no token can follow
            for one, chain in zip(drafts, chains, strict=True)
        ]
        return [nodes if longer else [] for nodes, longer in zip(frontiers, goes_on, strict=True)]

    def _feed_frontiers(self, drafts: Sequence[_Growing]) -> PassOutput:
        """One pass over the frontiers; logits [n, V] at all their nodes; those of merged nodes are their leader's. It
        is exact if there is text."""
        spans, token_ids, wanted, num_rows, num_text = list[Span](), list[int](), list[int](), 0, 0
        for one in drafts:
            if not one.frontier:
                continue
            span, fed, places = self._level(one) if one.level else (*self._suffix(one.context), [0])
            wanted += [num_rows + place for place in places]
            spans.append(span)
            token_ids += fed
            num_rows += span.num_logits
            num_text += 0 if one.level else len(fed)
        self.num_fed_nodes += len(token_ids) - num_text
        self.num_merged_nodes += len(wanted) - num_rows
        output = self.runner.forward(spans, token_ids, fuzzy=not num_text)
        if len(wanted) == num_rows:
            return output
        return replace(output, logits=output.logits[upload(wanted, output.logits.device)])

    def _level(self, draft: _Growing) -> tuple[Span, list[int], list[int]]:
        """The rows of a frontier, their tokens, and which of them has the logits of each node."""
        rows, tree, nodes = self._rows[draft.context.request_id], draft.tree, draft.frontier
        leader = leaders(tree, nodes, self._merge_ngram)
        fed = [node for node in nodes if leader[node] == node]
        parents = [rows.of(tree.parents[node]) for node in fed]
        first = rows.num_suffix + len(rows.of_node) - 1
        place = {node: i for i, node in enumerate(fed)}
        rows.of_node |= {node: first + i for node, i in place.items()}
        rows.shared |= {node: rows.of_node[leader[node]] for node in nodes if leader[node] != node}
        span = Span(draft.context.request_id, len(fed), parents, len(fed))
        return span, [tree.token_ids[node] for node in fed], [place[leader[node]] for node in nodes]

    def _draw_candidates(self, drafts: list[_Growing], logits: Tensor) -> list[list[Candidate]]:
        """Children for every frontier node, in the order they were drawn. Fills `distributions` for nodes drawn at
        random."""
        batch = [node_rows(one.context, one.tree.token_ids, one.tree.parents, one.frontier) for one in drafts]
        scores = process_batch(logits, batch, self._options.eos_token_ids)
        positions, params, drawing, widths = [], [], [], list[int]()
        for one in drafts:
            size = len(one.frontier)  # equally deep nodes
            positions += [len(one.context.token_ids) + one.level] * size
            params += [one.context.sampling] * size
            drawing += [self._drawing_params(one.context.sampling)] * size
            widths.append(min(self._growth.width(one.level), scores.shape[-1]) if size else 0)
        places = [(i, node) for i, one in enumerate(drafts) for node in one.frontier]
        sampled = [row for row, one in enumerate(params) if self._samples(one)]
        ranked: Iterable[tuple[list[int], list[float]]] = [([], [])] * len(params)
        reads_leads = self._chain_rule is not None and self._chain_rule.reads_leads
        if len(sampled) < len(params):
            width = max(*widths, 2 * reads_leads)
            likeliest = top_children(scores, drawing, positions, width, given_noise=self._ranks_given_noise)
            ranked = zip(*(values.tolist() for values in to_host(likeliest)), strict=True)
        drawn = dict(zip(sampled, self._draw(scores, drafts, places, sampled, max(widths)), strict=True))
        offered: list[list[Candidate]] = [[] for _ in drafts]
        for row, ((i, node), (token_ids, log_probs)) in enumerate(zip(places, ranked, strict=True)):
            if row in drawn:
                children = drawn[row]
                if children.token_ids:
                    drafts[i].distributions[node] = children.distribution
                fields = zip(children.token_ids, children.log_probs, children.scores, strict=True)
                offered[i] += [Candidate(node, *child) for child in fields]
            else:
                path, pairs = drafts[i].tree.values[node], zip(token_ids, log_probs, strict=True)
                if reads_leads:
                    drafts[i].predicted.append(log_probs[0] - log_probs[1])
                offered[i] += [
                    Candidate(node, token, value, path + value)
                    for token, value in islice(pairs, widths[i])
                    if value > -torch.inf
                ]
        return offered

    def _draw(
        self,
        scores: Tensor,
        drafts: list[_Growing],
        places: list[tuple[int, int]],
        rows: list[int],
        width: int,
    ) -> list[DrawnChildren]:
        """Children drawn at random for these rows of `scores`; row r is at node `places[r][1]` of a draft's tree."""
        if not rows:
            return []
        at, nodes = [drafts[places[row][0]].context for row in rows], [places[row][1] for row in rows]
        keys = [one.sampling for one in at], [context.step for context in at], nodes
        if self._is_beam:
            parents = [drafts[places[row][0]].tree for row in rows]
            values = [(tree.values[node], tree.scores[node]) for tree, node in zip(parents, nodes, strict=True)]
            return draw_beam(scores[upload(rows, scores.device)], *keys, width, self._options.law_size, values)
        draw = draw_iid if self._kind is SamplingKind.IID else draw_without_replacement
        return draw(scores[upload(rows, scores.device)], *keys, width, self._options.law_size)

    def _samples(self, params: SamplingParams) -> bool:
        """Whether children are drawn at random from a distribution that travels with them, rather than chosen."""
        return self._may_sample and not self._coupled and not is_greedy(params)

    def _drawing_params(self, params: SamplingParams) -> SamplingParams:
        """How tokens are drawn: without shared noise the best guess is the likeliest one."""
        return params if self._coupled else replace(params, temperature=0.0)

    def _finish(
        self, context: Context, distributions: dict[int, SparseDistribution], grown: TokenTree, kept: list[int]
    ) -> Draft:
        rows = self._rows[context.request_id]
        if self._chain_rule is not None and (num_dropped := self._chain_rule.num_dropped(context.request_id)):
            kept = kept[:-num_dropped]
            grown = TokenTree(grown.token_ids[:-num_dropped], grown.parents[:-num_dropped])
        place = {node: i for i, node in enumerate(kept)}
        rows.of_node = {place[node]: row for node, row in rows.of_node.items() if node in place}
        if self._coupled:
            return Draft(grown)
        if not distributions:
            return Draft.chosen(grown)
        sampling_kinds = (SamplingKind.ROOT, *[self._kind] * grown.num_draft_tokens)
        return Draft(grown, sampling_kinds, tuple(distributions.get(node) for node in kept))


def _chain_rule(config: PassDrafterConfig) -> ChainRule | None:
    """None: chains have the ordered length, and no rule is loaded."""
    if config.length_rule is LengthRule.ordered:
        return None
    if config.length_rule is LengthRule.priced:
        from actors.drafters.model.priced_chains import PricedRule

        return PricedRule()
    from actors.drafters.model.chain_rules import GapRule, ProbabilityRule, ThompsonRule, ThresholdRule

    match config.length_rule:
        case LengthRule.threshold:
            return ThresholdRule(config.rejection_threshold)
        case LengthRule.thompson:
            return ThompsonRule()
        case LengthRule.probability:
            return ProbabilityRule(config.least_probability)
    return GapRule(config.rejection_threshold)


def _seen_before_drawing(rule: ChainRule, output: PassOutput) -> Iterator[float] | None:
    """What the rule reads of each row in place of the probability of the token drawn there; None: that probability, or
    what was found when the token was drawn."""
    if rule.reads_leads:
        return None
    if rule.reads_gaps:
        likeliest = output.logits.softmax(dim=-1).topk(2, dim=-1).values
        return iter((likeliest[:, 0] - likeliest[:, 1]).tolist())
    return None if output.acceptance is None else iter(output.acceptance.log().tolist())


def node_rows(context: Context, token_ids: Iterable[int], parents: Iterable[int], nodes: Sequence[int]) -> LogitRows:
    """The histories of some nodes of a tree after the context's text, for the logit processors; without any processor
    the root stands for every node."""
    if is_plain(context.sampling):
        tree, nodes = TokenTree.root(context.token_ids[-1]), [0] * len(nodes)
    else:
        tree = TokenTree(tuple(token_ids), tuple(parents))
    return LogitRows(context.sampling, context.prompt_len, context.token_ids, tree, nodes)
