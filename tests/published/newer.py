"""Published models of newer decoder families: LFM2, EmbeddingGemma 2, gpt-oss, Granite, SmolLM3, OLMo."""

from __future__ import annotations

from tests.published.catalog import Json, Published, Reads, modules, pooling
from tests.published.decoders import llama, mistral, qwen3
from tests.published.encoders import labels
from tests.published.more_decoders import generator, refused
from tests.published.more_encoders import colbert

_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
_GPT_OSS: dict[str, Json] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": _YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
_KINDS = ("account_number", "private_address", "private_date", "private_email", "private_person")
_KINDS += ("private_phone", "private_url", "secret")
_PRIVACY = {
    "architectures": ["OpenAIPrivacyFilterForTokenClassification"],
    "model_type": "openai_privacy_filter",
    "hidden_size": 640,
    "intermediate_size": 640,
    "num_attention_heads": 14,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 128,
    "vocab_size": 200064,
    "eos_token_id": 199999,
    "rope_scaling": None,
    "rope_parameters": _YARN | {"rope_theta": 150000.0},
}
_PRIVACY_DROPPED = ("layer_types", "hidden_act", "experts_per_token", "initial_context_length")
_LFM2: dict[str, Json] = {
    "architectures": ["Lfm2Model"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 1024,
    "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 1024,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
_BIDIRECTIONAL = _LFM2 | {
    "architectures": ["Lfm2BidirectionalModel"],
    "auto_map": {"AutoModel": "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"},
}
_GEMMA2_TOWER: dict[str, Json] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "embedding_dim": 768,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 512,
    "hidden_size_per_layer_input": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    "max_position_embeddings": 262144,
    "model_type": "embedding_gemma2_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "per_layer_config": {
        f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 1} for layer in (5, 11, 17, 23)
    },
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "vocab_size": 262144,
}
_GEMMA3_TOWER = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
_GEMMA2_TASKS = {
    "search result": "BitextMining Reranking Retrieval Retrieval-query SearchQuery query",
    "classification": "Classification MultilabelClassification",
    "clustering": "Clustering",
    "code retrieval": "CodeRetrieval InstructionRetrieval",
    "fact checking": "FactChecking",
    "sentence similarity": "PairClassification STS SentenceSimilarity Summarization",
    "question answering": "QuestionAnswering",
}
_GEMMA2_PROMPTS = {
    name: f"task: {task} | query: " for task, names in _GEMMA2_TASKS.items() for name in names.split()
} | dict.fromkeys(("Document", "Retrieval-document", "document"), "title: none | text: ")
_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
NEWER = (
    colbert(
        "LiquidAI/LFM2-ColBERT-350M",
        _LFM2,
        (1024, 128),
        32,
        512,
        causal=True,
        source="vllm-project/vllm tests/models/language/pooling/test_colbert.py: 511 tokens, 1_Dense",
        unverified="its markers, and the length of queries",
    ),
    colbert(
        "LiquidAI/LFM2.5-ColBERT-350M",
        _BIDIRECTIONAL,
        (1024, 128),
        32,
        512,
        unverified="the length of queries",
    ),
    Published(
        id="LiquidAI/LFM2.5-Embedding-350M",
        config=_BIDIRECTIONAL,
        files={
            "modules.json": modules("Transformer", "Pooling"),
            "1_Pooling/config.json": pooling("cls_token", 1024),
            "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: ", "document": "document: "},
                "similarity_fn_name": "cosine",
            },
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=1024,
            pooling=("cls",),
            normalize=False,
            max_tokens=512,
            prompts={"query": "query: ", "document": "document: "},
        ),
    ),
    Published(
        id="google/embeddinggemma-2",
        config={
            "architectures": ["EmbeddingGemma2Model"],
            "audio_config": {},
            "audio_token_id": 258881,
            "boa_token_id": 256000,
            "boi_token_id": 255999,
            "eoa_token_index": 258883,
            "eoi_token_id": 258882,
            "image_token_id": 258880,
            "initializer_range": 0.02,
            "model_type": "embedding_gemma2",
            "text_config": _GEMMA2_TOWER,
            "video_token_id": 258884,
            "vision_config": {
                "head_dim": 64,
                "hidden_size": 768,
                "intermediate_size": 3072,
                "model_type": "gemma4_vision",
                "num_attention_heads": 12,
                "num_hidden_layers": 16,
                "num_key_value_heads": 12,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "default_output_length": 280,
                "position_embedding_size": 10240,
                "rms_norm_eps": 1e-06,
                "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"},
                "standardize": False,
                "use_clipped_linears": False,
            },
        },
        tokens=("<|image|>", "<|image>", "<image|>"),
        files={
            "processor_config.json": {
                "audio_seq_length": 280,
                "image_processor": {
                    "do_convert_rgb": True,
                    "do_normalize": False,
                    "do_rescale": True,
                    "do_resize": True,
                    "image_mean": [0.0, 0.0, 0.0],
                    "image_processor_type": "Gemma4ImageProcessor",
                    "image_seq_length": 280,
                    "image_std": [1.0, 1.0, 1.0],
                    "max_soft_tokens": 280,
                    "patch_size": 16,
                    "pooling_kernel_size": 3,
                    "resample": 3,
                    "rescale_factor": 0.00392156862745098,
                },
                "image_seq_length": 280,
                "processor_class": "EmbeddingGemma2Processor",
            },
            "tokenizer_config.json": {
                "image_token": "<|image|>",
                "boi_token": "<|image>",
                "eoi_token": "<image|>",
            },
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "sentence_bert_config.json": {
                "transformer_task": "feature-extraction",
                "modality_config": {
                    **dict.fromkeys(("text", "image", "audio", "video"), _FORWARD),
                    "message": _FORWARD | {"format": "structured"},
                },
                "module_output_name": "token_embeddings",
            },
            "1_Pooling/config.json": {
                "embedding_dimension": 768,
                "include_prompt": True,
                "pooling_mode": "mean",
            },
            "config_sentence_transformers.json": {
                "default_prompt_name": None,
                "model_type": "SentenceTransformer",
                "prompts": _GEMMA2_PROMPTS,
            },
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=768,
            pooling=("mean",),
            normalize=True,
            max_tokens=8192,
            prompts=_GEMMA2_PROMPTS,
        ),
        source="its files in ollama's library (embeddinggemma-2:740m); its config.json in the tests of "
        "ml-explore/mlx-swift-lm; its card and files as cohere-ai/rcp-ndcg read them (914f7f8)",
    ),
    generator(
        "openai/gpt-oss-20b",
        _GPT_OSS | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
        131072,
    ),
    generator("lmsys/gpt-oss-20b-bf16", _GPT_OSS, 131072),
    Published(
        id="openai/privacy-filter",
        config={key: value for key, value in _GPT_OSS.items() if key not in _PRIVACY_DROPPED}
        | _PRIVACY
        | labels("O", *(f"{place}-{kind}" for kind in _KINDS for place in "BIES")),
        reads=Reads(task="token_classify", max_tokens=131072, labels=33),
    ),
    generator(
        "HuggingFaceTB/SmolLM3-3B",
        llama(2048, 36, 16, kind="SmolLM3ForCausalLM", model_type="smollm3")
        | {"intermediate_size": 11008, "num_key_value_heads": 4, "max_position_embeddings": 65536}
        | {"rope_scaling": None, "rope_theta": 5000000.0, "no_rope_layer_interval": 4}
        | {"no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36}
        | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "pretraining_tp": 2},
        65536,
    ),
    generator(
        "ibm-granite/granite-3.3-2b-instruct",
        llama(2048, 40, 32, kind="GraniteForCausalLM", model_type="granite")
        | {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
        | {"residual_multiplier": 0.22, "rope_scaling": None, "rope_theta": 10000000.0, "vocab_size": 49159},
        131072,
    ),
    generator(
        "allenai/OLMo-2-0425-1B-Instruct",
        llama(2048, 16, 16, kind="Olmo2ForCausalLM", model_type="olmo2")
        | {"num_key_value_heads": 16, "max_position_embeddings": 4096, "rope_scaling": None}
        | {"rms_norm_eps": 1e-06, "tie_word_embeddings": False, "vocab_size": 100352},
        4096,
    ),
    generator(
        "allenai/Olmo-3-7B-Think",
        llama(4096, 32, 32, kind="Olmo3ForCausalLM", model_type="olmo3")
        | {"num_key_value_heads": 32, "max_position_embeddings": 65536, "intermediate_size": 11008}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "sliding_window": 4096}
        | {"rms_norm_eps": 1e-06, "tie_word_embeddings": False, "vocab_size": 100278}
        | {
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            }
        },
        65536,
    ),
    generator(
        "google/gemma-3-4b-it",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": _GEMMA3_TOWER,
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        },
        131072,
    ),
    refused(
        "google/gemma-3n-E2B-it",
        {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": {}}
        | {"vision_config": {}, "audio_config": {}},
        "Gemma3nForConditionalGeneration",
    ),
    refused(
        "Qwen/Qwen3.5-0.8B",
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
        | {"text_config": qwen3(1024, 24), "vision_config": {}},
        "recurrent state|it reads images",
    ),
    refused(
        "tiiuae/Falcon-H1-0.5B-Instruct",
        mistral(kind="FalconH1ForCausalLM", model_type="falcon_h1"),
        "recurrent state",
    ),
)
