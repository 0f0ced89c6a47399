"""The report on a model, as text and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from penstock import __version__
from penstock.errors import shown
from penstock.verify.choose import Library
from penstock.verify.compare import Finding
from penstock.verify.samples import Sample

_LIBRARIES = ("torch", "transformers", "sentence-transformers", "tokenizers")
_COLUMNS = ("check", "inputs", "worst cosine", "largest difference", "same order", "same best", "same tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    model: str
    architecture: str
    reference: Library
    precision: str  # Penstock's; the reference runs in fp32
    device: str
    findings: tuple[Finding, ...]
    sample: Sample
    note: str = ""  # what the comparison does not cover

    @property
    def is_same(self) -> bool:
        return all(finding.is_same for finding in self.findings)

    @property
    def verdict(self) -> str:
        if self.is_same:
            return "the same answers as the reference" + (f", but {self.note}" if self.note else "")
        reasons = [f"{finding.name}: {reason}" for finding in self.findings for reason in finding.reasons]
        return "DIFFERENT from the reference: " + "; ".join(reasons)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "architecture": self.architecture,
            "verdict": "same" if self.is_same else "different",
            "note": self.note,
            "reference": self.reference,
            "precision": self.precision,
            "device": self.device,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "texts": len(self.sample.texts),
            "findings": [asdict(finding) | {"worst_text": self._text(finding)} for finding in self.findings],
        }

    def as_text(self) -> str:
        rows = [_COLUMNS, *(_row(finding) for finding in self.findings)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        head = (
            f"{self.model} ({self.architecture}), {self.precision} on {self.device}, "
            f"against {self.reference} in float32"
        )
        return "\n".join([head, "", *table, "", f"verdict: {self.verdict}"])

    def _text(self, finding: Finding) -> str | None:
        if finding.worst_input is None:
            return None
        if finding.name == "score":
            return shown(self.sample.pairs[finding.worst_input])
        return shown(self.sample.texts[finding.worst_input])


def versions() -> Mapping[str, str]:
    found = {"python": platform.python_version(), "penstock": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except ImportError:
            continue
    return found


def _row(finding: Finding) -> tuple[str, ...]:
    tokens = "-" if finding.same_tokens is None else f"{finding.same_tokens} of {finding.inputs}"
    return (
        finding.name,
        str(finding.inputs),
        "-" if finding.worst_cosine is None else f"{finding.worst_cosine:.7f}",
        "-" if finding.max_difference is None else f"{finding.max_difference:.1e}",
        "-" if finding.ordered_alike is None else f"{finding.ordered_alike:.2%}",
        "-" if finding.same_best is None else f"{finding.same_best:.0%}",
        tokens,
    )
