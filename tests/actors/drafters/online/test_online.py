"""A draft model that learns: what it keeps, that it gets better and falls back, and that nothing else changes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.drafters.config import Placement
from actors.drafters.interface import Context, FeatureRows
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.online import learner as learner_module
from actors.drafters.online import windows as windows_module
from actors.drafters.online.idle_time import IdleTime
from actors.drafters.online.learner import DROPPED, OnlineLearner, likely_loss
from actors.drafters.online.window_features import KEPT, WindowFeatures
from actors.drafters.online.windows import TargetWindow, WindowBuilder, WindowMemory
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import Parallel
from actors.protocol.messages import Admit, Commit, SamplingParams, SparseDistribution, TopTokens
from actors.verification.rules import RULES
from parallel.model.families.registry import read_config
from parallel.speculators.adapted import AdaptedDraftLayers
from parallel.training.adapted import AdaptedDecoder
from tests import matrices
from tests.actors.verification.rule_enumeration import emission, enumerate_drafts, total_variation

ONLINE = ModelDrafterConfig(num_draft_tokens=5, online=True, online_rate=1e-2)
SPECULATOR = SpeculatorDrafterConfig(
    path="eagle3", num_draft_tokens=3, online=True, online_rate=1e-2, placement=Placement.separate
)
FORGIVING = "actors.drafters.online.idle_time.MOST_DELAYED"


def law_of(rows):
    """Top tokens of rows (own token, likeliest next tokens)."""
    contexts = np.array([(-1, own) for own, _ in rows], np.int32)
    likely = np.array([tokens for _, tokens in rows], np.int32)
    probs = np.full(likely.shape, 0.25, np.float32)
    return contexts.tobytes(), likely.tobytes(), probs.tobytes()


def context_of(token_ids, request_id=7):
    admit = Admit(request_id, 0, tuple(token_ids), len(token_ids), SamplingParams())
    return Context.admitted(admit, None)


def verdict(context, path, tokens):
    return Commit(context.request_id, context.epoch, len(context.token_ids), tuple(path), tuple(tokens))


@pytest.fixture
def short_windows(monkeypatch):
    monkeypatch.setattr(windows_module, "POSITIONS", 4)
    monkeypatch.setattr(windows_module, "FEWEST", 1)


def test_rows_of_accepted_paths_and_first_rejections_become_windows(short_windows):
    laws, context = WindowBuilder(), context_of([1, 2, 3])
    # a tree: root 3, children 4 and 5, below 5 the token 6; 5 and 6 are accepted, the target adds 9
    rows = [(3, (5, 50)), (4, (40, 41)), (5, (6, 60)), (6, (9, 90))]
    laws.read(TopTokens(2, *law_of(rows), ((7, 3, 4), (8, 3, 0))), {7: context})
    assert laws.observe(context, verdict(context, (2, 3), (5, 6, 9))) is None
    context.extend((5, 6, 9))
    laws.read(TopTokens(2, *law_of([(9, (11, 12)), (77, (1, 2))]), ((7, 6, 2),)), {7: context})
    window = laws.observe(context, verdict(context, (), (11,)))
    assert window is not None
    assert window.token_ids.tolist() == [1, 2, 3, 5, 6, 9]
    assert window.likely.tolist() == [[5, 50], [6, 60], [9, 90], [11, 12]], "each law is of the token after its row"


def test_rows_may_come_after_their_verdict(short_windows):
    """As the target sends them, a pass later."""
    found = []
    for is_late in (False, True):
        laws, context, windows = WindowBuilder(), context_of([1, 2, 3]), []
        passes = [([(3, (5, 50)), (5, (6, 60))], (1,), (5, 6)), ([(6, (7, 70))], (), (7,)), ([(7, (8, 80))], (), (8,))]
        for rows, path, tokens in passes:
            top_tokens = TopTokens(2, *law_of(rows), ((7, len(context.token_ids), len(rows)),))
            if not is_late:
                assert not laws.read(top_tokens, {7: context})
            windows.append(laws.observe(context, verdict(context, path, tokens)))
            context.extend(tokens)
            if is_late:
                windows += [window for _, window in laws.read(top_tokens, {7: context})]
        (window,) = [window for window in windows if window is not None]
        found.append((window.token_ids.tolist(), window.likely.tolist()))
    assert found[0] == found[1] == ([1, 2, 3, 5, 6, 7], [[5, 50], [6, 60], [7, 70], [8, 80]])


def test_rows_of_another_text_are_dropped_and_a_gap_starts_a_new_window(short_windows):
    laws, context = WindowBuilder(), context_of([1, 2, 3])
    laws.read(TopTokens(2, *law_of([(3, (5, 50))]), ((7, 2, 1),)), {7: context})
    assert laws.observe(context, verdict(context, (), (5,))) is None
    context.extend((5,))
    laws.read(TopTokens(2, *law_of([(4, (5, 50))]), ((7, 4, 1),)), {7: context})
    assert laws.observe(context, verdict(context, (), (6,))) is None
    assert laws.release(context) is None, "neither row was of this text"
    context = context_of([1, 2, 3])
    laws.read(TopTokens(2, *law_of([(3, (5, 50))]), ((7, 3, 1),)), {7: context})
    laws.observe(context, verdict(context, (), (5,)))
    context.extend((5,))
    window = laws.release(context)
    assert window is not None
    assert window.token_ids.tolist() == [1, 2, 3]
    laws.read(TopTokens(2, *law_of([(3, (5, 50))]), ((9, 3, 1),)), {7: context})
    assert not laws._verified, "rows of requests without a drafter would pile up"


def test_requests_of_a_pass_have_their_own_rows_and_others_none(short_windows):
    """A request that has no drafter stands between two that have; all are of one length and begin alike."""
    laws, contexts, windows = WindowBuilder(), {one: context_of([1, 2, 3], one) for one in (7, 9)}, {}
    for step in range(4):
        rows, spans = [], []
        for request, mark in ((7, 10), (8, 20), (9, 30)):
            own = 3 if step == 0 else mark + step - 1
            rows.append((own, (mark + step, 99)))
            spans.append((request, 3 + step, 1))
        laws.read(TopTokens(2, *law_of(rows), tuple(spans)), contexts)
        for request, context in contexts.items():
            token = {7: 10, 9: 30}[request] + step
            windows[request] = laws.observe(context, verdict(context, (), (token,)))
            context.extend((token,))
    for request, first in ((7, 10), (9, 30)):
        assert windows[request].likely[:, 0].tolist() == [first, first + 1, first + 2, first + 3]
        assert windows[request].token_ids.tolist() == [1, 2, 3, first, first + 1, first + 2]


def window_of(length, tag):
    return TargetWindow(
        torch.full((length,), tag), torch.zeros(length, 2, dtype=torch.int64), torch.zeros(length, 2), True
    )


def test_memory_is_bounded_and_each_window_is_learned_a_few_times():
    memory = WindowMemory(100)
    for tag in range(10):
        memory.add(window_of(30, tag))
        assert memory.num_positions <= 100
    taken = []
    while len(memory):
        taken.append(int(memory.take().token_ids[0]))
    assert taken[:3] == [9, 8, 7], "the newest are kept, and learned first"
    assert sorted(taken) == sorted([7, 8, 9] * windows_module.USES)


def test_the_loss_is_least_at_the_target_s_law():
    likely, probs = torch.tensor([[2, 4]]), torch.tensor([[0.5, 0.3]])
    right = torch.log(torch.tensor([[0.1, 0.05, 0.5, 0.05, 0.3]]))
    at_best = likely_loss(right, likely, probs)
    expected = -(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2))
    assert float(at_best) == pytest.approx(expected, abs=1e-5)
    for _ in range(20):
        assert likely_loss(right + 0.3 * torch.randn_like(right), likely, probs) > at_best
    beyond = likely_loss(right[:, :4], likely, probs)
    assert torch.isfinite(beyond), "a token that the draft model lacks counts among the others"


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def makes_steps(monkeypatch, short_windows):
    """Small steps, published at once, whatever the clock says."""
    monkeypatch.setattr(FORGIVING, 1e9)
    monkeypatch.setattr(IdleTime, "pause_s", lambda *_: 0.0)
    monkeypatch.setattr(learner_module, "WINDOWS_PER_STEP", 1)
    monkeypatch.setattr(learner_module, "STEPS_PER_VERSION", 1)


def learn_once(room):
    """A step after every round, also where draft-ahead leaves no time."""
    if room.draft.drafter.wants_learning:
        room.draft.drafter.learn()


def learner_of(models, path="small", **options):
    model = AdaptedDecoder(read_config(models[path]), models[path], "cpu", 16)
    return OnlineLearner(model, **{"rate": 1e-2, "strength": 1.0, "num_positions": 4096} | options)


def windows_from(models, *, count=12, seed=0, teacher="reference", length=24):
    """Windows of random text with the laws of a model."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = torch.randint(2, 97, (length,), generator=source)
        with torch.no_grad():
            top = models[teacher](tokens[None]).logits[0].softmax(-1).topk(8)
        found.append(TargetWindow(tokens, top.indices[-16:], top.values[-16:], greedy=True))
    return found


