"""Models and layers give the same results with kernels as with torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.checkpoint.sparse import SparseSpec
from penstock.kernels import language
from penstock.kernels.attention import attention_reference
from penstock.kernels.quantize import Activations, Quantized
from penstock.layers import attention
from penstock.layers.attention import AttentionKind
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.fp8 import Fp8Linear
from penstock.layers.head import TaskHead
from penstock.layers.linear import Linear
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler, VariantTensors
from penstock.pooling.sparse import Splade
from penstock.types import PoolingParams, Task, Variant
from penstock.weights.stream import open_weights
from tests.helpers import make_spec
from tests.layers.inputs import ordered_batch

pytestmark = pytest.mark.usefixtures("only_interpreted")

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "xlm-r": ("XLMRobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}),
    "modernbert": ("ModernBertModel", {}),
    "mistral": ("MistralModel", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Model", {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma3": ("Gemma3TextModel", {"num_key_value_heads": 1, "head_dim": 16}),
}
SPARSE = (
    "Qwen3MoeModel",
    {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
)


def batch_with(lengths: list[int], type_ids: Tensor | None = None) -> Batch:
    return replace(ordered_batch(lengths), type_ids=type_ids)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3-moe"])
@torch.inference_mode()
def test_a_model_gives_the_same_with_kernels(family: str, request: pytest.FixtureRequest) -> None:
    architecture, more = FAMILIES.get(family, SPARSE)
    weights = open_weights(Path("/nowhere"), "dummy", 0, torch.float32, CPU)
    model = build_model(architecture, SIZES | more, LayerBuilder(weights))
    batch = batch_with([3, 7])
    plain = model(batch)
    request.getfixturevalue("kernels")
    torch.testing.assert_close(model(batch), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_quantised_model_gives_the_same_with_kernels(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and activations return quantised rows, so only the first product and the products after attention
    quantise."""
    architecture, more = FAMILIES[family]
    weights = open_weights(Path("/nowhere"), "dummy", 0, torch.float32, CPU)
    model = build_model(architecture, SIZES | more, LayerBuilder(weights, "fp8"))
    batch = batch_with([3, 7])
    plain = model(batch)
    request.getfixturevalue("kernels")
    given: list[bool] = []
    product = Fp8Linear._product

    def watched(self: Fp8Linear, x: Activations, bias: Tensor | None) -> Tensor:
        given.append(isinstance(x, Quantized))
        return product(self, x, bias)

    monkeypatch.setattr(Fp8Linear, "_product", watched)
    with_kernels = model(batch)
    assert torch.nn.functional.cosine_similarity(with_kernels, plain).min() > 0.99
    assert given == [False, False, True, True, True, False, True, True]


@torch.inference_mode()
def test_token_types_are_looked_up(kernels: None) -> None:
    weights = open_weights(Path("/nowhere"), "dummy", 0, torch.float32, CPU)
    model = build_model("BertModel", SIZES, LayerBuilder(weights))
    types = torch.tensor([0, 0, 1, 0, 1, 1, 1], dtype=torch.int32)
    with_kernels = model(batch_with([3, 4], types))
    language.set_kernel_devices()
    torch.testing.assert_close(with_kernels, model(batch_with([3, 4], types)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu", "tanh", "identity"])
@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_gives_the_same_with_bias_and_activation_in_a_kernel(
    act: str, biased: bool, request: pytest.FixtureRequest
) -> None:
    x, weight, residual = torch.randn(3, 8), torch.randn(12, 8), torch.randn(3, 12)
    layer = Linear(weight, torch.randn(12) if biased else None, act)
    plain = layer(x, residual)
    request.getfixturevalue("kernels")
    torch.testing.assert_close(layer(x, residual), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("own", [4, 12])
@pytest.mark.parametrize("kind", [AttentionKind(), AttentionKind(causal=True), AttentionKind(window=2)])
def test_rows_go_to_kernels_by_length_and_each_is_written_once(
    own: int, kind: AttentionKind, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows, medium rows and rows for the library's kernel, in every mixture that the limits allow."""
    lengths = [1, 2, 2, 4, 5, 9, 12, 13, 20]
    batch = ordered_batch(lengths)
    query, key, value = torch.randn(sum(lengths), 6, 16).split([4, 1, 1], dim=1)
    options = {"scale": 0.25, "causal": kind.causal, "window": kind.window}
    expected = attention_reference(query, key, value, batch.cu_lengths, **options)
    given: list[int] = []

    def library(*args: Any, first_row: int = 0) -> Tensor:
        given.append(first_row)
        out = torch.full_like(expected, float("nan"))
        first = int(batch.cu_lengths[first_row])
        out[first:] = expected[first:]
        return out

    monkeypatch.setattr(attention, "_varlen", library)
    monkeypatch.setattr(attention, "MAX_SHORT_LENGTH", 4)
    monkeypatch.setattr(attention, "_MAX_OWN_LENGTH", own)
    got = attention._on_cuda(query, key, value, batch, kind)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert given == [sum(length <= own for length in lengths)]
    monkeypatch.setattr(attention, "_MAX_OWN_LENGTH", 64)
    got = attention._on_cuda(query, key, value, batch, kind)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert len(given) == 1  # the library was not called again


@pytest.mark.parametrize("method", ["mean", "cls", "last", "max"])
def test_the_pooler_gives_the_same_with_kernels(method: str, request: pytest.FixtureRequest) -> None:
    spec = make_spec()
    pooler = Pooler(make_spec(pooling=type(spec.pooling)(methods=(method,))), {}, [])
    batch, hidden = ordered_batch([2, 3, 9]), torch.randn(14, 8)
    rows = torch.tensor([2, 0], dtype=torch.int32)
    tokens = torch.tensor([5, 1, 13], dtype=torch.int32)
    variants = (
        Variant(PoolingParams(), None),
        Variant(PoolingParams(dimensions=5), rows.numpy()),
        Variant(PoolingParams(dimensions=5, normalize=False), None),
        Variant(PoolingParams(task=Task.TOKEN_EMBED, normalize=True), None, tokens.numpy()),
    )
    tensors = [VariantTensors(selected) for selected in (None, rows, None, tokens)]
    plain = pooler(hidden, batch, variants, tensors)
    request.getfixturevalue("kernels")
    for got, expected in zip(pooler(hidden, batch, variants, tensors), plain, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_sparse_weights_are_the_same_with_kernels(reduce: str, request: pytest.FixtureRequest) -> None:
    layer = Linear(torch.randn(40, 8), torch.randn(40))
    spec = SparseSpec(kind="splade", reduce=reduce, logs=1)
    splade = Splade(TaskHead("all", layer, 40), spec, max_logits=40 * 12)
    batch, hidden = ordered_batch([2, 3, 3, 5, 20]), torch.randn(33, 8)
    variant = Variant(PoolingParams(task=Task.SPARSE, top_k=10), None)
    plain = splade(hidden, batch, variant, None)
    request.getfixturevalue("kernels")
    torch.testing.assert_close(splade(hidden, batch, variant, None), plain, atol=1e-5, rtol=1e-5)
