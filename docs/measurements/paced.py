"""What overlap is worth at a GPU's pass times: `python -m docs.measurements.paced OUT.jsonl [options] SETTING ...`.

A setting is `PIPELINE-LENGTH`, such as `branches-5`; `attached` stands for `sync` with the drafter on the target's
ranks, `plain` has no length, and `sync-8-adaptive` lets the policy choose. Every start makes a new engine for each pace
and setting in turn, whose target and draft model keep the pace (`target.pace_ms`, `drafter.pace_ms`), and appends one
line of figures. The same setting on the virtual clock stands beside it: the tokens and the drafter's choices are those
of the first engine. `--table` prints what the files have: medians, and ranges in brackets; `--plot` draws it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from actors.drafters.model.config import ModelDrafterConfig
from cluster import pocket
from cluster.config import load_config
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.pictures import picture
from cluster.io.prompts import Prompt, read_prompts
from cluster.io.text import read_eos_token_ids
from cluster.observability.report import figures
from cluster.observability.results import Run
from cluster.run_prompts import all_completed, serve_prompts
from cluster.tools.planning.rounds import KnownText
from cluster.tools.planning.transcript import Transcript, record
from cluster.tools.simulation import Scenario, simulate
from docs.measurements import lines
from parallel.pass_cost import PassCost

COMMON = ("cluster=inprocess", "cluster.dashboard=false", "sampling.max_tokens=96", "sampling.ignore_eos=true")
PIPELINES = "sync", "attached", "pearl", "branches", "tree"
KEPT = (
    "tokens_per_s",
    "decode_ms_per_token",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "branch_hit_rate",
    "foreseen_rate",
    "target_busy",
    "draft_busy",
    "round_ms",
    "round_overhead_ms",
    "draft_lengths",
    "fallback_s",
    "wall_s",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A pipeline at a draft length, at most that length if adaptive, and milliseconds of a pass of each role."""

    name: str
    target_ms: float
    draft_ms: float
    batch: int

    @property
    def parts(self) -> tuple[str, int, bool]:
        """Pipeline as it is named here, draft tokens, whether the policy adapts."""
        pipeline, length, *rest = [*self.name.split("-"), "1"][:3]
        return pipeline, int(length), rest == ["adaptive"]

    def overrides(self) -> list[str]:
        pipeline, length, adaptive = self.parts
        return [
            "drafter=model",
            f"target.pace_ms={self.target_ms}",
            f"drafter.pace_ms={self.draft_ms}",
            f"drafter.num_draft_tokens={length}",
            f"pipeline={'sync' if pipeline == 'attached' else pipeline}",
            f"pipeline.adaptive={str(adaptive).lower()}",
            f"drafter.placement={'attached' if pipeline == 'attached' else 'separate'}",
        ]

    def scenario(self, drafter: ModelDrafterConfig, transcript: Transcript) -> Scenario:
        pipeline, _, adaptive = self.parts
        return Scenario(
            "sync" if pipeline == "attached" else pipeline,
            PassCost.of_ms(self.target_ms),
            PassCost.of_ms(self.draft_ms),
            drafter,
            transcript,
            self.batch,
            max_tokens=len(transcript.tokens),
            adaptive=adaptive,
        )


# --- running ----------------------------------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace) -> Iterator[Setting]:
    for pace in options.paces:
        target_ms, draft_ms = map(float, pace.split("/"))
        for name in options.settings:
            yield Setting(name, target_ms, draft_ms, options.batch)


def measure(options: argparse.Namespace) -> None:
    """Every start in turn, so that what else the machine does meets all settings alike."""
    prompts = read_prompts(Path(options.prompts), options.limit)
    transcript: Transcript | None = None
    predictions: dict[Setting, float] = {}
    for start in range(options.starts):
        for setting in settings_of(options):
            config = load_config([*COMMON, *options.overrides, *setting.overrides()])
            run, texts = _served(config, prompts, setting)
            transcript = transcript or _recorded(config, texts)
            if setting not in predictions:
                assert isinstance(config.drafter, ModelDrafterConfig)
                predictions[setting] = simulate(setting.scenario(config.drafter, transcript)).tokens_per_s
            found: dict[str, Any] = dict(figures(run))
            name = " ".join([setting.name, *(one for one in options.overrides if not one.startswith("cluster"))])
            line = {"setting": name, "target_ms": setting.target_ms, "draft_ms": setting.draft_ms}
            line |= {"batch": setting.batch, "start": start, "backend": str(config.cluster.name)}
            line |= {key: found[key] for key in KEPT} | {"simulated": predictions[setting]}
            line |= {
                "target_pass_ms": _span_ms(run, "target", "verify"),
                "ahead_pass_ms": _span_ms(run, "draft", "ahead"),
            }
            lines.append(options.file, line)


def _served(config: LaunchConfig, prompts: Sequence[Prompt], setting: Setting) -> tuple[Run, list[KnownText]]:
    with Engine(config) as engine:
        sampling = config.sampling_params(engine.tokenizer)
        options: dict[str, Any] = dict(speculate=setting.parts[0] != "plain", concurrency=setting.batch)
        serve_prompts(engine, prompts[-setting.batch :], sampling, **options)
        run = serve_prompts(engine, prompts, sampling, **options)
        known = [(engine.tokenizer.encode(one.prompt.text).ids, one.token_ids) for one in all_completed(run)]
    return run, [KnownText((*read, *written), len(read)) for read, written in known]


def _span_ms(run: Run, lane: str, name: str) -> float | None:
    """Median milliseconds of a pass with the work around it."""
    times = [1e3 * (end - begin) for at, what, begin, end, _ in run.spans if (at, what) == (lane, name)]
    return median(times) if times else None


