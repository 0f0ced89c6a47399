"""Keys of config.json that change what a model computes.

Values that a family's implementation does not support are refused here, before anything is built. Keys that
nothing reads and that are not listed as harmless are reported once, when the model is loaded. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.families import Family
from penstock.checkpoint.files import shown
from penstock.errors import ModelLoadError

Accepted = Mapping[str, tuple[Any, ...]]  # supported values of each key; null always is

_ANY: Accepted = {
    "pruned_heads": ({}, []),
    "add_cross_attention": (False,),
    "mask_non_image_embeddings": (False,),
}
_ENCODER: Accepted = {"is_decoder": (False,), "is_causal": (False,)}
_CAUSAL: Accepted = {"use_bidirectional_attention": (False,)}  # transformers ignores it for these families
_PLAIN_LOGITS: Accepted = {"final_logit_softcapping": (), "logits_scaling": (1,)}
_QWEN2_VL = (
    *("qwen2_vl", "qwen2_5_vl", "BiQwen2", "BiQwen2_5", "ColQwen2", "ColQwen2_5", "GmeQwen2VL"),
    "JinaEmbeddingsV4",
)
_QWEN3_VL = ("qwen3_vl", "BiQwen3", "ColQwen3")
# hidden_act "gelu" is a mistake in Gemma's first files; transformers uses the tanh form for it.
_GEMMA_ACT: Accepted = {
    "hidden_act": ("gelu", "gelu_pytorch_tanh"),
    "hidden_activation": ("gelu_pytorch_tanh",),
}
_BY_FAMILY: dict[str, Accepted] = {
    # Both are constants in transformers, whatever config.json says.
    "mpnet": {"pad_token_id": (1,), "relative_attention_num_buckets": (32,)},
    "gemma": {**_GEMMA_ACT, **_PLAIN_LOGITS},
    # A whole row is a prefix, in which transformers attends in both directions, whatever config.json says.
    "ColPali": {**_GEMMA_ACT, "use_bidirectional_attention": (True,), "is_causal": (False,)},
    "exaone4": {**_CAUSAL, **_PLAIN_LOGITS},
    "gemma2": {**_CAUSAL, "logits_scaling": (1,)},
    "gpt_oss": {**_CAUSAL, **_PLAIN_LOGITS},
    "granite": _CAUSAL,
    "lfm2": {**_CAUSAL, **_PLAIN_LOGITS, "is_causal": (True,)},  # its convolutions are causal
    "gpt2": {**_CAUSAL, **_PLAIN_LOGITS},
    "llama": {**_CAUSAL, **_PLAIN_LOGITS},
    "ministral": {**_CAUSAL, **_PLAIN_LOGITS},
    "ministral3": {**_CAUSAL, **_PLAIN_LOGITS},
    "mistral": {**_CAUSAL, **_PLAIN_LOGITS},
    "olmo2": {**_CAUSAL, **_PLAIN_LOGITS},
    # transformers applies any other base only to full attention, which no model intends.
    "olmo3": {**_CAUSAL, **_PLAIN_LOGITS, "rope_theta": (500_000,)},
    "phi3": {**_CAUSAL, **_PLAIN_LOGITS},
    "qwen2": {**_CAUSAL, **_PLAIN_LOGITS},
    "qwen3": {**_CAUSAL, **_PLAIN_LOGITS},
    **{name: {**_CAUSAL, **_PLAIN_LOGITS} for name in _QWEN2_VL},
    **{name: {**_CAUSAL, **_PLAIN_LOGITS, "use_sliding_window": (False,)} for name in _QWEN3_VL},
    "smollm3": {**_CAUSAL, **_PLAIN_LOGITS},
    "qwen3_moe": {**_CAUSAL, **_PLAIN_LOGITS, "use_sliding_window": (False,)},
}
# In transformers, all layers of these have the same attention: it ignores layer_types.
_UNIFORM_FAMILIES = frozenset(("eurobert", "gemma", "granite", "llama", "llama_bidirec", *_QWEN3_VL))


_MODERNBERTS = ("modernbert", "modernvbert", "ColModernVBert")


def check_keys(file: Path, family: Family, config: Mapping[str, Any]) -> None:
    """Refuse values that the family's implementation would compute differently from the reference."""
    tables = [_ANY, *([] if family.is_decoder else [_ENCODER]), _BY_FAMILY.get(family.name, {})]
    for key, accepted in (pair for table in tables for pair in table.items()):
        value = config.get(key)
        if value is None or any(value == other for other in accepted):
            continue
        if key == "use_bidirectional_attention" and isinstance(config.get("is_causal"), bool):
            continue  # is_causal takes precedence
        raise _unsupported(file, key, value, _words(accepted, key))
    _check_layer_types(file, family, config)
    if family.name in _MODERNBERTS:
        _check_window(file, config)
    if family.name in _T5_KINDS:
        _check_t5_activation(file, config, _T5_KINDS[family.name])


