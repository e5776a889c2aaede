"""One level of a cascade over a toy model and a scripted child: its orders, the tokens it accepts, its proposals."""

from __future__ import annotations

import numpy as np
import pytest

from actors.drafters.cascade.child import ChildLevel, LocalChild
from actors.drafters.cascade.draft_lengths import LengthControl, PassedLengths
from actors.drafters.cascade.level import CascadeDrafter, LevelSpec
from actors.drafters.config import ModelOptions
from actors.drafters.interface import Capabilities, Context, Draft
from actors.options import INDEPENDENT_ONLY
from actors.protocol.messages import Commit, SamplingKind, SamplingParams, SparseDistribution, TokenTree
from actors.sampling.noise import NoiseStream, noise_key
from actors.verification.random_source import HashRandomSource
from tests.actors.verification.cascade_enumeration import ToyRunner

VOCAB = 5


def successor(text):
    """The law of a model that counts: 3 follows token 2."""
    return np.eye(VOCAB)[(text[-1] + 1) % VOCAB if text else 1]


class ScriptedChild:
    """Proposes the given drafts, and records budgets and accepted paths."""

    capabilities = Capabilities()

    def __init__(self, *drafts: Draft) -> None:
        self.drafts, self.budgets, self.paths = list(drafts), [], []

    def open(self, context) -> None: ...

    def release(self, request_id) -> None: ...

    def observe(self, context, commit) -> None:
        self.paths.append(commit.path)

    def propose(self, contexts, budgets) -> list[Draft]:
        self.budgets += budgets
        return [self.drafts.pop(0) if self.drafts else Draft.nothing(contexts[0])]


def chain(root, *token_ids) -> Draft:
    return Draft.chosen(TokenTree.chain(root, token_ids))


def open_level(child, lengths, *, number=1, rule="coupled", temperature=0.0, **options):
    level = CascadeDrafter(
        ToyRunner(successor, VOCAB, 0).as_runner(),
        ChildLevel(LocalChild(child), str(number - 1), max(lengths[:number])),
        LevelSpec(number, str(number), **options),
        ModelOptions(rule, VOCAB, (), 99),
        PassedLengths(lengths),
    )
    context = Context(1, 0, [0, 1], 2, SamplingParams(temperature=temperature))
    level.open(context)
    return level, context


FAMILIAR = SparseDistribution((2, 3), (0.5, 0.5))
STRANGE = SparseDistribution((2, VOCAB), (0.5, 0.5))


@pytest.mark.parametrize(
    "draft",
    [
        chain(1, 2, VOCAB),
        Draft(TokenTree.chain(1, (2,)), (SamplingKind.ROOT, SamplingKind.IID), (STRANGE, None)),
    ],
)
def test_a_draft_with_tokens_that_this_model_lacks_is_no_draft(draft):
    child = ScriptedChild(draft)
    level, context = open_level(child, (2, 3), rule="rejection", temperature=1.0)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (1, 2, 3, 4) and child.budgets[0] == 2
    assert not any(work.num_accepted_tokens for work in level.level_stats())


def test_a_draft_of_its_own_tokens_is_reviewed():
    level, context = open_level(
        ScriptedChild(Draft(TokenTree.chain(1, (2,)), (SamplingKind.ROOT, SamplingKind.IID), (FAMILIAR, None))),
        (2, 3),
        rule="rejection",
        temperature=1.0,
    )
    level.propose([context], [3])
    assert sum(work.num_accepted_tokens for work in level.level_stats()) == 1


def counted(level):
    """Per level: drafts, tokens and accepted tokens of all verdicts."""
    totals: dict[str, tuple[int, ...]] = {}
    for work in level.level_stats():
        found = work.num_drafts, work.num_draft_tokens, work.num_accepted_tokens
        totals[work.level] = tuple(map(sum, zip(totals.get(work.level, (0, 0, 0)), found, strict=False)))
    return totals


def give_verdict(level, context, path, *token_ids):
    """The target's verdict."""
    level.observe(context, Commit(1, 0, len(context.token_ids), path, token_ids))
    context.extend(token_ids)


