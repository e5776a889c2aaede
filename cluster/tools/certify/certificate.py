"""A certificate and its checks, as JSON, as one page of Markdown and as rows for the terminal. Runs no check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a certificate, which passes if all its checks do."""

    name: str
    passed: bool
    findings: str
    """One line for the tables."""
    figures: Mapping[str, object]
    """Its other entries in `certificate.json`."""
    details: Sequence[str] = field(default_factory=list)
    """Lines for the page."""

    @property
    def result(self) -> str:
        return "passed" if self.passed else "FAILED"

    @property
    def row(self) -> list[str]:
        return [self.name, self.result, self.findings]


@dataclass(frozen=True, slots=True)
class Certificate:
    """All checks of one configuration; `subject` describes it by name and value."""

    subject: Mapping[str, str]
    checks: Sequence[Check]
    notes: Sequence[str]

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if not check.passed]

    @property
    def verdict(self) -> str:
        return "FAILED" if self.failed else "PASSED"

    def to_json(self) -> dict[str, object]:
        return {
            "passed": not self.failed,
            "subject": self.subject,
            "checks": [{"name": check.name, "passed": check.passed, **check.figures} for check in self.checks],
            "notes": self.notes,
        }

    def to_markdown(self) -> str:
        lines = [
            f"# Certificate of unchanged output: {self.verdict}",
            "",
            "Speculative decoding as configured here emits what plain decoding of the same target emits, as far as the",
            "checks below can see. `certificate.json` holds every figure.",
            "",
            *(f"- {name}: {value}" for name, value in self.subject.items()),
            "",
            "| check | result | findings |",
            "|---|---|---|",
            *("| " + " | ".join(check.row) + " |" for check in self.checks),
            "",
            *(line for check in self.checks for line in check.details),
            *(f"Note: {note}.\n" for note in self.notes),
        ]
        return "\n".join(lines)
