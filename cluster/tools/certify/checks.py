"""The checks of a certificate, from evidence to records: what was looked at, what was found, whether it passes.

Pure but for the models it is handed; starts no engine and writes no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from tokenizers import Tokenizer

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import VerifyConfig, VerifyRule
from actors.protocol.messages import SamplingKind, SamplingParams
from actors.sampling.logits import is_greedy
from cluster.tools.certify.draws import Scene, Scheme, fit_draws
from cluster.tools.certify.goodness import Fit, detectable_distance, rejected
from cluster.tools.certify.identity import Output, must_be_equal
from cluster.tools.certify.reader import Reader
from cluster.tools.certify.rounding import EXPLAINED, Movement, Scorer

Check = dict[str, object]
CONTEXT_SHOWN = 80
"""Characters of text shown before a divergence."""


def check_identity(
    outputs: Sequence[Output], rule: VerifyRule, scorer: Scorer, tokenizer: Tokenizer, tolerance: float
) -> Check:
    """Tokens of speculation against plain decoding's; a divergence that begins at a tie is excused and shown."""
    compared = [output for output in outputs if must_be_equal(rule, output.sampling)]
    divergences = [
        _divergence(output, scorer, tokenizer, tolerance) for output in compared if output.first_difference is not None
    ]
    return {
        "name": "token identity",
        "passed": all(divergence["is_tie"] for divergence in divergences),
        "num_outputs": len(compared),
        "num_tokens": sum(len(output.plain) for output in compared),
        "num_accepted_draft_tokens": sum(output.num_accepted_tokens for output in compared),
        "settings": _settings(compared),
        "num_unequal_outputs": len(divergences),
        "num_excused_by_ties": sum(bool(divergence["is_tie"]) for divergence in divergences),
        "divergences": divergences,
    }


def _settings(outputs: Sequence[Output]) -> list[dict[str, object]]:
    pairs = dict.fromkeys((output.sampling.temperature, output.sampling.seed) for output in outputs)
    return [{"temperature": temperature, "seed": seed} for temperature, seed in pairs]


def _divergence(output: Output, scorer: Scorer, tokenizer: Tokenizer, tolerance: float) -> dict[str, object]:
    at = output.first_difference
    gaps = scorer.gaps(output) if at < len(output.plain) else []
    gap = gaps[at] if gaps else None
    before = tokenizer.decode([*output.prompt_ids, *output.plain[:at]])
    sides = {"plain": output.plain[at : at + 1], "speculative": output.speculative[at : at + 1]}
    return {
        "prompt": output.prompt + 1,
        "temperature": output.sampling.temperature,
        "seed": output.sampling.seed,
        "position": at,
        "after": before[-CONTEXT_SHOWN:],
        **{name: {"token_ids": list(tokens), "text": tokenizer.decode(list(tokens))} for name, tokens in sides.items()},
        "gap": gap,
        "is_tie": gap is not None and gap <= tolerance,
    }


def check_rounding(movement: Movement, outputs: Sequence[Output], scorer: Scorer, reader: Reader) -> Check:
    """Whether logits move with the shape of a pass no more than rounding explains, and how many choices are ties."""
    tolerance = 2 * movement.largest
    gaps = [gap for output in outputs if scorer.has_ties(output) for gap in scorer.gaps(output)]
    return {
        "name": "rounding",
        "passed": movement.largest <= EXPLAINED[reader.dtype],
        "dtype": str(reader.dtype).removeprefix("torch."),
        "num_rows": movement.num_rows,
        "largest_logit_change": movement.largest,
        "allowed_logit_change": EXPLAINED[reader.dtype],
        "num_flipped_choices": movement.num_flips,
        "tie_below": tolerance,
        "num_choices": len(gaps),
        "num_ties": sum(gap <= tolerance for gap in gaps),
        "smallest_gap": min(gaps, default=None),
    }


def scheme_of(verify: VerifyConfig, drafter: DrafterConfig, kind: SamplingKind) -> Scheme:
    """Drafts of this kind in the width the user's drafter tries."""
    chain = getattr(drafter, "strategy", None) is Strategy.chain
    width = 1 if chain else getattr(drafter, "width", 1)
    return Scheme(str(verify.rule), kind, min(width, verify.law_size), verify.law_size)


def kinds_of(verify: VerifyConfig, drafter: DrafterConfig, kinds: set[SamplingKind]) -> list[SamplingKind]:
    """How the drafter draws; under the coupled rule a model's tokens share the target's noise."""
    if verify.rule is VerifyRule.coupled:
        models = ModelDrafterConfig | CascadeDrafterConfig
        return [SamplingKind.COUPLED if isinstance(drafter, models) else SamplingKind.DETERMINISTIC]
    return sorted(kinds) or [SamplingKind.DETERMINISTIC]


def draw_fits(
    texts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    schemes: Sequence[Scheme],
    eos_token_ids: Sequence[int],
    readers: tuple[Reader, Reader | None],
    num_draws: int,
    on_chunk: Callable[[int], None],
) -> list[Fit]:
    """Every text at every temperature above zero, under every scheme."""
    fits: list[Fit] = []
    for one in params:
        for scheme in schemes:
            for number, token_ids in enumerate(texts, start=1):
                scene = Scene(token_ids, one, eos_token_ids, scheme, *readers)
                name = f"T={one.temperature:g}, text {number}" + f", {scheme.kind.name}" * (len(schemes) > 1)
                fits += fit_draws(name, scene, num_draws, on_chunk)
    return fits


def check_distribution(fits: Sequence[Fit], significance: float, power: float) -> Check:
    """All comparisons with the target's law together: one false alarm among them has probability `significance`."""
    alarms = rejected(fits, significance)
    each = significance / max(1, len(fits))
    bounds = {fit.name: detectable_distance(fit.num_draws, fit.num_cells, each, power) for fit in fits}
    return {
        "name": "law at the model's vocabulary",
        "passed": not alarms,
        "significance": significance,
        "power": power,
        "num_comparisons": len(fits),
        "num_draws": sum(fit.num_draws for fit in fits if fit.name.endswith("first token")),
        "alarms": [fit.name for fit in alarms],
        "smallest_p_value": min((fit.p_value for fit in fits), default=None),
        "visible_bias": {
            "of first tokens": _worst(bounds, "first token"),
            "towards what the drafter favours": _worst(bounds, "favours"),
            "of second tokens": _worst(bounds, "second token"),
            "of the engine's tokens": _worst(bounds, "sampled tokens"),
        },
        "comparisons": [{**asdict(fit), "visible_bias": bounds[fit.name]} for fit in fits],
    }


def _worst(bounds: dict[str, float], ending: str) -> float | None:
    return max((bound for name, bound in bounds.items() if name.endswith(ending)), default=None)


def remarks(outputs: Sequence[Output], rule: VerifyRule, reader: Reader, vocab_size: int) -> list[str]:
    """What a reader must know beside the checks."""
    said = []
    if not any(output.num_accepted_tokens for output in outputs):
        said.append(
            "no draft token was accepted anywhere: identity shows that speculation did no harm, not that it ran"
        )
    if rule is not VerifyRule.coupled and not all(is_greedy(output.sampling) for output in outputs):
        said.append(f"verify.rule={rule} keeps the law of sampled tokens, not the tokens: those are compared as a law")
    if all(is_greedy(output.sampling) for output in outputs):
        said.append("only greedy decoding was asked for: no law was tested; add job.temperatures=[0,1]")
    if reader.vocab_size != vocab_size:
        said.append(f"the draft model has {reader.vocab_size} tokens of the target's {vocab_size}")
    return said
