"""Small seeded checkpoints of decoder families in their real layouts, with transformers as the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import processors
from torch import nn

from tests.parity.lfm2 import look_both_ways
from tests.parity.reference import Vectors, byte_level_bpe

VOCABULARY = 400
LIMIT = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
MINISTRAL = {
    "head_dim": 16,
    "sliding_window": 10,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 6}
GEMMA_TOWER = {
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "sliding_window": 10,
    "sliding_window_pattern": 2,
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 20,
    "embedding_dim": 56,
}
LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.2,
}
GRANITE = {
    "embedding_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "mlp_bias": True,
}
OLMO3 = {
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}
EXAONE4 = {"sliding_window": 9, "sliding_window_pattern": 2, "num_hidden_layers": 4, "head_dim": 16}
GPT_OSS = {
    "head_dim": 16,
    "sliding_window": 9,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "swiglu_limit": 0.8,
    "rope_parameters": YARN | {"truncate": False},
}
IMAGES = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": LIMIT, "n_inner": 80}
MOE = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
MINISTRAL3 = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.6,
    },
}
PPLX = {
    "architectures": ["PPLXQwen3Model"],
    "model_type": "bidirectional_pplx_qwen3",
    "use_bidirectional_attention": True,
}
CAPPED = GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0, "sliding_window": 12}


@dataclass(frozen=True)
class Family:
    """A transformers class, its special settings, and further keys of config.json."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    says: dict[str, Any] = field(default_factory=dict)
    full: bool = False  # the reference uses bidirectional attention
    old: bool = False  # config.json in the older form of files on the hub
    nested: bool = False  # the sizes belong to a nested text config
    outer: dict[str, Any] = field(default_factory=dict)  # keys of the configuration outside the text tower's
    adjust: Callable[[Any], None] = lambda model: None  # adds a variant that transformers lacks

    def write(self, folder: Path, seed: int = 0, **settings: Any) -> Path:
        kind = getattr(transformers, self.model)
        values = SIZES | self.settings | settings
        options = {"text_config": values, **self.outer} if self.nested else values
        model = kind(kind.config_class(**options)).eval()
        randomise(model, seed)
        model.save_pretrained(folder)
        change_config(folder, lambda config: (old_form(config) if self.old else config) | self.says)
        write_tokenizer(folder)
        return folder


FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3Model", {"head_dim": 16}),
    "qwen3-causal-lm": Family("Qwen3ForCausalLM", {"head_dim": 12, "tie_word_embeddings": True}, old=True),
    "qwen3-bias-yarn": Family(
        "Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True, "rope_parameters": YARN}, old=True
    ),
    "qwen3-windows": Family(
        "Qwen3Model",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        old=True,
    ),
    "qwen2": Family("Qwen2Model", old=True),
    "qwen2-causal-lm": Family("Qwen2ForCausalLM", {"num_key_value_heads": 3}),
    "qwen2-windows": Family(
        "Qwen2Model", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    ),
    "llama": Family("LlamaModel", {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}, old=True),
    "llama3": Family("LlamaForCausalLM", {"head_dim": 16, "rope_parameters": LLAMA3}, old=True),
    "llama-biases": Family(
        "LlamaModel", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 10}
    ),
    "llama-linear-rope": Family(
        "LlamaModel", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, old=True
    ),
    "mistral": Family("MistralModel", {"sliding_window": 16, "rms_norm_eps": 1e-5}, old=True),
    "mistral-no-window": Family("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    "ministral": Family("MinistralModel", MINISTRAL),
    "gemma": Family("GemmaModel", {"head_dim": 16}, old=True),
    "gemma2": Family("Gemma2Model", CAPPED),
    "gemma3": Family("Gemma3TextModel", GEMMA),
    "gemma3-causal-lm": Family("Gemma3ForCausalLM", GEMMA | {"attention_bias": True}, old=True),
    "embeddinggemma": Family("Gemma3TextModel", GEMMA | {"use_bidirectional_attention": True}, old=True),
    "embeddinggemma-new": Family(
        "Gemma3TextModel", GEMMA | {"use_bidirectional_attention": True, "sliding_window": 31}
    ),
    "embeddinggemma2": Family("EmbeddingGemma2Model", GEMMA_TOWER, {"image_token_id": 9}, nested=True),
    "lfm2-causal-lm": Family(
        "Lfm2ForCausalLM", LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
    ),
    "lfm2-bidirectional": Family(
        "Lfm2Model", LFM2, {"architectures": ["Lfm2BidirectionalModel"]}, adjust=look_both_ways
    ),
    "granite": Family("GraniteModel", GRANITE),
    "smollm3": Family("SmolLM3Model", {"no_rope_layer_interval": 2, "attention_bias": True}, old=True),
    "olmo3": Family("Olmo3Model", OLMO3),
    "gpt-oss": Family("GptOssModel", GPT_OSS),
    "privacy-filter": Family("OpenAIPrivacyFilterModel", GPT_OSS),
    "gpt2": Family("GPT2Model", GPT2),
    "phi3": Family("Phi3Model"),
    "qwen3-moe": Family("Qwen3MoeModel", MOE),
    "nemotron": Family(
        "LlamaModel",
        {"rope_parameters": LLAMA3},
        {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "pooling": "avg"},
        full=True,
        old=True,
    ),
    "gritlm": Family(
        "MistralForCausalLM", {"sliding_window": 16}, {"architectures": ["GritLM"]}, full=True, old=True
    ),
    "eurobert": Family("EuroBertModel", {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}, old=True),
    "eurobert-masked-lm": Family("EuroBertForMaskedLM", {"attention_bias": True, "mlp_bias": True}),
    "ministral3": Family("Ministral3ForCausalLM", MINISTRAL3),
    "ministral3-embed": Family(
        "Ministral3Model", MINISTRAL3 | {"is_causal": False, "sliding_window": None}, {"pooling": "avg"}
    ),
    "pplx": Family("Qwen3Model", {"head_dim": 16}, PPLX, full=True),
    "qwen2-looking-ahead": Family("Qwen2ForCausalLM", {"is_causal": False}, old=True),
    "mistral-looking-ahead": Family("MistralModel", {"is_causal": False, "sliding_window": 8}, old=True),
}
# Layouts that only the parity table covers.
MORE_FAMILIES: dict[str, Family] = {
    "lfm2": Family("Lfm2Model", LFM2),
    "exaone4-windows": Family("Exaone4Model", EXAONE4),
    "gemma3-tower": Family("Gemma3ForConditionalGeneration", GEMMA, nested=True, outer=IMAGES),
    "embeddinggemma2-text": Family("EmbeddingGemma2TextModel", GEMMA_TOWER | {"attention_bias": True}),
    "smollm3-windows": Family(
        "SmolLM3Model", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9}
    ),
    "exaone4": Family("Exaone4Model", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "mistral3-tower": Family(
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        nested=True,
        outer=IMAGES | {"tie_word_embeddings": False},
    ),
    "olmo2": Family("Olmo2Model", {"attention_bias": True}),
}
LOOK_AHEAD = (
    "embeddinggemma",
    "nemotron",
    "gritlm",
    "eurobert",
    "ministral3-embed",
    "pplx",
    "qwen2-looking-ahead",
    "mistral-looking-ahead",
    "lfm2-bidirectional",
    "privacy-filter",
)


def randomise(model: nn.Module, seed: int) -> None:
    """Set every parameter far from its usual initial value, at a scale that preserves the signal's
    strength."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            plain = "norm" in name and type(model).__name__[:5] != "Gemma"  # Gemma adds one to these
            parameter.data = 0.3 * noise + (1 if plain else 0)
        else:
            parameter.data = noise * (1 if "embed" in name else 0.8 * parameter.shape[1] ** -0.5)


def change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def old_form(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration in the form that preceded `rope_parameters`."""
    rope, old = config.pop("rope_parameters"), dict(config)
    old["torch_dtype"] = old.pop("dtype", "float32")
    old.pop("layer_types", None)
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    return old


def write_tokenizer(folder: Path, frame: str = "$A </s>") -> None:
    """Write a tokenizer that frames texts by `frame`; by default as Qwen's, with only an end token."""
    tokenizer = byte_level_bpe()
    special = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=special)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=LIMIT, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)


def make_rows() -> list[list[int]]:
    draw = np.random.default_rng(7)
    lengths = [1, 2, 3, 9, 16, 17, 33, 33, 64, 120, 200]
    return [draw.integers(5, VOCABULARY, length).tolist() for length in lengths]


ROWS = make_rows()


