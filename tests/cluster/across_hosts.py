"""What a test runs on one of its hosts: engines on the Ray cluster there, one after the other; answers in JSON.

Each line on stdin is a list of overrides; each line on stdout holds the tokens of two greedy and two sampled requests
and the layout, or the line of the error. `keep on` before them repeats the requests until the next line on stdin, with
a line on stdout for each repeat, one with the error if the engine ends, and `null` at the end. It is a script and no
test: it must run where the cluster is.
"""

from __future__ import annotations

import json
import selectors
import sys

from actors.protocol.sampling_params import SamplingParams
from cluster.config.compose import load_config
from cluster.engine import Engine, EngineError

PROMPTS = ["def median(values):", "class Stack:"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.9, seed=4)


def answer(overrides: list[str]) -> dict[str, object]:
    said: list[str] = []
    try:
        with Engine(load_config(overrides), progress=said.append) as engine:
            tokens = [one.token_ids for sampling in (GREEDY, SAMPLED) for one in engine.generate(PROMPTS, sampling)]
            return {"tokens": tokens, "hosts": {place.identity: place.host for place in engine.places}, "said": said}
    except (ValueError, EngineError) as error:
        return {"error": str(error), "said": said}


def keep_on(overrides: list[str]) -> None:
    """Says after each repeat which tokens came, how many of its requests were drafted for, who is where, how many
    records were stale, and how often the drafter was lost."""
    stdin = selectors.DefaultSelector()
    stdin.register(sys.stdin, selectors.EVENT_READ)
    try:
        with Engine(load_config(overrides)) as engine:
            while not stdin.select(timeout=0):
                completions = engine.generate(PROMPTS, GREEDY)
                speculated = sum(completion.stats.num_spec_steps > 0 for completion in completions)
                hosts = {place.identity: place.host for place in engine.places}
                tokens = [completion.token_ids for completion in completions]
                counters = engine.report(spans=False).counters
                losses = counters["num_role_losses"].get("draft", 0)
                stale = counters["num_stale"]
                say({"tokens": tokens, "speculated": speculated, "hosts": hosts, "stale": stale, "losses": losses})
    except (ValueError, EngineError) as error:
        say({"tokens": [], "error": str(error)})


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    while line := sys.stdin.readline():
        words = json.loads(line)
        if words[:1] == ["keep on"]:
            keep_on(words[1:])
            sys.stdin.readline()
            say(None)
        else:
            say(answer(words))