def _recorded(config: LaunchConfig, texts: Sequence[KnownText]) -> Transcript:
    assert isinstance(config.drafter, ModelDrafterConfig)
    eos_token_ids = read_eos_token_ids(Path(config.target.path))
    return record(config.drafter, "cpu", texts, config.sampling.params(), eos_token_ids)


# --- showing ----------------------------------------------------------------------------------------------------------

Found = dict[tuple[str, int, str, str], list[dict[str, Any]]]
"""(backend, batch, pace, setting) -> the lines of its starts."""


def read_lines(file: Path) -> Found:
    found: Found = {}
    for line in lines.read(file):
        pace = f"{line['target_ms']:g} / {line['draft_ms']:g}"
        found.setdefault((line["backend"], line["batch"], pace, line["setting"]), []).append(line)
    return found


def of_ceiling(line: dict[str, Any]) -> float | None:
    """The shortest round by the passes' times over the measured one: a target pass, and what no draft-ahead can hide of
    drafting, which is one pass where the outcome was not prepared, and the whole draft in turn."""
    if not line["round_ms"] or "adaptive" in line["setting"]:
        return None
    length, hit_rate = int(line["setting"].split()[0].split("-")[1]), line["branch_hit_rate"]
    hidden = length if hit_rate is None else 1 - hit_rate
    return (line["target_ms"] + hidden * line["draft_ms"]) / line["round_ms"]


def table(found: Found) -> str:
    """Markdown: a row for each setting."""
    head = "backend", "requests", "passes, ms", "setting", "starts", "tokens/s", "over `sync`", "of the virtual clock"
    head += "acceptance length", "hits", "target busy", "overhead, ms", "pass, ms", "ahead, ms", "of the ceiling"
    rows = [lines.head(*head)]
    for (backend, batch, pace, name), starts in found.items():
        speeds = [one["tokens_per_s"] for one in starts]
        usual = _best(found, (backend, batch, pace), "sync")
        decoding = [batch * 1e3 / one["decode_ms_per_token"] for one in starts]
        cells = [backend, str(batch), pace, name, str(len(starts)), lines.spread(speeds)]
        over = f"{median(speeds) / median(usual):.2f}" if usual else ""
        cells += [over, f"{median(decoding) / starts[0]['simulated']:.2f}"]
        keys = {"mean_acceptance_length": 2, "branch_hit_rate": 2, "target_busy": 2, "round_overhead_ms": 1}
        keys |= {"target_pass_ms": 1, "ahead_pass_ms": 1}
        cells += [_middle([one[key] for one in starts], digits) for key, digits in keys.items()]
        rows.append(lines.row(*cells, _middle(list(map(of_ceiling, starts)), 2)))
    return "\n".join(rows) + "\n"


def _best(found: Found, place: tuple[str, int, str], pipeline: str) -> list[float]:
    """Speeds of the starts of the pipeline's best fixed length; none where it was not measured there."""
    of_lengths = [
        [one["tokens_per_s"] for one in starts]
        for key, starts in found.items()
        if key[:3] == place and key[3].split("-")[0] == pipeline and "adaptive" not in key[3]
    ]
    return max(of_lengths, key=median, default=[])


def _middle(values: Sequence[float | None], digits: int) -> str:
    known = [one for one in values if one is not None]
    return f"{median(known):.{digits}f}" if known else ""


def draw(found: Found, path: Path) -> None:
    """Each pipeline at its best fixed length, with the range of its starts; a group of bars for every pace."""
    keys = [key for key in found if key[0] == "inprocess" and key[1] == 1]
    paces = list(dict.fromkeys(key[2] for key in keys))
    with picture(path, 10, 4) as ((axes,),):
        for number, pipeline in enumerate(PIPELINES):
            for at, pace in enumerate(paces):
                plain, speeds = (_best(found, ("inprocess", 1, pace), name) for name in ("plain", pipeline))
                if not (plain and speeds):
                    continue
                ratios = [speed / median(plain) for speed in speeds]
                middle = median(ratios)
                error = [[middle - min(ratios)], [max(ratios) - middle]]
                place = at + (number - (len(PIPELINES) - 1) / 2) * 0.13
                axes.bar(place, middle, 0.12, yerr=error, color=f"C{number}", label="" if at else pipeline)
        axes.set(ylabel="tokens/s over plain decoding", xlabel="milliseconds of a pass: target / draft model")
        axes.set_xticks(range(len(paces)), paces)
        axes.grid(axis="y")
        axes.figure.legend(ncols=len(PIPELINES), loc="outside upper center")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path, help="lines of figures, appended to")
    parser.add_argument("settings", nargs="*", help="such as plain sync-5 attached-5 branches-5 sync-8-adaptive")
    parser.add_argument("--paces", nargs="+", default=["15/1.5"], help="milliseconds of a pass, target/draft")
    parser.add_argument("--prompts", default=str(pocket.PROMPTS))
    parser.add_argument("--limit", type=int, default=4, help="prompts")
    parser.add_argument("--starts", type=int, default=1, help="engines of every setting, one after the other")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--overrides", nargs="*", default=[], help="of every launch, such as cluster=local")
    parser.add_argument("--table", action="store_true", help="print the medians of the file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the medians of the file")
    options = parser.parse_intermixed_args(arguments)
    measure(options)
    if options.table:
        sys.stdout.write(table(read_lines(options.file)))
    if options.plot:
        draw(read_lines(options.file), options.plot)


if __name__ == "__main__":
    main()
