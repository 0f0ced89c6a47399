"""Published encoders."""

from __future__ import annotations

from tests.published.catalog import Json, Published, Reads, modules, sentence_transformer


def bert(hidden: int, layers: int, heads: int, *, kind: str = "BertModel", **more: Json) -> dict[str, Json]:
    return {
        "architectures": [kind],
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": None,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "bert",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": 30522,
    } | more


def xlmr(hidden: int, layers: int, *, kind: str = "XLMRobertaModel", **more: Json) -> dict[str, Json]:
    own: dict[str, Json] = {
        "bos_token_id": 0,
        "eos_token_id": 2,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 514,
        "model_type": "xlm-roberta",
        "output_past": True,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "vocab_size": 250002,
    }
    return bert(hidden, layers, hidden // 64, kind=kind) | own | more


def roberta(hidden: int, layers: int, *, kind: str = "RobertaModel", **more: Json) -> dict[str, Json]:
    return xlmr(hidden, layers, kind=kind, model_type="roberta", vocab_size=50265) | more


def modernbert(
    hidden: int, layers: int, heads: int, *, kind: str = "ModernBertModel", **more: Json
) -> dict[str, Json]:
    return {
        "architectures": [kind],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 50281,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "cls_token_id": 50281,
        "decoder_bias": True,
        "deterministic_flash_attn": False,
        "embedding_dropout": 0.0,
        "eos_token_id": 50282,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "hidden_activation": "gelu",
        "hidden_size": hidden,
        "initializer_cutoff_factor": 2.0,
        "initializer_range": 0.02,
        "intermediate_size": 1152,
        "layer_norm_eps": 1e-05,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "mlp_dropout": 0.0,
        "model_type": "modernbert",
        "norm_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 50283,
        "position_embedding_type": "absolute",
        "sep_token_id": 50282,
        "sparse_pred_ignore_index": -100,
        "sparse_prediction": False,
        "vocab_size": 50368,
    } | more


NOMIC: dict[str, Json] = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
    "vocab_size": 30528,
}
NEW: dict[str, Json] = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "model_type": "new",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pack_qkv": True,
    "pad_token_id": 0,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 500000,
    "type_vocab_size": 0,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 30528,
}
_MXBAI = "Represent this sentence for searching relevant passages: "
_DEBERTA: dict[str, Json] = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-07,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "model_type": "deberta-v2",
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "pooler_dropout": 0,
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": 768,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}
_NER = ["O", "B-MISC", "I-MISC", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]


def labels(*names: str) -> dict[str, Json]:
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def embedder(
    id: str, config: dict[str, Json], method: str, width: int, limit: int, **more: Json
) -> Published:
    """A sentence-transformers embedder in the usual layout."""
    prompts = more.pop("prompts", {})
    normalize = more.pop("normalize", True)
    source, unverified = more.pop("source", ""), more.pop("unverified", "")
    dimension, activation = more.pop("dense", (width, ""))
    files = sentence_transformer(method, width, limit, normalize=normalize) | more
    if activation:
        kinds = ("Transformer", "Pooling", "Dense", *(["Normalize"] if normalize else []))
        files["modules.json"] = modules(*kinds, Normalize="3_Normalize")
        files["2_Dense/config.json"] = {
            "in_features": width,
            "out_features": dimension,
            "bias": True,
            "activation_function": activation,
        }
    if prompts:
        files["config_sentence_transformers.json"] = {"prompts": prompts, "default_prompt_name": None}
    pooled = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}[method]
    reads = Reads(
        task="embed",
        score="bi",
        dimension=dimension,
        pooling=(pooled,),
        normalize=normalize,
        max_tokens=limit,
        prompts=prompts,
    )
    return Published(id=id, config=config, files=files, reads=reads, source=source, unverified=unverified)


