"""Published models that are no plain encoder or decoder: static, labelled, multimodal, other formats."""

from __future__ import annotations

from tests.published.catalog import Json, Published, Reads, modules
from tests.published.encoders import bert, modernbert

_TEXT_AND_IMAGES = {"vision_config": {"hidden_size": 1280, "depth": 32}}
_GLINER: dict[str, Json] = {
    "class_token_index": 128001,
    "dropout": 0.4,
    "embed_ent_token": True,
    "ent_token": "<<ENT>>",
    "eval_every": 5000,
    "fine_tune": True,
    "freeze_token_rep": False,
    "fuse_layers": False,
    "has_rnn": True,
    "hidden_size": 512,
    "labels_encoder": None,
    "log_dir": "logs",
    "lr_encoder": "1e-5",
    "max_len": 384,
    "max_neg_type_ratio": 1,
    "max_types": 25,
    "max_width": 12,
    "model_name": "microsoft/deberta-v3-base",
    "model_type": "gliner",
    "name": "correct",
    "num_post_fusion_layers": 1,
    "random_drop": True,
    "sep_token": "<<SEP>>",
    "shuffle_types": True,
    "size_sup": -1,
    "span_mode": "markerV0",
    "subtoken_pooling": "first",
    "vocab_size": 128004,
    "words_splitter_type": "whitespace",
}


def images(id: str, kind: str, **more: Json) -> Published:
    config = {"architectures": [kind], **_TEXT_AND_IMAGES, **more}
    return Published(id=id, config=config, refused="it reads images")


def without_config(id: str, reason: str, **files: Json) -> Published:
    return Published(id=id, config=None, files=files, refused=reason)


def unknown(id: str, config: dict[str, Json], reason: str = "no family is known by this name") -> Published:
    return Published(id=id, config=config, refused=reason)


