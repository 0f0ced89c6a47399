"""NomicBERT: nomic-embed-text v1, v1.5 and v2-moe, and models fine-tuned from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.families import FAMILIES
from penstock.checkpoint.limits import max_positions
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.moe import ExpertShape
from penstock.models.heads import NOMIC_MLM, MaskedLMShape, add_masked_lm_head, add_pooler_head
from penstock.models.options import option, require, rope_options
from penstock.models.rotary_encoder import RotaryEncoder, Shape, TensorNames, ported
from penstock.types import Task

GATED = TensorNames(
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),  # the gate is the second of the two
    down="mlp.fc2",
    output_norm="norm2",
    embedding_norm="emb_ln",
)
PLAIN = replace(GATED, up=("mlp.fc1",))
PORTED = ported(up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj")
GATES = {"glu": "sigmoid", "geglu": "gelu", "swiglu": "silu"}
IGNORED = ("pooler.", "cls.")


def nomic(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> RotaryEncoder:
    require(
        config,
        prenorm=False,
        causal=False,
        parallel_block=False,
        parallel_block_tied_norm=False,
        use_rms_norm=False,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
    )
    if config.get("rotary_emb_scale_base") is not None:
        raise ModelLoadError("config.json sets rotary_emb_scale_base, which is not supported")
    shape = _shape(config)
    layouts = (GATED, PORTED) if shape.gated else (PLAIN,)
    model = RotaryEncoder(build, shape, layouts, IGNORED)
    add_pooler_head(model, build, config, head)
    if head is Task.SPARSE:
        head_shape = MaskedLMShape(names=NOMIC_MLM, act=shape.act, eps=shape.eps)
        add_masked_lm_head(model, build, config, model.embedding.words, head_shape)
    return model


def _shape(config: Mapping[str, Any]) -> Shape:
    hidden, heads = option(config, "hidden_size", "n_embd"), option(config, "num_attention_heads", "n_head")
    require(config, head_dim=hidden // heads)
    # Only the original code sets activation_function; the port always has SwiGLU without biases.
    act = config.get("activation_function")
    original = act is not None
    fraction = float(option(config, "rotary_emb_fraction", default=0.0 if original else 1.0))
    if not 0 < fraction <= 1:
        raise ModelLoadError(f"config.json has rotary_emb_fraction = {fraction}; it has to be in (0, 1]")
    multiple = config.get("pad_vocab_size_multiple") or 1
    return Shape(
        hidden=hidden,
        layers=option(config, "num_hidden_layers", "n_layer"),
        heads=heads,
        intermediate=option(config, "intermediate_size", "n_inner", default=4 * hidden),
        vocabulary=-(-config["vocab_size"] // multiple) * multiple,
        positions=max_positions(FAMILIES["nomic_bert"], config),
        segments=config.get("type_vocab_size", 2),
        act=config.get("hidden_act", "silu") if act is None else GATES.get(act, act),
        eps=option(config, "layer_norm_eps", "layer_norm_epsilon", default=1e-12),
        rope=rope_options(config, "rotary_emb_base", default=10_000)
        if original
        else rope_options(config, "rope_theta", default=1000),
        rope_fraction=fraction,
        rope_interleaved=bool(config.get("rotary_emb_interleaved")),
        gated=not original or act in GATES,
        qkv_bias=bool(config.get("qkv_proj_bias", original)),
        out_bias=bool(config.get("qkv_proj_bias", original)),
        up_bias=bool(config.get("mlp_fc1_bias", original)),
        down_bias=bool(config.get("mlp_fc2_bias", original)),
        **_experts(config, option(config, "num_hidden_layers", "n_layer")),
    )


def _experts(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The experts, which are in every n-th layer from the second on. Expert weights are a softmax over all
    experts, so the weights of a token's chosen experts sum to less than one."""
    count, step = config.get("num_experts") or 0, config.get("moe_every_n_layers") or 0
    if not count and not step:
        return {}
    chosen = config.get("moe_top_k", 1)
    act = config.get("activation_function")
    if act is None or act in GATES:
        raise ModelLoadError(
            f"config.json has num_experts = {count} with activation_function = {act!r}, which is not "
            f"supported; experts are supported with one that has no gate, such as 'gelu'"
        )
    require(
        config,
        num_shared_experts=0,
        expert_choice_router=False,
        moe_normalize_expert_weights=False,
        ffn_div=1,
        mlp_fc1_bias=True,
        mlp_fc2_bias=True,
    )
    if step < 2 or count < 1:
        raise ModelLoadError(
            f"config.json has num_experts = {count} and moe_every_n_layers = {step}, which is not supported; "
            "supported: at least 1 expert and every 2 layers or more"
        )
    if not 1 <= chosen <= count:
        raise ModelLoadError(
            f"config.json has moe_top_k = {chosen}; it has to be from 1 to num_experts = {count}"
        )
    inner = option(
        config, "intermediate_size", "n_inner", default=4 * option(config, "hidden_size", "n_embd")
    )
    return {
        "experts": ExpertShape(count, chosen, inner, normalize=False, gated=False),
        "expert_layers": frozenset(range(1, layers, step)),
    }
