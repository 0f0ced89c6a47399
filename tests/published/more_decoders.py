"""More published decoders: embedders, rerankers, guards, reward models and generators."""

from __future__ import annotations

from tests.published.catalog import Json, Published, Reads, modules, pooling
from tests.published.decoders import last_token, llama, mistral, qwen2, qwen3
from tests.published.embedders import ADAPTER, TASKS

_INSTRUCT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_CHATML = "{% for message in messages %}{{ '<|im_start|>' + message.content }}{% endfor %}"
_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "yes", "no", "Yes", "No", "0", "1")
_CHAT = {"tokenizer_config.json": {"model_max_length": 131072, "chat_template": _CHATML}}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_GEMMA2: dict[str, Json] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "use_cache": True,
    "vocab_size": 256000,
}
_GEMMA3: dict[str, Json] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
_MINISTRAL3_ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
}
_LONG_ROPE = {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48}


def embedder(id: str, config: dict[str, Json], *, max_tokens: int, **more: Json) -> Published:
    """Last token, unit length, with the query prompt of Qwen3-Embedding unless `prompts` has others."""
    prompts = more.pop("prompts", {"query": _INSTRUCT, "document": ""})
    limit, own = more.pop("max_seq_length", None), more.pop("files", {})
    files = last_token(config["hidden_size"]) | _CHAT | own
    files["config_sentence_transformers.json"] = {"prompts": prompts, "default_prompt_name": None}
    if limit is not None:
        files["sentence_bert_config.json"] = {"max_seq_length": limit, "do_lower_case": False}
    reads = Reads(
        task="embed",
        score="bi",
        dimension=config["hidden_size"],
        pooling=("last",),
        normalize=True,
        max_tokens=max_tokens,
        causal=True,
        prompts=prompts,
    )
    return Published(id=id, config=config, files=files, reads=reads, **more)


def generator(id: str, config: dict[str, Json], max_tokens: int, **more: Json) -> Published:
    limits = {"tokenizer_config.json": {"model_max_length": 131072}}
    reads = Reads(task="embed", score=None, max_tokens=max_tokens, causal=True, generates=True)
    return Published(id=id, config=config, files=limits, reads=reads, **more)


def refused(id: str, config: dict[str, Json], reason: str, **files: Json) -> Published:
    return Published(id=id, config=config, files=files, refused=reason)


