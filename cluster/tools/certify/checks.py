"""The checks of a certificate on outputs of the engine and on counted draws: figures, findings, passed or failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tokenizers import Tokenizer

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import VerifyConfig, VerifyRule
from actors.protocol.messages import SamplingKind, SamplingParams
from actors.sampling.logits import is_greedy
from cluster.tools.certify.certificate import Check
from cluster.tools.certify.draws import DraftScheme, VerifiedText, fit_draws
from cluster.tools.certify.goodness import GoodnessOfFit, detectable_distance, rejected
from cluster.tools.certify.identity import OutputPair, must_be_equal
from cluster.tools.certify.scoring import LogitMovement, OutputScorer, TextReader

CONTEXT_SHOWN = 80
"""Characters of text before a divergence in the JSON; the page shows half of them."""
DIVERGENCES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token, or none at the end of an output, and its text."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two outputs; `gap` is the lead of the plain token in logits, if it is known."""

    prompt: int
    temperature: float
    seed: int
    position: int
    after: str
    plain: TokenText
    speculative: TokenText
    gap: float | None
    is_tie: bool

    def line(self) -> str:
        gap = "unknown" if self.gap is None else f"{self.gap:.2e}"
        return (
            f"- prompt {self.prompt}, T={self.temperature:g}, seed {self.seed}, token {self.position}: "
            f"plain {self.plain.text!r}, speculative {self.speculative.text!r}; "
            f"lead of the plain token {gap}, {'a tie' if self.is_tie else 'NOT a tie'}; "
            f"after `{self.after[-CONTEXT_SHOWN // 2 :]!r}`"
        )


def check_identity(
    outputs: Sequence[OutputPair], rule: VerifyRule, scorer: OutputScorer, tokenizer: Tokenizer, tolerance: float
) -> Check:
    """Tokens of speculation against plain decoding's; a divergence that begins at a tie is excused and shown."""
    compared = [output for output in outputs if must_be_equal(rule, output.sampling)]
    settings = dict.fromkeys((output.sampling.temperature, output.sampling.seed) for output in compared)
    divergences = [
        _divergence(output, position, scorer, tokenizer, tolerance)
        for output in compared
        if (position := output.first_difference) is not None
    ]
    num_tokens = sum(len(output.plain) for output in compared)
    num_accepted = sum(output.num_accepted_tokens for output in compared)
    num_excused = sum(divergence.is_tie for divergence in divergences)
    findings = f"{len(compared)} outputs, {num_tokens} tokens ({num_accepted} drafted): {len(divergences)} unequal"
    details = []
    if divergences:
        findings += f", {num_excused} of them from a tie on"
        details = ["## First differences", "", *(one.line() for one in divergences[:DIVERGENCES_SHOWN])]
        if len(divergences) > DIVERGENCES_SHOWN:
            details.append(f"- and {len(divergences) - DIVERGENCES_SHOWN} more in certificate.json")
        details.append("")
    return Check(
        "token identity",
        num_excused == len(divergences),
        findings,
        {
            "num_outputs": len(compared),
            "num_tokens": num_tokens,
            "num_accepted_draft_tokens": num_accepted,
            "settings": [{"temperature": temperature, "seed": seed} for temperature, seed in settings],
            "num_unequal_outputs": len(divergences),
            "num_excused_by_ties": num_excused,
            "divergences": [asdict(divergence) for divergence in divergences],
        },
        details,
    )


def _divergence(
    output: OutputPair, position: int, scorer: OutputScorer, tokenizer: Tokenizer, tolerance: float
) -> Divergence:
    gap = scorer.gaps(output)[position] if position < len(output.plain) else None
    before = tokenizer.decode([*output.prompt_ids, *output.plain[:position]])
    plain, speculative = (
        TokenText(side[position : position + 1], tokenizer.decode(list(side[position : position + 1])))
        for side in (output.plain, output.speculative)
    )
    return Divergence(
        prompt=output.prompt + 1,
        temperature=output.sampling.temperature,
        seed=output.sampling.seed,
        position=position,
        after=before[-CONTEXT_SHOWN:],
        plain=plain,
        speculative=speculative,
        gap=gap,
        is_tie=gap is not None and gap <= tolerance,
    )


def check_rounding(
    movement: LogitMovement, outputs: Sequence[OutputPair], scorer: OutputScorer, reader: TextReader
) -> Check:
    """Whether logits move with the shape of a pass no more than rounding explains, and how many choices are ties."""
    gaps = [gap for output in outputs if scorer.has_ties(output) for gap in scorer.gaps(output)]
    num_ties = sum(gap <= movement.tie_below for gap in gaps)
    dtype, allowed = str(reader.dtype).removeprefix("torch."), reader.explained
    return Check(
        "rounding",
        movement.largest <= allowed,
        f"{dtype}: logits move by {movement.largest:.1e} with the shape of a pass ({allowed:g} allowed), "
        f"{movement.num_flips} greedy choices with them; {num_ties} of {len(gaps)} choices are ties",
        {
            "dtype": dtype,
            "num_rows": movement.num_rows,
            "largest_logit_change": movement.largest,
            "allowed_logit_change": allowed,
            "num_flipped_choices": movement.num_flips,
            "tie_below": movement.tie_below,
            "num_choices": len(gaps),
            "num_ties": num_ties,
            "smallest_gap": min(gaps, default=None),
        },
    )


