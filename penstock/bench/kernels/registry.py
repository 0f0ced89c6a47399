"""The kernels that are measured. Each entry yields its cases for a device and a dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.bench.kernels.cases import Case, Place, mixed_lengths, ragged, size
from penstock.bench.kernels.sampling import sampling
from penstock.kernels.activation import gated_activation, gated_activation_reference
from penstock.kernels.language import use_kernel
from penstock.kernels.maxsim import maxsim_packed
from penstock.layers.attention import attend_fused
from penstock.layers.batch import Batch
from penstock.layers.int8 import Int8Linear
from penstock.layers.linear import Linear, LinearLayer, make_linear
from penstock.layers.norm import LayerNorm, Norm, RMSNorm
from penstock.pooling.methods import METHODS
from penstock.types import LengthGroup

STEPS = (64, 1024)  # tokens of a small step and of a full step
SHAPES = ((384, 1152, "identity"), (384, 1536, "gelu"), (1536, 384, "identity"), (768, 3072, "gelu"))


def linear(place: Place) -> Iterator[Case]:
    """The layer that the engine chooses for this device, compared with `Linear`."""
    yield from _linear("linear", place, lambda w, b, act: make_linear(w, b, act, None))


def linear_int8(place: Place) -> Iterator[Case]:
    if place.device.type == "cpu" and place.dtype == torch.float32:
        yield from _linear("linear_int8", place, Int8Linear)


def _linear(name: str, place: Place, make: Callable[[Tensor, Tensor, str], LinearLayer]) -> Iterator[Case]:
    for inputs, outputs, act in SHAPES:
        weight = place.random(outputs, inputs, scale=inputs**-0.5)
        bias = place.random(outputs)
        layer, plain = make(weight, bias, act), Linear(weight, bias, act)
        for tokens in STEPS:
            x = place.random(tokens, inputs)
            yield Case(
                name,
                f"{tokens} × {inputs} → {outputs} {act}",
                run=partial(layer, x),
                reference=partial(plain, x),
                moved_bytes=size(x, weight, bias) + tokens * outputs * x.element_size(),
                flops=2 * tokens * inputs * outputs,
                int8=layer.__class__ is Int8Linear,
            )


def attention(place: Place) -> Iterator[Case]:
    """Ragged attention, compared with one padded and masked library call."""
    for heads, dim in ((12, 32), (12, 64)):
        for tokens in STEPS:
            batch = ragged(mixed_lengths(tokens), place)
            qkv = place.random(batch.num_tokens, 3 * heads * dim)
            pairs = sum(group.num_rows * group.length**2 for group in batch.groups)
            yield Case(
                "attention",
                f"{batch.num_rows} rows, {batch.num_tokens} tokens, {heads} × {dim}",
                run=partial(attend_fused, qkv, heads, batch),
                reference=partial(padded_attention, qkv, heads, batch),
                moved_bytes=size(qkv) * 4 // 3,
                flops=4 * pairs * heads * dim,
            )


def padded_attention(qkv: Tensor, heads: int, batch: Batch) -> Tensor:
    """[tokens, 3 · hidden] → [tokens, hidden], with every row padded to the longest."""
    width = qkv.shape[1]
    block = qkv.new_zeros(batch.num_rows, batch.max_length, width)
    rows = torch.arange(batch.num_rows, device=qkv.device).repeat_interleave(batch.lengths)
    block[rows, batch.positions] = qkv
    split = block.view(batch.num_rows, batch.max_length, 3, heads, width // (3 * heads))
    query, key, value = split.permute(2, 0, 3, 1, 4)
    positions = torch.arange(batch.max_length, device=qkv.device)
    mask = (positions < batch.lengths[:, None])[:, None, None]
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return context.transpose(1, 2).flatten(2)[rows, batch.positions]


def pooling(place: Place) -> Iterator[Case]:
    """Each method on a whole step at once, compared with a loop over its rows."""
    for name, method in METHODS.items():
        for tokens in STEPS:
            batch = ragged(mixed_lengths(tokens), place)
            hidden = place.random(batch.num_tokens, 384)
            used = batch.num_rows if name in ("cls", "last") else batch.num_tokens
            yield Case(
                f"pooling {name}",
                f"{batch.num_rows} rows, {batch.num_tokens} tokens, 384",
                run=partial(method, hidden, batch),
                reference=partial(row_by_row, name, hidden, batch),
                moved_bytes=used * 384 * hidden.element_size() + batch.num_rows * 384 * 4,
                flops=0,
            )


def late_interaction(place: Place) -> Iterator[Case]:
    """MaxSim of one query with 32 tokens and ragged documents, compared with one product over padded
    documents."""
    for tokens in (1024, 32768):
        lengths = torch.tensor(mixed_lengths(tokens), dtype=torch.int32)
        query, documents = place.random(32, 128), place.random(int(lengths.sum()), 128)
        padded = pad_sequence(documents.split(lengths.tolist()), batch_first=True)
        cu_lengths = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(place.device)
        yield Case(
            "maxsim",
            f"32 × {len(lengths)} documents, {len(documents)} tokens, 128",
            run=partial(maxsim_packed, query, documents, cu_lengths, max_document_length=int(lengths.max())),
            reference=partial(padded_maxsim, query, padded, lengths.to(place.device)),
            moved_bytes=size(query, documents) + 4 * len(lengths),
            flops=2 * len(query) * documents.numel(),
        )


def padded_maxsim(query: Tensor, padded: Tensor, lengths: Tensor) -> Tensor:
    """[length, width] and [documents, longest, width] → [documents]"""
    beyond = torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]
    found = (padded @ query.T).float().masked_fill(beyond[:, :, None], float("-inf"))
    return found.amax(dim=1).sum(dim=1)


def row_by_row(name: str, hidden: Tensor, batch: Batch) -> Tensor:
    return torch.stack([_pool_row(name, rows) for rows in _rows(hidden.float(), batch.groups)])


def _rows(hidden: Tensor, groups: tuple[LengthGroup, ...]) -> Iterator[Tensor]:
    for group in groups:
        for row in range(group.num_rows):
            first = group.first_token + row * group.length
            yield hidden[first : first + group.length]


def _pool_row(name: str, row: Tensor) -> Tensor:
    """[length, width] → [width]"""
    match name:
        case "cls":
            return row[0]
        case "last":
            return row[-1]
        case "mean":
            return row.mean(dim=0)
        case "mean_sqrt_len":
            return row.sum(dim=0) / math.sqrt(len(row))
        case "weighted_mean":
            weights = torch.arange(1, len(row) + 1, device=row.device, dtype=row.dtype)[:, None]
            return (row * weights).sum(dim=0) / weights.sum()
        case "max":
            return row.amax(dim=0)
    raise KeyError(f"no reference for pooling method {name}")


def norm(place: Place) -> Iterator[Case]:
    """Residual addition and norm in one pass, compared with two passes."""
    for width, rms in ((768, False), (1024, True)):
        weight = place.random(width)
        layer: Norm
        layer = RMSNorm(weight, 1e-6) if rms else LayerNorm(weight, place.random(width, scale=0.1), 1e-6)
        for tokens in STEPS:
            x, residual = place.random(tokens, width), place.random(tokens, width, scale=2.0)
            yield Case(
                "norm",
                f"{tokens} × {width} {'RMS' if rms else 'layer'}",
                run=partial(_joined, layer, x, residual),
                reference=partial(_one_by_one, layer, x, residual),
                moved_bytes=3 * size(x),
                flops=0,
            )


def _joined(layer: Norm, x: Tensor, residual: Tensor) -> Tensor:
    return layer.post_norm(x, residual)[0]


def _one_by_one(layer: Norm, x: Tensor, residual: Tensor) -> Tensor:
    return layer(x + residual)


def gate(place: Place) -> Iterator[Case]:
    """The activation between the two products of a gated feed-forward block."""
    for width, act in ((1152, "gelu"), (3072, "silu")):
        for tokens in STEPS:
            x = place.random(tokens, 2 * width)
            yield Case(
                "gate",
                f"{tokens} × {width} {act}",
                run=partial(gated_activation if use_kernel(x) else gated_activation_reference, x, act, True),
                reference=partial(gated_activation_reference, x, act, True),
                moved_bytes=size(x) * 3 // 2,
                flops=0,
            )


KERNELS: dict[str, Callable[[Place], Iterator[Case]]] = {
    "linear": linear,
    "linear_int8": linear_int8,
    "attention": attention,
    "norm": norm,
    "gate": gate,
    "pooling": pooling,
    "maxsim": late_interaction,
    "sampling": sampling,
}
