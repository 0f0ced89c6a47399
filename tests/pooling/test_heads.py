from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.checkpoint.pooling import PoolingSpec
from penstock.layers.linear import Linear
from penstock.pooling.build import Pooler, VariantTensors
from penstock.pooling.heads import Dense, cast, unit
from penstock.types import OutputDtype, PoolingParams, Variant
from tests.helpers import make_spec
from tests.pooling.ragged import batch_of

WIDTHS = [8, 16, 384, 12, 7, 1]


def vectors_of(width: int, rows: int = 20, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def pool(hidden: Tensor, params: PoolingParams, normalize: bool = False) -> Tensor:
    """Pool rows of one token each, so that pooling itself changes nothing."""
    spec = make_spec(pooling=PoolingSpec(methods=("mean",), normalize=normalize))
    (out,) = Pooler(spec, {}, [])(
        hidden, batch_of([1] * len(hidden)), (Variant(params, None),), [VariantTensors()]
    )
    return out


def test_float32_output_is_unchanged() -> None:
    vectors = vectors_of(16)
    assert torch.equal(cast(vectors, OutputDtype.FLOAT32), vectors)


def test_float16_is_the_nearest_half() -> None:
    vectors = vectors_of(16)
    np.testing.assert_array_equal(
        cast(vectors, OutputDtype.FLOAT16).numpy(), vectors.numpy().astype(np.float16)
    )


def test_bfloat16_travels_as_the_bits_of_the_nearest_bfloat16() -> None:
    vectors = vectors_of(16)
    bits = cast(vectors, OutputDtype.BFLOAT16).numpy()
    assert bits.dtype == np.uint16
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened, vectors.to(torch.bfloat16).float().numpy())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "zero"), [(OutputDtype.INT8, 0), (OutputDtype.UINT8, 128)])
def test_eight_bits_keep_the_direction_and_use_the_whole_range(
    width: int, dtype: OutputDtype, zero: int
) -> None:
    vectors = vectors_of(width) * torch.logspace(-6, 6, 20)[:, None]
    small = cast(vectors, dtype).numpy().astype(np.float64) - zero
    assert np.all(np.abs(small).max(axis=1) == 127)
    exact = vectors.double().numpy()
    cosine = (small * exact).sum(1) / np.linalg.norm(small, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosine.min() > 0.9999


@pytest.mark.parametrize("dtype", [OutputDtype.INT8, OutputDtype.UINT8])
def test_a_zero_vector_has_an_eight_bit_form(dtype: OutputDtype) -> None:
    zero = 0 if dtype is OutputDtype.INT8 else 128
    assert cast(torch.zeros(1, 8), dtype).tolist() == [[zero] * 8]


@pytest.mark.parametrize("width", WIDTHS)
def test_ubinary_packs_signs_as_numpy_does(width: int) -> None:
    vectors = vectors_of(width)
    vectors[0] = 0.0
    np.testing.assert_array_equal(
        cast(vectors, OutputDtype.UBINARY).numpy(), np.packbits(vectors.numpy() > 0, axis=-1)
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_binary_is_ubinary_less_128(width: int) -> None:
    vectors = vectors_of(width)
    signed = cast(vectors, OutputDtype.BINARY)
    assert signed.dtype == torch.int8
    packed = np.packbits(vectors.numpy() > 0, axis=-1).astype(np.int16)
    np.testing.assert_array_equal(signed.numpy(), packed - 128)


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_packed_bits_are_those_of_sentence_transformers(precision: str) -> None:
    quantize = pytest.importorskip("sentence_transformers.util").quantize_embeddings
    vectors = vectors_of(384)
    wanted = quantize(vectors.numpy(), precision=precision)
    ours = cast(vectors, OutputDtype(precision)).numpy()
    assert ours.dtype == wanted.dtype
    np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("dtype", OutputDtype)
def test_each_output_dtype_gives_its_documented_array_type(dtype: OutputDtype) -> None:
    out = cast(vectors_of(24), dtype).numpy()
    assert out.dtype == dtype.numpy
    assert out.shape == (20, 3 if dtype.is_packed else 24)


def test_unit_gives_length_one_and_keeps_zero_vectors() -> None:
    vectors = vectors_of(16) * 37
    vectors[3] = 0
    lengths = unit(vectors).norm(dim=1)
    assert lengths[3] == 0
    torch.testing.assert_close(lengths[torch.arange(20) != 3], torch.ones(19))


def test_a_model_that_normalises_does_so_unless_the_caller_declines() -> None:
    hidden = vectors_of(16)
    torch.testing.assert_close(pool(hidden, PoolingParams(), normalize=True), unit(hidden))
    torch.testing.assert_close(pool(hidden, PoolingParams(normalize=False), normalize=True), hidden)


def test_a_model_that_does_not_normalise_does_so_only_when_asked() -> None:
    hidden = vectors_of(16)
    torch.testing.assert_close(pool(hidden, PoolingParams()), hidden)
    torch.testing.assert_close(pool(hidden, PoolingParams(normalize=True)), unit(hidden))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_cut_vector_is_renormalised_unless_the_caller_declines(normalize: bool) -> None:
    hidden = vectors_of(16)
    cut = pool(hidden, PoolingParams(dimensions=5), normalize)
    torch.testing.assert_close(cut, unit(hidden[:, :5]))
    raw = pool(hidden, PoolingParams(dimensions=5, normalize=False), normalize)
    torch.testing.assert_close(raw, hidden[:, :5])


def test_vectors_are_cut_before_their_bits_are_packed() -> None:
    hidden = vectors_of(16)
    out = cast(pool(hidden, PoolingParams(dimensions=8)), OutputDtype.UBINARY)
    np.testing.assert_array_equal(out.numpy(), np.packbits(hidden[:, :8].numpy() > 0, axis=-1))


def test_each_variant_gets_its_own_rows_and_parameters() -> None:
    hidden = vectors_of(16, rows=5)
    variants = (
        Variant(PoolingParams(), np.array([4, 0], dtype=np.int32)),
        Variant(PoolingParams(dimensions=2, normalize=False), np.array([1, 3, 2], dtype=np.int32)),
    )
    tensors = [VariantTensors(torch.from_numpy(variant.rows)) for variant in variants]
    whole, cut = Pooler(make_spec(), {}, [])(hidden, batch_of([1] * 5), variants, tensors)
    torch.testing.assert_close(whole, hidden[[4, 0]])
    torch.testing.assert_close(cut, hidden[[1, 3, 2], :2])


def test_several_methods_are_concatenated_in_order() -> None:
    hidden = vectors_of(4, rows=6)
    spec = make_spec(pooling=PoolingSpec(methods=("cls", "max", "mean")))
    (out,) = Pooler(spec, {}, [])(
        hidden, batch_of([2, 4]), (Variant(PoolingParams(), None),), [VariantTensors()]
    )
    rows = hidden.split([2, 4])
    wanted = torch.stack([torch.cat([row[0], row.amax(0), row.mean(0)]) for row in rows])
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("act", ["identity", "tanh", "relu", "gelu", "sigmoid", "silu"])
def test_dense_heads_add_the_residual_after_the_activation(act: str) -> None:
    pooled, weight, bias = vectors_of(6), vectors_of(6, rows=6, seed=1), vectors_of(6, rows=1, seed=2)[0]
    function = torch.nn.Identity() if act == "identity" else getattr(torch.nn.functional, act)
    inner = function(pooled @ weight.T + bias)
    linear = Linear(weight, bias, act)
    torch.testing.assert_close(Dense(linear, None, False)(pooled), inner)
    torch.testing.assert_close(Dense(linear, None, True)(pooled), inner + pooled)
    other = vectors_of(6, rows=6, seed=3)
    projected = Dense(linear, Linear(other, None), True)(pooled)
    torch.testing.assert_close(projected, inner + pooled @ other.T)