def backbone(family: Family) -> Any:
    if family.model.endswith("ForConditionalGeneration"):
        return getattr(transformers, family.model)
    name = (
        family.model.replace("ForCausalLM", "Model")
        .replace("ForMaskedLM", "Model")
        .replace("Gemma3Model", "Gemma3TextModel")
    )
    return getattr(transformers, name)


def open_backbone(family: Family, folder: Path) -> nn.Module:
    model: nn.Module = backbone(family).from_pretrained(folder, dtype=torch.float32).eval()
    family.adjust(model)
    if family.model.endswith("ForConditionalGeneration"):
        model = model.model.language_model  # type: ignore[union-attr,assignment]
    return model


@torch.inference_mode()
def states_of(model: nn.Module, full: bool) -> list[Vectors]:
    """Run each row alone, so that there is no padding. `full` makes attention bidirectional."""
    found = []
    for row in ROWS:
        mask = None
        if full:
            mask = torch.zeros(1, 1, len(row), len(row), dtype=next(model.parameters()).dtype)
        states = model(input_ids=torch.tensor([row]), attention_mask=mask).last_hidden_state
        found.append(states[0].float().numpy())
    return found


def reference_states(family: Family, folder: Path) -> list[Vectors]:
    return states_of(open_backbone(family, folder), family.full)


def unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


HEADS = {
    "qwen3": Family("Qwen3ForSequenceClassification", {"head_dim": 16}),
    "qwen2": Family("Qwen2ForSequenceClassification", old=True),
    "llama": Family("LlamaForSequenceClassification", {"rope_parameters": LLAMA3}, old=True),
    "mistral": Family("MistralForSequenceClassification", {"sliding_window": 16}),
    "ministral": Family("MinistralForSequenceClassification", MINISTRAL),
    "gemma3": Family("Gemma3TextForSequenceClassification", GEMMA),
    "reward": Family("Qwen2ForSequenceClassification", {"num_labels": 1}),
    "qwen3-tokens": Family("Qwen3ForTokenClassification", {"head_dim": 16}, old=True),
    "qwen2-tokens": Family("Qwen2ForTokenClassification"),
    "llama-tokens": Family("LlamaForTokenClassification", {"num_labels": 9}),
    "mistral-tokens": Family("MistralForTokenClassification", {"sliding_window": 16}),
    "ministral-tokens": Family("MinistralForTokenClassification", MINISTRAL),
    "ministral3": Family("Ministral3ForSequenceClassification", MINISTRAL3),
    "ministral3-tokens": Family("Ministral3ForTokenClassification", MINISTRAL3),
    "eurobert": Family("EuroBertForSequenceClassification"),
    "eurobert-bos": Family("EuroBertForSequenceClassification", {"classifier_pooling": "bos"}),
    "eurobert-mean": Family("EuroBertForSequenceClassification", {"classifier_pooling": "mean"}),
    "eurobert-tokens": Family("EuroBertForTokenClassification"),
    "gpt-oss-tokens": Family("GptOssForTokenClassification", GPT_OSS),
    "privacy-filter-tokens": Family("OpenAIPrivacyFilterForTokenClassification", GPT_OSS),
}
LANGUAGE_HEADS = {  # language-model heads for SPLADE
    "eurobert": Family("EuroBertForMaskedLM", {"mlp_bias": True}),
    "eurobert-tied": Family("EuroBertForMaskedLM", {"tie_word_embeddings": True}, old=True),
    "qwen3": FAMILIES["qwen3-causal-lm"],
    "qwen2-looking-ahead": FAMILIES["qwen2-looking-ahead"],
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 16}),
    "gemma2": Family("Gemma2ForCausalLM", CAPPED),  # caps its logits
    "phi3": Family("Phi3ForCausalLM"),
}
MORE_HEADS = {
    "smollm3": Family("SmolLM3ForSequenceClassification"),
    "olmo3": Family("Olmo3ForSequenceClassification", OLMO3),
}
NEMOTRON_RERANKER = Family(  # pools before the projection, and divides by a temperature
    "LlamaForSequenceClassification",
    {"num_labels": 1},
    {
        "architectures": ["LlamaBidirectionalForSequenceClassification"],
        "model_type": "llama_bidirec",
        "pooling": "avg",
        "temperature": 0.2,
    },
    full=True,
)
