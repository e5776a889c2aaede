"""Scripted roles around the real coordinator: a target that writes a small language, a drafter with right, wrong and
malformed answers, a client.

The language is a function of the whole history, so any token that is lost, doubled or misplaced shows at once. The
roles check what they receive and hold the scheduler to the rows that are really there.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from actors.coordinator.bridged_port import MOST_UNRECEIVED
from actors.coordinator.local_drafts import LocalDrafts
from actors.coordinator.port import open_port
from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.options import SchedulerConfig
from actors.policy.policy import Policy
from actors.protocol.membership import RoleBack, RoleLost
from actors.protocol.messages import (
    HASH_SEED,
    DraftBatch,
    DraftPreview,
    DraftPreviewBatch,
    FeatureExport,
    Proposal,
    ProposalBatch,
    Tokens,
    TokenTree,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    extend_hash,
)
from actors.topology import seat_role
from parallel.kv.pool import KVPool
from parallel.kv.prefix_tree import Text
from tests.actors.small_language import EOS, MAX_MODEL_LEN, next_word


@dataclass
class Knowledge:
    """What a role knows of its requests; refuses unknown requests, and one that is admitted twice."""

    texts: dict[int, list[int]] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    sources: dict[int, tuple[int, ...]] = field(default_factory=dict)
    admitted: set[int] = field(default_factory=set)
    last_round: int = 0
    speculates: set[int] = field(default_factory=set)

    def learn(self, batch, *, has_last: bool = False) -> None:
        """`has_last`: of released requests the last commits are sent too."""
        assert batch.after == self.last_round, "the role has missed a batch"
        self.last_round = batch.round
        last = [commit for commit in batch.commits if has_last and commit.request_id in batch.releases]
        for commit in last:
            self.commit(commit)
        for request_id in batch.releases:
            del self.texts[request_id]
        for admit in batch.admits:
            assert admit.request_id not in self.texts, "admitted twice"
            assert admit.epoch > self.epochs.get(admit.request_id, -1), "an old epoch came back"
            self.texts[admit.request_id] = list(admit.token_ids)
            self.epochs[admit.request_id] = admit.epoch
            self.sources[admit.request_id] = admit.source
            self.admitted.add(admit.request_id)
            (self.speculates.add if admit.speculates else self.speculates.discard)(admit.request_id)
        for commit in [commit for commit in batch.commits if commit not in last]:
            self.commit(commit)

    def commit(self, commit) -> None:
        text = self.texts[commit.request_id]
        assert commit.prefix_len == len(text) and commit.epoch == self.epochs[commit.request_id]
        text += commit.token_ids


class ScriptedTarget:
    """Walks proposals with the language, and holds the scheduler to the rows of a real pool. One that writes in blocks
    brings no to three tokens of its own with a verdict."""

    def __init__(self, num_slots: int, num_own=lambda: 1) -> None:
        self.knows = Knowledge()
        self.num_own = num_own
        self.pool = KVPool(1, num_slots, 1, 1)
        self.fed: dict[int, int] = {}
        self.bare: set[int] = set()  # their last verdict brought no token after the path
        self.num_fed = self.num_hits = 0
        self.sent = (0, 0)  # bridge, and number of tensors that were sent over it

    def forget(self, last_round: int) -> None:
        """A role that came together anew. It remembers epochs only to check that they grow."""
        self.knows = Knowledge(epochs=self.knows.epochs, last_round=last_round)
        self.pool, self.fed = KVPool(1, self.pool.num_slots, 1, 1), {}

    def answer(self, batch: VerifyBatch) -> VerdictBatch:
        self.knows.learn(batch, has_last=True)
        for commit in batch.commits:
            fed, is_bare = self.fed[commit.request_id], commit.request_id in self.bare
            rows = [*range(fed), *(fed - 1 + node for node in commit.path)]
            self.pool.commit(commit.request_id, rows[: len(rows) - is_bare])
        for request_id in batch.releases:
            self.pool.close(request_id)
            self.pool.close((request_id, "source"))
        hits = self.open(batch)
        verdicts, spans = [], [(request_id, 0, count) for request_id, count in hits.items()]
        for item in batch.items:
            text, cached = self.knows.texts[item.request_id], self.pool.cached_len(item.request_id)
            num_tokens = min(item.num_tokens, len(text) - cached)
            assert num_tokens == item.num_tokens or item.request_id in hits
            self.fed[item.request_id] = num_tokens
            num_nodes = item.proposal.tree.num_draft_tokens if item.proposal else 0
            source = self.knows.sources[item.request_id]
            if source and not self.pool.cached_len((item.request_id, "source")):
                assert not cached, "a source is read before the text"
                self.pool.reserve((item.request_id, "source"), len(source))
                self.pool.commit((item.request_id, "source"), range(len(source)))
            self.pool.reserve(item.request_id, num_tokens + num_nodes)
            self.num_fed += num_tokens
            if cached + num_tokens < len(text):
                assert item.proposal is None
                self.pool.commit(item.request_id, range(num_tokens))
                spans.append((item.request_id, cached, num_tokens))
                continue
            path = self.walk(text, item.proposal.tree) if item.proposal else []
            kept = [item.proposal.tree.token_ids[node] for node in path] if item.proposal else []
            spans.append((item.request_id, cached, num_tokens + len(path)))
            epoch = self.knows.epochs[item.request_id]
            written = [*text, *kept]
            for _ in range(num_own := self.num_own()):
                written.append(next_word(written))
            (self.bare.discard if num_own else self.bare.add)(item.request_id)
            own = tuple(written[len(written) - num_own :])
            verdicts.append(Verdict(item.request_id, epoch, len(text), tuple(path), own))
        num_rows = sum(self.fed[item.request_id] for item in batch.items)
        spans = [span for span in spans if span[0] in self.knows.speculates]
        export = self.export(batch, spans)
        return VerdictBatch(batch.round, tuple(verdicts), 0.0, 0.5, num_rows, export=export, hits=(*hits.items(),))

    def open(self, batch: VerifyBatch) -> dict[int, int]:
        """The admitted requests with rows, and how many."""
        for admit in batch.admits:
            scope = admit.rows_scope
            text = None if scope is None else Text(self.knows.texts[admit.request_id], scope)
            self.pool.open(admit.request_id, text)
            self.pool.open((admit.request_id, "source"))
        hits = {admit.request_id: self.pool.cached_len(admit.request_id) for admit in batch.admits}
        self.num_hits += sum(hits.values())
        return {request_id: count for request_id, count in hits.items() if count}

    def export(self, batch: VerifyBatch, spans) -> FeatureExport | None:
        if not (batch.bridge and spans):
            return None
        bridge, number = self.sent
        number = number + 1 if batch.bridge == bridge else 1
        assert 0 <= batch.num_received < number <= batch.num_received + MOST_UNRECEIVED, "too many are kept"
        self.sent = batch.bridge, number
        return FeatureExport(batch.bridge, number, 8, "float32", tuple(spans))

    @staticmethod
    def walk(text: list[int], tree: TokenTree) -> list[int]:
        assert tree.token_ids[0] == text[-1]
        path, kept, children = [], [], tree.children()
        while True:
            here = path[-1] if path else 0
            match = [child for child in children[here] if tree.token_ids[child] == next_word(text + kept)]
            if not match:
                return path
            path.append(match[0])
            kept.append(tree.token_ids[match[0]])


class ScriptedDrafter:
    """Answers each order by a method drawn from the names `answers`. `splits` of its answers come in two parts.

    `previews` is the share of its drafts that are followed by a preview of what may come behind them.
    """

    def __init__(self, choose: random.Random, answers: tuple[str, ...], splits: float, previews: float) -> None:
        self.knows = Knowledge()
        self.choose, self.answers, self.splits, self.previews = choose, answers, splits, previews
        self.asked: set[int] = set()
        self.num_prefetched = 0
        self.bridge = 0  # over which it is sent hidden states
        self.num_received = 0
        self.features: dict[int, int] = {}  # of so many leading tokens
        self.drafted: set[int] = set()  # requests for which it has made a draft since it knows them
        self.is_far = False  # orders need not have a draft that it has prepared

    def forget(self, last_round: int) -> None:
        self.knows = Knowledge(last_round=last_round, admitted=self.knows.admitted)
        self.num_received, self.features = 0, {}
        self.drafted.clear()

    def read_features(self, batch: DraftBatch) -> None:
        for request_id in (*batch.releases, *(admit.request_id for admit in batch.admits)):
            self.features.pop(request_id, None)
        for export in batch.exports:
            self.num_received += 1
            assert (export.bridge, export.number) == (self.bridge, self.num_received), "a tensor was left out"
            for request_id, start, count in export.spans:
                if request_id is not None:
                    assert start == self.features.get(request_id, 0) and request_id in self.knows.texts
                    self.features[request_id] = start + count
        for order in batch.orders:
            if self.bridge and order.num_draft_tokens:
                text = self.knows.texts[order.request_id]
                assert self.features.get(order.request_id, 0) == len(text) - 1, "a draft cannot be made of this"

    def answer(self, batch: DraftBatch) -> list[ProposalBatch | DraftPreviewBatch]:
        self.drafted -= {*batch.releases, *(admit.request_id for admit in batch.admits)}
        for commit in batch.commits:
            assert not commit.path or commit.request_id in self.drafted, "the path is one of another drafter's draft"
        self.knows.learn(batch)
        self.read_features(batch)
        self.drafted |= {order.request_id for order in batch.orders if order.num_draft_tokens}
        assert len({order.request_id for order in batch.orders}) == len(batch.orders), "two orders for one request"
        for order in batch.orders:
            if order.prefetched is not None:
                assert self.is_far or order.prefetched.num_draft_tokens > 0
                assert order.prefetched.num_draft_tokens <= order.num_draft_tokens
                assert order.prefetched.token_ids[0] == self.knows.texts[order.request_id][-1]
                self.num_prefetched += 1
        asked = [order.request_id for order in batch.orders if order.num_draft_tokens]
        seen = [self.preview(request_id) for request_id in asked if self.choose.random() < self.previews]
        return self.proposals(batch) + ([DraftPreviewBatch(tuple(seen))] if seen else [])

    def preview(self, request_id) -> DraftPreview:
        """The right words for some way, beside wrong ones; sometimes of another text."""
        text = list(self.knows.texts[request_id])
        tokens, parents, at = [text[-1]], [-1], 0
        written = list(text)
        for _ in range(self.choose.randint(0, 9)):
            right = next_word(written)
            siblings = [right] if self.choose.random() < 0.7 else self.choose.sample([right, 12], 2)
            tokens += siblings
            parents += [at] * len(siblings)
            at = len(tokens) - len(siblings) + siblings.index(right)
            written.append(right)
        values = tuple(-float(i) for i in range(len(tokens))) if self.choose.random() < 0.5 else ()
        epoch = self.knows.epochs[request_id] + (self.choose.random() < 0.05)
        tree = TokenTree(tuple(tokens), tuple(parents))
        return DraftPreview(request_id, epoch, len(text), extend_hash(HASH_SEED, text), tree, values)

    def proposals(self, batch: DraftBatch) -> list[ProposalBatch]:
        orders = [(order.request_id, order.num_draft_tokens) for order in batch.orders if order.prefetched is None]
        self.asked |= {request_id for request_id, _ in orders}
        proposals: list[Proposal] = []
        for request_id, budget in orders:
            text = self.knows.texts[request_id]
            if budget:
                assert len(text) + budget < MAX_MODEL_LEN, "more was ordered than can be emitted"
                proposals += getattr(self, self.choose.choice(self.answers))(request_id, text, budget)
        if self.choose.random() >= self.splits:
            return [ProposalBatch(batch.round, tuple(proposals), 0.0, 0.25)]
        late = {request_id for request_id, budget in orders if budget and self.choose.random() < 0.5}
        early = tuple(proposal for proposal in proposals if proposal.request_id not in late)
        rest = tuple(proposal for proposal in proposals if proposal.request_id in late)
        return [
            ProposalBatch(batch.round, early, 0.0, 0.125, max(1, len(late))),
            ProposalBatch(batch.round, rest, 0.125, 0.25),
        ]

    def propose(self, request_id, text, tree) -> list[Proposal]:
        return [Proposal(request_id, self.knows.epochs[request_id], len(text), extend_hash(HASH_SEED, text), tree)]

    def right(self, request_id, text, budget):
        draft = []
        for _ in range(budget):
            draft.append(next_word(text + draft))
        return self.propose(request_id, text, TokenTree.chain(text[-1], draft))

    def wrong(self, request_id, text, budget):
        return self.propose(request_id, text, TokenTree.chain(text[-1], [12] * budget))

    def bushy(self, request_id, text, budget):
        size = self.choose.randint(0, budget)
        tokens = (text[-1], *(self.choose.choice([next_word(text), 3, 5]) for _ in range(size)))
        return self.propose(
            request_id, text, TokenTree(tokens, (-1, *(self.choose.randrange(i + 1) for i in range(size))))
        )

    def missing(self, request_id, text, budget):
        return []

    def stale(self, request_id, text, budget):
        (right,) = self.right(request_id, text, budget)
        return [replace(right, **self.choose.choice([{"epoch": 7}, {"prefix_len": len(text) - 1}, {"prefix_hash": 3}]))]

    def twice(self, request_id, text, budget):
        return self.right(request_id, text, budget) + self.wrong(request_id, text, budget)

    def unrooted(self, request_id, text, budget):
        return self.propose(request_id, text, TokenTree.chain(12, [1] * budget))

    def strange(self, request_id, text, budget):
        (right,) = self.right(request_id, text, budget)
        return [replace(right, request_id=10_000), right]


class ScriptedLookup(RequestwiseDrafter):
    """Drafts right and wrong words, or none."""

    capabilities = Capabilities()

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose

    def _propose(self, context: Context, budget: int) -> Draft:
        draft = []
        for _ in range(self.choose.randint(0, budget)):
            draft.append(next_word(context.token_ids + draft) if self.choose.random() < 0.6 else 3)
        return Draft.chosen(TokenTree.chain(context.token_ids[-1], draft))


ANSWERS = ("right", "wrong", "bushy", "missing", "stale", "twice", "unrooted", "strange")


class World:
    """Two roles and a client around one coordinator; `choose` decides whose record arrives next, `tick_s` later."""

    tick_s = 1.0

    def __init__(
        self,
        choose,
        pipeline="sync",
        answers=ANSWERS,
        limits=None,
        slots=200,
        drafts=True,
        duplicates=0.0,
        splits=0.0,
        previews=0.0,
        lateness=0.0,
        policy=None,
        bridged=False,
        writes_blocks=False,
        num_seats=1,
        far=False,
        parts=0.0,
    ):
        self.choose, self.duplicates, self.lateness, self.parts = choose, duplicates, lateness, parts
        policy = policy or Policy(pipeline, 4)
        self.weighs_waiting = policy.weighs_waiting
        limits = limits or SchedulerConfig()
        lookup: Any = LocalDrafts("lookup", ScriptedLookup(choose)) if far else "none"
        kind = {"bridged": bridged, "num_seats": num_seats, "local_drafter": lookup}
        port = open_port(policy, limits.prefill_chunk, drafts=drafts, **kind)
        self.coordinator: Any = Coordinator(Scheduler(limits, Capacity(slots, MAX_MODEL_LEN)), policy, [EOS], port)
        self.bridged = bridged
        self.target = ScriptedTarget(slots, (lambda: choose.choice([0, 1, 2, 3])) if writes_blocks else (lambda: 1))
        roles = [seat_role(seat) for seat in range(num_seats)]
        self.drafters = {role: ScriptedDrafter(choose, answers, splits, previews) for role in roles}
        self.drafter = self.drafters["draft"]
        self.drafter.is_far = far
        self.answers: dict[str, deque] = {role: deque() for role in ("target", *roles)}
        self.senders: dict[int, str] = {}  # of answers, by their identity
        self.noted: set[tuple[str, int]] = set()  # roles and rounds of batches whose drafts were all read off previews
        self.sent: list = []
        self.past: list = []
        self.lost: set[str] = set()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Any] = {}
        self.clock = 0.0
        if bridged:
            self.bring_back("draft")

    def lose(self, role: str) -> None:
        """The role dies, or is taken for dead; what it has said may still arrive, much later."""
        self.past += self.answers[role]
        self.answers[role].clear()
        self.lost.add(role)
        self.deliver(RoleLost(role))
        if self.bridged and role == "target" and "draft" not in self.lost:
            self.lose("draft")  # it may miss hidden states

    def bring_back(self, role: str) -> None:
        """Another one takes its place, which knows nothing."""
        if self.bridged and role == "draft":
            if "target" in self.lost:
                return
            self.drafter.bridge += 1
        {"target": self.target, **self.drafters}[role].forget(self.coordinator.last_round(role))
        self.lost.discard(role)
        self.deliver(RoleBack(role, self.drafter.bridge))

    def deliver(self, record) -> None:
        self.clock += self.tick_s
        self.post(self.coordinator.on(record, self.clock, self.senders.get(id(record), "draft")))
        if self.clock % 2 < 1:  # else it learns before it does anything else
            self.coordinator.learn()

    def stop_waiting(self) -> None:
        """Nothing arrives until the coordinator waits no longer."""
        assert self.coordinator.stop_waiting(self.clock - 1e9) == [], "it is not late yet"
        self.clock = max(self.clock, self.coordinator.wait_until)
        self.post(self.coordinator.stop_waiting(self.clock))

    def post(self, answers) -> None:
        for_clients = [isinstance(answer, Tokens) for answer in answers]
        assert for_clients == sorted(for_clients), "a role waited for what a client merely reads"
        for answer in answers:
            self.sent.append(answer)
            match answer:
                case VerifyBatch():
                    assert "target" not in self.lost, "a pass was started on a target that is not there"
                    assert not self.answers["target"], "a pass was started while one is out"
                    self.answers["target"].extend(self.in_parts(self.target.answer(answer)))
                case DraftBatch():
                    role = seat_role(answer.seat)
                    assert role not in self.lost, "drafts were ordered from a drafter that is not there"
                    out = {(role, one.round) for one in self.answers[role] if isinstance(one, ProposalBatch)}
                    assert self.drafter.is_far or out <= self.noted, "drafts were ordered while some are out"
                    if answer.orders and all(order.prefetched is not None for order in answer.orders):
                        self.noted.add((role, answer.round))
                    made = self.drafters[role].answer(answer)
                    self.senders |= {id(record): role for record in made}
                    self.answers[role].extend(made)
                case Tokens():
                    self.receive(answer)
        self.check_orders(answers)

    def in_parts(self, answer) -> list:
        """The target's answer, now and then its verdicts first, as where a drafter reads much before it drafts."""
        if not self.parts or self.choose.random() >= self.parts:
            return [answer]
        return [replace(answer, drafts_follow=True), replace(answer, verdicts=(), hits=(), follows_verdicts=True)]

    def check_orders(self, answers) -> None:
        """A draft for a sequence that is verified would be stale before it is made, and tell at most how late it is."""
        if self.weighs_waiting:
            return
        for batch in answers:
            if isinstance(batch, DraftBatch) and self.answers["target"]:
                missing = [order for order in batch.orders if order.num_draft_tokens and not order.prefetched]
                ordered = {order.request_id for order in missing}
                judged = {verdict.request_id for verdict in self.answers["target"][0].verdicts}
                assert not ordered & judged

    def receive(self, news: Tokens) -> None:
        tokens = self.tokens.setdefault(news.request_id, [])
        assert news.request_id not in self.ends, "news of a request that ended"
        assert news.position == len(tokens) and (news.token_ids or news.finish_reason)
        tokens += news.token_ids
        if news.finish_reason is not None:
            assert news.stats is not None
            self.ends[news.request_id] = news

    def deliver_one(self) -> bool:
        """One role's answer, now and then an old one once more; False if nothing is under way.

        Where a draft was lost on the way, time passes until the coordinator waits for it no longer.
        """
        ready = [queue for queue in self.answers.values() if queue]
        if not ready:
            if self.coordinator.wait_until is not None:
                self.stop_waiting()
            return bool(self.answers["target"])
        if self.coordinator.wait_until is not None and self.choose.random() < self.lateness:
            assert not self.answers["target"], "it waits while the target works"
            self.stop_waiting()
            assert self.answers["target"], "time was up, and the target idles"
            return True
        if self.past and self.choose.random() < self.duplicates:
            self.deliver(self.choose.choice(self.past))
        record = self.choose.choice(ready).popleft()
        self.past.append(record)
        self.deliver(record)
        return True

    def settle(self) -> None:
        deliveries = 0
        while self.deliver_one():
            deliveries += 1
            assert deliveries < 5_000, "this never ends"
        assert self.coordinator.num_requests == 0, "a request was forgotten"
