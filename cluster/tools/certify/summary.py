"""A certificate as one page of Markdown, and its checks as rows for the terminal. Pure; reads the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DIVERGENCES_SHOWN = 5
Check = Mapping[str, object]


def verdict(certificate: Mapping[str, object]) -> str:
    return "PASSED" if certificate["passed"] else "FAILED"


def check_rows(checks: Sequence[Check]) -> list[list[str]]:
    """Name, result and findings of every check."""
    return [
        [str(check["name"]), "passed" if check["passed"] else "FAILED", _FINDINGS[check["name"]](check)]
        for check in checks
    ]


def page(certificate: Mapping[str, object]) -> str:
    """The whole page."""
    subject = certificate["subject"]
    lines = [
        f"# Certificate of unchanged output: {verdict(certificate)}",
        "",
        "Speculative decoding as configured here emits what plain decoding of the same target emits, as far as the",
        "checks below can see. `certificate.json` holds every figure.",
        "",
        *(f"- {name}: {value}" for name, value in subject.items()),
        "",
        "| check | result | findings |",
        "|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in check_rows(certificate["checks"])),
        "",
        *_divergence_lines(certificate["checks"]),
        *_bias_lines(certificate["checks"]),
        *(f"Note: {remark}.\n" for remark in certificate["notes"]),
    ]
    return "\n".join(lines)


def _divergence_lines(checks: Sequence[Check]) -> list[str]:
    found = next(check for check in checks if check["name"] == "token identity")["divergences"]
    if not found:
        return []
    lines = ["## First differences", ""]
    for one in found[:DIVERGENCES_SHOWN]:
        gap = "unknown" if one["gap"] is None else f"{one['gap']:.2e}"
        excuse = "a tie" if one["is_tie"] else "NOT a tie"
        lines.append(
            f"- prompt {one['prompt']}, T={one['temperature']:g}, seed {one['seed']}, token {one['position']}: "
            f"plain {one['plain']['text']!r}, speculative {one['speculative']['text']!r}; "
            f"lead of the plain token {gap}, {excuse}; after `{one['after'][-40:]!r}`"
        )
    if len(found) > DIVERGENCES_SHOWN:
        lines.append(f"- and {len(found) - DIVERGENCES_SHOWN} more in certificate.json")
    return [*lines, ""]


def _bias_lines(checks: Sequence[Check]) -> list[str]:
    distribution = next((check for check in checks if check["name"] == "law at the model's vocabulary"), None)
    if distribution is None:
        return []
    bounds = {name: bound for name, bound in distribution["visible_bias"].items() if bound is not None}
    lines = [
        "## The smallest bias the samples could have shown",
        "",
        "Output that differs from the target's law by at least this total variation would have been found with",
        f"probability {distribution['power']:.0%}, at {distribution['significance']:.1%} for one false alarm among all comparisons.",
        "Tokens expected less than ten times are counted as one. What is smaller is left to the exact enumeration.",
        "",
        *(f"- {name}: {bound:.3f}" for name, bound in bounds.items()),
        "",
    ]
    alarms = [f"- does not fit: {name}" for name in distribution["alarms"]]
    return [*lines, *alarms, *[""] * bool(alarms)]


def _identity(check: Check) -> str:
    said = (
        f"{check['num_outputs']} outputs, {check['num_tokens']} tokens ({check['num_accepted_draft_tokens']} drafted): "
        f"{check['num_unequal_outputs']} unequal"
    )
    return said + f", {check['num_excused_by_ties']} of them from a tie on" * bool(check["num_unequal_outputs"])


def _exact(check: Check) -> str:
    worst = min(check["broken_rules_found_at"].values())
    return (
        f"{check['rule']}, {check['num_enumerations']} enumerations: largest distance {check['largest_distance']:.0e}; "
        f"broken rules found out at {worst:.2f} and above"
    )


def _levels(check: Check) -> str:
    return (
        f"{_exact(check)}; {check['num_texts_of_rounds']} texts of several rounds: p-value "
        f"{check['p_value_of_rounds']:.2f}, {check['p_value_of_coins_met_twice']:.0e} where coins are met twice"
    )


def _distribution(check: Check) -> str:
    least = check["smallest_p_value"]
    return (
        f"{check['num_draws']} verifications, {check['num_comparisons']} comparisons: "
        f"{len(check['alarms'])} do not fit; smallest p-value {least:.1e}"
    )


def _rounding(check: Check) -> str:
    return (
        f"{check['dtype']}: logits move by {check['largest_logit_change']:.1e} with the shape of a pass "
        f"({check['allowed_logit_change']:g} allowed), {check['num_flipped_choices']} greedy choices with them; "
        f"{check['num_ties']} of {check['num_choices']} choices are ties"
    )


_FINDINGS = {
    "token identity": _identity,
    "exact enumeration": _exact,
    "exact enumeration of levels": _levels,
    "law at the model's vocabulary": _distribution,
    "rounding": _rounding,
}