OTHERS = (
    images("nvidia/llama-nemoretriever-colembed-1b-v1", "llama_NemoRetrieverColEmbed"),
    images("jinaai/jina-clip-v2", "JinaCLIPModel"),
    images("jinaai/jina-reranker-m0", "JinaVLForRanking"),
    images("nvidia/llama-nemotron-embed-vl-1b-v2", "LlamaNemotronVLModel"),  # NeMo-Retriever, vLLM
    images("nvidia/llama-nemotron-rerank-vl-1b-v2", "LlamaNemotronVLForSequenceClassification"),  # vLLM
    images("nvidia/nemotron-colembed-vl-4b-v2", "Qwen3VLNemotronEmbedModel"),  # vLLM test_colqwen3.py
    images("OpenSearch-AI/Ops-Colqwen3-4B", "OpsColQwen3Model"),  # vLLM test_colqwen3.py
    images("athrael-soju/colqwen3.5-4.5B-v3", "ColQwen3_5"),  # vLLM, colpali-engine
    without_config(
        "vidore/colqwen2.5-v0.2",
        "an adapter for 'vidore/colqwen2.5-base'",
        **{"adapter_config.json": {"base_model_name_or_path": "vidore/colqwen2.5-base"}},
    ),
    without_config(
        "nomic-ai/colnomic-embed-multimodal-3b",
        "an adapter for ",
        **{"adapter_config.json": {"base_model_name_or_path": "nomic-ai/colqwen2.5-3B-base"}},
    ),
    without_config("Qwen/Qwen3-Embedding-0.6B-GGUF", "GGUF", **{"Qwen3-Embedding-0.6B-Q8_0.gguf": b""}),
    without_config("nomic-ai/nomic-embed-text-v1.5-GGUF", "GGUF", **{"nomic-embed-text-v1.5.f16.gguf": b""}),
    without_config("mistralai/Mistral-7B-v0.1-original", "Mistral's own layout", **{"params.json": {}}),
    without_config("Qdrant/bm25", "it has no config.json", **{"README.md": {}}),
    Published(
        id="fastino/gliner2-base-v1",
        config={
            "architectures": ["Extractor"],
            "model_type": "extractor",
            "model_name": "microsoft/deberta-v3-base",
            "counting_layer": "count_lstm",
            "max_width": 8,
            "token_pooling": "first",
        },
        refused="GLiNER2",
    ),
    Published(
        id="urchade/gliner_medium-v2.1",
        config=None,
        files={"gliner_config.json": _GLINER},
        tokens=("[FLERT]", "<<ENT>>", "<<SEP>>"),
        reads=Reads(task="entities", max_tokens=2048),  # it is meant for 384 words
    ),
    Published(
        id="numind/NuNER_Zero",
        config=None,
        files={
            "gliner_config.json": _GLINER
            | {"span_mode": "token_level", "max_width": 1, "model_name": "microsoft/deberta-v3-large"}
        },
        tokens=("[FLERT]", "<<ENT>>", "<<SEP>>"),
        reads=Reads(task="entities", max_tokens=2048),  # it is meant for 384 words
    ),
    Published(
        id="knowledgator/gliclass-modern-base-v3.0",
        config={
            "architecture_type": "uni-encoder",
            "architectures": ["GLiClassModel"],
            "class_token_index": 50368,
            "contrastive_loss_coef": 0.0,
            "dropout": 0.3,
            "embed_class_token": True,
            "encoder_config": modernbert(768, 22, 12, kind="ModernBertForMaskedLM", vocab_size=50370),
            "encoder_model_name": "answerdotai/ModernBERT-base",
            "extract_text_features": False,
            "focal_loss_alpha": -1,
            "focal_loss_gamma": -1,
            "hidden_size": 768,
            "ignore_index": -100,
            "logit_scale_init_value": 2.6592,
            "max_num_classes": 25,
            "model_type": "GLiClass",
            "normalize_features": False,
            "pooling_strategy": "avg",
            "problem_type": "multi_label_classification",
            "projector_hidden_act": "gelu",
            "prompt_first": True,
            "scorer_type": "mlp",
            "squeeze_layers": False,
            "text_token_index": 50369,
            "use_lstm": False,
            "use_segment_embeddings": False,
            "vocab_size": 50370,
        },
        tokens=("<<LABEL>>", "<<SEP>>"),
        reads=Reads(task="zero_shot", max_tokens=8192),
        source="Knowledgator/GLiClass gliclass/config.py, for the names of options",
        unverified="the values of options that differ from those of gliclass-base-v1.0",
    ),
    Published(
        id="minishlab/potion-base-8M",
        config={
            "model_type": "model2vec",
            "architectures": ["StaticModel"],
            "tokenizer_name": "baai/bge-base-en-v1.5",
            "apply_pca": 256,
            "apply_zipf": True,
            "hidden_dim": 256,
            "seq_length": 1000000,
            "normalize": True,
        },
        files={
            "modules.json": [
                {
                    "idx": 0,
                    "name": "0",
                    "path": ".",
                    "type": "sentence_transformers.models.StaticEmbedding",
                },
                {
                    "idx": 1,
                    "name": "1",
                    "path": "1_Normalize",
                    "type": "sentence_transformers.models.Normalize",
                },
            ]
        },
        tensors={"embeddings": (170, 256)},
        reads=Reads(
            task="embed", score="bi", dimension=256, pooling=("mean",), normalize=True, max_tokens=131072
        ),
    ),
    Published(
        id="sentence-transformers/static-retrieval-mrl-en-v1",
        config=None,
        files={
            "modules.json": modules("StaticEmbedding", StaticEmbedding="0_StaticEmbedding"),
            "config_sentence_transformers.json": {"prompts": {}, "similarity_fn_name": "cosine"},
        },
        tokenizer_folder="0_StaticEmbedding",
        tensors={"embedding.weight": (170, 1024)},
        reads=Reads(
            task="embed", score="bi", dimension=1024, pooling=("mean",), normalize=False, max_tokens=131072
        ),
    ),
    unknown(
        "allenai/longformer-base-4096",
        bert(768, 12, 12, kind="LongformerForMaskedLM", model_type="longformer"),
    ),
    unknown("google/bigbird-roberta-base", bert(768, 12, 12, kind="BigBirdForPreTraining")),
    unknown("google/mobilebert-uncased", bert(512, 24, 4, kind="MobileBertForPreTraining")),
    unknown("microsoft/deberta-base", bert(768, 12, 12, kind="DebertaModel", model_type="deberta")),
    unknown("facebook/xlm-roberta-xl", bert(2560, 36, 32, kind="XLMRobertaXLForMaskedLM")),
    unknown("facebook/xmod-base", bert(768, 12, 12, kind="XmodForMaskedLM")),
    unknown(
        "facebook/bart-large-mnli",
        {"architectures": ["BartForSequenceClassification"], "model_type": "bart", "d_model": 1024},
        "BartForSequenceClassification",
    ),
    unknown(
        "KaLM-Embedding/KaLM-Reranker-V1-Nano",
        {"architectures": ["T5Gemma2ForConditionalGeneration"], "model_type": "t5gemma2"},
        "an encoder with a decoder",
    ),
    unknown(
        "deepset/roberta-base-squad2",
        bert(768, 12, 12, kind="RobertaForQuestionAnswering", model_type="roberta"),
        "a task that Penstock does not have",
    ),
)
