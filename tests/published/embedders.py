"""Published embedders that decoders serve and whose code comes with their weights."""

from __future__ import annotations

from tests.published.catalog import Json, Published, Reads, modules, pooling
from tests.published.decoders import qwen3

TASKS = ["retrieval", "text-matching", "clustering", "classification"]
ADAPTER: dict[str, Json] = {
    "alpha_pattern": {},
    "bias": "none",
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": "gaussian",
    "layer_replication": None,
    "layers_to_transform": None,
    "lora_alpha": 32,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 32,
    "rank_pattern": {},
    "target_modules": ["gate_proj", "v_proj", "q_proj", "down_proj", "o_proj", "k_proj", "up_proj"],
    "task_type": "FEATURE_EXTRACTION",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}


def eurobert(kind: str, **more: Json) -> dict[str, Json]:
    return {
        "architectures": [kind],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_dropout": 0.0,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "is_decoder": False,
        "mask_token_id": 128002,
        "max_position_embeddings": 8192,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "num_key_value_heads": 12,
        "pad_token_id": 128001,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    } | more


EMBEDDERS = (
    Published(
        id="EuroBERT/EuroBERT-210m",
        config=eurobert("EuroBertForMaskedLM", model_type="eurobert", rope_theta=250000, clf_pooling="late"),
        reads=Reads(task="embed", score="bi", max_tokens=8192),
    ),
    Published(
        id="jinaai/jina-embeddings-v5-text-nano",
        config=eurobert(
            "JinaEmbeddingsV5Model", model_type="jina_embeddings_v5", rope_theta=1000000, task_names=TASKS
        ),
        files={
            "modules.json": [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}],
            "config_sentence_transformers.json": {
                "prompts": {"query": "Query: ", "document": "Document: "},
                "default_prompt_name": "document",
            },
            **{f"adapters/{task}/adapter_config.json": ADAPTER for task in TASKS},
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=768,
            pooling=("last",),
            normalize=True,
            max_tokens=8192,
            prompts={"query": "Query: ", "document": "Document: "},
            default_prompt="document",
            adapters=tuple(TASKS),
        ),
    ),
    Published(
        id="perplexity-ai/pplx-embed-v1-0.6b",
        config=qwen3(
            1024,
            28,
            kind="PPLXQwen3Model",
            model_type="bidirectional_pplx_qwen3",
            use_bidirectional_attention=True,
            max_position_embeddings=32768,
            vocab_size=151936,
        ),
        files={
            "modules.json": [
                *modules("Transformer", "Pooling"),
                {"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer"},
            ],
            "1_Pooling/config.json": pooling("mean_tokens", 1024),
        },
        reads=Reads(
            task="embed", score="bi", dimension=1024, pooling=("mean",), normalize=False, max_tokens=32768
        ),
    ),
)
