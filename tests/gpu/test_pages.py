"""Page retrievers and EmbeddingGemma 2 on CUDA: the CPU's vectors, alone and in mixed steps, without a wait.

pytest -m gpu tests/gpu/test_pages.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from penstock import Engine
from penstock.inputs.images.preprocess import prepare
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, Task
from tests.parity.embedding_gemma2 import CASES as GEMMAS
from tests.parity.embedding_gemma2 import GemmaCase
from tests.parity.pages import CASES as PAGES
from tests.parity.pages import QUERIES, PageCase, pictures
from tests.parity.reference import Vectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
Case = PageCase | GemmaCase
CASES: list[Case] = [*PAGES, *GEMMAS]
PICTURES = pictures()[:3]
# Minimum and mean cosine: random weights amplify the rounding of single tokens.
TOLERANCES = [("bfloat16", 0.9, 0.99), ("float16", 0.995, 0.999), ("float32", 0.9999, 0.99999)]


def write(case: Case, folder: Path) -> None:
    if not hasattr(transformers, case.reference):
        pytest.skip(f"transformers {transformers.__version__} has no {case.reference}")
    case.write(folder)


def rows_of(engine: Engine) -> list[Any]:
    assert engine.spec.images is not None
    images = [prepare(picture, engine.spec.images) for picture in PICTURES]
    return [images[1], QUERIES[0], images[0], images[2], QUERIES[1], images[1]]


def vectors(engine: Engine, rows: list[Any]) -> Vectors:
    if Task.EMBED in engine.spec.tasks:
        found = [np.asarray(engine.embed(rows), dtype=np.float32)]
    else:
        found = [np.asarray(each, dtype=np.float32) for each in engine.token_embed(rows)]
    joined = np.concatenate(found)
    normed: Vectors = joined / np.linalg.norm(joined, axis=1, keepdims=True)
    return normed


@pytest.mark.parametrize(("dtype", "least", "mean"), TOLERANCES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda_equals_the_cpu(case: Case, dtype: str, least: float, mean: float, tmp_path: Path) -> None:
    write(case, tmp_path)
    with Engine(str(tmp_path), device="cpu", dtype="float32") as cpu:
        rows = rows_of(cpu)
        expected = vectors(cpu, rows)
    with Engine(str(tmp_path), device="cuda", dtype=dtype) as cuda:
        mixed = vectors(cuda, rows)
        alone = np.concatenate([vectors(cuda, [row]) for row in rows])
        again = vectors(cuda, rows)
    for got in (mixed, alone, again):
        cosines = (got * expected).sum(axis=1)
        assert cosines.min() >= least and cosines.mean() >= mean


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_with_images_never_waits_between_launch_and_collect(case: Case, tmp_path: Path) -> None:
    write(case, tmp_path)
    with Engine(str(tmp_path), device="cuda", dtype="bfloat16") as engine:
        params = PoolingParams(Task.EMBED if Task.EMBED in engine.spec.tasks else Task.TOKEN_EMBED)
        request = engine.local.text.processor.prepare("r", rows_of(engine), params)
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ModelRunner)
        share = ScheduledRows(request, np.arange(request.num_rows, dtype=np.int32))
        plans = [build_plan([share], image_cache=ImageCache(4096)) for _ in range(2)]
        runner.launch(plans[0]).result()  # compiles the kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = runner.launch(plans[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert np.isfinite(np.asarray(step.result().outputs[0], dtype=np.float32)).all()


def test_pages_are_scored_as_on_the_cpu(tmp_path: Path) -> None:
    write(PAGES[0], tmp_path)
    with Engine(str(tmp_path), device="cpu", dtype="float32") as cpu:
        expected = np.asarray(cpu.score(QUERIES[0], PICTURES))
    with Engine(str(tmp_path), device="cuda", dtype="float32") as cuda:
        assert np.abs(np.asarray(cuda.score(QUERIES[0], PICTURES)) - expected).max() < 1e-2