ENCODERS = (
    embedder("sentence-transformers/all-MiniLM-L6-v2", bert(384, 6, 12), "mean_tokens", 384, 256),
    embedder("sentence-transformers/all-MiniLM-L12-v2", bert(384, 12, 12), "mean_tokens", 384, 128),
    embedder("BAAI/bge-small-en-v1.5", bert(384, 12, 12, id2label={"0": "LABEL_0"}), "cls_token", 384, 512),
    embedder("BAAI/bge-base-en-v1.5", bert(768, 12, 12, id2label={"0": "LABEL_0"}), "cls_token", 768, 512),
    embedder("BAAI/bge-large-en-v1.5", bert(1024, 24, 16, id2label={"0": "LABEL_0"}), "cls_token", 1024, 512),
    embedder("intfloat/e5-base-v2", bert(768, 12, 12), "mean_tokens", 768, 512),
    embedder("thenlper/gte-base", bert(768, 12, 12, torch_dtype="float16"), "mean_tokens", 768, 512),
    embedder(
        "mixedbread-ai/mxbai-embed-large-v1",
        bert(1024, 24, 16, torch_dtype="float16", use_cache=False),
        "cls_token",
        1024,
        512,
        normalize=False,
        prompts={"query": _MXBAI, "passage": ""},
    ),
    embedder("WhereIsAI/UAE-Large-V1", bert(1024, 24, 16), "cls_token", 1024, 512, normalize=False),
    embedder(
        "Snowflake/snowflake-arctic-embed-l",
        bert(1024, 24, 16),
        "cls_token",
        1024,
        512,
        prompts={"query": _MXBAI},
    ),
    embedder(
        "intfloat/multilingual-e5-small",
        bert(384, 12, 12, vocab_size=250037, tokenizer_class="XLMRobertaTokenizer"),
        "mean_tokens",
        384,
        512,
    ),
    embedder("intfloat/multilingual-e5-large", xlmr(1024, 24), "mean_tokens", 1024, 512),
    embedder(
        "Snowflake/snowflake-arctic-embed-l-v2.0",
        xlmr(1024, 24, max_position_embeddings=8194),
        "cls_token",
        1024,
        8192,
        prompts={"query": "query: "},
    ),
    Published(
        id="BAAI/bge-m3",
        config=xlmr(1024, 24, max_position_embeddings=8194),
        files=sentence_transformer("cls_token", 1024, 8192)
        | {"sparse_linear.pt": b"", "colbert_linear.pt": b""},
        reads=Reads(
            task="embed", score="bi", dimension=1024, pooling=("cls",), normalize=True, max_tokens=8192
        ),
    ),
    embedder("sentence-transformers/all-distilroberta-v1", roberta(768, 6), "mean_tokens", 768, 512),
    embedder(
        "sentence-transformers/all-mpnet-base-v2",
        bert(768, 12, 12, kind="MPNetForMaskedLM")
        | {
            "model_type": "mpnet",
            "max_position_embeddings": 514,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "layer_norm_eps": 1e-5,
            "relative_attention_num_buckets": 32,
            "vocab_size": 30527,
        },
        "mean_tokens",
        768,
        384,
    ),
    embedder(
        "sentence-transformers/distiluse-base-multilingual-cased-v2",
        {
            "activation": "gelu",
            "architectures": ["DistilBertModel"],
            "attention_dropout": 0.1,
            "dim": 768,
            "dropout": 0.1,
            "hidden_dim": 3072,
            "initializer_range": 0.02,
            "max_position_embeddings": 512,
            "model_type": "distilbert",
            "n_heads": 12,
            "n_layers": 6,
            "output_past": True,
            "pad_token_id": 0,
            "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
            "vocab_size": 119547,
        },
        "mean_tokens",
        768,
        128,
        normalize=False,
        dense=(512, "torch.nn.modules.activation.Tanh"),
    ),
    Published(
        id="cross-encoder/ms-marco-MiniLM-L6-v2",
        config=bert(
            384,
            6,
            12,
            kind="BertForSequenceClassification",
            sbert_ce_default_activation_function="torch.nn.modules.linear.Identity",
            **labels("LABEL_0"),
        ),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="classify", score="cross", max_tokens=512, labels=1),
    ),
    Published(
        id="dslim/bert-base-NER",
        config=bert(768, 12, 12, kind="BertForTokenClassification", vocab_size=28996, **labels(*_NER)),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="token_classify", max_tokens=512, labels=9),
    ),
    Published(
        id="colbert-ir/colbertv2.0",
        config=bert(768, 12, 12, kind="HF_ColBERT"),
        files={
            "artifact.metadata": {
                "query_token_id": "[unused0]",
                "doc_token_id": "[unused1]",
                "query_token": "[Q]",
                "doc_token": "[D]",
                "dim": 128,
                "doc_maxlen": 180,
                "mask_punctuation": True,
                "query_maxlen": 32,
                "attend_to_mask_tokens": False,
                "similarity": "cosine",
            },
            "special_tokens_map.json": {"mask_token": "[MASK]", "unk_token": "[UNK]"},
        },
        tokens=("[unused0]", "[unused1]"),
        reads=Reads(
            task="token_embed",
            score="late",
            dimension=128,
            max_tokens=512,
            markers=("[unused0]", "[unused1]"),
        ),
    ),
    Published(
        id="naver/splade-v3",
        config=bert(768, 12, 12, kind="BertForMaskedLM"),
        files={
            "modules.json": modules(
                "MLMTransformer", "SpladePooling", package="sentence_transformers.sparse_encoder.models"
            ),
            "1_SpladePooling/config.json": {
                "pooling_strategy": "max",
                "activation_function": "relu",
                "word_embedding_dimension": None,
            },
            "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        },
        reads=Reads(task="sparse", max_tokens=512),
    ),
    Published(
        id="BAAI/bge-reranker-v2-m3",
        config=xlmr(
            1024,
            24,
            kind="XLMRobertaForSequenceClassification",
            max_position_embeddings=8194,
            **labels("LABEL_0"),
        ),
        files={"tokenizer_config.json": {"model_max_length": 8192}},
        reads=Reads(task="classify", score="cross", max_tokens=8192, labels=1),
    ),
    Published(
        id="BAAI/bge-reranker-base",
        config=xlmr(768, 12, kind="XLMRobertaForSequenceClassification", **labels("LABEL_0")),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="classify", score="cross", max_tokens=512, labels=1),
    ),
    Published(
        id="papluca/xlm-roberta-base-language-detection",
        config=xlmr(
            768,
            12,
            kind="XLMRobertaForSequenceClassification",
            **labels(*[f"l{number}" for number in range(20)]),
        ),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="classify", max_tokens=512, labels=20),
    ),
    Published(
        id="SamLowe/roberta-base-go_emotions",
        config=roberta(
            768,
            12,
            kind="RobertaForSequenceClassification",
            problem_type="multi_label_classification",
            **labels(*[f"emotion{number}" for number in range(28)]),
        ),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="classify", max_tokens=512, labels=28),
    ),
    Published(
        id="ibm-granite/granite-embedding-30m-sparse",
        config=roberta(384, 6, kind="RobertaForMaskedLM"),
        files={
            "modules.json": modules(
                "MLMTransformer", "SpladePooling", package="sentence_transformers.sparse_encoder.models"
            ),
            "1_SpladePooling/config.json": {"pooling_strategy": "max", "activation_function": "relu"},
            "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        },
        reads=Reads(task="sparse", max_tokens=512),
    ),
    Published(
        id="mixedbread-ai/mxbai-rerank-base-v1",
        config=_DEBERTA | {"architectures": ["DebertaV2ForSequenceClassification"]} | labels("LABEL_0"),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="classify", score="cross", max_tokens=512, labels=1),
    ),
    Published(
        id="meta-llama/Llama-Prompt-Guard-2-86M",
        config=_DEBERTA
        | {"architectures": ["DebertaV2ForSequenceClassification"], "vocab_size": 251000}
        | labels("LABEL_0", "LABEL_1"),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="classify", max_tokens=512, labels=2),
    ),
    Published(
        id="MoritzLaurer/deberta-v3-large-zeroshot-v2.0",
        config=_DEBERTA
        | {
            "architectures": ["DebertaV2ForSequenceClassification"],
            "hidden_size": 1024,
            "num_hidden_layers": 24,
        }
        | {"intermediate_size": 4096, "num_attention_heads": 16, "pooler_hidden_size": 1024}
        | labels("entailment", "not_entailment"),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="classify", max_tokens=512, labels=2),
    ),
    Published(
        id="distilbert/distilbert-base-uncased-finetuned-sst-2-english",
        config={
            "activation": "gelu",
            "architectures": ["DistilBertForSequenceClassification"],
            "attention_dropout": 0.1,
            "dim": 768,
            "dropout": 0.1,
            "finetuning_task": "sst-2",
            "hidden_dim": 3072,
            "initializer_range": 0.02,
            "max_position_embeddings": 512,
            "model_type": "distilbert",
            "n_heads": 12,
            "n_layers": 6,
            "output_past": True,
            "pad_token_id": 0,
            "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
            "vocab_size": 30522,
        }
        | labels("NEGATIVE", "POSITIVE"),
        files={"tokenizer_config.json": {"model_max_length": 512}},
        reads=Reads(task="classify", max_tokens=512, labels=2),
    ),
    embedder(
        "Alibaba-NLP/gte-modernbert-base", modernbert(768, 22, 12), "cls_token", 768, 8192, normalize=False
    ),
    embedder(
        "ibm-granite/granite-embedding-english-r2",
        modernbert(768, 22, 12, classifier_pooling="mean", sparse_prediction=False),
        "cls_token",
        768,
        8192,
    ),
    Published(
        id="Alibaba-NLP/gte-reranker-modernbert-base",
        config=modernbert(768, 22, 12, kind="ModernBertForSequenceClassification", **labels("LABEL_0")),
        files={"tokenizer_config.json": {"model_max_length": 8192}},
        reads=Reads(task="classify", score="cross", max_tokens=8192, labels=1),
    ),
    Published(
        id="lightonai/GTE-ModernColBERT-v1",
        config=modernbert(768, 22, 12),
        files={
            "modules.json": [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
            ],
            "1_Dense/config.json": {
                "in_features": 768,
                "out_features": 128,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "config_sentence_transformers.json": {
                "prompts": {},
                "default_prompt_name": None,
                "similarity_fn_name": "MaxSim",
                "query_prefix": "[Q] ",
                "document_prefix": "[D] ",
                "query_length": 48,
                "document_length": 300,
                "attend_to_expansion_tokens": False,
                "skiplist_words": ["!", ".", ","],
                "do_query_expansion": True,
            },
            "sentence_bert_config.json": {"max_seq_length": 299, "do_lower_case": False},
            "special_tokens_map.json": {"mask_token": "[MASK]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
        },
        tokens=("[Q] ", "[D] "),
        reads=Reads(
            task="token_embed", score="late", dimension=128, max_tokens=299, markers=("[Q] ", "[D] ")
        ),
    ),
    embedder("nomic-ai/nomic-embed-text-v1.5", NOMIC, "mean_tokens", 768, 8192, normalize=False),
    embedder(
        "Snowflake/snowflake-arctic-embed-m-long",
        NOMIC | {"rotary_scaling_factor": None},
        "cls_token",
        768,
        2048,
        prompts={"query": _MXBAI},
    ),
    embedder("Alibaba-NLP/gte-base-en-v1.5", NEW, "cls_token", 768, 8192, normalize=False),
    embedder(
        "Alibaba-NLP/gte-multilingual-base",
        NEW
        | {"rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000, "type_vocab_size": 1}
        | {"vocab_size": 250048, "pad_token_id": 1},
        "cls_token",
        768,
        8192,
    ),
    Published(
        id="Alibaba-NLP/gte-multilingual-reranker-base",
        config=NEW
        | {"architectures": ["NewForSequenceClassification"], "rope_scaling": {"factor": 8.0, "type": "ntk"}}
        | {"rope_theta": 20000, "type_vocab_size": 1, "vocab_size": 250048, "pad_token_id": 1}
        | labels("LABEL_0"),
        files={"tokenizer_config.json": {"model_max_length": 8192}},
        reads=Reads(task="classify", score="cross", max_tokens=8192, labels=1),
    ),
)