@pytest.mark.extended
def test_acceptance_rises_on_text_that_repeats(open_room, make_requests, models, makes_steps, monkeypatch):
    """The same requests again; what was learned from the first time counts the second time."""
    monkeypatch.setattr(windows_module, "POSITIONS", 32)
    monkeypatch.setattr(windows_module, "READ_BEFORE", 200)  # random models attend to everything
    monkeypatch.setattr(windows_module, "USES", 20)
    room = open_room(replace(ONLINE, online_rate=3e-3), path=models["tiny"])  # at 1e-2 some orders of windows diverge
    requests = make_requests(2, max_tokens=40)
    shares = []
    for _ in range(2):
        room.tokens.clear()
        room.serve(requests)
        shares.append(room.stats.num_accepted_tokens / room.stats.num_draft_tokens)
        role = room.draft
        while role.wants_work:
            role.work()
        room.target.forget()
        role.forget()
    frozen = open_room(replace(ONLINE, online=False), path=models["tiny"]).serve(requests).stats
    shipped = frozen.num_accepted_tokens / frozen.num_draft_tokens
    assert shares[1] > shipped + 0.1, (shares, shipped, role.drafter.learning())
    assert role.drafter.learner.version > 3


@pytest.mark.extended
@pytest.mark.parametrize(
    ("pipeline", "temperature"),
    [pytest.param("sync", 0.0, marks=pytest.mark.slow), ("sync", 1.0), ("tree", 1.0), ("pingpong", 0.0)],
)
def test_weights_that_change_in_mid_request_change_no_token(
    open_room, make_requests, models, makes_steps, pipeline, temperature
):
    requests = make_requests(4, max_tokens=36, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(ONLINE, path=models["small"], pipeline=pipeline).serve(requests, after_round=learn_once)
    assert room.tokens == plain.tokens
    assert room.draft.drafter.learner.version > 3, "no weights were replaced: the test shows nothing"


def learning_speculators():
    """Every one in every pipeline; by default in one each."""
    pipelines = [("sync", 0.0), ("tree", 1.0), ("pingpong", 0.0)]
    for i, path in enumerate(["eagle3", "mtp", "eagle"]):
        for j, pipeline in enumerate(pipelines):
            yield pytest.param(path, *pipeline, marks=[] if i == j else pytest.mark.slow)


@pytest.mark.extended
@pytest.mark.parametrize(("path", "pipeline", "temperature"), list(learning_speculators()))
def test_a_speculator_that_learns_in_mid_request_changes_no_token(
    open_room, make_requests, makes_steps, path, pipeline, temperature
):
    requests = make_requests(4, max_tokens=40 if matrices.is_whole else 20, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(replace(SPECULATOR, path=path), pipeline=pipeline).serve(requests, after_round=learn_once)
    assert room.tokens == plain.tokens
    assert room.draft.drafter.learner.version > 3, "no weights were replaced: the test shows nothing"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("pipeline", "config"),
    [pytest.param("sync", ONLINE, marks=pytest.mark.slow), ("tree", ONLINE), ("sync", SPECULATOR)],
)
def test_no_draft_mixes_versions_of_the_weights(
    open_room, make_requests, models, makes_steps, monkeypatch, pipeline, config
):
    """Every pass of one call under a ratio rule of `propose` reads the same weights, and steps of learning none."""
    room = open_room(config, path=models["small"], pipeline=pipeline, rule="rejection")
    drafter = room.draft.drafter
    first = drafter._served[0]
    passes, learn, propose = [], drafter.learn, drafter.propose
    x = torch.ones(1, 32 if config is ONLINE else 64)

    def proposing(*args):
        passes.clear()
        drafts = propose(*args)
        assert all(torch.equal(one, passes[0]) for one in passes), "weights changed within a draft"
        return drafts

    def learning():
        before = first.multiply(x)
        learn()
        assert torch.equal(before, first.multiply(x)), "a step of learning changed weights that are served"

    forward = drafter.runner.forward
    monkeypatch.setattr(drafter, "propose", proposing)
    monkeypatch.setattr(drafter, "learn", learning)
    monkeypatch.setattr(
        drafter.runner, "forward", lambda *a, **k: (passes.append(first.multiply(x)), forward(*a, **k))[1]
    )
    room.serve(make_requests(3, max_tokens=14, temperature=1.0), after_round=learn_once)
    assert drafter.learner.version > 3, "no weights were replaced: the test shows nothing"


def test_a_ratio_test_with_the_likely_of_another_version_would_be_found():
    """The control: tokens drawn by one version and tested with the law of the next are biased, their own are exact."""

    def law(seed):
        return lambda context: np.random.default_rng([seed, *context]).dirichlet(np.ones(4))

    def of_next_version(draft):
        tree, law_of_next = draft.tree, law(901)
        laws = tuple(
            one and SparseDistribution(tuple(range(4)), tuple(law_of_next(path).tolist()))
            for one, path in zip(
                draft.distributions,
                [tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(len(tree.parents))],
                strict=True,
            )
        )
        return replace(draft, distributions=laws)

    from actors.protocol.messages import SamplingKind

    kind, target, served = SamplingKind.WITHOUT_REPLACEMENT, law(1), law(900)
    drafts = list(enumerate_drafts(served, [(kind,), (kind,)]))
    exact = total_variation(emission(RULES["rejection"], iter(drafts), target, 2), target, 2)
    mixed = total_variation(emission(RULES["rejection"], map(of_next_version, drafts), target, 2), target, 2)
    assert exact < 1e-12
    assert mixed > 0.02


@pytest.mark.extended
def test_it_serves_the_average_and_strength_zero_the_shipped_model(models, makes_steps):
    learner = learner_of(models)
    shipped = [weight.clone() for weight in learner._model.weights]
    for window in windows_from(models):
        learner.memory.add(window)
    while learner.wants_step:
        learner.learn()
    weights = learner.take_weights()
    assert weights is not None
    assert learner.take_weights() is None
    expected = learner._model.folded(learner._average, 1.0)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    live = learner._model.folded([(up.detach(), down.detach()) for up, down in learner._live], 1.0)
    assert not torch.equal(weights[0], live[0])
    assert all(torch.equal(one, other) for one, other in zip(learner._model.weights, shipped, strict=True))
    off = learner_of(models, strength=0.0)
    off.memory.add(windows_from(models, count=1)[0])
    while off.wants_step:
        off.learn()
    assert off.num_steps > 0
    assert off.take_weights() is None


def test_what_is_served_is_the_running_average_of_what_is_trained(models, makes_steps, monkeypatch):
    """The average after n steps moves to the trained adapters by 9 / (10 + n)."""
    learner, expected, seen = learner_of(models), None, []
    step = learner._step

    def stepping():
        nonlocal expected
        before = expected or [[part.clone() for part in pair] for pair in learner._average]
        step()
        share = 9 / (10 + len(seen))
        seen.append(share)
        expected = [
            [mean + share * (now.detach() - mean) for mean, now in zip(means, live, strict=True)]
            for means, live in zip(before, learner._live, strict=True)
        ]

    monkeypatch.setattr(learner, "_step", stepping)
    for window in windows_from(models, count=2):
        learner.memory.add(window)
    while learner.wants_step:
        learner.learn()
    assert len(seen) > 3 and expected is not None
    for pair, found in zip(expected, learner._average, strict=True):
        for one, other in zip(pair, found, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.extended
def test_adapters_that_are_left_out_are_made_up_for_by_the_others(models, makes_steps, monkeypatch):
    """The mean of an adapter's scale is 1, so that what is trained is what is served."""
    learner, seen = learner_of(models), []
    logits = learner._model.logits

    def recording(tokens, count, adapters, scales, features):
        seen.extend(scales if adapters is learner._live else ())
        return logits(tokens, count, adapters, scales, features)

    monkeypatch.setattr(learner._model, "logits", recording)
    for window in windows_from(models):
        learner.memory.add(window)
    while learner.wants_step:
        learner.learn()
    assert sorted(set(seen)) == pytest.approx([0, 1 / (1 - DROPPED)])
    assert sum(seen) / len(seen) == pytest.approx(1, abs=0.1)


def test_tokens_that_the_drafter_lacks_are_never_accepted(models):
    """The whole law is of a token beyond its vocabulary."""
    likely, probs = torch.full((8, 1), 300), torch.ones(8, 1)
    window = TargetWindow(torch.arange(2, 22), likely, probs, greedy=False)
    assert learner_of(models)._accepted_share(window, None) == 0


def test_it_falls_back_to_the_shipped_weights_where_it_drafts_worse(models, makes_steps):
    """It learns nonsense, is then tested on text that the shipped model knows, and starts anew."""
    learner = learner_of(models, path="target")
    for window in windows_from(models, count=10):
        wrong = TargetWindow(window.token_ids, (window.likely + 11) % 97, window.probs, greedy=True)
        learner.memory.add(wrong)
    while learner.wants_step:
        learner.learn()
    assert learner.take_weights() is not learner._model.weights
    assert learner.serves
    assert learner.num_rollbacks == 0, "by its own tests the nonsense is an improvement"
    for window in windows_from(models, count=12, seed=5):
        learner.memory.add(window)
    while not learner.num_rollbacks:
        assert learner.wants_step, "the tests were passed"
        learner.learn()
    assert learner.take_weights() is learner._model.weights
    assert not learner.serves
    assert all(not up.any() for up, _ in learner._average), "what was learned is kept"


@pytest.mark.parametrize(("gain", "last"), [(0.02, 299), (-0.1, 20)])
def test_what_was_learned_is_dropped_where_it_is_worse_and_not_by_chance(models, monkeypatch, gain, last):
    """Shares of windows scatter as those of 32 positions do; the average is a little better, or worse."""
    learner, source, number = learner_of(models), random.Random(2), 0
    scripted = lambda _, adapters: 0.7 + (0.0 if adapters is None else source.gauss(gain, 0.06))  # noqa: E731
    monkeypatch.setattr(learner, "_accepted_share", scripted)
    (window,) = windows_from(models, count=1)
    while not learner.num_rollbacks and number < 299:
        learner._test(window)
        number += 1
    assert (number == last) if gain > 0 else (number < last)


@pytest.fixture
def speculator_windows(models, speculator):
    """A learner of a speculator, and windows of random text with the target's features and its laws, or one token."""
    model = AdaptedDraftLayers(str(speculator("eagle3")), str(models["target"]), "cpu", 16)
    learner = OnlineLearner(model, rate=1e-2, strength=1.0, num_positions=4096)

    def windows(count, seed, always=None):
        source, found = torch.Generator().manual_seed(seed), []
        for _ in range(count):
            tokens = torch.randint(2, 97, (24,), generator=source)
            with torch.no_grad():
                output = models["reference"](tokens[None], output_hidden_states=True)
            top = output.logits[0].softmax(-1).topk(8)
            features = torch.cat([output.hidden_states[tap][0] for tap in model._layers.config.taps], 1)
            likely, probs = top.indices[-16:], top.values[-16:]
            laws = (likely, probs) if always is None else (torch.full((16, 1), always), torch.full((16, 1), 0.9))
            found.append(TargetWindow(tokens[1:], *laws, True, start=1, features=features[:-1]))
        return found

    return learner, windows


@pytest.mark.extended
def test_a_speculator_learns_new_laws_and_falls_back_where_they_do_not_hold(speculator_windows, makes_steps):
    """It learns to say one token always, serves that, is tested on the target's own laws, and starts anew."""
    learner, windows = speculator_windows
    for window in windows(30, seed=0, always=5):
        learner.memory.add(window)
    while learner.wants_step:
        learner.learn()
    assert learner.adapted_share.mean > learner.shipped_share.mean, "nothing was learned"
    assert learner.num_rollbacks == 0
    learner.take_weights()
    assert learner.serves
    for window in windows(40, seed=5):
        learner.memory.add(window)
    while not learner.num_rollbacks:
        assert learner.wants_step, "the tests were passed"
        learner.learn()
    assert learner.take_weights() is learner._model.weights
    assert not learner.serves


@pytest.mark.extended
def test_a_speculator_learns_what_features_tell_and_tokens_do_not(speculator_windows, makes_steps):
    """Features of one sign stand before one token, of the other before another; as a control the signs are drawn."""
    learner, windows = speculator_windows
    direction = torch.randn(96, generator=torch.Generator().manual_seed(1))
    losses = []
    for tells in (True, False):
        learner.roll_back()
        learner.loss = type(learner.loss)(0.97)
        for i, window in enumerate(windows(28, seed=1, always=5)):
            sign = 1.0 if (i if tells else i // 2) % 2 else -1.0
            features = sign * direction.expand(len(window.token_ids), -1)
            likely = torch.full_like(window.likely, 5 if i % 2 else 9)
            learner.memory.add(replace(window, features=features, likely=likely))
        while learner.wants_step:
            learner.learn()
        losses.append(learner.loss.mean)
    assert losses[0] < 0.9 * losses[1], losses


def feature_rows(start, stop, request_id=7):
    """Features of these positions: each one holds its number."""
    return FeatureRows(request_id, start, torch.arange(start, stop)[:, None].float())


def numbered_window(start, stop, num_laws):
    """Tokens 100 + position, laws that begin with their row's number."""
    likely = torch.arange(num_laws)[:, None]
    return TargetWindow(torch.arange(start, stop) + 100, likely, torch.ones(num_laws, 1), True, start=start)


def test_each_token_of_a_window_has_the_features_before_it(short_windows):
    features = WindowFeatures()
    features.open(7)
    assert features.read(feature_rows(0, 5)) == []
    (window,) = features.add(7, numbered_window(2, 6, 3))
    assert window.token_ids.tolist() == [102, 103, 104, 105]
    assert window.features is not None and window.features[:, 0].tolist() == [1, 2, 3, 4]
    (window,) = features.add(7, numbered_window(0, 4, 2))
    assert window.token_ids.tolist() == [101, 102, 103], "nothing is before the first token"
    assert window.features is not None and window.features[:, 0].tolist() == [0, 1, 2]
    assert features.add(7, numbered_window(0, 4, 4)) == [], "a law of its row would be without features"


def test_a_window_waits_for_its_last_features_and_is_cut_where_they_never_come(short_windows):
    features = WindowFeatures()
    features.open(7)
    features.open(8)
    features.read(feature_rows(0, 4))
    assert features.add(7, numbered_window(1, 7, 4)) == []
    assert features.read(feature_rows(4, 5)) == []
    assert features.read(feature_rows(0, 9, request_id=8)) == [], "features of another request"
    (window,) = features.read(feature_rows(5, 6))
    assert window.features is not None and window.features[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert features.add(7, numbered_window(3, 9, 4)) == []
    (rest,) = features.release(7)
    assert rest.token_ids.tolist() == [103, 104, 105, 106]
    assert rest.features is not None and rest.features[:, 0].tolist() == [2, 3, 4, 5]
    assert rest.likely[:, 0].tolist() == [0, 1], "the laws of rows without features are cut off too"
    assert not features._waiting.get(7) and 7 not in features._texts


def test_features_are_kept_for_a_bounded_part_of_a_text():
    features = WindowFeatures()
    features.open(7)
    for start in range(0, 10 * KEPT, 10):
        features.read(feature_rows(start, start + 10))
    kept = features._texts[7]
    assert kept.end - kept.start == KEPT
    assert features.add(7, numbered_window(5, 40, 8)) == [], "long gone"


def test_state_is_continued_and_another_model_s_is_refused(models, makes_steps, tmp_path):
    learner, file = learner_of(models), tmp_path / "state"
    for window in windows_from(models, count=3):
        learner.memory.add(window)
    while learner.wants_step:
        learner.learn()
    served = learner.take_weights()
    learner.save(file)
    again = learner_of(models)
    again.restore(file)
    assert again.num_steps == learner.num_steps > 0
    restored = again.take_weights()
    assert served is not None
    assert restored is not None
    assert all(torch.equal(one, other) for one, other in zip(served, restored, strict=True))
    for one in (learner, again):  # and both go on alike, but for the moments of AdamW
        assert [torch.equal(a, b) for a, b in zip(one._live[0], learner._live[0], strict=True)] == [True, True]
    for one in (learner, again):  # without gradients a step moves the average alone, by what it has averaged so far
        one._step()
    for pair, found in zip(learner._average, again._average, strict=True):
        assert [torch.equal(a, b) for a, b in zip(pair, found, strict=True)] == [True, True]
    with pytest.raises(ValueError, match="another model"):
        learner_of(models, path="tiny").restore(file)
    file.write_bytes(b"no state")
    with pytest.raises(ValueError, match="is not a saved state"):
        learner_of(models).restore(file)


def test_a_rank_that_ends_keeps_what_was_learned(open_room, make_requests, models, makes_steps, tmp_path):
    config = replace(ONLINE, online_state=str(tmp_path / "state"))
    room = open_room(config, path=models["small"]).serve(make_requests(2, max_tokens=16))
    room.draft.close()
    fresh = open_room(config, path=models["small"])
    assert fresh.draft.drafter.learner.num_steps == room.draft.drafter.learner.num_steps > 0


def test_the_report_says_what_was_learned(open_room, make_requests, models, makes_steps):
    room = open_room(ONLINE, path=models["small"]).serve(make_requests(2, max_tokens=20))
    learning = room.stats.report(1.0).counters["learning"]
    assert learning["num_steps"] > 0
    assert learning["version"] > 0
    assert learning["busy_s"] > 0
    assert learning["num_positions"] >= 4 * learning["num_steps"] > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"online": False, "online_state": "x"}, "drafter.online_state=x: is for a drafter that learns"),
        ({"parallel": Parallel.tensor, "ranks": 2}, "learns on one rank"),
        ({"placement": Placement.attached}, "needs a rank that idles"),
        ({"vocabulary": "list"}, "learns the target's own tokens"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused_in_one_line(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(ONLINE, **fields).check_fields("drafter")
    if set(fields) & {"online_state", "placement"}:
        with pytest.raises(ValueError, match=words):
            replace(SPECULATOR, **fields).check_fields("drafter")
