"""GPT-2: pre-norm, learned positions, weights stored as inputs × outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.labels import label_count
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.attention import AttentionKind, attend
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.head import TaskHead
from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.mlp import MLP
from penstock.layers.norm import LayerNorm
from penstock.layers.residual import pre_norm_residual
from penstock.models.options import option, require
from penstock.types import Task

IGNORED = ("lm_head.", ".attn.bias", ".attn.masked_bias")


class GPT2Layer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(self, build: LayerBuilder, prefix: str, config: Mapping[str, Any], layer: int) -> None:
        hidden = config["n_embd"]
        inner = config.get("n_inner") or 4 * hidden
        act = config.get("activation_function", "gelu_new")
        self.qkv = _linear(build, prefix + "attn.c_attn", hidden, 3 * hidden)
        self.out = _linear(build, prefix + "attn.c_proj", hidden, hidden)
        up = _linear(build, prefix + "mlp.c_fc", hidden, inner, act)
        self.mlp = MLP(up, _linear(build, prefix + "mlp.c_proj", inner, hidden))
        self.mlp_norm = build.norm(prefix + "ln_2", hidden, config.get("layer_norm_epsilon", 1e-5))
        self.heads, self.layer = config["n_head"], layer
        scale = (hidden // self.heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
        if config.get("scale_attn_by_inverse_layer_idx"):
            scale /= layer + 1
        self.kind = AttentionKind(causal=True, scale=scale)

    def __call__(
        self, hidden: Tensor, normed: Activations, batch: Batch, next_norm: LayerNorm
    ) -> tuple[Tensor, Activations]:
        """The hidden states after this layer, plain and normalised by `next_norm`."""
        qkv = self.qkv(normed)
        query, key, value = qkv.view(qkv.shape[0], 3, self.heads, -1).unbind(1)
        context = attend(query, key, value, batch, self.kind, layer=self.layer)
        if self.is_last:
            context, hidden = batch.select_outputs(context, hidden)
        hidden, normed = pre_norm_residual(self.out, self.mlp_norm, context, hidden)
        return pre_norm_residual(self.mlp, next_norm, normed, hidden)


class GPT2:
    """token ids → hidden states after the last norm, [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, config: Mapping[str, Any]) -> None:
        require(config, add_cross_attention=False, reorder_and_upcast_attn=False, is_causal=True)
        hidden, layers, eps = config["n_embd"], config["n_layer"], config.get("layer_norm_epsilon", 1e-5)
        prefix = build.weights.prefix_of("wte.weight")
        positions = option(config, "n_positions", "n_ctx")
        self.embedding = build.table(prefix + "wte", config["vocab_size"], hidden)
        self.adapted_words = build.adapted_table(prefix + "wte", self.embedding)
        self.positions = build.table(prefix + "wpe", positions, hidden)
        self.layers = [GPT2Layer(build, f"{prefix}h.{i}.", config, i) for i in range(layers)]
        self.layers[-1].is_last = True
        names = [*(f"h.{i}.ln_1" for i in range(layers)), "ln_f"]
        self.norms = [build.norm(prefix + name, hidden, eps) for name in names]
        self.hidden_size = hidden
        self.is_causal = True
        self.prunes_last_layer = True
        self.kv_shape = (layers, config["n_head"], hidden // config["n_head"])
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self.embedding)
        if self.adapted_words is not None:
            self.adapted_words.change_(hidden, batch.token_ids)
        hidden += F.embedding(batch.positions, self.positions)
        normed: Activations = self.norms[0](hidden)
        for layer, next_norm in zip(self.layers, self.norms[1:], strict=True):
            hidden, normed = layer(hidden, normed, batch, next_norm)
        return dequantize(normed)


def gpt2(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> GPT2:
    model = GPT2(build, config)
    if head is not None:
        labels = label_count(config)
        per_token = head is Task.TOKEN_CLASSIFY
        score = build.linear(
            "classifier" if per_token else "score", model.hidden_size, labels, bias=per_token
        )
        model.heads[head] = TaskHead("all" if per_token else "last", score, labels)
    return model


def _linear(build: LayerBuilder, name: str, inputs: int, outputs: int, act: str = "identity") -> LinearLayer:
    weight = build.weights.take(f"{name}.weight", inputs, outputs).t().contiguous()
    layer = make_linear(weight, build.weights.take(f"{name}.bias", outputs), act, build.quantization)
    return build.adapted(layer, [name], [outputs], act, bias=True, is_transposed=True)
