"""vLLM in an interpreter that need not be this one: reads what to load and then requests, a JSON object a line each.

Run as a program by `vllm_peer.py`, with a file descriptor for its answers as the only argument: libraries print to
standard output. It may import vLLM and the standard library alone: vLLM pins other versions than this project.

    {"load": {arguments of vllm.LLM}}                                    -> {"version": "0.32.0"}
    {"prompts": [[5, 6]], "max_tokens": 9, "ignore_eos": true, "in_flight": 16}
        -> {"wall_s": 0.5, "answers": [{"tokens": [7], "ttft_s": 0.1, "latency_s": 0.4, "reason": "length"}]}
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serves until standard input ends."""
    import vllm  # pyright: ignore[reportMissingImports] (the user's to install)

    answers = os.fdopen(int(sys.argv[1]), "w")
    engine: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if engine is None:
            engine = vllm.LLM(**order["load"]).llm_engine
            answer = {"version": vllm.__version__}
        else:
            sampling = vllm.SamplingParams(
                temperature=0.0, max_tokens=order["max_tokens"], ignore_eos=order["ignore_eos"], detokenize=False
            )
            answer = _complete(engine, order["prompts"], sampling, order["in_flight"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _complete(engine: Any, prompts: list[list[int]], sampling: Any, in_flight: int) -> dict[str, Any]:
    """All prompts, so many at a time; the next one is added when one ends."""
    started = time.monotonic()
    added: dict[str, float] = {}
    first: dict[str, float] = {}
    found: dict[str, dict[str, Any]] = {}
    while len(found) < len(prompts):
        while len(added) < min(len(prompts), len(found) + in_flight):
            name = str(len(added))
            added[name] = time.monotonic()
            engine.add_request(name, {"prompt_token_ids": prompts[int(name)]}, sampling)
        for output in engine.step():
            now, name = time.monotonic(), output.request_id.partition("-")[0]
            first.setdefault(name, now)
            if output.finished:
                tokens, reason = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
                times = {"ttft_s": first[name] - added[name], "latency_s": now - added[name]}
                found[name] = {"tokens": tokens, "reason": reason, **times}
    ordered = [found[str(index)] for index in range(len(prompts))]
    return {"wall_s": time.monotonic() - started, "answers": ordered}


if __name__ == "__main__":
    main()
