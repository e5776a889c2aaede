"""Which draft tokens of a large batch are verified: chosen before they are drafted, or after, by their probabilities.

    python -m docs.measurements.verify_budget record FILE.npz --prompts PROMPTS.jsonl [--temperature 1]
    python -m docs.measurements.verify_budget offline FILE.npz
    python -m docs.measurements.verify_budget policy FILE.npz
    python -m docs.measurements.verify_budget engine FILE.npz

`record`: what the bundled target writes after each prompt, and at every token of it the bundled drafter's chain of
`LONGEST` tokens, by how much each won over the second, and how many of them the text has. Verification changes no
token, so every rule meets these texts. `offline` decodes batches of them round by round under each rule, which knows
what passes cost: a fixed length; lengths from what a request accepted lately; and, once all have drafted so many
tokens or as long as another pass is expected to pay, the globally best beginnings of all chains, up to the most tokens
for the time. Chances are fitted to half of the texts and used on the other half. `policy` lets the engine's policy
choose the lengths of the same rounds, from what it learns of them. `engine` runs the coordinator and the
draft role on the virtual clock over the same chains: fixed lengths, `length_rule=ordered` and `priced`, warm.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.drafters.model.config import LengthRule, ModelDrafterConfig
from actors.policy.acceptance import DraftOutcome
from actors.policy.policy import AdaptivePolicy, RoundObservation
from actors.protocol.messages import SamplingParams
from actors.sampling.noise import NoiseStream, gumbel, noise_key
from cluster import pocket
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer
from cluster.tools.offline import OfflineTask
from cluster.tools.planning.layer_choice import write_texts
from cluster.tools.simulation import Scenario, simulate
from cluster.tools.simulation.language import RequestText
from docs.measurements import lines
from docs.measurements.decider import at_length, decided
from docs.measurements.pools import DRAFT_ROWS, TARGET_ROWS
from parallel.kv.pass_plan import Span
from parallel.pass_cost import PassCost
from parallel.runtime.runner import ModelRunner, open_model

LONGEST = 8
"""Tokens of a recorded chain."""
LONGEST_PROMPT = 640
"""The pair was trained on sequences of 512."""
TOGETHER = 16
"""Texts that are written at a time."""
BATCHES = (16, 64, 256)
TOKENS = {16: 800, 64: 400, 256: 240}
"""Of each request of a batch, offline."""
ENGINE_TOKENS = {16: 300, 64: 200, 256: 60}
TILE = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of passes by their rows; `context_ms` more of a target's pass for every request."""

    target: dict[int, float]
    draft: dict[int, float]
    context_ms: float = 0.0

    def of(self, batch: int) -> tuple[PassCost, PassCost]:
        behind = self.context_ms * batch
        return PassCost.of_ms({rows: ms + behind for rows, ms in self.target.items()}), PassCost.of_ms(self.draft)


def scaled(table: dict[int, float], share: float) -> dict[int, float]:
    return {rows: share * ms for rows, ms in table.items()}


def tiled(table: dict[int, float]) -> dict[int, float]:
    """A staircase: rows are rounded up to whole tiles."""
    cost, steps = PassCost.of_ms(table), dict[int, float]()
    for first in range(1, 4 * TILE * TILE, TILE):
        steps[first] = steps[first + TILE - 1] = 1e3 * cost(first + TILE - 1)
    return steps


H100 = {1: 7.1, 16: 9.0, 96: 10.2, 384: 18.9}
"""An 8B model on an H100, measured (docs/gpu/h100.md); beyond 384 rows the last slope goes on."""
COSTS = {
    "flat": Costs({1: 15.0}, {1: 1.5}),
    "70B, drafter a tenth": Costs(TARGET_ROWS, DRAFT_ROWS),
    "the same in tiles": Costs(tiled(TARGET_ROWS), tiled(DRAFT_ROWS)),
    "70B, a tenth, 2k tokens": Costs(TARGET_ROWS, DRAFT_ROWS, 0.06),
    "70B, head a fiftieth": Costs(TARGET_ROWS, scaled(TARGET_ROWS, 0.02)),
    "70B, head, 2k tokens": Costs(TARGET_ROWS, scaled(TARGET_ROWS, 0.02), 0.06),
    "8B measured, head a thirtieth": Costs(H100, scaled(H100, 1 / 30)),
    "linear in rows": Costs({1: 15.3, 1001: 315.3}, {1: 1.53, 1001: 31.53}),
}


