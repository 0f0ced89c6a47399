"""GLiNER and GLiClass on CUDA: the CPU's scores, and no wait between launch and collect.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from penstock import Engine
from penstock.inputs.labelled import LabelledOptions
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from tests.checkpoints import WORDS
from tests.parity.labelled import write_gliclass, write_gliner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LABELS = ["person", "long water", "oil"]
TEXTS = [" ".join(WORDS[at : at + size]) for at, size in ((0, 3), (4, 12), (9, 30), (2, 1))]
KINDS = [("markerV0", "deberta-v2"), ("token_level", "deberta-v2"), ("markerV0", "modernbert")]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize(("mode", "kind"), KINDS)
def test_entity_scores_are_those_of_the_cpu(
    mode: str, kind: str, dtype: str, most: float, tmp_path: Path
) -> None:
    folder = str(write_gliner(tmp_path, mode, kind).folder)
    found = []
    for options in ({"device": "cpu"}, {"device": "cuda", "dtype": dtype}):
        with Engine(folder, **options) as engine:
            for _ in range(4):  # a repeated shape is captured
                rows = engine.entities(TEXTS, labels=LABELS, threshold=0.0, flat=False, multi_label=True)
            found.append([{(e.start, e.end, e.label): e.score for e in row} for row in rows])
    cpu, cuda = found
    for expected, got in zip(cpu, cuda, strict=True):
        common = expected.keys() & got.keys()
        assert len(common) > 0.9 * len(expected)
        assert max(abs(expected[each] - got[each]) for each in common) <= most


@pytest.mark.parametrize("kind", ["deberta-v2", "modernbert"])
def test_zero_shot_scores_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    folder = str(write_gliclass(tmp_path, kind, prompt_first=True, scorer_type="weighted-dot").folder)
    with Engine(folder, device="cpu") as cpu, Engine(folder, device="cuda", dtype="float32") as cuda:
        for expected, got in zip(cpu.zero_shot(TEXTS, LABELS), cuda.zero_shot(TEXTS, LABELS), strict=True):
            assert got.labels == expected.labels
            np.testing.assert_allclose(got.scores, expected.scores, atol=1e-4)


@pytest.mark.parametrize(("mode", "kind"), KINDS)
def test_a_step_with_labels_never_waits_for_the_device(mode: str, kind: str, tmp_path: Path) -> None:
    with Engine(str(write_gliner(tmp_path, mode, kind).folder), device="cuda", dtype="bfloat16") as engine:
        local = engine._async.local
        runner, inputs = local.engine._core.runner, local.text.processor.labelled
        assert isinstance(runner, ModelRunner) and inputs is not None
        request, _ = inputs.prepare("r", TEXTS, LABELS, LabelledOptions())
        plan = build_plan([ScheduledRows(request, np.arange(request.num_rows, dtype=np.int32))])
        runner.launch(plan).result()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner.forward(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