def _check_layer_types(file: Path, family: Family, config: Mapping[str, Any]) -> None:
    types = config.get("layer_types")
    if not isinstance(types, list):
        return
    wanted = "full_attention" if family.name in _UNIFORM_FAMILIES else None
    if family.name == "phi3":
        wanted = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
    if wanted is not None and any(kind != wanted for kind in types):
        raise _unsupported(file, "layer_types", types, f"{wanted} in all layers of a {family.name} model")


def _check_window(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a `sliding_window` that is not half of `local_attention`, which it repeats."""
    window, both_sides = config.get("sliding_window"), config.get("local_attention", 128)
    if window is not None and window != both_sides // 2:
        supported = f"{both_sides // 2}, half of local_attention; set local_attention instead"
        raise _unsupported(file, "sliding_window", window, supported)


_T5_KINDS = {"t5": "relu", "mt5": "gated-gelu"}  # defaults of feed_forward_proj


def _check_t5_activation(file: Path, config: Mapping[str, Any], default: str) -> None:
    """Refuse a `dense_act_fn` or `is_gated_act` that contradicts `feed_forward_proj`."""
    kind = str(config.get("feed_forward_proj", default))
    act = "gelu_new" if kind == "gated-gelu" else kind.rpartition("-")[2]
    for key, wanted in (("dense_act_fn", act), ("is_gated_act", kind.startswith("gated-"))):
        if config.get(key) not in (None, wanted):
            raise _unsupported(file, key, config[key], f"{wanted!r}, as feed_forward_proj = {kind!r} says")


def _words(accepted: tuple[Any, ...], key: str) -> str:
    if key == "use_bidirectional_attention":
        return (
            "false, because transformers does not read it for this architecture; if tokens see later ones, "
            """say so with --hf-overrides '{"is_causal": false}'"""
        )
    return ", ".join(map(repr, accepted)) or "null"


def _unsupported(file: Path, key: str, value: Any, supported: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file} has {key} = {shown(value)}, which is not supported; supported: {supported}", param="model"
    )


class ReadKeys(dict[str, Any]):
    """A configuration that records which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def unknown(self, family: Family) -> dict[str, Any]:
        """Keys with a true value that nothing has read, and that are not listed as harmless."""
        known = self.read | _KNOWN | set(_UNUSED_BY_FAMILY.get(family.name, "").split())
        if family.is_nested:
            known |= _OTHER_TOWERS
        return {
            key: value
            for key, value in self.items()
            if value and key not in known and not key.startswith("_") and not key.endswith(_TOKEN_SUFFIXES)
        }


# Read by other modules of `checkpoint`, or checked above.
_READ_ELSEWHERE = """
text_model_type vlm_model_type add_cross_attention architectures auto_map classifier_from_token eos_token_id
final_logit_softcapping id2label is_causal is_decoder is_original_qwen3_reranker label2id lora_adaptations
lora_alpha lora_rank max_trained_positions model_type num_labels pad_token_id pooling problem_type
pruned_heads load_trained_adapters lora_prompts quantization_config sbert_ce_default_activation_function
score_template sentence_transformers type_vocab_size use_bidirectional_attention vocab_size
"""
# Missing or superfluous tensors reveal these: no such weight is left unread.
_SHOWN_BY_TENSORS = """
attention_bias classifier_bias decoder_bias lm_head_bias mlp_bias norm_bias qkv_bias tie_encoder_decoder
tie_weights_ tie_word_embeddings use_qk_norm
"""
# Keys for training, generation defaults, libraries and token ids, and second names of sizes.
_HARMLESS = """
attention_dropout attention_probs_dropout_prob attn_dropout attn_pdrop classifier_dropout
classifier_dropout_prob cls_dropout dropout dropout_rate embd_pdrop embedding_dropout hidden_dropout
hidden_dropout_prob lora_dropout_p mlp_dropout pooler_dropout qa_dropout resid_pdrop seq_classif_dropout
summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type
summary_use_proj deterministic_flash_attn finetuning_task fused_bias_fc fused_dropout_add_ln
gradient_checkpointing initializer_cutoff_factor initializer_factor initializer_range output_router_logits
repad_logits_with_grad router_aux_loss_coef sparse_pred_ignore_index sparse_prediction sinusoidal_pos_embds
use_xentropy bad_words_ids begin_suppress_tokens bos_token_id cls_token_id decoder_start_token_id
diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
forced_bos_token_id forced_eos_token_id length_penalty mask_token_id max_length min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
sep_token_id suppress_tokens top_k top_p typical_p unk_token_id attn_implementation classifier_pooling
clf_pooling chunk_size_feed_forward dtype is_encoder_decoder is_llama_config language matryoshka_dimensions
model_max_length moe_impl output_attentions output_hidden_states output_past output_scores prefix
pretraining_tp reference_compile return_dict return_dict_in_generate task_specific_params tf_legacy_loss
tokenizer_class torch_dtype torchscript transformers.js_config transformers_version truncate_dim
unpad_inputs use_bfloat16 use_cache use_flash_attn use_memory_efficient_attention cache_implementation
dense_seq_output directionality layer_norm_eps logn_attention_clip1 max_position_embeddings n_ctx
original_max_position_embeddings pooler_fc_size pooler_num_attention_heads pooler_hidden_act
pooler_num_fc_layers pooler_size_per_head pooler_type position_embedding_type sliding_window
max_window_layers rope_theta sliding_window_pattern use_sliding_window
"""
_TOKEN_SUFFIXES = ("_token_id", "_token_ids", "_token_index")
_OTHER_TOWERS = frozenset(("audio_config", "mm_tokens_per_image", "vision_config"))
_CLIP = "logit_scale_init_value text_config_dict vision_config_dict"
_LFM2 = """
block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init
conv_dim conv_use_xavier_init num_heads use_pos_enc
"""
_PAGE_DIM = "dim embed_dim embedding_dim"  # `pages` reads it
# Keys that other families read, but that this family's reference code does not.
_UNUSED_BY_FAMILY = {
    **dict.fromkeys(("ColQwen2", "ColQwen2_5", "ColQwen3"), _PAGE_DIM),
    "ColModernVBert": _PAGE_DIM + " classifier_activation",  # for heads that are not read
    "modernvbert": "classifier_activation",
    # The projector is one linear layer, and its tensor has the width. The last two keys are for training.
    "ColPali": _PAGE_DIM + " projection_dim num_image_tokens ignore_index",
    "clip": _CLIP,
    "albert": "down_scale_factor gap_size net_structure_type num_memory_blocks",
    "gpt_oss": "experts_per_token initial_context_length",  # given twice
    "JinaEmbeddingsV4": "matryoshka_dims pretrained_peft_model_name_or_path verbosity",
    "JinaBert": "hidden_act",  # feed_forward_type names the activation
    "lfm2": _LFM2,
    "lfm2_bidirectional": _LFM2,
    "mt5": "n_positions num_decoder_layers",
    "nvembed": "add_pad_token padding_side",  # rows are never padded
    "t5": "n_positions num_decoder_layers",
}
_KNOWN = KNOWN_KEYS = frozenset((_READ_ELSEWHERE + _SHOWN_BY_TENSORS + _HARMLESS).split())
