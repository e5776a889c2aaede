"""Prompts for guidellm, each with its domain:

    python -m docs.measurements.guidellm_prompts HUMANEVAL.jsonl SPEC_BENCH.jsonl > PROMPTS.jsonl

41 HumanEval tasks and 79 first turns of Spec-Bench, in equal parts of its six subtasks, drawn and shuffled once by a
seed. The eight categories that Spec-Bench has from MT-Bench are one domain, conversation. guidellm reads `prompt` and
`output_tokens_count`, `guidellm_table.py` reads `prompt` and `domain`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_TASKS, NUM_QUESTIONS, NUM_TOKENS, SEED = 41, 79, 96, 27
LONGEST = 4000
"""Characters of a prompt."""
DOMAINS = {
    "translation": "translation",
    "summarization": "summarization",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}
"""By category of Spec-Bench; the others are MT-Bench's."""
CONVERSATION = "conversation"


def _records(file: str) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def main(humaneval: str, spec_bench: str) -> None:
    chance = random.Random(SEED)
    chosen = [(record["prompt"], "code") for record in chance.sample(_records(humaneval), NUM_TASKS)]
    questions: dict[str, list[str]] = {domain: [] for domain in (*DOMAINS.values(), CONVERSATION)}
    for record in _records(spec_bench):
        first = record["turns"][0]
        if len(first) <= LONGEST:
            questions[DOMAINS.get(record["category"], CONVERSATION)].append(first)
    for place, (domain, texts) in enumerate(questions.items()):
        num = NUM_QUESTIONS // len(questions) + (place < NUM_QUESTIONS % len(questions))
        chosen += [(text, domain) for text in chance.sample(texts, num)]
    chance.shuffle(chosen)
    for prompt, domain in chosen:
        record = {"prompt": prompt, "output_tokens_count": NUM_TOKENS, "domain": domain}
        sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
