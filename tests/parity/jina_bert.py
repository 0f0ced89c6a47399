"""A reference JinaBERT: the published encoder of jina-embeddings-v2, inside transformers' BERT."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output

Tensors = dict[str, Tensor]


def slopes_of(heads: int) -> list[float]:
    """ALiBi slopes. Powers of two follow the paper; other counts also use every second slope of the next
    power."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**n for n in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return slopes_of(power) + slopes_of(2 * power)[0::2][: heads - power]


class _Layer(nn.Module):
    def __init__(self, config: Any, code: bool, gated: bool) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.code, self.gated, self.heads, self.inner = code, gated, config.num_attention_heads, inner
        own = nn.Module()
        for name in ("query", "key", "value"):
            setattr(own, name, nn.Linear(hidden, hidden))
        if code:
            own.layer_norm_q, own.layer_norm_k = nn.LayerNorm(hidden, eps), nn.LayerNorm(hidden, eps)
            self.layer_norm_1, self.layer_norm_2 = nn.LayerNorm(hidden, eps), nn.LayerNorm(hidden, eps)
        self.attention = nn.Module()
        self.attention.self = own
        self.attention.output = nn.Module()
        self.attention.output.dense = nn.Linear(hidden, hidden)
        self.attention.output.LayerNorm = nn.LayerNorm(hidden, eps)
        self.mlp = nn.Module()
        if code:
            self.mlp.up_gated_layer = nn.Linear(hidden, 2 * inner, bias=False)
            self.mlp.down_layer = nn.Linear(inner, hidden)
        elif gated:
            self.mlp.gated_layers = nn.Linear(hidden, 2 * inner, bias=False)
            self.mlp.wo = nn.Linear(inner, hidden)
            self.mlp.layernorm = nn.LayerNorm(hidden, eps)
        else:
            self.intermediate, self.output = nn.Module(), nn.Module()
            self.intermediate.dense = nn.Linear(hidden, inner)
            self.output.dense = nn.Linear(inner, hidden)
            self.output.LayerNorm = nn.LayerNorm(hidden, eps)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        out = self.attention.output
        attended = out.LayerNorm(out.dense(self._attend(x, bias)) + x)
        if self.code:
            x = self.layer_norm_1(x + attended)
            up, gate = self.mlp.up_gated_layer(x).split(self.inner, dim=-1)
            return self.layer_norm_2(x + self.mlp.down_layer(up * F.gelu(gate)))  # type: ignore[no-any-return]
        if self.gated:
            gate, up = self.mlp.gated_layers(attended).split(self.inner, dim=-1)
            return self.mlp.layernorm(self.mlp.wo(F.gelu(gate) * up) + attended)  # type: ignore[no-any-return]
        inner = F.gelu(self.intermediate.dense(attended))
        return self.output.LayerNorm(self.output.dense(inner) + attended)  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, bias: Tensor) -> Tensor:
        own = self.attention.self
        query, key, value = own.query(x), own.key(x), own.value(x)
        if self.code:
            query, key = own.layer_norm_q(query), own.layer_norm_k(key)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


class _Encoder(nn.Module):
    def __init__(self, config: Any, code: bool, gated: bool) -> None:
        super().__init__()
        layers = (_Layer(config, code, gated) for _ in range(config.num_hidden_layers))
        self.layer = nn.ModuleList(layers)
        self.heads = config.num_attention_heads

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Output:
        place = torch.arange(hidden.shape[1])
        distance = (place[None] - place[:, None]).abs()
        bias = -torch.tensor(slopes_of(self.heads))[:, None, None] * distance
        for layer in self.layer:
            hidden = layer(hidden, bias.to(hidden.dtype))
        return Output(last_hidden_state=hidden)


def _base(model: nn.Module) -> Any:
    return getattr(model, "bert", model)


def install(model: nn.Module, *, code: bool = False, gated: bool = True) -> None:
    """Put the encoder into a BERT model of transformers."""
    base = _base(model)
    base.encoder = _Encoder(base.config, code, gated)


def drop_positions(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "position_embeddings" not in name}


def zero_positions(model: nn.Module) -> None:
    _base(model).embeddings.position_embeddings.weight.data.zero_()
