"""A round room for tests: the real coordinator, target and drafters, called directly; and a hub with links. No Ray."""

from __future__ import annotations

import copy
import itertools
import logging
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from actors.coordinator.port import open_port
from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DraftSetup, Placement
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.grammars.compiler import GrammarCompiler
from actors.grammars.masks import GrammarMasks
from actors.options import Parallel, SchedulerConfig, TargetConfig, VerifyConfig
from actors.policy.policy import Policy
from actors.protocol.membership import Bridge, RoleBack
from actors.protocol.messages import DraftBatch, Request, SamplingParams, VerifyBatch
from actors.roles.attached import AttachedDrafter
from actors.roles.bridge import FeatureReceiver, FeatureSender
from actors.roles.draft import DraftRole
from actors.roles.run_ahead import RunAhead
from actors.roles.target import TargetRole
from actors.transport.channel import Hub, is_client
from actors.verification.features import FeatureReader
from actors.verification.top_tokens import TopTokensReader
from actors.worker.spec import RankSpec
from parallel.comm.group import SINGLE
from parallel.comm.rendezvous import host_store
from parallel.model.layers.backends import default_backend
from parallel.runtime.runner import open_model
from tests.actors.service_harness import KEYS, Stage, link_to

EOS, QUOTE = 1, 94
VOCAB_SIZE = 97
MAX_LEN = 256


@dataclass
class Room:
    """Drives requests to their end; `tokens`, `ends` and `stats` tell how they fared."""

    target: Any  # a `TargetRole` or what answers as it does
    draft: Any  # a `DraftRole`, or None
    num_draft_tokens: int
    limits: SchedulerConfig
    slots: int
    pipeline: str
    attached: bool = False
    bridge: tuple[FeatureSender, FeatureReceiver] | None = None
    is_chain: bool = False  # by the drafter's record no proposal branches
    has_exact_rows: bool = True  # a row has the same bits in every pass
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str | None] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[Any]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)  # tokens of the prompt whose rows were there
    preempted: dict[int, int] = field(default_factory=dict)  # times that a request lost its place
    stats: object = None
    leisure: random.Random = field(default_factory=lambda: random.Random(0))
    local_drafter: str = "none"  # with one, the drafter is far away
    proposers: Counter[str] = field(default_factory=Counter)  # accepted tokens by what had drafted them
    _on_their_way: deque[Any] = field(default_factory=deque)  # batches to a far drafter, and what it has sent

    def serve(self, requests, after_round=None, policy=None):
        policy = policy or Policy(self.pipeline, self.num_draft_tokens)
        drafter = open_port(
            policy,
            self.limits.prefill_chunk,
            drafts=self.draft is not None,
            attached=self.attached,
            bridged=self.bridge is not None,
            local_drafter=self.local_drafter,
        )
        coordinator = Coordinator(Scheduler(self.limits, Capacity(self.slots, MAX_LEN)), policy, [EOS], drafter)
        clock = itertools.count()
        if self.bridge is not None:
            assert not coordinator.on(RoleBack("draft", self.bridge[0].number), next(clock))
        queue: list[Any] = [record for request in requests for record in coordinator.on(request, next(clock))]
        while queue:
            record = self._next(queue)
            if isinstance(record, VerifyBatch):
                trees = [item.proposal.tree for item in record.items if item.proposal is not None]
                assert not self.is_chain or all(tree.is_chain for tree in trees), "a draft branched: see `is_chain`"
                self._idle(coordinator, clock)
                for answer in self.target.answer(record):
                    coordinator.check(answer)
                    queue += coordinator.on(answer, next(clock))
                self.target.runner.pool.check()
                if after_round is not None:
                    after_round(self)
            elif isinstance(record, DraftBatch) and self.local_drafter != "none":
                self._on_their_way.append(record)
            elif isinstance(record, DraftBatch):
                features = self.bridge[1].receive(record.exports) if self.bridge is not None else ()
                answers = self.draft.answer(record, features)
                queue += [r for answer in answers for r in coordinator.on(answer, next(clock))]
            else:
                tokens = self.tokens.setdefault(record.request_id, [])
                assert record.position == len(tokens), "tokens arrive once and in order"
                tokens += record.token_ids
                for name, count in record.proposers:
                    self.proposers[name] += count
                self._keep_logprobs(record)
                if record.finish_reason:
                    self.ends[record.request_id] = record.finish_reason
                    self.errors[record.request_id] = record.error
                    self.cached[record.request_id] = record.stats.num_cached_tokens
                    self.preempted[record.request_id] = record.stats.num_preemptions
        self._arrive(len(self._on_their_way), coordinator, clock)
        assert coordinator.num_requests == 0, "a request was left waiting"
        self.stats = coordinator.stats
        return self

    @property
    def said(self):
        """All that the clients were sent which may not depend on speculation: bits of log-probabilities where a row's
        do not depend on the rows beside it, else how many there are."""
        logprobs = self.logprobs, self.prompt_logprobs
        counts = [{number: len(entries) for number, entries in one.items()} for one in logprobs]
        return self.tokens, self.ends, *(logprobs if self.has_exact_rows else counts)

    def _keep_logprobs(self, record):
        """Log-probabilities of each request as bits, one for a token: those generated, and the prompt but its first."""
        if record.logprobs is not None:
            record.logprobs.check(VOCAB_SIZE)
            self.logprobs.setdefault(record.request_id, []).extend(bits(record.logprobs))
        if record.prompt_logprobs is not None:
            assert record.request_id not in self.prompt_logprobs, "those of a prompt come once"
            record.prompt_logprobs.check(VOCAB_SIZE)
            self.prompt_logprobs[record.request_id] = bits(record.prompt_logprobs)

    def _next(self, queue):
        """Batches of one moment reach their roles in any order."""
        both = {type(record) for record in queue[:2]} == {VerifyBatch, DraftBatch}
        return queue.pop(self.leisure.randrange(2) if both else 0)

    def _check_rows(self, holder):
        """Checks the rows of a runner, or of what a drafter or runner consists of; a head keeps none."""
        if hasattr(holder, "pool"):
            holder.pool.check()
        elif hasattr(holder, "runner"):
            self._check_rows(holder.runner)
        for member in getattr(holder, "members", ()):
            self._check_rows(member.drafter)

    def _idle(self, coordinator, clock):
        """While the target verifies, the drafter gets a random number of steps of its own, and may tell of them."""
        if self.draft is None:
            return
        self._arrive(self.leisure.randrange(10), coordinator, clock)
        for _ in range(self.leisure.randrange(6)):
            if not self.draft.wants_work:
                break
            # any width may be chosen, 0 is the configured one, and any number of passes
            self.draft.work(self.leisure.randrange(4), self.leisure.choice((1, 1, 3)))
            self._check_rows(self.draft.drafter)
        if self.leisure.random() < 0.7 and (preview := self.draft.preview(last=True)) is not None:
            if self.local_drafter != "none":
                self._on_their_way.append(preview)
            else:
                assert not coordinator.on(preview, next(clock))

    def _arrive(self, most, coordinator, clock):
        """Records between the coordinator and a far drafter arrive, at most so many, in order."""
        for _ in range(min(most, len(self._on_their_way))):
            match record := self._on_their_way.popleft():
                case DraftBatch():
                    self._on_their_way += self.draft.answer(record)
                case _:
                    orders = coordinator.on(record, next(clock))
                    assert all(isinstance(one, DraftBatch) for one in orders)
                    self._on_their_way += orders


