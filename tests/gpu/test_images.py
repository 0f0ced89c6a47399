"""Vision towers on CUDA: the CPU's vectors, alone and in mixed steps, without a wait; each image runs once.

pytest -m gpu tests/gpu/test_images.py
"""

from __future__ import annotations

from pathlib import Path

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
from penstock.types import PoolingParams, PreparedImage
from tests.parity.dual import CASES, IMAGES, TEXTS, DualCase
from tests.parity.reference import cosines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def prepared(engine: Engine) -> list[PreparedImage]:
    assert engine.spec.images is not None
    return [prepare(image, engine.spec.images) for image in IMAGES]


def write(case: DualCase, folder: Path) -> None:
    if not hasattr(transformers, f"{case.model}Model"):
        pytest.skip(f"this transformers has no {case.model}")
    case.write(folder)


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.998), ("float16", 0.9999), ("float32", 0.99999)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda_equals_the_cpu(case: DualCase, dtype: str, least: float, tmp_path: Path) -> None:
    write(case, tmp_path)
    with Engine(str(tmp_path), device="cpu", dtype="float32") as cpu:
        images = prepared(cpu)
        rows = [images[2], TEXTS[0], images[0], images[1], TEXTS[3], images[2], TEXTS[1], images[3]]
        expected = cpu.embed(rows)
    with Engine(str(tmp_path), device="cuda", dtype=dtype) as cuda:
        mixed = cuda.embed(rows)
        alone = np.concatenate([cuda.embed([row]) for row in rows])
        again = cuda.embed(rows)
    for got in (mixed, alone, again):
        assert cosines(got, expected).min() >= least


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_with_images_never_waits_between_launch_and_collect(case: DualCase, tmp_path: Path) -> None:
    write(case, tmp_path)
    with Engine(str(tmp_path), device="cuda", dtype="bfloat16") as engine:
        processor = engine.local.text.processor
        request = processor.prepare("r", [*prepared(engine), TEXTS[0]], PoolingParams())
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


def test_texts_of_a_model_with_towers_still_use_graphs(tmp_path: Path) -> None:
    write(CASES[0], tmp_path)
    with Engine(str(tmp_path), device="cuda", dtype="bfloat16") as engine:
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ModelRunner) and runner.graphs is not None
        engine.embed([TEXTS[0]])
        # Whether a step is replayed depends on measured times; that graphs could be captured does not.
        assert runner.graphs.captured and not runner.graphs.refused and not runner.graphs.gave_up
