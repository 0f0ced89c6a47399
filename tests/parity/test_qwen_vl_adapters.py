"""LoRA adapters on models that read images: each row gives PEFT's result, whatever runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.errors import ModelLoadError
from penstock.layers.images import ImageBatch
from penstock.models.qwen_vision import QwenVisionTower
from penstock.types import PoolingParams, SamplerParams, Task
from tests.generation.streams import read_stream
from tests.helpers import ints
from tests.parity.lora import FIRST_ID, write_adapter
from tests.parity.qwen_vl import (
    Row,
    as_published,
    flat_config,
    make_model,
    make_row,
    reference_inputs,
    request_of,
    write_model,
)
from tests.parity.reference import Vectors

LANGUAGE = r".*language_model.*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$"
PICTURE = make_row(4, (6, 8), 5, seed=3)
ROWS = [
    PICTURE,
    make_row(9, seed=5),
    PICTURE,
    PICTURE,
    make_row(2, (4, 4), 3, (4, 8), 2, seed=4),
    make_row(7, seed=6),
]
CHOSEN = (0, 1, 1, -1, 0, -1)  # the adapter of each row; three rows differ only in it
_ids = count()


@dataclass(frozen=True)
class Subject:
    base: Any
    adapted: list[Any]  # models adapted by PEFT
    engine: Engine

    def expected(self, row: Row, adapter: int) -> Vectors:
        last = states(self.adapted[adapter] if adapter >= 0 else self.base, row)[-1]
        return last / np.linalg.norm(last)


def states(model: Any, row: Row) -> Vectors:
    base = model.base_model.model if hasattr(model, "base_model") and hasattr(model, "peft_config") else model
    base = base.model if hasattr(base, "lm_head") else base
    base.rope_deltas = None
    with torch.inference_mode():
        found: Vectors = base(**reference_inputs(row)).last_hidden_state[0].numpy()
    return found


def opened(folder: Path, adapters: list[Path], **options: Any) -> Engine:
    settings = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16, "enable_generation": True} | options
    engine = Engine(str(folder), dtype="float32", device="cpu", threads=1, **settings)
    for number, adapter in enumerate(adapters):
        engine.local.engine.core.load_adapter(FIRST_ID + number, str(adapter), adapter.name).result(60)
    return engine


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Qwen2-VL has the tensor names of its first files; its adapters have those of current transformers."""
    folder, model = tmp_path_factory.mktemp(request.param), make_model(request.param)
    write_model(folder / "base", model)
    if request.param == "qwen2_vl":
        renamed = {"model.language_model.": "model.", "model.visual.": "visual."}
        as_published(folder / "base", renamed, flat_config("qwen2_vl", folder / "base"))
    paths = [folder / "one", folder / "two"]
    adapted = [
        write_adapter(model, path, seed, target_modules=LANGUAGE, r=2 + 3 * seed).eval()
        for seed, path in enumerate(paths)
    ]
    options = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 48}
    engine = opened(folder / "base", paths, **options)
    yield Subject(model, adapted, engine)
    engine.close()


def vectors(subject: Subject, rows: list[Row], adapters: tuple[int, ...], **more: Any) -> Vectors:
    chosen = ints([-1 if each < 0 else FIRST_ID + each for each in adapters])
    request = request_of(f"row-{next(_ids)}", rows, PoolingParams(Task.EMBED), adapters=chosen, **more)
    values: Vectors = subject.engine.local.engine.submit(request).result(60).values  # type: ignore[assignment]
    return values


def test_rows_with_images_and_without_have_adapters_of_their_own_in_one_request(subject: Subject) -> None:
    wanted = [subject.expected(row, each) for row, each in zip(ROWS, CHOSEN, strict=True)]
    assert np.abs(vectors(subject, ROWS, CHOSEN) - np.stack(wanted)).max() < 1e-4
    same = [wanted[0], wanted[2], wanted[3]]  # the same picture and text with two adapters and without one
    assert min(np.abs(a - b).max() for a, b in pairwise(same)) > 1e-2


def test_one_image_under_several_adapters_shares_no_prefix(subject: Subject) -> None:
    """Requests run one after another with prefix caching, in both orders."""
    for adapter in (0, 1, -1, 1, 0):
        (got,) = vectors(subject, [PICTURE], (adapter,), reuse_prefix=True)
        assert np.abs(got - subject.expected(PICTURE, adapter)).max() < 1e-4
    longer = Row([*PICTURE.ids, 30, 31, 32], PICTURE.grids, PICTURE.seed)
    for adapter in (1, -1, 0):
        (got,) = vectors(subject, [longer], (adapter,), reuse_prefix=True)
        assert np.abs(got - subject.expected(longer, adapter)).max() < 1e-4


def test_the_vision_tower_runs_once_for_an_image_under_several_adapters(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters do not change the tower, so its features can be shared. The decoder's prefixes cannot."""
    run, sizes = QwenVisionTower.__call__, list[int]()

    def counted(tower: QwenVisionTower, images: ImageBatch) -> torch.Tensor:
        sizes.append(len(images.patches))
        return run(tower, images)

    monkeypatch.setattr(QwenVisionTower, "__call__", counted)
    fresh = make_row(3, (6, 6), 4, seed=40)
    got = vectors(subject, [fresh] * 3, (0, 1, -1))
    assert sum(sizes) == 36
    for vector, adapter in zip(got, (0, 1, -1), strict=True):
        assert np.abs(vector - subject.expected(fresh, adapter)).max() < 1e-4


def test_texts_about_images_are_generated_with_the_adapter_of_their_request(subject: Subject) -> None:
    params = SamplerParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    async def tokens(adapter: int) -> list[int]:
        chosen = ints([-1 if adapter < 0 else FIRST_ID + adapter])
        request = request_of(
            f"row-{next(_ids)}", [PICTURE], PoolingParams(Task.GENERATE), sampling=params, adapters=chosen
        )
        parts = [part async for part in read_stream(subject.engine.local.engine, request)]
        return [token for part in parts for token in part.token_ids.tolist()]

    async def both() -> list[list[int]]:
        return list(await asyncio.gather(tokens(0), tokens(-1), tokens(1)))

    got = asyncio.run(both())
    for own, model in zip(got, (subject.adapted[0], subject.base, subject.adapted[1]), strict=True):
        with torch.inference_mode():
            out = model.generate(
                **reference_inputs(PICTURE), max_new_tokens=8, do_sample=False, eos_token_id=None
            )
        assert own == [int(token) for token in out[0, len(PICTURE.ids) :]]


def test_an_adapter_of_the_vision_tower_is_refused_by_name(subject: Subject, tmp_path: Path) -> None:
    write_adapter(subject.base, tmp_path / "tower", target_modules=r".*visual\.blocks.*qkv$")
    with pytest.raises(ModelLoadError, match=r"cannot be adapted: .*visual\.blocks\.0\.attn\.qkv"):
        subject.engine.local.engine.core.load_adapter(99, str(tmp_path / "tower"), "tower").result(60)
