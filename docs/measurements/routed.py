"""Draft models that learn while the domain of the texts changes: `python -m docs.measurements.routed [options]`.

The bundled target continues `--prompts`, greedy, one request at a time, with the production drafters and rule and
without an engine: no clock enters. Behind each text a drafter learns all that it holds, as its rank would between two
requests with time to spare. Each of `--settings` starts from the bundled draft model. The prompts come in the order of
their file and, with `--orders shuffled`, in a random one (`--seed`). A row for each setting: tokens a target pass, of
the prompts of each part of the file that is one domain (in thirds, where it is longer than 30 prompts), or shuffled of
the first and the second half of each domain. For `routed` also, in the same columns, the share of prompts that went to
the member which most prompts of that domain went to. Prints Markdown.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from actors.drafters.config import DraftSetup
from actors.drafters.interface import Drafter
from actors.options import SchedulerConfig
from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.config import load_config
from cluster.config.schema import LaunchConfig
from cluster.io.prompts import Prompt, read_prompts
from cluster.io.text import load_tokenizer, read_eos_token_ids
from cluster.tools.bench.rounds import complete
from docs.measurements import lines
from docs.measurements.constructions import TeachingVerifier
from parallel.comm.group import SINGLE
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.runner import open_model

PROMPTS = Path(__file__).parents[1] / "prompts" / "domain_switch.jsonl"
SETTINGS = {
    "one, as shipped": ["drafter=model"],
    "one that learns": ["drafter=model", "drafter.online=true"],
    "two that learn, routed": ["drafter=routed"],
}
ORDERS = ("file", "shuffled")
NUM_SLOTS = 4096
LONG_PART = 30


@dataclass(frozen=True, slots=True)
class Served:
    """One text: rounds and tokens of it, and the member that drafted, if there are several."""

    num_rounds: int
    num_tokens: int
    member: str


def built(config: LaunchConfig, eos: tuple[int, ...]) -> Drafter:
    return config.drafter.build(DraftSetup(config.verify, "sync", SchedulerConfig(), SINGLE, "cpu", eos))[0]


def serve(
    target: DecoderRunner, drafter: Drafter, config: LaunchConfig, prompts: Sequence[tuple[int, ...]], num_tokens: int
) -> Iterator[Served]:
    """The texts one after the other; the drafter learns all it can behind each of them."""
    eos, can = tuple(read_eos_token_ids(pocket.TARGET)), drafter.capabilities
    verifier = TeachingVerifier(target, eos, config.drafter.target_top_k, can.reads_top_tokens)
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            greedy = SamplingParams(temperature=0.0)
            length = config.drafter.num_draft_tokens
            rounds = [*complete(verifier, drafter, [prompt], greedy, length, num_tokens, first_id=i)]
        used = [] if can.has_levels is None else [one.level for one in can.has_levels.level_stats() if one.num_drafts]
        yield Served(len(rounds), sum(one.num_tokens for one in rounds), *(used or [""]))
        while can.learns is not None and can.learns.wants_learning:
            can.learns.learn()


def parts_of(domains: Sequence[str]) -> dict[str, list[int]]:
    """Name -> places: prompts of one domain that follow each other, in thirds where they are many."""
    found, first = dict[str, list[int]](), 0
    for domain, same in groupby(domains):
        places = range(first, first + len(list(same)))
        count = 3 if len(places) > LONG_PART else 1
        for part in range(count):
            name = f"{domain} {part + 1} of {count}" if count > 1 else domain
            own = places[part * len(places) // count : (part + 1) * len(places) // count]
            found[name if name not in found else f"{name} again"] = [*own]
        first = places.stop
    return found


def halves_of(domains: Sequence[str]) -> dict[str, list[int]]:
    """Name -> places: the first and the second half of the prompts of each domain, wherever they stand."""
    found = defaultdict[str, list[int]](list)
    for domain in dict.fromkeys(domains):
        places = [place for place, own in enumerate(domains) if own == domain]
        found[f"{domain}, first half"] = places[: len(places) // 2]
        found[f"{domain}, second half"] = places[len(places) // 2 :]
    return found


def followed(served: Sequence[Served], domains: Sequence[str], places: Sequence[int]) -> float:
    """The share of these prompts that went to the member which most prompts of their domain went to."""
    members = defaultdict[str, Counter[str]](Counter)
    for one, domain in zip(served, domains, strict=True):
        members[domain][one.member] += 1
    usual = {domain: counts.most_common(1)[0][0] for domain, counts in members.items()}
    return sum(served[place].member == usual[domains[place]] for place in places) / len(places)


def in_order(prompts: Sequence[Prompt], order: str, seed: int) -> list[Prompt]:
    chosen = [*prompts]
    if order == "shuffled":
        random.Random(seed).shuffle(chosen)
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="a JSONL file whose lines have a category")
    parser.add_argument("--every", type=int, default=1, help="of so many prompts one is taken")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["file"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(pocket.TARGET)
    target = open_model(str(pocket.TARGET), num_slots=NUM_SLOTS)
    for order in options.orders:
        prompts = in_order(read_prompts(options.prompts)[:: options.every], order, options.seed)
        domains = [prompt.category or "" for prompt in prompts]
        parts = parts_of(domains) if order == "file" else halves_of(domains)
        print(lines.head(order, *parts, "all", "steps, rollbacks"))
        for name in options.settings:
            ids = [tuple(tokenizer.encode(prompt.text).ids) for prompt in prompts]
            config = load_config(SETTINGS[name])
            drafter = built(config, tuple(read_eos_token_ids(pocket.TARGET)))
            served = [*serve(target, drafter, config, ids, options.tokens)]
            columns = [*parts.values(), range(len(served))]
            lengths = [
                sum(served[i].num_tokens for i in places) / sum(served[i].num_rounds for i in places)
                for places in columns
            ]
            learns = drafter.capabilities.learns
            learned = "" if learns is None else "{0.num_steps}, {0.num_rollbacks}".format(learns.learning())
            print(lines.row(name, *(f"{length:.2f}" for length in lengths), learned), flush=True)
            if any(one.member for one in served):
                shares = [f"{followed(served, domains, places):.0%}" for places in columns]
                print(lines.row("to the domain's member", *shares, ""), flush=True)


if __name__ == "__main__":
    main()
