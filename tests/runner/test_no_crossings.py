"""Between launch and collect, no code reads a number from the device. Only `staging` copies data."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor

from penstock.config import PoolerConfig
from penstock.offline.local import LocalEngine
from penstock.pooling.methods import METHODS
from penstock.types import OutputDtype, PooledOutput, PoolingParams, Request, Task
from tests.helpers import ints
from tests.parity import decoders, encoders
from tests.parity.encoders import opened
from tests.parity.reference import FAMILIES, with_head, write_transformer
from tests.runner.trap import Crossing, trapped

LENGTHS = (1, 3, 3, 17, 40, 60)


def submit(
    engine: LocalEngine, *params: PoolingParams, skip: bool = False, **more: Any
) -> list[PooledOutput]:
    """Submit one request for each of the parameters, together so that they share steps."""
    draw = np.random.default_rng(4)
    futures: list[Future[PooledOutput]] = []
    for number, wanted in enumerate(params):
        request = Request(
            str(number),
            draw.integers(5, 100, sum(LENGTHS)).astype(np.int32),
            ints(LENGTHS),
            wanted,
            skip=ints([int(length > 1) for length in LENGTHS]) if skip else None,
            **more,
        )
        futures.append(engine.submit(request))
    return [future.result(60) for future in futures]


DENSE = (PoolingParams(), PoolingParams(dimensions=16), PoolingParams(Task.TOKEN_EMBED))
CAST = tuple(PoolingParams(dtype=dtype) for dtype in OutputDtype)


def check(engine: LocalEngine, patch: pytest.MonkeyPatch, *params: PoolingParams, **more: Any) -> None:
    with trapped(patch) as trap:
        answers = submit(engine, *params, **more)
    assert trap.calls > 20, "otherwise no step ran under the trap"
    assert all(len(answer.values) for answer in answers)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skip", [False, True])
def test_a_mixed_step_of_an_encoder(
    method: str, skip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_transformer(tmp_path, with_head("bert", "ForSequenceClassification"), num_labels=3)
    with opened(tmp_path, pooler_config=PoolerConfig(pooling_type=method)) as ours:
        check(ours.engine, monkeypatch, *DENSE, PoolingParams(Task.CLASSIFY), *CAST, skip=skip)


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_a_step_with_splade_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_transformer(tmp_path, with_head(name, "ForMaskedLM"))
    with opened(tmp_path, pooler_config=PoolerConfig(pooling_type="splade")) as ours:
        sparse = (PoolingParams(Task.SPARSE), PoolingParams(Task.SPARSE, top_k=3))
        check(ours.engine, monkeypatch, *DENSE, *sparse)


def test_a_step_with_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_transformer(tmp_path, FAMILIES["bert"])
    with opened(tmp_path) as ours:
        check(ours.engine, monkeypatch, *DENSE, type_ids=ints([0, 1] * (sum(LENGTHS) // 2)))


@pytest.mark.parametrize("name", ["modernbert", "nomic", "gte", "jina-flash", "deberta-v3", "deberta-v2"])
def test_the_other_encoders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders.CASES[name].write(tmp_path, "ForTokenClassification")
    with opened(tmp_path) as ours:
        check(ours.engine, monkeypatch, *DENSE, PoolingParams(Task.TOKEN_CLASSIFY))


@pytest.mark.parametrize("name", ["qwen3", "mistral", "llama3", "gemma3", "embeddinggemma", "gritlm"])
def test_decoders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoders.FAMILIES[name].write(tmp_path)
    with opened(tmp_path) as ours:
        check(ours.engine, monkeypatch, *DENSE)


@pytest.mark.parametrize("method", ["last", "mean", "mean_sqrt_len"])
def test_rows_that_run_over_several_steps(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders.FAMILIES["qwen3"].write(tmp_path)
    options: dict[str, Any] = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}
    options |= {"long_prefill_token_threshold": 13, "pooler_config": PoolerConfig(pooling_type=method)}
    with opened(tmp_path, enable_prefix_caching=True, **options) as ours:
        assert ours.engine._core.runner.cache is not None  # type: ignore[attr-defined]
        check(ours.engine, monkeypatch, *DENSE)


VIOLATIONS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.float().numpy(),
    "an array": lambda x: np.asarray(x),
    "to the CPU": lambda x: x.to("cpu"),
    "to a device": lambda x: x.to(device=torch.device("cpu"), dtype=torch.float16),
    "a truth": lambda x: bool(x.sum() > 0),
    "a branch": lambda x: 1 if x.sum() > 0 else 2,
    "an integer": lambda x: int(x.sum()),
    "a float": lambda x: float(x.sum()),
    "an index": lambda x: [0] * x.shape[0] * x.argmax().mul(0).__index__(),
    "a range": lambda x: range(x.argmax()),  # type: ignore[arg-type]
    "nonzero": lambda x: x.nonzero(),
    "torch.nonzero": lambda x: torch.nonzero(x),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "a mask": lambda x: x[x > 0],
    "a mask among indices": lambda x: x[x[:, 0] > 0, 1],
    "a masked write": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "repeats": lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.int64), dim=0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "a new tensor": lambda x: x + torch.tensor(1.0),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_the_trap_catches_a_violation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the same step with one bad line in the model."""
    write_transformer(tmp_path, FAMILIES["bert"])
    with opened(tmp_path) as ours:
        runner: Any = ours.engine._core.runner
        model = runner.model

        def bad(batch: Any) -> Tensor:
            hidden: Tensor = model(batch)
            VIOLATIONS[name](hidden)
            return hidden

        submit(ours.engine, PoolingParams())  # without the trap, the model itself works
        bad.prunes_last_layer = model.prunes_last_layer  # type: ignore[attr-defined]
        runner.model = bad
        submit(ours.engine, PoolingParams())
        with trapped(monkeypatch), pytest.raises(Exception, match=Crossing.__name__):
            submit(ours.engine, PoolingParams())