# --- recording --------------------------------------------------------------------------------------------------------


def draws(logits: Tensor, temperature: float, seed: int, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The token of each row, the likeliest or the engine's own draw under the noise of its position, and by how much it
    won over the second, in nats, noise included: [n] both."""
    scores = logits.float().log_softmax(-1)
    if temperature:
        keys = [noise_key(seed, NoiseStream.COUPLED, position) for position in positions]
        scores = scores / temperature + gumbel(keys, torch.arange(scores.shape[-1]))
    best = scores.topk(2)
    return best.indices[:, 0], best.values[:, 0] - best.values[:, 1]


@torch.inference_mode()
def written(prompts: Sequence[Sequence[int]], temperature: float, length: int) -> list[list[int]]:
    """The prompts with what the target writes after each; prompt i takes seed i."""
    runner = open_model(pocket.TARGET, num_slots=TOGETHER * (LONGEST_PROMPT + length + 1))
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=length) for seed in range(len(prompts))]
    texts: list[list[int]] = []
    for first in range(0, len(prompts), TOGETHER):
        some = slice(first, first + TOGETHER)
        for context in write_texts(runner, OfflineTask([*map(tuple, prompts[some])], params[some], ()), LONGEST_PROMPT):
            runner.close(context.request_id)
            texts.append(context.token_ids)
    return texts


@torch.inference_mode()
def drafted(text: Sequence[int], start: int, temperature: float, seed: int, runner: ModelRunner) -> tuple[Tensor, ...]:
    """The drafter's chains behind the first `start`, `start` + 1, ... tokens: tokens and leads, [n, LONGEST].

    One pass for a place of all chains: the text is a chain of rows, and behind each of its rows a chain begins.
    """
    count = len(text) - start - LONGEST + 1
    read = text[: start + count - 1]
    runner.open(0)
    logits = runner.forward([Span(0, len(read), num_logits=count)], read).logits
    parents, num_rows, places = range(start - 1, len(read)), len(read), []
    for place in range(LONGEST):
        places.append(draws(logits, temperature, seed, range(start + place, start + place + count)))
        if place + 1 < LONGEST:
            tokens = places[-1][0].tolist()
            logits = runner.forward([Span(0, count, [*parents], num_logits=count)], tokens).logits
            parents, num_rows = range(num_rows, num_rows + count), num_rows + count
    runner.close(0)
    return tuple(torch.stack(one, 1) for one in zip(*places, strict=True))


def record(options: argparse.Namespace) -> None:
    tokenizer, temperature = load_tokenizer(pocket.TARGET), options.temperature
    encoded = [tokenizer.encode(prompt.text).ids for prompt in read_prompts(options.prompts, options.limit)]
    prompts = [one for one in encoded if len(one) <= LONGEST_PROMPT]
    texts = written(prompts, temperature, options.tokens + LONGEST)
    runner = open_model(pocket.DRAFTER, num_slots=LONGEST_PROMPT + (LONGEST + 2) * (options.tokens + LONGEST))
    num_right, leads = [], []
    for seed, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        tokens, lead = drafted(text, len(prompt), temperature, seed, runner)
        truth = torch.tensor(text[len(prompt) :]).unfold(0, LONGEST, 1)
        num_right.append((tokens == truth).long().cumprod(1).sum(1).numpy())
        leads.append(lead.numpy())
    right = np.stack(num_right)
    np.savez_compressed(options.file, num_right=right, leads=np.stack(leads))
    whole = " ".join(f"{(right >= length).mean():.3f}" for length in range(1, LONGEST + 1))
    print(f"{len(texts)} texts, {right.size} chains, of which the text has the first 1, 2, ... tokens: {whole}")


@dataclass(frozen=True, slots=True)
class Recorded:
    """`num_right` [texts, places] of the `leads` [texts, places, LONGEST] of each chain are right."""

    num_right: np.ndarray
    leads: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Recorded:
        arrays = np.load(path)
        return cls(arrays["num_right"].astype(int), arrays["leads"].astype(float))

    def text(self, request_id: int, prompt: tuple[int, ...] = ()) -> RequestText:
        """Texts one after the other, in an order and from a place of the request's own, for the simulator."""
        choose = np.random.default_rng(request_id)
        order, start = choose.permutation(len(self.num_right)), int(choose.integers(self.num_right.shape[1]))
        right, leads = (np.concatenate(one[order])[start:] for one in (self.num_right, self.leads))
        return RecordedText(right, leads, len(prompt))


@dataclass(frozen=True, slots=True)
class RecordedText:
    """Tokens are named by their positions, and a wrong draft token by the next one."""

    num_right: np.ndarray
    leads: np.ndarray
    prompt_len: int

    def token(self, position: int) -> int:
        return position

    def children(self, position: int, distance: int, count: int) -> tuple[list[int], list[float]]:
        place, depth = max(0, position - distance - self.prompt_len), min(distance, LONGEST - 1)
        first = 0 if self.num_right[place] > depth else 1
        lead = min(float(self.leads[place, depth]), 20.0)
        log_probs = [
            -math.log1p(math.exp(-lead)),
            -lead - math.log1p(math.exp(-lead)),
            *(-60.0 - i for i in range(count)),
        ]
        token_ids = [position + first, position + 1 - first, *range(position + 2, position + 2 + count)]
        return token_ids[:count], log_probs[:count]


# --- rules that know what passes cost ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Slots:
    """The requests of a batch, and where in its text each is; a text that ends is followed by another."""

    recorded: Recorded
    size: int
    speed: float = 0.0
    """Tokens per second lately: what time is worth."""
    text: np.ndarray = field(init=False)
    place: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._choose, self._left = np.random.default_rng(0), list[int]()
        self.text = np.array([self._next() for _ in range(self.size)])
        self.place = self._choose.integers(0, self.recorded.num_right.shape[1], self.size)

    _choose: np.random.Generator = field(init=False)
    _left: list[int] = field(init=False)

    def _next(self) -> int:
        if not self._left:
            self._left = [*self._choose.permutation(len(self.recorded.num_right))]
        return int(self._left.pop())

    def of(self, values: np.ndarray) -> np.ndarray:
        """The values at the present places."""
        return values[self.text, self.place]

    def advance(self, num_tokens: np.ndarray) -> None:
        self.place += num_tokens
        for i in np.flatnonzero(self.place >= self.recorded.num_right.shape[1]):
            self.text[i], self.place[i] = self._next(), 0


Seconds = Callable[[int], float]
Rule = Callable[[Slots, Seconds, Seconds], tuple[np.ndarray, float]]
"""Slots and seconds of a target pass and of a draft pass by rows -> lengths to verify, and seconds of drafting."""


def fixed(length: int) -> Rule:
    return lambda slots, _, draft_s: (np.full(slots.size, length), length * draft_s(slots.size))


def best_beginnings(chances: np.ndarray, speed: float, verify_s: Seconds) -> tuple[np.ndarray, float]:
    """Of chains whose beginnings are kept with these chances [requests, length]: the lengths with the most tokens, less
    what their time is worth, and how many that is."""
    size, longest = chances.shape
    order = np.argsort(-chances, axis=None, kind="stable")
    seconds = np.array([verify_s(size + count) for count in range(order.size + 1)])
    worth = np.concatenate([[0.0], np.cumsum(chances.ravel()[order])]) - speed * seconds
    count = int(worth.argmax())
    return np.bincount(order[:count] // longest, minlength=size), float(worth[count])


def draft_passes(lengths: np.ndarray, draft_s: Seconds) -> float:
    return sum(draft_s(int((lengths > place).sum())) for place in range(lengths.max(initial=0)))


def before(chances: np.ndarray) -> Rule:
    """Lengths from what is known before a token is drafted."""

    def lengths(slots: Slots, verify_s: Seconds, draft_s: Seconds) -> tuple[np.ndarray, float]:
        best = np.zeros(slots.size, int), 0.0, -slots.speed * verify_s(slots.size)
        for longest in range(1, LONGEST + 1):
            found, worth = best_beginnings(slots.of(chances)[:, :longest], slots.speed, verify_s)
            drafting_s = draft_passes(found, draft_s)
            if worth - slots.speed * drafting_s > best[2]:
                best = found, drafting_s, worth - slots.speed * drafting_s
        return best[:2]

    return lengths


def after(chances: np.ndarray, length: int) -> Rule:
    """All draft so many tokens; then the best beginnings are chosen."""

    def lengths(slots: Slots, verify_s: Seconds, draft_s: Seconds) -> tuple[np.ndarray, float]:
        found, _ = best_beginnings(slots.of(chances)[:, :length], slots.speed, verify_s)
        return found, length * draft_s(slots.size)

    return lengths


def while_it_pays(chances: np.ndarray, steps: np.ndarray) -> Rule:
    """Drafts another token for requests that it may be worth a row for, by the chance of a step before it is drawn, as
    long as that is expected to bring more than the pass costs."""

    def lengths(slots: Slots, verify_s: Seconds, draft_s: Seconds) -> tuple[np.ndarray, float]:
        known, step, drafting_s = slots.of(chances), slots.of(steps), 0.0
        drafted, alive = np.zeros((slots.size, 0)), np.ones(slots.size)
        found, worth = np.zeros(slots.size, int), -slots.speed * verify_s(slots.size)
        for place in range(LONGEST):
            hoped = np.concatenate([drafted, (alive * step[:, place])[:, None]], 1)
            wanted, hoped_worth = best_beginnings(hoped, slots.speed, verify_s)
            takes_part = wanted > place
            if not takes_part.any() or hoped_worth - worth <= slots.speed * draft_s(int(takes_part.sum())):
                break
            drafting_s += draft_s(int(takes_part.sum()))
            alive = np.where(takes_part, known[:, place], 0.0)
            drafted = np.concatenate([drafted, alive[:, None]], 1)
            found, worth = best_beginnings(drafted, slots.speed, verify_s)
        return found, drafting_s

    return lengths


def decoded(recorded: Recorded, batch: int, costs: Costs, rule: Rule, speed: float = 0.0) -> float:
    """Tokens per second, the first quarter left out; `speed` is what they are expected to be."""
    slots, (target, draft) = Slots(recorded, batch, speed), costs.of(batch)
    total, tokens, seconds = 0, 0, 0.0
    while total < TOKENS[batch] * batch:
        lengths, drafting_s = rule(slots, target, draft)
        brought = 1 + np.minimum(slots.of(recorded.num_right), lengths)
        took_s = drafting_s + target(batch + int(lengths.sum()))
        slots.advance(brought)
        slots.speed += 0.05 * (brought.sum() / took_s - slots.speed)
        total += brought.sum()
        if total > TOKENS[batch] * batch / 4:
            tokens, seconds = tokens + brought.sum(), seconds + took_s
    return tokens / seconds


def fitted(features: np.ndarray, kept: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Logistic regression by Newton's method."""
    found = np.zeros(features.shape[-1])
    for _ in range(30):
        chances = 1 / (1 + np.exp(-features @ found))
        curvature = (features * (weights * chances * (1 - chances))[:, None]).T @ features + 1e-3 * np.eye(len(found))
        found = found + np.linalg.solve(curvature, features.T @ (weights * (kept - chances)))
    return found


def visits(recorded: Recorded, length: int) -> np.ndarray:
    """How often each place of a text is where a draft of this length begins: hard ones more often than others."""
    counts = np.zeros(recorded.num_right.shape)
    for of_text, right in zip(counts, recorded.num_right, strict=True):
        for first in range(0, len(right), 5):
            place = first
            while place < len(right):
                of_text[place] += 1
                place += min(int(right[place]), length) + 1
    return counts


def chances_of(recorded: Recorded, length: int, *, drawn: bool) -> tuple[np.ndarray, np.ndarray]:
    """Chance of every beginning of every chain, and of each step: by the leads of its tokens once these are `drawn`,
    else by the place in the chain and by how much of its text the drafter foresaw lately. Half of the texts each are
    fitted for the others."""
    right = recorded.num_right
    lately, seen, weight = np.zeros(right.shape), np.full(len(right), 4 * (right > 0).mean()), np.full(len(right), 4.0)
    for place in range(right.shape[1]):
        lately[:, place] = seen / weight
        seen, weight = 0.95 * seen + (right[:, place] > 0), 0.95 * weight + 1
    lately = np.log(lately + 0.02) - np.log(1.02 - lately)
    shape, depth = recorded.leads.shape, np.arange(LONGEST)
    columns = [np.broadcast_to(depth == one, shape).astype(float) for one in depth]
    columns.append(np.broadcast_to(lately[..., None], shape))
    if drawn:
        columns.append(np.log(np.minimum(recorded.leads, 20.0) + 0.03))
    features = np.stack(columns, -1)
    tested, kept = right[..., None] >= depth, right[..., None] > depth
    weights = np.broadcast_to(visits(recorded, length)[..., None], shape)
    steps = np.zeros(shape)
    for fold in range(2):
        others, own = np.arange(len(right)) % 2 != fold, np.arange(len(right)) % 2 == fold
        known = tested[others]
        found = fitted(features[others][known], kept[others][known].astype(float), weights[others][known])
        steps[own] = 1 / (1 + np.exp(-features[own] @ found))
    return np.cumprod(steps, -1), steps


def compare_offline(recorded: Recorded, names: Sequence[str], batches: Sequence[int]) -> None:
    columns = ("by request", "after drafting", "while it pays", "known", "after / before")
    print(lines.head("costs", "batch", "plain", "best fixed", *columns))
    for name in names:
        costs = COSTS[name]
        for batch in batches:
            plain = decoded(recorded, batch, costs, fixed(0))
            speeds = {length: decoded(recorded, batch, costs, fixed(length)) for length in (1, 2, 3, 4, 6, 8)}
            length = max(speeds, key=lambda one: speeds[one])
            expected = max(plain, speeds[length])
            drawn, _ = chances_of(recorded, length, drawn=True)
            hoped, steps = chances_of(recorded, length, drawn=False)
            shared = decoded(recorded, batch, costs, before(hoped), expected)
            known = (recorded.num_right[..., None] > np.arange(LONGEST)).astype(float)
            chosen, known_best = (
                max(decoded(recorded, batch, costs, after(one, most), expected) for most in (1, 2, 3, 4, 6, 8))
                for one in (drawn, known)
            )
            paying = decoded(recorded, batch, costs, while_it_pays(drawn, steps), expected)
            ratios = [one / plain for one in (speeds[length], shared, chosen, paying, known_best)]
            gain = max(chosen, paying) / max(expected, shared)
            cells = [f"{ratios[0]:.2f} ({length})", *(f"{one:.2f}" for one in ratios[1:]), f"{gain:.3f}"]
            print(lines.row(name, batch, f"{plain:.0f}", *cells), flush=True)


# --- the engine's policy, and all of the engine on the virtual clock --------------------------------------------------


def decoded_by_policy(recorded: Recorded, batch: int, costs: Costs) -> float:
    """Tokens per second with the lengths of the policy, after the first third."""
    slots, (target, draft), policy = Slots(recorded, batch), costs.of(batch), AdaptivePolicy("sync", 0, LONGEST)
    names, num_named, total, tokens, seconds = [*range(batch)], batch, 0, 0, 0.0
    while total < TOKENS[batch] * batch:
        policy.caught_up()
        lengths = np.array([policy.draft_length(name, TOKENS[batch]) for name in names])
        kept = np.minimum(slots.of(recorded.num_right), lengths)
        drafting_s, verify_s = draft_passes(lengths, draft), target(batch + int(lengths.sum()))
        outcomes = [
            DraftOutcome(name, int(length), range(1, count + 1), count + 1 if length else 0)
            for name, length, count in zip(names, lengths, kept.tolist(), strict=True)
        ]
        brought, took_s = batch + int(kept.sum()), drafting_s + verify_s
        policy.update(
            RoundObservation(took_s, verify_s, drafting_s, batch, 100.0, batch, num_prompt_rows=0, outcomes=outcomes)
        )
        before = slots.place.copy()
        slots.advance(1 + kept)
        for i in np.flatnonzero(slots.place <= before):
            policy.release(names[i])
            names[i], num_named = num_named, num_named + 1
        total += brought
        if total > TOKENS[batch] * batch / 3:
            tokens, seconds = tokens + brought, seconds + took_s
    return tokens / seconds


def compare_policy(recorded: Recorded, names: Sequence[str], batches: Sequence[int]) -> None:
    print(lines.head("costs", "batch", "plain", "best fixed", "the policy"))
    for name in names:
        for batch in batches:
            plain = decoded(recorded, batch, COSTS[name], fixed(0))
            best = max((decoded(recorded, batch, COSTS[name], fixed(length)), length) for length in (1, 2, 3, 4, 6, 8))
            speed = decoded_by_policy(recorded, batch, COSTS[name])
            cells = f"{plain:.0f}", f"{best[0] / plain:.2f} ({best[1]})", f"{speed / plain:.2f}"
            print(lines.row(name, batch, *cells), flush=True)


def compare_engine(recorded: Recorded, names: Sequence[str], batches: Sequence[int]) -> None:
    rules = [f"`{rule}`: cold, warm" for rule in (LengthRule.ordered, LengthRule.priced)]
    print(lines.head("costs", "batch", "plain", "best fixed", *rules, "accepted of verified"))
    for name in names:
        for batch in batches:
            target, draft = COSTS[name].of(batch)
            case = Scenario(
                "sync",
                target,
                draft,
                ModelDrafterConfig(num_draft_tokens=LONGEST),
                recorded,
                num_requests=batch,
                max_tokens=ENGINE_TOKENS[batch],
                target_link_s=5e-5,
                draft_link_s=5e-5,
            )
            plain = simulate(replace(case, pipeline="plain")).tokens_per_s
            fixed_speeds = {length: simulate(at_length(case, length)).tokens_per_s for length in (1, 2, 3, 4, 6)}
            length = max(fixed_speeds, key=lambda one: fixed_speeds[one])
            cells, shares = [f"{plain:.0f}", f"{fixed_speeds[length] / plain:.2f} ({length})"], []
            for rule in (LengthRule.ordered, LengthRule.priced):
                runs = decided(replace(case, drafter=replace(case.drafter, length_rule=rule)))
                cells.append(", ".join(f"{run.tokens_per_s / plain:.2f}" for run in runs))
                counters = runs[1].counters
                drafts = counters["num_draft_tokens"]
                shares.append(f"{counters['num_accepted_tokens'] / drafts:.2f}" if drafts else "none")
            print(lines.row(name, batch, *cells, ", ".join(shares)), flush=True)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("what", choices=("record", "offline", "policy", "engine"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=Path, default=pocket.PROMPTS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--limit", type=int, default=0, help="prompts, spread over the categories; 0: all")
    parser.add_argument("--costs", nargs="+", choices=tuple(COSTS), default=list(COSTS))
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    options = parser.parse_args()
    if options.what == "record":
        record(options)
        return
    compare = {"offline": compare_offline, "policy": compare_policy, "engine": compare_engine}[options.what]
    compare(Recorded.read(options.file), options.costs, options.batches)


if __name__ == "__main__":
    main()
