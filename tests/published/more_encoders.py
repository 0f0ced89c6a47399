"""More published encoders: with quirks of their own in modules.json, sparse, late and labelled."""

from __future__ import annotations

from tests.published.catalog import Json, Published, Reads, modules, pooling
from tests.published.encoders import NEW, NOMIC, bert, embedder, labels, modernbert, roberta, xlmr

_ARCTIC = "Represent this sentence for searching relevant passages: "
_TANH = "torch.nn.modules.activation.Tanh"
_JINA_TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
_JINA_PROMPTS = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
    "separation": "",
    "classification": "",
    "text-matching": "",
}
_FLASH = {
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "use_flash_attn": True,
}
_MMBERT = {
    "vocab_size": 256000,
    "bos_token_id": 2,
    "cls_token_id": 1,
    "eos_token_id": 1,
    "sep_token_id": 1,
    "pad_token_id": 0,
    "local_rope_theta": 160000.0,
    "position_embedding_type": "sans_pos",
}
_ELECTRA: dict[str, Json] = {
    "model_type": "electra",
    "embedding_size": 768,
    "summary_activation": "gelu",
    "summary_last_dropout": 0.1,
    "summary_type": "first",
    "summary_use_proj": True,
}
_ALBERT: dict[str, Json] = {
    "architectures": ["AlbertForSequenceClassification"],
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 2,
    "classifier_dropout_prob": 0.1,
    "down_scale_factor": 1,
    "embedding_size": 128,
    "eos_token_id": 3,
    "gap_size": 0,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "inner_group_num": 1,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "albert",
    "net_structure_type": 0,
    "num_attention_heads": 12,
    "num_hidden_groups": 1,
    "num_hidden_layers": 12,
    "num_memory_blocks": 0,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 30000,
}
_T5: dict[str, Json] = {
    "architectures": ["T5EncoderModel"],
    "d_ff": 3072,
    "d_kv": 64,
    "d_model": 768,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "relu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "use_cache": True,
    "vocab_size": 32128,
}
_JINA_V2: dict[str, Json] = bert(768, 12, 12, kind="JinaBertForMaskedLM") | {
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoModelForMaskedLM": "jinaai/jina-bert-implementation--modeling_bert.JinaBertForMaskedLM"
    },
    "attn_implementation": None,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "max_position_embeddings": 8192,
    "model_max_length": 8192,
    "position_embedding_type": "alibi",
    "vocab_size": 30528,
}
_SPLADE = "sentence_transformers.sparse_encoder.models"


