"""Published decoders: embedders, rerankers, reward models, generators."""

from __future__ import annotations

from tests.published.catalog import Json, Published, Reads, modules, pooling


def qwen3(hidden: int, layers: int, *, kind: str = "Qwen3ForCausalLM", **more: Json) -> dict[str, Json]:
    return {
        "architectures": [kind],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151669,
    } | more


def qwen2(
    hidden: int, layers: int, heads: int, *, kind: str = "Qwen2ForCausalLM", **more: Json
) -> dict[str, Json]:
    return {
        "architectures": [kind],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    } | more


def mistral(*, kind: str = "MistralModel", **more: Json) -> dict[str, Json]:
    return {
        "architectures": [kind],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "use_cache": False,
        "vocab_size": 32000,
    } | more


def llama(hidden: int, layers: int, heads: int, *, kind: str, **more: Json) -> dict[str, Json]:
    return {
        "architectures": [kind],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 128256,
    } | more


def last_token(width: int, *, normalize: bool = True, include_prompt: bool | None = True) -> dict[str, Json]:
    kinds = ("Transformer", "Pooling", "Normalize") if normalize else ("Transformer", "Pooling")
    return {
        "modules.json": modules(*kinds),
        "1_Pooling/config.json": pooling("lasttoken", width, include_prompt=include_prompt),
    }