@pytest.mark.parametrize("path, own, tail", [((1, 2, 3, 4), (1, 2, 2), (1, 2, 2)), ((1,), (1, 2, 1), (0, 0, 0))])
def test_a_tail_is_as_long_as_it_should_be_and_gets_its_verdict(path, own, tail):
    child = ScriptedChild(Draft.nothing(Context(1, 0, [1], 1, SamplingParams())), chain(3, 4, 0))
    level, context = open_level(child, (3, 9), tail=2)
    (offered,) = level.propose([context], [4])
    assert offered.tree.token_ids == (1, 2, 3, 4, 0) and child.budgets == [1, 2]
    assert offered.parts == (("1", 2), ("0", 2))
    give_verdict(level, context, path, *[offered.tree.token_ids[node] for node in path], 1)
    totals = counted(level)
    assert totals["1"] == own and totals.get("0", (0, 0, 0)) == tail, "tokens after a rejected one are not verified"
    level.propose([context], [4])
    assert ((1, 2) in child.paths) == (len(path) == 4)


def test_what_a_level_has_left_is_offered_before_its_childs_tail():
    """It has verified these tokens, however few are ordered next."""
    nothing = Draft.nothing(Context(1, 0, [1], 1, SamplingParams()))
    child = ScriptedChild(nothing, nothing, chain(4, 0, 0), chain(4, 1))
    level, context = open_level(child, (3, 3), tail=2)
    (offered,) = level.propose([context], [5])
    assert offered.tree.token_ids == (1, 2, 3, 4, 0, 0)
    give_verdict(level, context, (1,), 2)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (2, 3, 4, 1) and offered.parts == (("1", 2), ("0", 1)), "two are left, not one"


def test_merged_tokens_are_those_of_the_level_that_drafted_them():
    child = ScriptedChild(chain(1, 2, 0))
    level, context = open_level(child, (2, 9), merge=2)
    (offered,) = level.propose([context], [5])
    assert offered.tree.token_ids == (1, 2, 3, 4, 0) and offered.tree.parents[-1] == 1
    counted(level)
    give_verdict(level, context, (1, 4), 2, 0, 3)
    assert counted(level) == {"1": (1, 3, 1), "0": (1, 1, 1)}


def test_a_level_of_length_0_forwards_the_drafts_of_its_child():
    child = ScriptedChild(chain(1, 4, 4, 4), chain(0, 1))
    level, context = open_level(child, (3, 0))
    (offered,) = level.propose([context], [5])
    assert offered.tree.token_ids == (1, 4, 4, 4) and child.budgets == [3]
    give_verdict(level, context, (1,), 4, 0)
    assert counted(level) == {"0": (1, 3, 1)}
    (offered,) = level.propose([context], [2])
    assert offered.tree.token_ids == (0, 1) and child.paths == [(1,)]


def test_each_level_is_verified_once_by_its_parent():
    child = ScriptedChild(chain(1, 2), chain(3, 4))
    middle, context = open_level(child, (1, 2), is_last=False)
    above, context = open_level(middle, (1, 2, 3), number=2)
    (offered,) = above.propose([context], [3])
    assert offered.tree.token_ids == (1, 2, 3, 4)
    assert counted(above) == {"0": (1, 1, 1), "1": (1, 2, 2), "2": (0, 0, 0)}
    give_verdict(above, context, (1, 2), 2, 3, 0)
    above.propose([context], [3])
    assert counted(above)["2"] == (1, 3, 2)


def test_a_level_that_works_ahead_rests_once_the_next_proposal_is_ready():
    """It assumes that all is accepted: its proposal, the target's token, and one more proposal behind them."""
    child = ScriptedChild()
    level, context = open_level(child, (1, 3), works_ahead=True)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (1, 2, 3, 4)
    steps = 0
    while level.wants_work:
        level.work()
        steps += 1
        assert steps < 20, "it never comes to rest"
    num_ordered = len(child.budgets)
    give_verdict(level, context, (1, 2, 3), 2, 3, 4, 0)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (0, 1, 2, 3) and len(child.budgets) == num_ordered, "it is drafted again"


# --- with a runner that has limits, and a child that notes all --------------------------------------------------------


class NotingChild(ScriptedChild):
    """Also notes the texts and requests that it sees."""

    def __init__(self, *drafts):
        super().__init__(*drafts)
        self.texts, self.released, self.read = [], [], []
        self.capabilities = Capabilities(prefills=self)

    def prefill(self, contexts):
        self.read += [tuple(context.token_ids) for context in contexts]

    def propose(self, contexts, budgets):
        self.texts += [tuple(context.token_ids) for context in contexts]
        return super().propose(contexts, budgets)

    def release(self, request_id):
        self.released.append(request_id)