def bits(logprobs):
    """What is said of each token."""
    return [(one.token_ids, one.values, one.ranks) for one in map(logprobs.part, *_edges(len(logprobs)))]


def _edges(count):
    return range(count), range(1, count + 1)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Paths of a random target and of three drafters that agree with it less and less, and the target itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        eos_token_id=EOS,
    )
    paths, model = {}, LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data.mul_(3 if weight.dim() > 1 else 1)  # sharper laws: fewer ties
    for name in ("target", "drafter", "small", "tiny"):
        paths[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(paths[name])
        if name == "target":
            reference = copy.deepcopy(model)
        for weight in model.parameters():
            weight.data.add_(torch.randn_like(weight) * weight.std() * 0.15)  # agrees with the target now and then
    save_tokenizer(paths["target"], range(VOCAB_SIZE))
    paths["foreign"] = _renumbered(reference, tmp_path_factory.mktemp("foreign"))
    paths["deep"] = tmp_path_factory.mktemp("deep")
    _deepened(reference).save_pretrained(paths["deep"])
    return {**paths, "reference": reference}


def _renumbered(model, path):
    """The model, which errs now and then, with other ids for its tokens; the target lacks the last ten."""
    other = copy.deepcopy(model)
    order = [*range(0, VOCAB_SIZE, 2), *range(1, VOCAB_SIZE, 2)]
    for table in (other.model.embed_tokens.weight, other.lm_head.weight):
        table.data = table.data[order]
    for weight in other.parameters():
        weight.data.add_(torch.randn_like(weight) * weight.std() * 0.15)
    other.save_pretrained(path)
    save_tokenizer(path, [*order[:-10], *range(VOCAB_SIZE, VOCAB_SIZE + 10)])
    return path


def save_tokenizer(path, characters):
    """One whose tokens are single bytes, by their numbers in the alphabet of byte-level tokenizers; the quotation mark,
    which JSON needs, has changed places with a byte that nothing needs, because its number is the end token's."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet[EOS], alphabet[QUOTE] = alphabet[QUOTE], alphabet[EOS]
    tokenizer = Tokenizer(models.BPE({alphabet[c]: token for token, c in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path / "tokenizer.json"))


def byte_level_tokenizer(path):
    """Its content, with the decoder that matchers of grammars need."""
    from tokenizers import Tokenizer, decoders

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def _deepened(model):
    """The model with four layers put in its middle that change its mind now and then."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 6, None
    deep = type(model)(config).eval()
    for name, weight in deep.named_parameters():
        weight.data.mul_(1 if weight.dim() == 1 else 0.4 if "o_proj" in name or "down_proj" in name else 3)
    places = {"model.layers.0.": "model.layers.0.", "model.layers.1.": "model.layers.5."}
    for name, weight in model.state_dict().items():
        place = next((deeper for shallow, deeper in places.items() if name.startswith(shallow)), "")
        deep.state_dict()[place + name.removeprefix(name[: len(place)])].copy_(weight)
    return deep


def with_paths(config, models, path=None):
    """The cascade with its models' names, such as "drafter", replaced by where they lie; `path` is the last level's."""
    levels = [replace(one, path=str(models[one.path])) if hasattr(one, "path") else one for one in config.levels]
    if path is not None:
        levels[-1] = replace(levels[-1], path=str(path))
    return replace(config, levels=tuple(levels))


@pytest.fixture(scope="session")
def speculator(models, made_once):
    """Directory of a speculator of the target, by the name of its recipe."""
    from tests.actors.small_speculators import train_speculator  # loads transformers

    return lambda recipe: made_once(
        f"speculator-{recipe}", lambda folder: train_speculator(recipe, models["reference"], models["drafter"], folder)
    )


@pytest.fixture
def open_bridge():
    """A bridge between two ends in this thread: sends do not wait for the other end."""
    store, opened = host_store(), []

    def open_():
        ends = tuple(end("127.0.0.1", "cpu", logging.getLogger("test")) for end in (FeatureSender, FeatureReceiver))
        for end in ends:
            end.form(Bridge(len(opened) + 1, ("127.0.0.1", store.port)))
        deadline = time.monotonic() + 20
        while not all(end.number for end in ends) and time.monotonic() < deadline:
            time.sleep(0.002)
        opened.append(ends)
        return ends

    yield open_
    for end in itertools.chain(*opened):
        end.close()


def in_type(config: Any, dtype: str) -> Any:
    """The drafter with its models in this type, as far as it has models of its own."""
    if isinstance(config, AutoDrafterConfig):
        return replace(config, drafters=tuple(in_type(one, dtype) for one in config.drafters))
    return replace(config, dtype=dtype) if hasattr(config, "dtype") else config


@pytest.fixture
def open_room(models, speculator, open_bridge):
    """Room for a drafter config (None for none); `path` is the draft model, the smaller one unless said otherwise, and
    `weights` and `kv_dtype` the types in which the target's matrices and KV rows are stored; target and drafter compute
    in `dtype`."""

    def open_(
        config: Any = None,
        *,
        path=None,
        rule: Any = "coupled",
        limits=None,
        slots=4096,
        pipeline="sync",
        wrap=None,
        weights=None,
        kv_dtype=None,
        dtype="float32",
        attached=False,
        local_drafter="none",
    ):
        limits = limits or SchedulerConfig()
        reader = None
        if config is not None and (top_k := config.target_top_k):
            reader = TopTokensReader(top_k, reads_prompts=config.reads_prompts, is_late=config.learns_later)
        types = dict(dtype=getattr(torch, dtype), weights=weights, kv_dtype=kv_dtype)
        runner = open_model(models["target"], num_slots=slots, **types)
        has_exact_rows = default_backend(runner.pool) == "ragged"
        draft = on_target = features = bridge = None
        if config is not None:
            if isinstance(config, AutoDrafterConfig):
                inside = [replace(one, path=str(models["drafter"])) if one.models() else one for one in config.drafters]
                inside = [replace(one, path=str(speculator(one.path))) if one.speculators() else one for one in inside]
                config = replace(config, drafters=tuple(inside))
            elif isinstance(config, CascadeDrafterConfig):
                config = with_paths(config, models, path)
            elif isinstance(config, ModelDrafterConfig):
                deep = config.parallel is Parallel.layer  # the other models have too few layers
                path = models["deep"] if deep else models[config.path] if config.tokenizer else path
                path = speculator(config.path) if config.path in ("pard", "specdiff") else path
                tokenizer = config.tokenizer and str(models[config.tokenizer])
                config = replace(config, path=str(path or models["drafter"]), tokenizer=tokenizer, kv_slots=4096)
            elif isinstance(config, SpeculatorDrafterConfig):
                config = replace(config, path=str(speculator(config.path)), kv_slots=4096)
            config = in_type(config, dtype)
            runner = config.on_target(runner)
            target_config = TargetConfig(path=str(models["target"]), dtype=dtype)
            verify, on_its_ranks = VerifyConfig(rule, law_size=16), runner if attached else None
            setup = DraftSetup(verify, pipeline, limits, SINGLE, "cpu", (EOS,), target_config, on_its_ranks)
            drafter, _ = config.build(setup)
            drafter = wrap(drafter) if wrap else drafter
            pool = runner.pool if limits.prefix_cache else None
            if attached:
                on_target = AttachedDrafter(drafter, SINGLE, "cpu")
                features = FeatureReader(config.taps(2), pool) if config.reads_features else None
            else:
                draft = DraftRole(drafter)
                if config.reads_features:
                    bridge, features = open_bridge(), FeatureReader(config.taps(2), pool)
                    bridge[0].fuser = config.open_fuser(2, "cpu")
        ahead = None
        if attached:
            has_streams = features is not None and features.has_streams
            ahead = RunAhead((EOS,), MAX_LEN, price=0, has_streams=has_streams)
        target = TargetRole(
            runner,
            rule,
            (EOS,),
            is_lead=True,
            top_tokens=reader,
            features=features,
            drafter=on_target or (bridge and bridge[0]),
            ahead=ahead,
            grammars=lambda: GrammarMasks(GrammarCompiler(lambda: byte_level_tokenizer(models["target"]), (EOS,))),
        )
        num_draft_tokens = config.num_draft_tokens if config else 0
        is_chain = config is not None and config.is_chain and wrap is None
        roles = target, draft, num_draft_tokens, limits, slots, pipeline, attached, bridge
        return Room(*roles, is_chain, has_exact_rows, local_drafter=local_drafter)

    return open_


@pytest.fixture
def make_requests():
    """Requests of mixed prompt lengths, the same for the same arguments."""

    def make(count, *, max_tokens=32, seed=0, longest=60, **sampling):
        choose = random.Random(seed)
        return [
            Request(
                i,
                tuple(choose.randrange(2, VOCAB_SIZE) for _ in range(choose.randrange(1, longest))),
                SamplingParams(max_tokens=max_tokens, seed=100 + i, **sampling),
            )
            for i in range(count)
        ]

    return make


@pytest.fixture
def spec(models):
    """The only rank of a target, beside a drafter with a model."""
    return RankSpec(
        role="target",
        rank=0,
        size=1,
        device="cpu",
        num_threads=1,
        cores=(),
        hub_address="",
        host="127.0.0.1",
        eos_token_ids=(1,),
        target=TargetConfig(path=str(models["target"]), kv_slots=300),
        drafter=ModelDrafterConfig(path=str(models["drafter"]), placement=Placement.separate),
        verify=VerifyConfig(),
        pipeline="sync",
        scheduler=SchedulerConfig(max_num_seqs=2),
        key=KEYS.of("target-0"),
    )


@pytest.fixture
def hub():
    hub = Hub("tcp://127.0.0.1:*", KEYS)
    yield hub
    hub.close()


@pytest.fixture
def open_link(hub):
    links = []

    def open_(identity):
        links.append(link_to(hub.client_address if is_client(identity) else hub.address, identity))
        return links[-1]

    yield open_
    for link in links:
        link.close()


@pytest.fixture
def open_stage():
    """Conductors in their threads; ended with the test."""
    stages = []

    def open_(*arguments, **options):
        stages.append(Stage(*arguments, **options))
        return stages[-1]

    yield open_
    for stage in stages:
        stage.stop()