def schemes_of(verify: VerifyConfig, drafter: DrafterConfig, kinds: set[SamplingKind]) -> list[DraftScheme]:
    """Drafts of each of the drafter's sampling kinds, in the width it tries.

    Under the coupled rule the tokens of a model share the target's noise.
    """
    width = drafter.width if isinstance(drafter, SuffixDrafterConfig) else 1
    if isinstance(drafter, ModelDrafterConfig):
        width = drafter.widest
    drawn = sorted(kinds) or [SamplingKind.DETERMINISTIC]
    if verify.rule is VerifyRule.coupled:
        has_model = isinstance(drafter, ModelDrafterConfig | CascadeDrafterConfig)
        drawn = [SamplingKind.COUPLED if has_model else SamplingKind.DETERMINISTIC]
    return [DraftScheme(str(verify.rule), kind, min(width, verify.law_size), verify.law_size) for kind in drawn]


def draw_fits(
    texts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    schemes: Sequence[DraftScheme],
    eos_token_ids: Sequence[int],
    readers: tuple[TextReader, TextReader | None],
    num_draws: int,
    on_chunk: Callable[[], None],
) -> list[GoodnessOfFit]:
    """Every text at every temperature above zero, under every scheme."""
    fits: list[GoodnessOfFit] = []
    for sampling in params:
        for scheme in schemes:
            for number, token_ids in enumerate(texts, start=1):
                text = VerifiedText(token_ids, sampling, eos_token_ids, scheme, *readers)
                name = f"T={sampling.temperature:g}, text {number}" + f", {scheme.kind.name}" * (len(schemes) > 1)
                fits += fit_draws(name, text, num_draws, on_chunk)
    return fits


def check_distribution(fits: Sequence[GoodnessOfFit], significance: float, power: float) -> Check:
    """All comparisons of distributions; one false alarm among them has probability `significance`."""
    alarms = rejected(fits, significance)
    each = significance / max(1, len(fits))
    bounds = {fit.name: detectable_distance(fit.num_draws, fit.num_cells, each, power) for fit in fits}
    kinds = {
        "of first tokens": "first token",
        "towards what the drafter favours": "favours",
        "of second tokens": "second token",
        "of the engine's tokens": "sampled tokens",
    }
    visible = {
        kind: max((bound for name, bound in bounds.items() if name.endswith(ending)), default=None)
        for kind, ending in kinds.items()
    }
    num_draws = sum(fit.num_draws for fit in fits if fit.name.endswith("first token"))
    smallest = min((fit.p_value for fit in fits), default=None)
    details = [
        "## The smallest bias the samples could have shown",
        "",
        "Output that differs from the target's distribution by at least this total variation would have been found",
        f"with probability {power:.0%}, at {significance:.1%} for one false alarm among all comparisons.",
        "Tokens expected less than ten times are counted as one. What is smaller is left to enumerations in the tests.",
        "",
        *(f"- {kind}: {bound:.3f}" for kind, bound in visible.items() if bound is not None),
        "",
    ]
    if alarms:
        details += [*(f"- does not fit: {fit.name}" for fit in alarms), ""]
    return Check(
        "distribution at the model's vocabulary",
        not alarms,
        f"{num_draws} verifications, {len(fits)} comparisons: {len(alarms)} do not fit; "
        f"smallest p-value {1.0 if smallest is None else smallest:.1e}",
        {
            "significance": significance,
            "power": power,
            "num_comparisons": len(fits),
            "num_draws": num_draws,
            "alarms": [fit.name for fit in alarms],
            "smallest_p_value": smallest,
            "visible_bias": visible,
            "comparisons": [{**asdict(fit), "visible_bias": bounds[fit.name]} for fit in fits],
        },
        details,
    )


def notes_of(outputs: Sequence[OutputPair], rule: VerifyRule, draft_vocab_size: int, vocab_size: int) -> list[str]:
    """Limits of the checks that a reader must know."""
    notes = []
    if not any(output.num_accepted_tokens for output in outputs):
        notes.append(
            "no draft token was accepted anywhere: identity shows that speculation did no harm, not that it ran"
        )
    if all(is_greedy(output.sampling) for output in outputs):
        notes.append("only greedy decoding was asked for: no distribution was tested; add job.temperatures=[0,1]")
    elif rule is not VerifyRule.coupled:
        notes.append(f"verify.rule={rule} keeps the distribution of sampled tokens, not the tokens: it is compared")
    if draft_vocab_size != vocab_size:
        notes.append(f"the draft model has {draft_vocab_size} tokens of the target's {vocab_size}")
    return notes