_QWEN_INSTRUCT = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
)
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "yes", "no", "Yes", "No", "0", "1")
_LONG = {"tokenizer_config.json": {"model_max_length": 131072, "chat_template": _CHATML}}
DECODERS = (
    Published(
        id="Qwen/Qwen3-Embedding-0.6B",
        config=qwen3(1024, 28, max_position_embeddings=32768),
        files=last_token(1024)
        | _LONG
        | {
            "config_sentence_transformers.json": {
                "prompts": {"query": _QWEN_INSTRUCT, "document": ""},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            }
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=1024,
            pooling=("last",),
            normalize=True,
            max_tokens=32768,
            causal=True,
            prompts={"query": _QWEN_INSTRUCT, "document": ""},
        ),
    ),
    Published(
        id="Qwen/Qwen3-Reranker-0.6B",
        config=qwen3(1024, 28),
        files=_LONG,
        tokens=_QWEN_TOKENS,
        reads=Reads(task="score", score="cross", max_tokens=40960, causal=True, answers=("yes", "no")),
    ),
    Published(
        id="tomaarsen/Qwen3-Reranker-0.6B-seq-cls",
        config=qwen3(1024, 28, kind="Qwen3ForSequenceClassification", id2label={"0": "LABEL_0"}),
        files=_LONG,
        tokens=_QWEN_TOKENS,
        reads=Reads(task="classify", score="cross", max_tokens=40960, causal=True, labels=1),
    ),
    Published(
        id="mixedbread-ai/mxbai-rerank-base-v2",
        config=qwen2(896, 24, 14, intermediate_size=4864),
        files=_LONG,
        tokens=_QWEN_TOKENS,
        reads=Reads(task="score", score="cross", max_tokens=32768, causal=True, answers=("1", "0")),
    ),
    Published(
        id="BAAI/bge-reranker-v2-gemma",
        config={
            "architectures": ["GemmaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "head_dim": 256,
            "hidden_act": "gelu",
            "hidden_activation": None,
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 16384,
            "max_position_embeddings": 8192,
            "model_type": "gemma",
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_cache": True,
            "vocab_size": 256000,
        },
        tokens=("Yes", "<bos>", "<eos>"),
        reads=Reads(task="score", score="cross", max_tokens=8192, causal=True, answers=("Yes",)),
    ),
    Published(
        id="jinaai/jina-reranker-v3",
        config=qwen3(1024, 28, kind="JinaForRanking", vocab_size=151936, max_position_embeddings=131072),
        tokens=("<|embed_token|>", "<|rerank_token|>"),
        reads=Reads(task="score", score="list", max_tokens=131072, causal=True),
    ),
    Published(
        id="intfloat/e5-mistral-7b-instruct",
        config=mistral(),
        files=last_token(4096, include_prompt=None)
        | {"sentence_bert_config.json": {"max_seq_length": 4096, "do_lower_case": False}},
        reads=Reads(
            task="embed",
            score="bi",
            dimension=4096,
            pooling=("last",),
            normalize=True,
            max_tokens=4096,
            causal=True,
        ),
    ),
    Published(
        id="Salesforce/SFR-Embedding-Mistral",
        config=mistral(),
        files=last_token(4096, include_prompt=None)
        | {"sentence_bert_config.json": {"max_seq_length": 4096, "do_lower_case": False}},
        reads=Reads(
            task="embed",
            score="bi",
            dimension=4096,
            pooling=("last",),
            normalize=True,
            max_tokens=4096,
            causal=True,
        ),
    ),
    Published(
        id="Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        config=qwen2(
            1536,
            28,
            12,
            auto_map={"AutoModel": "modeling_qwen.Qwen2Model"},
            is_causal=False,
            max_position_embeddings=131072,
            sliding_window=131072,
            max_window_layers=21,
            vocab_size=151646,
        ),
        files=last_token(1536, include_prompt=None)
        | {"sentence_bert_config.json": {"max_seq_length": 32768, "do_lower_case": False}},
        tokens=_QWEN_TOKENS,
        reads=Reads(
            task="embed", score="bi", dimension=1536, pooling=("last",), normalize=True, max_tokens=32768
        ),
    ),
    Published(
        id="NovaSearch/stella_en_1.5B_v5",
        config=qwen2(
            1536,
            28,
            12,
            auto_map={"AutoModel": "modeling_qwen.Qwen2Model"},
            is_causal=False,
            max_position_embeddings=131072,
            sliding_window=131072,
            max_window_layers=21,
            vocab_size=151646,
        ),
        files={
            "modules.json": modules("Transformer", "Pooling", "Dense", Dense="2_Dense_1024"),
            "1_Pooling/config.json": pooling("mean_tokens", 1536, include_prompt=True),
            "2_Dense_1024/config.json": {
                "in_features": 1536,
                "out_features": 1024,
                "bias": True,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        },
        reads=Reads(
            task="embed", score="bi", dimension=1024, pooling=("mean",), normalize=False, max_tokens=512
        ),
    ),
    Published(
        id="GritLM/GritLM-7B",
        config=mistral(kind="MistralForCausalLM", rope_scaling=None)
        | {"architectures": ["GritLM"], "auto_map": {"AutoModel": "modeling_gritlm7b.MistralModel"}},
        reads=Reads(
            task="embed",
            score="bi",
            dimension=4096,
            pooling=("mean",),
            normalize=True,
            max_tokens=32768,
            generates=True,
        ),
    ),
    Published(
        id="nvidia/llama-embed-nemotron-8b",
        config=llama(
            4096,
            32,
            32,
            kind="LlamaBidirectionalModel",
            model_type="llama_bidirec",
            intermediate_size=14336,
            pooling="avg",
            auto_map={"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"},
        ),
        reads=Reads(
            task="embed", score="bi", dimension=4096, pooling=("mean",), normalize=True, max_tokens=131072
        ),
    ),
    Published(
        id="google/embeddinggemma-300m",
        config={
            "_sliding_window_pattern": 6,
            "architectures": ["Gemma3TextModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "dtype": "float32",
            "eos_token_id": 1,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 1152,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
            "max_position_embeddings": 2048,
            "model_type": "gemma3_text",
            "num_attention_heads": 3,
            "num_hidden_layers": 24,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": 512,
            "use_bidirectional_attention": True,
            "use_cache": True,
            "vocab_size": 262144,
        },
        files={
            "modules.json": [
                *modules("Transformer", "Pooling"),
                {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
                {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"},
                {
                    "idx": 4,
                    "name": "4",
                    "path": "4_Normalize",
                    "type": "sentence_transformers.models.Normalize",
                },
            ],
            "1_Pooling/config.json": pooling("mean_tokens", 768, include_prompt=True),
            "2_Dense/config.json": {
                "in_features": 768,
                "out_features": 3072,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "3_Dense/config.json": {
                "in_features": 3072,
                "out_features": 768,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "sentence_bert_config.json": {"max_seq_length": 2048, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "prompts": {
                    "query": "task: search result | query: ",
                    "document": "title: none | text: ",
                    "STS": "task: sentence similarity | query: ",
                },
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=768,
            pooling=("mean",),
            normalize=True,
            max_tokens=2048,
            prompts={
                "query": "task: search result | query: ",
                "document": "title: none | text: ",
                "STS": "task: sentence similarity | query: ",
            },
        ),
    ),
    Published(
        id="HuggingFaceTB/SmolLM2-135M-Instruct",
        config=llama(
            576,
            30,
            9,
            kind="LlamaForCausalLM",
            intermediate_size=1536,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rope_scaling=None,
            rope_theta=100000,
            rope_interleaved=False,
            vocab_size=49152,
            bos_token_id=1,
            eos_token_id=2,
            is_llama_config=True,
        ),
        files={"tokenizer_config.json": {"model_max_length": 8192, "chat_template": _CHATML}},
        reads=Reads(task="embed", score=None, max_tokens=8192, causal=True, generates=True),
    ),
    Published(
        id="Qwen/Qwen3Guard-Gen-0.6B",
        config=qwen3(1024, 28, max_position_embeddings=32768, vocab_size=151936),
        files=_LONG,
        reads=Reads(task="embed", score=None, max_tokens=32768, causal=True, generates=True),
    ),
    Published(
        id="Skywork/Skywork-Reward-V2-Llama-3.2-1B",
        config=llama(2048, 16, 32, kind="LlamaForSequenceClassification", id2label={"0": "LABEL_0"}),
        files={"tokenizer_config.json": {"model_max_length": 131072}},
        reads=Reads(task="classify", score="cross", max_tokens=131072, causal=True, labels=1),
    ),
)
