"""Runs a comparison: runs the checks in the reference library, releases it, then runs them in Penstock."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from penstock.offline.open import DescribedModel
from penstock.verify.choose import Library, choose, limits
from penstock.verify.compare import compare
from penstock.verify.ours import Penstock
from penstock.verify.references import ReferenceOptions, open_reference
from penstock.verify.report import Report
from penstock.verify.samples import Answers, Check, Sample


def verify(
    engine: Mapping[str, Any],
    sample: Sample,
    *,
    library: Library | None = None,
    runs_model_code: bool = False,
) -> Report:
    """Compare a model with its reference.

    `engine` are fields of `EngineConfig`. `library` overrides the library that is chosen by the files.
    """
    described = DescribedModel.of(None, engine)
    spec, settings = described.spec, described.settings
    library = library or choose(spec)
    options = ReferenceOptions("cuda" if settings.device.startswith("cuda") else "cpu", runs_model_code)
    reference = open_reference(library, spec, options)
    expected: list[tuple[Check, Answers]] = [
        (check, reference.answer(check, sample)) for check in reference.checks()
    ]
    del reference
    gc.collect()
    is_fp32 = settings.dtype == "float32" and settings.quantization is None
    with Penstock(described) as ours:
        findings = [
            compare(check, sample, ours.answer(check, sample), theirs, is_fp32=is_fp32)
            for check, theirs in expected
        ]
    return Report(
        model=spec.name,
        architecture=spec.architecture,
        reference=library,
        precision=settings.dtype + (f", {settings.quantization}" if settings.quantization else ""),
        device=settings.device,
        findings=tuple(findings),
        sample=sample,
        note=limits(spec, library),
    )