_ZEMBED_PROMPTS = {
    kind: f"<|im_start|>system\n{kind}<|im_end|>\n<|im_start|>user\n" for kind in ("query", "document")
}
_HARRIER_PROMPTS = {
    name: f"Instruct: {task}\nQuery: "
    for name, task in {
        "web_search_query": "Given a web search query, retrieve relevant passages that answer the query",
        "sts_query": "Retrieve semantically similar text",
        "bitext_query": "Retrieve parallel sentences",
    }.items()
}
_JINA_CODE_TASKS = {
    "nl2code": ("the most relevant code snippet given the following query", "code snippet"),
    "qa": ("the most relevant answer given the following question", "answer"),
    "code2code": ("an equivalent code snippet given the following code snippet", "code snippet"),
    "code2nl": ("the most relevant comment given the following code snippet", "comment"),
    "code2completion": (
        "the most relevant completion given the following start of code snippet",
        "completion",
    ),
}
_JINA_CODE_PROMPTS = {
    f"{name}_{kind}": text
    for name, (asked, found) in _JINA_CODE_TASKS.items()
    for kind, text in (("query", f"Find {asked}:\n"), ("document", f"Candidate {found}:\n"))
}
_NEMOTRON_PROMPTS = {"query": "query: ", "document": "passage: "}
_OCTEN_PROMPTS = {"query": _INSTRUCT, "document": " "}
_OCTEN: dict[str, Json] = {"2_Normalize/config.json": {"normalize_embeddings": True}}
_VOYAGE_PROMPTS = {
    "query": "Represent the query for retrieving supporting documents: ",
    "document": "Represent the document for retrieval: ",
}
MORE_DECODERS = (
    embedder(
        "Qwen/Qwen3-Embedding-8B",
        qwen3(4096, 36, num_attention_heads=32, intermediate_size=12288, tie_word_embeddings=False),
        max_tokens=40960,
    ),
    embedder(
        "Octen/Octen-Embedding-0.6B",
        qwen3(1024, 28, kind="Qwen3Model", max_position_embeddings=32768, vocab_size=151669),
        max_tokens=32768,
        prompts=_OCTEN_PROMPTS,
        files=_OCTEN,
        source="its commit 1a00a4e; cohere-ai/rcp-ndcg octen-embedding/family.yaml, which read d715b32",
    ),
    embedder(
        "Octen/Octen-Embedding-8B",
        qwen3(4096, 36, kind="Qwen3Model", num_attention_heads=32, intermediate_size=12288)
        | {"tie_word_embeddings": False},
        max_tokens=40960,
        prompts=_OCTEN_PROMPTS,
        files=_OCTEN,
        source="2_Normalize/config.json of its repository; cohere-ai/rcp-ndcg octen-embedding/family.yaml, "
        "which read 5adcfa2",
    ),
    embedder(
        "codefuse-ai/F2LLM-v2-0.6B",
        qwen3(1024, 28),
        max_tokens=40960,
        prompts={
            "query": "Instruct: Given a question, retrieve passages that can help answer the question.\n"
            "Query: ",
            "document": "",
        },
        source="mteb codefuse_models.py by its authors; modules.json of F2LLM-v2-8B; its model card",
    ),
    Published(
        id="zeroentropy/zembed-1-embedding",
        config=qwen3(2560, 36, num_attention_heads=32, intermediate_size=9728),
        files={
            "modules.json": [
                {"idx": 0, "name": "0", "path": "", "type": "modeling_zembed.ZembedTransformer"},
                *modules("Transformer", "Pooling", "Normalize")[1:],
            ],
            "1_Pooling/config.json": pooling("lasttoken", 2560, include_prompt=True),
            "config_sentence_transformers.json": {
                "prompts": _ZEMBED_PROMPTS,
                "default_prompt_name": "document",
                "suffix": "<|im_end|>\n",
            },
            "sentence_bert_config.json": {"max_seq_length": 32768, "do_lower_case": False},
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=2560,
            pooling=("last",),
            normalize=True,
            max_tokens=32768,
            causal=True,
            prompts=_ZEMBED_PROMPTS,
            default_prompt="document",
            is_sliced=False,
            end="<|im_end|>\n",
        ),
        source="modules.json of its repository and its commit d3c9465; cohere-ai/rcp-ndcg zembed-1, which "
        "read cf13c81",
        unverified="whether document is its default prompt, as a pull request of sentence-transformers asks",
    ),
    embedder(
        "microsoft/harrier-oss-v1-0.6b",
        qwen3(1024, 28, kind="Qwen3Model", max_position_embeddings=32768),
        max_tokens=32768,
        prompts=_HARRIER_PROMPTS,
        source="modules.json of harrier-oss-v1-27b; cohere-ai/rcp-ndcg harrier-oss-v1/family.yaml, which "
        "read f9b9dc8; mteb harrier_models.py",
    ),
    embedder(
        "microsoft/harrier-oss-v1-270m",
        _GEMMA3
        | {"architectures": ["Gemma3TextModel"], "hidden_size": 640, "num_hidden_layers": 18}
        | {"intermediate_size": 2048, "eos_token_id": 1},
        max_tokens=32768,
        prompts=_HARRIER_PROMPTS,
        source="cohere-ai/rcp-ndcg harrier-oss-v1/family.yaml, which read 31de22b; mteb harrier_models.py",
    ),
    embedder(
        "jinaai/jina-code-embeddings-0.5b",
        qwen2(896, 24, 14, kind="Qwen2ForCausalLM", intermediate_size=4864),
        max_tokens=32768,
        prompts=_JINA_CODE_PROMPTS,
        source="jina.ai's article about it, for queries",
        unverified="its prompts for documents, which are those that users' code has",
    ),
    embedder("Linq-AI-Research/Linq-Embed-Mistral", mistral(), max_tokens=32768, prompts={}),
    embedder("BAAI/bge-en-icl", mistral(), max_tokens=32768, prompts={}),
    Published(
        id="nvidia/llama-nemotron-embed-1b-v2",
        config=llama(
            2048,
            16,
            32,
            kind="LlamaBidirectionalModel",
            model_type="llama_bidirec",
            pooling="avg",
            auto_map={"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"},
        ),
        reads=Reads(
            task="embed", score="bi", dimension=2048, pooling=("mean",), normalize=True, max_tokens=131072
        ),
    ),
    Published(
        id="nvidia/llama-nemotron-rerank-1b-v2",
        config=llama(
            2048,
            16,
            32,
            kind="LlamaBidirectionalForSequenceClassification",
            model_type="llama_bidirec",
            pooling="avg",
            temperature=1.0,
            id2label={"0": "LABEL_0"},
        ),
        reads=Reads(task="classify", score="cross", max_tokens=131072, labels=1),
    ),
    Published(
        id="nvidia/Nemotron-3-Embed-1B-BF16",
        config=mistral(kind="Ministral3Model")
        | {"model_type": "ministral3", "is_causal": False, "pooling": "avg", "sliding_window": None}
        | {"head_dim": 128, "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 131072}
        | {"num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 6144}
        | {"rope_parameters": _MINISTRAL3_ROPE, "max_position_embeddings": 262144, "pad_token_id": 11},
        files={
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": pooling("mean_tokens", 2048, include_prompt=True),
            "config_sentence_transformers.json": {
                "prompts": _NEMOTRON_PROMPTS,
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=2048,
            pooling=("mean",),
            normalize=True,
            max_tokens=262144,
            prompts=_NEMOTRON_PROMPTS,
        ),
        source="NVIDIA/NeMo-Retriever (docs/cli, test_embed_model_spec.py); mteb nvidia_models.py, whose "
        "numbers of parameters give its sizes",
        unverified="the names of its prompts; its limit, which its card gives as 32,768; its rope, which is "
        "that of Ministral-3-3B",
    ),
    Published(
        id="nvidia/NV-Embed-v2",
        config={
            "_name_or_path": "nvidia/NV-Embed-v2",
            "add_eos": True,
            "add_pad_token": True,
            "architectures": ["NVEmbedModel"],
            "auto_map": {"AutoModel": "modeling_nvembed.NVEmbedModel"},
            "hidden_size": 4096,
            "is_mask_instruction": True,
            "latent_attention_config": {
                "model_type": "latent_attention",
                "num_latents_value": 512,
                "num_cross_heads": 8,
                "cross_dim_head": 4096,
                "hidden_dim": 4096,
                "latent_dim": 4096,
                "output_normalize": True,
            },
            "mask_type": "b",
            "model_type": "nvembed",
            "padding_side": "right",
            "text_config": mistral(kind="MistralModel")
            | {"_name_or_path": "nvidia/NV-Embed-v2", "model_type": "bidir_mistral", "use_cache": True},
        },
        files={"tokenizer_config.json": {"eos_token": "</s>", "add_eos_token": False}},
        tokens=("</s>",),
        reads=Reads(
            task="embed",
            score="bi",
            dimension=4096,
            pooling=("mean",),
            normalize=True,
            max_tokens=32768,
            end="</s>",
        ),
    ),
    Published(
        id="voyageai/voyage-4-nano",
        config=qwen3(
            1024,
            12,
            kind="Qwen3ForCausalLM",
            num_labels=2048,
            max_position_embeddings=32768,
            use_bidirectional_attention=True,
            auto_map={"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
        ),
        files={
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": pooling("mean_tokens", 2048),
            "config_sentence_transformers.json": {"prompts": _VOYAGE_PROMPTS},
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=2048,
            pooling=("mean",),
            normalize=True,
            max_tokens=32768,
            prompts=_VOYAGE_PROMPTS,
        ),
        source="voyage-4-nano-mlx on PyPI (config.py, ref_dump.py); vLLM's test of this model, which gives "
        "architectures and num_labels itself",
        unverified="architectures and num_labels: vLLM does not use those of its file",
    ),
    Published(
        id="jinaai/jina-embeddings-v5-text-small",
        config=qwen3(
            1024,
            28,
            kind="JinaEmbeddingsV5Model",
            model_type="jina_embeddings_v5",
            task_names=TASKS,
            max_position_embeddings=32768,
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
            dimension=1024,
            pooling=("last",),
            normalize=True,
            max_tokens=32768,
            causal=True,
            prompts={"query": "Query: ", "document": "Document: "},
            default_prompt="document",
            adapters=tuple(TASKS),
        ),
    ),
    Published(
        id="zeroentropy/zerank-1-small",
        config=qwen3(2048, 28),
        files=_CHAT,
        tokens=_TOKENS,
        reads=Reads(task="score", score="cross", max_tokens=40960, causal=True, answers=("Yes",)),
    ),
    Published(
        id="zeroentropy/zerank-2",
        config=qwen3(2560, 36, num_attention_heads=32, intermediate_size=9728),
        files=_CHAT,
        tokens=_TOKENS,
        reads=Reads(task="score", score="cross", max_tokens=40960, causal=True, answers=("Yes",)),
    ),
    Published(
        id="ContextualAI/ctxl-rerank-v2-instruct-multilingual-1b",
        config=qwen3(2048, 28),
        files=_CHAT,
        tokens=_TOKENS,
        reads=Reads(task="score", score="cross", max_tokens=40960, causal=True, answers=(0,)),
    ),
    Published(
        id="mixedbread-ai/mxbai-rerank-large-v2",
        config=qwen2(1536, 28, 12),
        files=_CHAT,
        tokens=_TOKENS,
        reads=Reads(task="score", score="cross", max_tokens=32768, causal=True, answers=("1", "0")),
    ),
    generator("meta-llama/Llama-3.2-1B-Instruct", llama(2048, 16, 32, kind="LlamaForCausalLM"), 131072),
    generator("meta-llama/Llama-Guard-3-1B", llama(2048, 16, 32, kind="LlamaForCausalLM"), 131072),
    generator("google/shieldgemma-2b", _GEMMA2, 8192),
    generator("google/gemma-3-1b-it", _GEMMA3, 32768),
    generator("Qwen/Qwen3-30B-A3B-FP8", qwen3(2048, 48) | _MOE | {"quantization_config": _FP8}, 40960),
    generator(
        "Qwen/Qwen3-8B-AWQ",
        qwen3(4096, 36, num_attention_heads=32, intermediate_size=12288, tie_word_embeddings=False)
        | {
            "quantization_config": {
                "backend": "autoawq",
                "bits": 4,
                "do_fuse": False,
                "exllama_config": None,
                "fuse_max_seq_len": None,
                "group_size": 128,
                "modules_to_fuse": None,
                "modules_to_not_convert": None,
                "quant_method": "awq",
                "version": "gemm",
                "zero_point": True,
            }
        },
        40960,
    ),
    generator(
        "Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4",
        qwen2(896, 24, 14, intermediate_size=4864)
        | {
            "quantization_config": {
                "batch_size": 1,
                "bits": 4,
                "block_name_to_quantize": None,
                "cache_block_outputs": True,
                "damp_percent": 0.01,
                "dataset": None,
                "desc_act": False,
                "exllama_config": {"version": 1},
                "group_size": 128,
                "modules_in_block_to_quantize": None,
                "quant_method": "gptq",
                "sym": True,
                "true_sequential": True,
                "use_cuda_fp16": False,
                "use_exllama": True,
            }
        },
        32768,
    ),
    generator(
        "RedHatAI/Qwen3-8B-FP8-dynamic",
        qwen3(4096, 36, num_attention_heads=32, intermediate_size=12288, tie_word_embeddings=False)
        | {
            "quantization_config": {
                "config_groups": {
                    "group_0": {
                        "input_activations": {
                            "dynamic": True,
                            "num_bits": 8,
                            "strategy": "token",
                            "symmetric": True,
                            "type": "float",
                        },
                        "output_activations": None,
                        "targets": ["Linear"],
                        "weights": {
                            "dynamic": False,
                            "num_bits": 8,
                            "strategy": "channel",
                            "symmetric": True,
                            "type": "float",
                        },
                    }
                },
                "format": "float-quantized",
                "ignore": ["lm_head"],
                "kv_cache_scheme": None,
                "quant_method": "compressed-tensors",
                "quantization_status": "compressed",
            }
        },
        40960,
    ),
    refused(
        "mlx-community/Qwen3-0.6B-4bit",
        qwen3(1024, 28) | {"quantization_config": {"group_size": 64, "bits": 4}},
        "quant",
    ),
    Published(
        id="Qwen/Qwen2.5-Math-PRM-7B",
        config=qwen2(3584, 28, 28, kind="Qwen2ForProcessRewardModel", num_labels=2),
        files={"tokenizer_config.json": {"model_max_length": 131072}},
        tokens=("<extra_0>",),
        reads=Reads(task="reward", max_tokens=32768, causal=True),
    ),
    Published(
        id="Qwen/Qwen2.5-Math-RM-72B",
        config=qwen2(8192, 80, 64, kind="Qwen2ForRewardModel"),
        files={"tokenizer_config.json": {"model_max_length": 131072}},
        reads=Reads(task="reward", max_tokens=32768, causal=True),
    ),
    refused(
        "microsoft/Phi-4-mini-instruct",
        llama(3072, 32, 24, kind="Phi3ForCausalLM", model_type="phi3", partial_rotary_factor=0.75)
        | {"rope_scaling": _LONG_ROPE, "original_max_position_embeddings": 4096},
        "partial_rotary_factor|longrope",
    ),
    refused("Qwen/Qwen3Guard-Stream-0.6B", qwen3(1024, 28, kind="Qwen3ForGuardModel"), "Qwen3ForGuardModel"),
    *(
        Published(
            id=id,
            config=qwen2(
                width,
                28,
                heads,
                kind=kind,
                intermediate_size=inner,
                auto_map={
                    "AutoModel": "modeling_qwen.Qwen2Model",
                    "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
                    "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
                },
                max_position_embeddings=131072,
                sliding_window=131072,
                vocab_size=151646,
            ),
            files=last_token(width),
            refused=r"modeling_qwen\.Qwen2Model.*set is_causal",
            source="its config.json on Hugging Face",
            unverified="its modules",
        )
        for id, width, heads, inner, kind in (
            ("Lenovo-Zhihui/Zhihui_LLM_Embedding", 3584, 28, 18944, "Qwen2Model"),
            ("sdadas/stella-pl-retrieval", 1536, 12, 8960, "Qwen2ForCausalLM"),
        )
    ),
    refused(
        "BAAI/bge-reranker-v2-minicpm-layerwise",
        llama(2304, 40, 36, kind="LayerWiseMiniCPMForCausalLM", model_type="minicpm")
        | {"auto_map": {"AutoModelForCausalLM": "modeling_minicpm_reranker.LayerWiseMiniCPMForCausalLM"}},
        "no code from a checkpoint",
    ),
    refused(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        qwen3(2048, 48, kind="Qwen3NextForCausalLM", model_type="qwen3_next"),
        "recurrent state",
    ),
)
