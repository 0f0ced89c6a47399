"""Published models on Qwen2-VL, Qwen2.5-VL and Qwen3-VL. Their files are recorded from their model cards and
the code that comes with them. `source` names public copies of files and code."""

from __future__ import annotations

from typing import Any

from tests.published.catalog import Json, Published, Reads, modules
from tests.published.pages import PAGE_MODULES as _PAGE_MODULES

_TOKENS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
_TOKENS |= {"vision_end_token_id": 151653}
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
_MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
_VISION_2: Json = {
    "depth": 32,
    "embed_dim": 1280,
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_chans": 3,
    "hidden_size": 1536,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
}
_VISION_2_5: Json = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
_VISION_3: Json = {
    "deepstack_visual_indexes": [5, 11, 17],
    "depth": 24,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1024,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _processor(patch_size: int) -> dict[str, Json]:
    values = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch_size, "merge_size": 2}
    values |= {"temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    if patch_size == 16:  # of Qwen3-VL-Embedding and Qwen3-VL-Reranker
        edges = {"longest_edge": 1310720, "shortest_edge": 4096}
        values |= {"min_pixels": 4096, "max_pixels": 1310720, "size": edges}
    return {"preprocessor_config.json": values}


def _text(hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> dict[str, Json]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": _MROPE,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


_QWEN2 = _text(1536, 28, 12, 2, 8960) | _TOKENS | {"model_type": "qwen2_vl", "vision_config": _VISION_2}
_QWEN2_5 = (
    _text(2048, 36, 16, 2, 11008) | _TOKENS | {"model_type": "qwen2_5_vl", "vision_config": _VISION_2_5}
)
_JINA_V4_TEXT = {**_text(2048, 36, 16, 2, 11008), "max_position_embeddings": 128000}
_JINA_V4_TEXT |= {"model_type": "qwen2_5_vl_text", "rope_scaling": _MROPE | {"rope_type": "default"}}
_JINA_V4: Json = {
    **_TOKENS,
    "model_type": "qwen2_5_vl",
    "text_config": _JINA_V4_TEXT,
    "vision_config": _VISION_2_5,
    "task_names": ["retrieval", "text-matching", "code"],
    "multi_vector_projector_dim": 128,
    "single_vector_pool_strategy": "mean",
    "matryoshka_dims": [128, 256, 512, 1024, 2048],
    "truncate_dim": None,
}
_QWEN3_TEXT: dict[str, Any] = _text(2048, 28, 16, 8, 6144) | {
    "head_dim": 128,
    "attention_bias": False,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_vl_text",
    "rope_theta": 5000000,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}
_QWEN3: dict[str, Any] = {"model_type": "qwen3_vl", "text_config": _QWEN3_TEXT, "vision_config": _VISION_3}
_QWEN3 |= {"tie_word_embeddings": True} | _TOKENS
# A template like those of Qwen3-VL's repositories: messages, and for a reranker its own.
_CHAT = """{%- macro parts(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ parts(message.content) }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
RERANK = """{%- macro parts(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set task = namespace(text="Given a search query, retrieve relevant candidates that answer the query.") -%}
{%- for message in messages if message.role == "system" -%}
{%- set task.text = parts(message.content) -%}{%- endfor -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ task.text }}<Query>:
{%- for message in messages if message.role == "query" -%}{{ parts(message.content) }}{%- endfor -%}
{{ "\\n<Document>:" }}
{%- for message in messages if message.role == "document" -%}{{ parts(message.content) }}{%- endfor -%}
<|im_end|>
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _by_modality(output: str) -> dict[str, Json]:
    """`modality_config` of a model that reads texts, images and videos as messages."""
    way = {"method": "forward", "method_output_name": output}
    return {**dict.fromkeys(("text", "image", "video"), way), "message": way | {"format": "structured"}}


EMBEDDING_FILES: dict[str, Json] = {
    "modules.json": modules("Transformer", "Pooling", "Normalize"),
    "1_Pooling/config.json": {
        "pooling_mode": "lasttoken",
        "embedding_dimension": 2048,
        "include_prompt": True,
    },
    "config_sentence_transformers.json": {
        "model_type": "SentenceTransformer",
        "prompts": {"default": "Represent the user's input."},
        "default_prompt_name": "default",
        "similarity_fn_name": "cosine",
    },
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": _by_modality("last_hidden_state"),
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    },
    "tokenizer_config.json": {"chat_template": _CHAT, "model_max_length": 262144},
}
RERANKER_FILES: dict[str, Json] = {
    "modules.json": modules("Transformer", "LogitScore", LogitScore="1_LogitScore"),
    "1_LogitScore/config.json": {"true_token_id": 9693, "false_token_id": 2152},
    "config_sentence_transformers.json": {
        "activation_fn": "torch.nn.modules.linear.Identity",
        "default_prompt_name": "query",
        "model_type": "CrossEncoder",
        "prompts": {"query": "Retrieve text relevant to the user's query."},
    },
    "sentence_bert_config.json": {
        "transformer_task": "any-to-any",
        "modality_config": _by_modality("logits"),
        "module_output_name": "causal_logits",
        "unpad_inputs": False,
        "processing_kwargs": {"chat_template": {"chat_template": "reranker", "add_generation_prompt": True}},
    },
    "additional_chat_templates/reranker.jinja": RERANK.replace("\\\n", "").encode(),
    "tokenizer_config.json": {"chat_template": _CHAT, "model_max_length": 262144},
}


def _model(
    id: str, config: dict[str, Json], name: str, reads: Reads, patch_size: int = 14, **more: Any
) -> Published:
    files = _processor(patch_size) | more.pop("files", {})
    return Published(
        id=id,
        config=config | {"architectures": [name]},
        files=files,
        tokens=(*_SPECIAL, *map(str, reads.answers)),
        reads=reads,
        **more,
    )


def _last(dimension: int, max_tokens: int, **more: Any) -> Reads:
    return Reads(
        task="embed",
        dimension=dimension,
        pooling=("last",),
        normalize=True,
        max_tokens=max_tokens,
        causal=True,
        **more,
    )


QWEN_VL = (
    _model(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        _QWEN2_5,
        "Qwen2_5_VLForConditionalGeneration",
        _last(2048, 32768, generates=True),
    ),
    _model(
        "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct",
        _QWEN2,
        "GmeQwen2VL",
        _last(1536, 32768, score="bi", end=_ANSWER + "<|endoftext|>"),
        source="gme_inference.py and modeling_gme_qwen2vl.py of its repository; mteb gme_v_models.py, with 4 "
        "instead of 256 tokens",
    ),
    _model(
        "jinaai/jina-embeddings-v4",
        _JINA_V4,
        "JinaEmbeddingsV4Model",
        Reads(
            task="embed",
            score="bi",
            dimension=2048,
            pooling=("mean",),
            normalize=True,
            max_tokens=32768,
            causal=True,
            prompts={"query": "Query: ", "passage": "Passage: "},
            default_prompt="query",
            adapters=("retrieval", "text-matching", "code"),
        ),
        files={
            "adapters/adapter_config.json": {
                "peft_type": "LORA",
                "r": 32,
                "lora_alpha": 32,
                "exclude_modules": ".*visual.*",
            }
        },
        source="modeling_jina_embeddings_v4.py and custom_lora_module.py of its repository, which read "
        "text_config; configuration_jina_embeddings_v4.py (cf456d3)",
    ),
    _model(
        "Qwen/Qwen3-VL-Embedding-2B",
        _QWEN3,
        "Qwen3VLForConditionalGeneration",
        _last(
            2048,
            262144,
            score="bi",
            prompts={"default": "Represent the user's input."},
            default_prompt="default",
            end=_ANSWER,
        ),
        patch_size=16,
        files=EMBEDDING_FILES,
        source="QwenLM/Qwen3-VL-Embedding src/models; discussions/23 of its repository; mteb "
        "qwen3_vl_embedding_models.py",
    ),
    _model(  # its files until sentence-transformers read it
        "Qwen/Qwen3-VL-Embedding-8B",
        _QWEN3,
        "Qwen3VLForConditionalGeneration",
        _last(2048, 262144, score="bi", end=_ANSWER),
        patch_size=16,
        source="QwenLM/Qwen3-VL-Embedding src/models",
    ),
    _model(
        "Qwen/Qwen3-VL-Reranker-2B",
        _QWEN3,
        "Qwen3VLForConditionalGeneration",
        Reads(
            task="score",
            score="cross",
            max_tokens=262144,
            causal=True,
            answers=(9693, 2152),
            prompts={"query": "Retrieve text relevant to the user's query."},
            default_prompt="query",
        ),
        patch_size=16,
        files=RERANKER_FILES,
        source="QwenLM/Qwen3-VL-Embedding src/models; its model card; cohere-ai/rcp-ndcg "
        "qwen3-vl-reranker/family.yaml, which read 4bd860a; lablup/mlxcel (1_LogitScore, reranker.jinja)",
    ),
    _model(  # its files until sentence-transformers read it
        "Qwen/Qwen3-VL-Reranker-8B",
        _QWEN3,
        "Qwen3VLForConditionalGeneration",
        Reads(task="score", score="cross", max_tokens=262144, causal=True, answers=("yes", "no")),
        patch_size=16,
        source="QwenLM/Qwen3-VL-Embedding src/models",
    ),
    _model(
        "vidore/colqwen2-v1.0-hf",
        {"model_type": "colqwen2", "embedding_dim": 128, "vlm_config": _QWEN2},
        "ColQwen2ForRetrieval",
        Reads(
            task="token_embed",
            score="late",
            dimension=128,
            max_tokens=32768,
            causal=True,
            prompts={"query": "Query: "},
            end="<|endoftext|>" * 10 + "\n",
        ),
        files=_PAGE_MODULES,
        source="sentence-transformers tests/multi_vector_encoder/test_pretrained.py",
    ),
    _model(
        "TomoroAI/tomoro-colqwen3-embed-4b",
        _QWEN3 | {"model_type": "colqwen3", "embed_dim": 320},
        "ColQwen3",
        Reads(
            task="token_embed",
            score="late",
            dimension=320,
            max_tokens=262144,
            causal=True,
            end="<|endoftext|>" * 10,
        ),
        patch_size=16,
        source="processing_colqwen3.py of its repository; vllm-project/vllm colqwen3.py and test_colqwen3.py",
        unverified="sizes of its towers; modules.json, which names a class of its own since August 2026",
    ),
)