class Control(LengthControl):
    """Chosen lengths that stay as they are; notes what it is given."""

    def __init__(self, lengths):
        super().__init__(lengths, ["0", "1"], drafts_at_once=True)
        self.log = []

    def choose(self):
        return self.lengths

    def request_opened(self):
        self.log.append("opened")

    def drafts_ordered(self, prefixes):
        self.log.append(("ordered", dict(prefixes)))

    def drafts_sent(self, mean_draft_tokens):
        self.log.append(("sent", mean_draft_tokens))

    def record_work(self, work):
        self.log.append(("work", [one.level for one in work]))


def level_over(child, lengths, *, runner=None, options=None, make_source=None, **spec):
    runner = runner or ToyRunner(successor, VOCAB, 0).as_runner()
    made = {} if make_source is None else {"make_random_source": make_source}
    return CascadeDrafter(
        *(runner, ChildLevel(LocalChild(child), "0", 3), LevelSpec(1, "1", **spec)),
        *(options or ModelOptions("coupled", VOCAB, (), 99), lengths),
        **made,
    )


@pytest.mark.parametrize("is_last", [True, False])
def test_the_control_of_lengths_hears_from_the_last_level(is_last):
    control = Control((2, 3))
    level = level_over(ScriptedChild(), control, is_last=is_last)
    context = Context(1, 0, [0, 1], 2, SamplingParams())
    level.open(context)
    level.propose([context], [2])
    level.level_stats()
    heard = ["opened", ("ordered", {1: 2}), ("sent", 2.0)]
    assert control.log[:3] == (heard if is_last else [])
    assert [kind for kind, _ in control.log[3:]] == (["work"] if is_last else [])


def test_a_request_that_ends_is_released_below_and_leaves_no_rows():
    child = NotingChild()
    runner = ToyRunner(successor, VOCAB, 0)
    level = level_over(child, PassedLengths((2, 3)), runner=runner.as_runner())
    context = Context(1, 0, [0, 1], 2, SamplingParams())
    level.open(context)
    level.propose([context], [3])
    level.release(1)
    assert runner.cached_len(1) == 0
    level.open(Context(2, 0, [0, 1], 2, SamplingParams()))
    level.propose([Context(2, 0, [0, 1], 2, SamplingParams())], [3])
    assert child.released == [1]


def test_a_prompt_is_read_by_every_level():
    child, runner = NotingChild(), ToyRunner(successor, VOCAB, 0)
    level = level_over(child, PassedLengths((2, 3)), runner=runner.as_runner())
    context = Context(1, 0, [0, 1, 2, 3], 4, SamplingParams())
    level.open(context)
    level.prefill([context])
    assert runner.cached_len(1) == 3, "the last token is the root of the first review"
    assert child.read == [(0, 1, 2, 3)] and not child.budgets


def test_a_text_that_was_cut_is_drafted_for_anew():
    child = NotingChild()
    level, context = open_level(child, (2, 3))
    level.propose([context], [3])
    del context.token_ids[1:]
    level.truncate(context)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (0, 1, 2, 3) and child.texts[-1][0] == 0
    give_verdict(level, context, (1,), 1, 4)
    (offered,) = level.propose([context], [2])
    assert offered.tree.token_ids == (4, 0, 1)


@pytest.mark.parametrize(("room", "is_able"), [(8, True), (7, False)])
@pytest.mark.parametrize("by", ["context", "pool"])
def test_drafts_for_which_there_is_no_room_are_not_made(by, room, is_able):
    """Two tokens of text, three of its own, and three of the child's behind them."""
    runner = ToyRunner(successor, VOCAB, 0)
    if by == "context":
        runner.longest_text = room
    else:
        runner.can_reserve = lambda num_rows: num_rows <= room
    level = level_over(ScriptedChild(), PassedLengths((3, 3)), runner=runner.as_runner())
    context = Context(1, 0, [0, 1], 2, SamplingParams())
    level.open(context)
    (offered,) = level.propose([context], [3])
    assert offered.tree.num_draft_tokens == (3 if is_able else 0)


def test_a_pool_that_filled_up_meanwhile_ends_the_work_ahead():
    runner = ToyRunner(successor, VOCAB, 0)
    level = level_over(ScriptedChild(), PassedLengths((1, 3)), runner=runner.as_runner(), works_ahead=True)
    context = Context(1, 0, [0, 1], 2, SamplingParams())
    level.open(context)
    level.propose([context], [3])
    assert level.wants_work
    runner.can_reserve = lambda num_rows: False
    level.work()
    assert not level.wants_work


