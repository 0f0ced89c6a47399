"""Steps as CUDA graphs run them, in Triton's interpreter, padded to the rows and tokens of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.checkpoint.pooling import PoolingSpec
from penstock.kernels import language
from penstock.kernels.attention import attention_reference, flash_attention, short_attention
from penstock.kernels.pooling import METHODS, pool, pool_reference
from penstock.kvcache.store import KVCache, KVStore
from penstock.layers import attention
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.capture import Work
from penstock.runner.graphs import Graphs
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, PoolPlan, Task
from penstock.weights.stream import open_weights
from tests.helpers import ints, make_request, make_spec

CPU = torch.device("cpu")
NAN = float("nan")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "modernbert": ("ModernBertModel", {"local_attention": 16}),
    "qwen3": ("Qwen3Model", {"num_key_value_heads": 1, "head_dim": 16}),
}


@pytest.fixture(autouse=True)
def only_interpreted() -> None:
    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu/test_graphs.py replays real graphs")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every layer with its kernels, even attention, which otherwise needs CUDA. New memory is NaN."""
    before = language._devices
    language.set_kernel_devices("cpu", "cuda")

    def attend(
        query: Tensor, key: Tensor, value: Tensor, batch: Any, kind: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        return attention._on_cuda(query, key, value, batch, kind or attention.BIDIRECTIONAL)

    for module in ("modernbert", "decoder_layers"):
        monkeypatch.setattr(f"penstock.models.{module}.attend", attend)
    monkeypatch.setattr(attention, "attend", attend)
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
    language.set_kernel_devices(*before)


def fake(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
    kept = [tensor.clone() for tensor in work()]

    def replay() -> None:
        for old, new in zip(kept, work(), strict=True):
            old.copy_(new)

    return replay, kept


def plan_of(lengths: tuple[int, ...], *params: PoolingParams) -> PoolPlan:
    wanted = params or (PoolingParams(),)
    requests = [make_request(str(i), lengths, params=p) for i, p in enumerate(wanted)]
    return build_plan([ScheduledRows(request, ints(range(len(lengths)))) for request in requests])


POOLED, PER_TOKEN = PoolingParams(), PoolingParams(Task.TOKEN_EMBED, dimensions=8)
BOTH = (POOLED, PER_TOKEN)
CASES = [(family, (5,), BOTH) for family in FAMILIES] + [("bert", (8, 8), BOTH)]
CASES += [(family, (3, 70), (PER_TOKEN,)) for family in ("modernbert", "qwen3")]  # one row is not short


@pytest.mark.parametrize(("family", "lengths", "outputs"), CASES)
def test_a_padded_step_gives_what_an_unpadded_one_gives(
    family: str, lengths: tuple[int, ...], outputs: tuple[PoolingParams, ...], kernels: None
) -> None:
    architecture, more = FAMILIES[family]
    weights = open_weights(Path("/nowhere"), "dummy", 0, torch.float32, CPU)
    with torch.inference_mode():
        model = build_model(architecture, SIZES | more, LayerBuilder(weights))
    spec = make_spec(pooling=PoolingSpec(methods=("mean",), normalize=True))
    pooler = Pooler(spec, model.heads, [])
    runner = ModelRunner(model, pooler, CPU, 2)
    graphs = Graphs(model, pooler, runner.staging, fake)
    for params in outputs:
        plan = plan_of(lengths, params)
        key = graphs.key_of(plan)
        assert key is not None
        with graphs.capture_on_first_use():
            got = runner._replay(graphs, key, plan)
        assert got is not None, "the step could not be captured"
        (expected,) = runner._step(plan).outputs
        np.testing.assert_allclose(got.outputs[0], expected, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skipped", [False, True])
def test_pooling_accepts_padding_rows(method: str, skipped: bool) -> None:
    hidden = torch.randn(12, 8)
    hidden[9:] = NAN
    cu = torch.tensor([0, 2, 9, 9, 9], dtype=torch.int32)
    skip = torch.tensor([1, 2, 0, 0], dtype=torch.int32) if skipped else None
    got = pool(hidden, cu, method, max_length=16, skip=skip, normalize=True)
    expected = pool_reference(hidden, cu[:3], method, skip=None if skip is None else skip[:2], normalize=True)
    torch.testing.assert_close(got[:2], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("longest", [32, 64, 256])
def test_attention_accepts_padding_rows_and_never_reads_past_the_last_token(
    causal: bool, longest: int
) -> None:
    qkv = torch.randn(40, 6, 16)
    qkv[30:] = NAN
    query, key, value = qkv.split([2, 2, 2], dim=1)
    cu = torch.tensor([0, 7, 30, 30, 30, 30], dtype=torch.int32)
    kernel = short_attention if longest <= 64 else flash_attention
    got = kernel(query, key, value, cu, max_length=longest, scale=0.25, causal=causal)
    expected = attention_reference(query[:30], key[:30], value[:30], cu[:3], scale=0.25, causal=causal)
    torch.testing.assert_close(got[:30], expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def with_kernels() -> Iterator[None]:
    before = language._devices
    language.set_kernel_devices("cpu", "cuda")
    yield
    language.set_kernel_devices(*before)


BLOCK = 4


def chunk(
    length: int, begin: int, end: int, table: tuple[int, ...] | None, number: int, params: PoolingParams
) -> ScheduledRows:
    """The chunk of a row from token `begin` to `end`."""
    request = make_request(str(number), [length], params=params)
    request.token_ids[:] = (np.arange(length) * 7 + 31 * number) % 250
    return ScheduledRows(request, ints([0]), ints([begin]), ints([end]), (table,))


@pytest.mark.parametrize("params", [PoolingParams(Task.TOKEN_EMBED), PoolingParams()])
def test_chunked_rows_in_padded_steps_give_what_whole_rows_give(
    params: PoolingParams, with_kernels: None
) -> None:
    architecture, more = FAMILIES["qwen3"]
    layers = 2 if params.per_token else 1
    weights = open_weights(Path("/nowhere"), "dummy", 0, torch.float16, CPU)
    with torch.inference_mode():
        model = build_model(architecture, SIZES | {"num_hidden_layers": layers} | more, LayerBuilder(weights))
    pooler = Pooler(make_spec(pooling=PoolingSpec(methods=("last",), normalize=True)), model.heads, [])
    store = KVStore(layers, 24 * BLOCK, 1, 16, torch.float16, CPU)
    store.keys.fill_(NAN)
    store.values.fill_(NAN)
    cache = KVCache(store, torch.zeros((24, 32)))
    runner = ModelRunner(model, pooler, CPU, 2, cache)
    graphs = Graphs(model, pooler, runner.staging, fake, cache=cache)
    long, other = tuple(range(23, 16, -1)), (3, 7, 1)
    steps = [
        [chunk(26, 0, 7, long, 0, params)],
        [
            chunk(26, 7, 17, long, 0, params),
            chunk(10, 0, 3, other, 1, params),
            chunk(3, 0, 3, None, 2, params),
        ],
        [chunk(26, 17, 26, long, 0, params), chunk(10, 3, 10, other, 1, params)],
    ]
    parts: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
    for shares in steps:
        plan = build_plan(shares, block_size=BLOCK)
        key = graphs.key_of(plan)
        assert key is not None and key.max_cached_keys is not None
        assert (key.params is None) is not params.per_token
        with graphs.capture_on_first_use():
            got = runner._replay(graphs, key, plan)
        assert got is not None, "the step could not be captured"
        outputs, plain = got.outputs, runner._step(plan).outputs
        for mine, theirs in zip(outputs, plain, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-3)
        ended = [i for variant in plan.variants for i in _rows_of(variant.rows, plan)]
        for share, piece in zip(shares, plan.slices, strict=True):
            row, number = int(piece.step_rows[0]), int(share.request.id)
            if params.per_token:
                begin, end = plan.cu_lengths[row : row + 2]
                parts[number].append(np.array(outputs[0][begin:end]))
            elif row in ended:
                parts[number].append(np.array(outputs[0][ended.index(row)])[None])
    for number, length in ((0, 26), (1, 10), (2, 3)):
        whole = chunk(length, 0, length, None, number, params)
        (expected,) = runner._step(build_plan([ScheduledRows(whole.request, ints([0]))])).outputs
        np.testing.assert_allclose(np.concatenate(parts[number]), expected, atol=4e-3)


def _rows_of(rows: np.ndarray | None, plan: PoolPlan) -> list[int]:
    return list(range(plan.num_rows)) if rows is None else rows.tolist()
