"""A case for every family that supports tensor parallelism: the architecture, and changes to `SIZES`."""

from __future__ import annotations

from typing import Any

NAMED = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}  # DistilBERT
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROWTH = {"rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}}
NOMIC_EXPERTS = {"activation_function": "gelu", "num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2}
NOMIC = {"rotary_emb_fraction": 1.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertModel", {"embedding_size": 16}),
    "bert": ("BertModel", {}),
    "distilbert": ("DistilBertModel", NAMED),
    "electra": ("ElectraModel", {"embedding_size": 16}),
    "mpnet": ("MPNetModel", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "eurobert": ("EuroBertModel", {}),
    "gte": ("GteModel", {}),
    "new": ("NewModel", {}),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1}),
    "xlm-roberta flash": ("XLMRobertaModel", {"pad_token_id": 1, "use_flash_attn": True}),
    "modernbert": ("ModernBertModel", {"local_attention": 16, "attention_bias": True, "mlp_bias": True}),
    "nomic": ("NomicBertModel", {}),
    "nomic moe": ("NomicBertModel", NOMIC | NOMIC_EXPERTS),
    "exaone4": ("Exaone4Model", {}),
    "gemma": ("GemmaModel", {}),
    "gemma2": ("Gemma2Model", {"sliding_window": 20}),
    "gemma3": ("Gemma3TextModel", {"sliding_window": 20}),
    "gemma3 tower": ("Gemma3ForConditionalGeneration", {"sliding_window": 20}),
    "granite": ("GraniteModel", {"residual_multiplier": 0.5, "attention_bias": True}),
    "gritlm": ("GritLM", {}),
    "jina ranking": ("JinaForRanking", {}),
    "llama": ("LlamaModel", {"attention_bias": True, "mlp_bias": True}),
    "llama both ways": ("LlamaBidirectionalModel", {}),
    "ministral3": ("Ministral3Model", GROWTH),
    "mistral": ("MistralModel", {"sliding_window": 20}),
    "mistral3 tower": ("Mistral3ForConditionalGeneration", {"text_model_type": "mistral"}),
    "phi3": ("Phi3Model", {}),
    "qwen2": ("Qwen2Model", {}),
    "qwen3": ("Qwen3Model", {}),
    "qwen3 moe": ("Qwen3MoeModel", EXPERTS),
    "qwen3 moe, some layers": ("Qwen3MoeModel", EXPERTS | {"mlp_only_layers": [1]}),
    "smollm3": ("SmolLM3Model", {}),
    "voyage": ("VoyageQwen3BidirectionalEmbed", {"num_labels": 16}),
}


# Cases for four ranks: two key heads for four ranks, experts, and heads without groups.
FOUR_RANKS = ("bert", "llama", "phi3", "qwen3 moe", "nomic moe")