def noted_sources(rule, **context):
    """(seed, step) of the numbers of four reviews."""
    asked = []

    def make(seed, step):
        asked.append((seed, step))
        return HashRandomSource(seed, step)

    level = level_over(
        ScriptedChild(), PassedLengths((1, 4)), options=ModelOptions(rule, VOCAB, (), 99), make_source=make
    )
    one = Context(1, context.get("epoch", 0), [0, 1], 2, SamplingParams(temperature=1.0, seed=5))
    one.admission = context.get("admission", 0)
    level.open(one)
    level.propose([one], [4])
    return asked


def test_numbers_are_those_of_the_level_the_epoch_and_the_admission():
    """A review has numbers of its own; under the coupled rule none are needed."""
    asked = noted_sources("rejection", epoch=3, admission=7)
    assert asked == [(noise_key(5, NoiseStream.DRAFT, 1, 3, 7), step) for step in range(1, 5)]
    assert noted_sources("coupled") == []


@pytest.mark.parametrize(
    ("rule", "temperature", "width", "kinds"),
    [
        ("coupled", 1.0, 1, ()),
        ("rejection", 0.0, 1, (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * 2)),
        ("rejection", 1.0, 1, (SamplingKind.ROOT, *[SamplingKind.IID] * 2)),
        *((rule, 1.0, 2, (SamplingKind.ROOT, *[SamplingKind.IID] * 4)) for rule in INDEPENDENT_ONLY),
        ("rejection", 1.0, 2, (SamplingKind.ROOT, *[SamplingKind.WITHOUT_REPLACEMENT] * 4)),
    ],
)
def test_how_tokens_were_drawn_is_said_of_each(rule, temperature, width, kinds):
    """Two tokens of its own; with a width of 2 each has a sibling, drawn from a law of all tokens."""
    runner = ToyRunner(lambda text: np.full(VOCAB, 1 / VOCAB), VOCAB, 0)
    level = level_over(
        *(ScriptedChild(), PassedLengths((1, 4))),
        runner=runner.as_runner(),
        options=ModelOptions(rule, VOCAB, (), 99),
        width=width,
    )
    context = Context(1, 0, [0, 1], 2, SamplingParams(temperature=temperature))
    level.open(context)
    (offered,) = level.propose([context], [2 * width])
    assert (offered.sampling_kinds or ()) == kinds or not kinds
    assert offered.tree.num_draft_tokens == 2 * width and offered.parts == (("1", 2 * width),)
    if kinds and temperature:
        assert [one is not None for one in offered.distributions] == [True, True, *[False] * (len(kinds) - 2)]


def test_what_a_level_says_of_itself():
    plain = level_over(ScriptedChild(), PassedLengths((1, 4)))
    assert plain.capabilities.vocab_size == VOCAB and plain.capabilities.works_ahead is None
    assert plain.capabilities.prefills is plain and plain.capabilities.has_levels is plain
    assert plain.width(None, 1.0) == 0 and not plain.wants_work and not plain.waits_for_child
    ahead = level_over(ScriptedChild(), PassedLengths((1, 4)), works_ahead=True)
    assert ahead.capabilities.works_ahead is ahead and ahead.may_work_ahead


def test_a_level_works_ahead_where_the_policy_lets_it():
    level, context = open_level(ScriptedChild(), (2, 3), works_ahead=True)
    level.propose([context], [3])
    assert level.wants_work
    level.may_work_ahead = False
    assert not level.wants_work


@pytest.mark.parametrize(
    "draft",
    [chain(2, 2), Draft.chosen(TokenTree.chain(1, (2, 3, 4)))],
    ids=["of another root", "of more tokens than ordered"],
)
def test_a_draft_that_was_not_ordered_is_no_draft(draft):
    level, context = open_level(ScriptedChild(draft), (2, 3), rule="rejection", temperature=1.0)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (1, 2, 3, 4)
    assert not any(work.num_accepted_tokens for work in level.level_stats())


def test_a_verdict_below_its_own_tokens_keeps_what_agreed():
    """Three own tokens, of which the target took one; none of them is drafted twice."""
    runner = ToyRunner(successor, VOCAB, 0)
    level = level_over(ScriptedChild(), PassedLengths((1, 3)), runner=runner.as_runner())
    context = Context(1, 0, [0, 1], 2, SamplingParams())
    level.open(context)
    level.propose([context], [3])
    give_verdict(level, context, (1,), 2, 0)
    assert runner.cached_len(1) == 3, "of the text and the token that it took"
    (offered,) = level.propose([context], [2])
    assert offered.tree.token_ids == (0, 1, 2)