def splade(id: str, config: dict[str, Json], **pooler: Json) -> Published:
    return Published(
        id=id,
        config=config,
        files={
            "modules.json": modules("MLMTransformer", "SpladePooling", package=_SPLADE),
            "1_SpladePooling/config.json": {"pooling_strategy": "max", "activation_function": "relu"}
            | pooler,
            "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        },
        reads=Reads(task="sparse", max_tokens=512),
    )


def routed(id: str, config: dict[str, Json], max_tokens: int) -> Published:
    """Inference-free SPLADE: queries look up weights, documents run through the model at the root."""
    package, base = "sentence_transformers.sparse_encoder.models", "sentence_transformers.models"
    return Published(
        id=id,
        config=config,
        files={
            "modules.json": [{"idx": 0, "name": "0", "path": "", "type": f"{base}.Router"}],
            "router_config.json": {
                "types": {
                    "query_0_SparseStaticEmbedding": f"{package}.SparseStaticEmbedding.SparseStaticEmbedding",
                    "": f"{package}.MLMTransformer.MLMTransformer",
                    "document_1_SpladePooling": f"{package}.SpladePooling.SpladePooling",
                },
                "structure": {
                    "query": ["query_0_SparseStaticEmbedding"],
                    "document": ["", "document_1_SpladePooling"],
                },
                "parameters": {"default_route": "document", "allow_empty_key": True},
            },
            "query_0_SparseStaticEmbedding/config.json": {"frozen": False},
            "document_1_SpladePooling/config.json": {
                "pooling_strategy": "max",
                "activation_function": "log1p_relu",
                "word_embedding_dimension": 30522,
            },
            "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        },
        reads=Reads(task="sparse", max_tokens=max_tokens),
        source="the lists of files by which others fetch its repository, such as webis-de/lightning-ir",
        unverified="the names in router_config.json, and its limit: as sentence-transformers saves them",
    )


def colbert(
    id: str, config: dict[str, Json], widths: tuple[int, ...], query: int, document: int, **more: Json
) -> Published:
    """A PyLate model with a Dense module for each step of `widths`."""
    dense = [f"{number}_Dense" for number in range(1, len(widths))]
    return Published(
        id=id,
        config=config,
        files={
            "modules.json": [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                *(
                    {"idx": at, "name": str(at), "path": path, "type": "pylate.models.Dense.Dense"}
                    for at, path in enumerate(dense, 1)
                ),
            ],
            **{
                f"{path}/config.json": {
                    "in_features": before,
                    "out_features": after,
                    "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity",
                }
                for path, before, after in zip(dense, widths, widths[1:], strict=False)
            },
            "config_sentence_transformers.json": {
                "prompts": {},
                "query_prefix": "[Q] ",
                "document_prefix": "[D] ",
                "query_length": query,
                "document_length": document,
                "attend_to_expansion_tokens": False,
                "skiplist_words": ["!", "."],
                "do_query_expansion": True,
            },
            "sentence_bert_config.json": {"max_seq_length": document - 1, "do_lower_case": False},
            "special_tokens_map.json": {"mask_token": "[MASK]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
        },
        tokens=("[Q] ", "[D] "),
        reads=Reads(
            task="token_embed",
            score="late",
            dimension=widths[-1],
            max_tokens=document - 1,
            causal=more.get("causal", False),
            markers=("[Q] ", "[D] "),
        ),
        source=more.get("source", ""),
        unverified=more.get("unverified", ""),
    )


def t5(id: str, config: dict[str, Json], max_tokens: int, **more: Json) -> Published:
    """Mean, a projection without bias, and unit length."""
    width = config["d_model"]
    return Published(
        id=id,
        config=config,
        files={
            "modules.json": modules("Transformer", "Pooling", "Dense", "Normalize", Normalize="3_Normalize"),
            "1_Pooling/config.json": pooling("mean_tokens", width),
            "2_Dense/config.json": {
                "in_features": width,
                "out_features": 768,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        },
        reads=Reads(
            task="embed", score="bi", dimension=768, pooling=("mean",), normalize=True, max_tokens=max_tokens
        ),
        **more,
    )


def classifier(
    id: str, config: dict[str, Json], *, count: int, limit: int = 512, task: str = "classify", **more: Json
) -> Published:
    scores = "cross" if count == 1 and task == "classify" else None
    return Published(
        id=id,
        config=config,
        files={"tokenizer_config.json": {"model_max_length": limit}},
        reads=Reads(task=task, score=scores, max_tokens=limit, labels=count),
        **more,
    )


MORE_ENCODERS = (
    embedder(
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2",
        bert(384, 12, 12, vocab_size=250037),
        "mean_tokens",
        384,
        128,
        normalize=False,
    ),
    embedder("sentence-transformers/multi-qa-MiniLM-L6-cos-v1", bert(384, 6, 12), "mean_tokens", 384, 512),
    embedder(
        "sentence-transformers/LaBSE",
        bert(768, 12, 12, vocab_size=501153, directionality="bidi", pooler_type="first_token_transform"),
        "cls_token",
        768,
        256,
        dense=(768, _TANH),
    ),
    embedder(
        "Snowflake/snowflake-arctic-embed-m-v1.5",
        bert(768, 12, 12),
        "cls_token",
        768,
        512,
        prompts={"query": _ARCTIC},
    ),
    embedder(
        "Snowflake/snowflake-arctic-embed-m-v2.0",
        NEW
        | {"architectures": ["GteModel"], "model_type": "gte", "rope_scaling": None, "rope_theta": 160000}
        | {"auto_map": {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"}, "type_vocab_size": 1}
        | {"vocab_size": 250048, "pad_token_id": 1, "unpad_inputs": "true"}
        | {"use_memory_efficient_attention": "true", "matryoshka_dimensions": [256]},
        "cls_token",
        768,
        8192,
        prompts={"query": "query: "},
    ),
    embedder("ibm-granite/granite-embedding-278m-multilingual", xlmr(768, 12), "cls_token", 768, 512),
    embedder("ibm-granite/granite-embedding-30m-english", roberta(384, 6), "cls_token", 384, 512),
    embedder(
        "ibm-granite/granite-embedding-small-english-r2",
        modernbert(384, 12, 12, intermediate_size=1536),
        "cls_token",
        384,
        8192,
    ),
    embedder(
        "lightonai/DenseOn",
        modernbert(768, 22, 12),
        "cls_token",
        768,
        512,
        normalize=False,
        prompts={"query": "query: ", "document": "document: "},
        source="lightonai/mdenseon-mlateon scripts/pretrain and scripts/finetune, english_dense.py",
    ),
    embedder(
        "lightonai/mDenseOn",
        modernbert(768, 22, 12, **_MMBERT),
        "cls_token",
        768,
        8192,
        normalize=False,
        prompts={"query": "query: ", "document": "document: "},
        source="lightonai/mdenseon-mlateon scripts/pretrain and scripts/finetune, multilingual_dense.py",
    ),
    Published(
        id="jhu-clsp/mmBERT-base",
        config=modernbert(768, 22, 12, kind="ModernBertForMaskedLM", **_MMBERT),
        reads=Reads(task="embed", score="bi", max_tokens=8192),
    ),
    Published(
        id="jhu-clsp/ettin-encoder-17m",
        config=modernbert(256, 7, 4, kind="ModernBertForMaskedLM", intermediate_size=384),
        reads=Reads(task="embed", score="bi", max_tokens=8192),
    ),
    Published(
        id="jinaai/jina-embeddings-v3",
        config=xlmr(1024, 24, max_position_embeddings=8194)
        | _FLASH
        | {
            "emb_pooler": None,
            "load_trained_adapters": True,
            "lora_adaptations": _JINA_TASKS,
            "lora_alpha": 1,
            "lora_dropout_p": 0.0,
            "lora_main_params_trainable": False,
            "lora_prompts": _JINA_PROMPTS,
            "lora_rank": 4,
            "matryoshka_dimensions": [32, 64, 128, 256, 512, 768, 1024],
            "position_embedding_type": "rotary",
            "rotary_emb_base": 20000.0,
            "truncate_dim": None,
        },
        files={
            "modules.json": [
                {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"},
                {
                    "idx": 1,
                    "name": "pooler",
                    "path": "1_Pooling",
                    "type": "sentence_transformers.models.Pooling",
                },
                {
                    "idx": 2,
                    "name": "normalizer",
                    "path": "2_Normalize",
                    "type": "sentence_transformers.models.Normalize",
                },
            ],
            "1_Pooling/config.json": pooling("mean_tokens", 1024, include_prompt=True),
            "config_sentence_transformers.json": {"prompts": _JINA_PROMPTS, "default_prompt_name": None},
        },
        reads=Reads(
            task="embed",
            score="bi",
            dimension=1024,
            pooling=("mean",),
            normalize=True,
            max_tokens=8192,
            prompts=_JINA_PROMPTS,
            adapters=tuple(_JINA_TASKS),
        ),
    ),
    Published(
        id="jinaai/jina-embeddings-v2-base-en",
        config=_JINA_V2,
        files={
            "modules.json": modules("Transformer", "Pooling"),
            "1_Pooling/config.json": pooling("mean_tokens", 768),
            "sentence_bert_config.json": {"max_seq_length": 8192, "do_lower_case": False},
        },
        reads=Reads(
            task="embed", score="bi", dimension=768, pooling=("mean",), normalize=False, max_tokens=8192
        ),
    ),
    embedder(
        "nomic-ai/nomic-embed-text-v2-moe",
        NOMIC
        | {"activation_function": "gelu", "layer_norm_epsilon": 1e-05, "max_trained_positions": 2048}
        | {"mlp_fc1_bias": True, "mlp_fc2_bias": True, "qkv_proj_bias": True, "n_positions": 2048}
        | {"moe_every_n_layers": 2, "moe_impl": "megablocks", "moe_normalize_expert_weights": False}
        | {"moe_top_k": 2, "num_experts": 8, "num_shared_experts": 0, "expert_choice_router": False}
        | {"ffn_div": 1, "rotary_emb_base": 10000, "type_vocab_size": 1, "vocab_size": 250048}
        | {"pad_token_id": 1, "add_pooling_layer": False, "attention_probs_dropout_prob": 0.0},
        "mean_tokens",
        768,
        512,
        prompts={"query": "search_query: ", "passage": "search_document: "},
        source="nomic-ai/contrastors configs/train/contrastive_finetune_moe.yaml, modeling_nomic_bert.py",
    ),
    t5("sentence-transformers/sentence-t5-base", _T5, 256),
    t5("sentence-transformers/gtr-t5-base", _T5, 512),
    t5(
        "hkunlp/instructor-large",
        _T5 | {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 24, "num_decoder_layers": 24},
        512,
        source="xlang-ai/instructor-embedding InstructorEmbedding/instructor.py, which masks the instruction",
    ),
    colbert("lightonai/Reason-ModernColBERT", modernbert(768, 22, 12), (768, 128), 128, 8192),
    colbert(
        "mixedbread-ai/mxbai-edge-colbert-v0-17m",
        modernbert(256, 7, 4, intermediate_size=384),
        (256, 512, 48),
        48,
        300,
        unverified="the width between its two Dense modules, and its lengths; its positions may be 7,999",
    ),
    Published(
        id="answerdotai/answerai-colbert-small-v1",
        config=bert(384, 12, 12, kind="HF_ColBERT"),
        files={
            "artifact.metadata": {
                "query_token_id": "[unused0]",
                "doc_token_id": "[unused1]",
                "dim": 96,
                "doc_maxlen": 300,
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
            dimension=96,
            max_tokens=512,
            markers=("[unused0]", "[unused1]"),
        ),
    ),
    Published(
        id="jinaai/jina-colbert-v2",
        config=xlmr(1024, 24, kind="HF_ColBERT", max_position_embeddings=8194)
        | _FLASH
        | {"position_embedding_type": "rotary", "rotary_emb_base": 10000.0},
        files={
            "artifact.metadata": {
                "query_token_id": "[QueryMarker]",
                "doc_token_id": "[DocumentMarker]",
                "dim": 128,
                "doc_maxlen": 300,
                "query_maxlen": 32,
                "mask_punctuation": True,
                "attend_to_mask_tokens": False,
            },
            "special_tokens_map.json": {"mask_token": "<mask>", "unk_token": "<unk>"},
        },
        tokens=("[QueryMarker]", "[DocumentMarker]"),
        reads=Reads(
            task="token_embed",
            score="late",
            dimension=128,
            max_tokens=8192,
            markers=("[QueryMarker]", "[DocumentMarker]"),
        ),
        source="vllm-project/vllm tests/models/language/pooling/test_colbert.py (8,192 tokens, 128 numbers); "
        "mteb pylate_models.py, which names its markers",
        unverified="rotary_emb_base, and the lengths of queries and documents",
    ),
    splade("naver/splade-cocondenser-ensembledistil", bert(768, 12, 12, kind="BertForMaskedLM")),
    splade(
        "opensearch-project/opensearch-neural-sparse-encoding-v2-distill",
        {
            "activation": "gelu",
            "architectures": ["DistilBertForMaskedLM"],
            "dim": 768,
            "hidden_dim": 3072,
            "max_position_embeddings": 512,
            "model_type": "distilbert",
            "n_heads": 12,
            "n_layers": 6,
            "pad_token_id": 0,
            "vocab_size": 30522,
        },
    ),
    routed(
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill",
        {
            "activation": "gelu",
            "architectures": ["DistilBertForMaskedLM"],
            "dim": 768,
            "hidden_dim": 3072,
            "max_position_embeddings": 512,
            "model_type": "distilbert",
            "n_heads": 12,
            "n_layers": 6,
            "pad_token_id": 0,
            "vocab_size": 30522,
        },
        512,
    ),
    routed(
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte",
        NEW | {"architectures": ["NewForMaskedLM"], "vocab_size": 30522},
        8192,
    ),
    classifier(
        "jinaai/jina-reranker-v2-base-multilingual",
        xlmr(768, 12, kind="XLMRobertaForSequenceClassification", max_position_embeddings=1026)
        | _FLASH
        | labels("LABEL_0"),
        count=1,
        limit=1024,
    ),
    classifier(
        "cross-encoder/nli-deberta-v3-base",
        bert(768, 12, 12, kind="DebertaV2ForSequenceClassification")
        | {"model_type": "deberta-v2", "layer_norm_eps": 1e-07, "type_vocab_size": 0, "vocab_size": 128100}
        | {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
        | {"share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
        | {"max_relative_positions": -1, "pooler_hidden_size": 768, "pooler_hidden_act": "gelu"}
        | labels("contradiction", "entailment", "neutral"),
        count=3,
    ),
    classifier(
        "cross-encoder/stsb-roberta-base",
        roberta(768, 12, kind="RobertaForSequenceClassification", **labels("LABEL_0")),
        count=1,
    ),
    classifier(
        "cross-encoder/ms-marco-electra-base",
        bert(768, 12, 12, kind="ElectraForSequenceClassification", **labels("LABEL_0")) | _ELECTRA,
        count=1,
    ),
    classifier("textattack/albert-base-v2-SST-2", _ALBERT, count=2),
    classifier(
        "Jean-Baptiste/camembert-ner",
        xlmr(768, 12, kind="CamembertForTokenClassification", model_type="camembert", vocab_size=32005)
        | {"bos_token_id": 5, "eos_token_id": 6}
        | labels("O", "I-LOC", "I-PER", "I-MISC", "I-ORG"),
        count=5,
        task="token_classify",
    ),
    classifier(
        "Davlan/xlm-roberta-base-ner-hrl",
        xlmr(768, 12, kind="XLMRobertaForTokenClassification")
        | labels("O", "B-DATE", "I-DATE", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"),
        count=9,
        task="token_classify",
    ),
    classifier(
        "cardiffnlp/twitter-roberta-base-sentiment-latest",
        roberta(
            768, 12, kind="RobertaForSequenceClassification", **labels("negative", "neutral", "positive")
        ),
        count=3,
    ),
    classifier(
        "ProsusAI/finbert",
        bert(768, 12, 12, kind="BertForSequenceClassification", **labels("positive", "negative", "neutral")),
        count=3,
    ),
    Published(
        id="nghuyong/ernie-3.0-base-zh",
        config=bert(768, 12, 12, kind="ErnieForMaskedLM")
        | {"model_type": "ernie", "max_position_embeddings": 2048, "type_vocab_size": 4, "vocab_size": 40000}
        | {"layer_norm_eps": 1e-05, "task_type_vocab_size": 3, "use_task_id": True, "task_id": 0},
        reads=Reads(task="embed", score="bi", max_tokens=2048),
    ),
)
