"""One record for each model family: everything that differs by family and does not depend on weights.

Free of torch, because API processes read it. `models/registry.py` builds models from the same records, so
a new family is one record here, the file that builds it, and a parity test.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.unsupported import why_unsupported
from penstock.errors import ModelLoadError
from penstock.types import Task

log = logging.getLogger("penstock.checkpoint")

COLBERT_CLASS = "HF_ColBERT"  # any backbone, which model_type names

# Suffixes of class names, after the family's prefix, and the heads of such checkpoints.
CLASS_SUFFIXES: dict[str, Task | None] = {
    "Model": None,
    "ForMaskedLM": None,
    "ForPreTraining": None,
    "ForCausalLM": None,
    "LMHeadModel": None,
    "ForSequenceClassification": Task.CLASSIFY,
    "ForTokenClassification": Task.TOKEN_CLASSIFY,
    "ForRewardModel": Task.REWARD,
    "ForProcessRewardModel": Task.REWARD,
}
_ENCODER_HEADS = frozenset({Task.CLASSIFY, Task.TOKEN_CLASSIFY, Task.SPARSE})
IMAGE_SUFFIXES = ("ForConditionalGeneration", "ForRetrieval")  # also of families that mix images and text
_DECODER_HEADS = frozenset({Task.CLASSIFY, Task.TOKEN_CLASSIFY, Task.REWARD, Task.GENERATE, Task.SPARSE})


# Builders that support tensor parallelism.
_DIVIDED = frozenset(
    {
        *("encoder:albert", "encoder:bert", "encoder:distilbert", "encoder:electra", "encoder:mpnet"),
        *("encoder:roberta", "eurobert:eurobert", "gte:gte", "gte:new", "jina:xlm_roberta"),
        *("modernbert:modernbert", "nomic:nomic"),
        *("decoder:exaone4", "decoder:gemma", "decoder:gemma2", "decoder:gemma3", "decoder:gemma3_tower"),
        *("decoder:granite", "decoder:gritlm", "decoder:jina_ranking", "decoder:llama"),
        *("decoder:llama_bidirectional", "decoder:ministral3", "decoder:mistral", "decoder:mistral3_tower"),
        *("decoder:phi3", "decoder:qwen2", "decoder:qwen3", "decoder:qwen3_moe", "decoder:smollm3"),
        "decoder:voyage",
    }
)


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """The keys of the sizes in a family's config.json. The first key that is set is used."""

    hidden_size: tuple[str, ...] = ("hidden_size",)
    num_layers: tuple[str, ...] = ("num_hidden_layers",)
    num_heads: tuple[str, ...] = ("num_attention_heads",)
    intermediate_size: tuple[str, ...] = ("intermediate_size",)
    max_positions: tuple[str, ...] = ("max_position_embeddings",)
    head_dim: tuple[str, ...] = ()  # empty: `head_dim`, or hidden size / heads
    output_size: tuple[str, ...] = ()  # width of the last hidden states, if not hidden_size
    trained_positions: str | None = None  # limits positions if `rotary_scaling_factor` is set


# For architectures without a record, which transformers runs.
ANY_KEYS = ConfigKeys(
    hidden_size=("hidden_size", "n_embd", "dim", "d_model"),
    num_layers=("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    max_positions=("max_position_embeddings", "n_positions"),
)

# Model types without a record whose positions are counted from pad_token_id + 1.
_COUNT_FROM_PADDING = frozenset(
    ("data2vec-text", "ibert", "longformer", "luke", "mluke", "roberta-prelayernorm", "xmod")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str  # model_type, or the class name if another family has the same model_type
    class_prefix: str  # class names are this prefix and one of CLASS_SUFFIXES
    builder: str  # "file:function" below penstock/models
    heads: frozenset[Task] = _ENCODER_HEADS  # heads that the builder supports
    # Attention.
    is_decoder: bool = False  # causal, unless the next two fields or config.json say otherwise
    attends_both_ways: bool = False  # a bidirectional decoder, unless config.json says otherwise
    both_ways_key: str | None = None  # bidirectional if config.json has this key
    # Sizes and positions.
    keys: ConfigKeys = field(default_factory=ConfigKeys)
    is_nested: bool = False  # config.json has the sizes of the text tower in text_config
    outer_keys: tuple[str, ...] = ()  # keys whose top-level value is used, not that in text_config
    nested_defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of missing keys
    default_head_dim: int | None = None  # if config.json has no head_dim; None: hidden size / heads
    default_num_segments: int = 0  # if config.json has no type_vocab_size
    has_experts: bool = False  # check the sizes of experts too
    shares_layers: bool = False  # the layers of a group are stored once and repeated
    has_rotary_positions: bool = False  # no position table is stored
    positions_follow_padding: bool = False  # positions are counted from pad_token_id + 1
    max_row_length: int | None = None  # limit for relative positions; config.json has none
    trained_row_length: int | None = None  # default row limit if files and flags set none
    # Texts.
    instruction_template: str | None = None  # with {instruction}; precedes every text
    appends_eos: bool = False  # append the eos token to each text; the tokenizer does not
    begins_with_bos: bool = False  # add only the bos token to a text, whatever its tokenizer adds
    colbert_markers: tuple[str, str] = ("[unused0]", "[unused1]")  # markers of queries, documents
    adapters_key: str = "lora_adaptations"  # key with the names of task adapters
    requires_adapter: bool = False  # each request has to choose an adapter
    prompts: Mapping[str, str] = field(default_factory=dict)  # from published code; the first is the default
    query_adapters: tuple[str, ...] = ()  # adapters with which every text gets the query prompt
    # Images.
    qwen_vision: str | None = None  # kind of vision tower in checkpoint/qwen_vision.py; None: none
    page_dim: int | None = None  # default width of a page retriever's token vectors; None: not one
    has_gemma_vision: bool = False  # Gemma 4's vision tower, if its files have one
    has_siglip: bool = False  # its text model reads the patches of a SigLIP tower as tokens
    token_dim_key: str | None = None  # key of the token vectors' width, if they have their own
    is_dual: bool = False  # separate towers for texts and images, one vector space
    vision_defaults: Mapping[str, Any] = field(default_factory=dict)  # the same for vision_config
    # Pooling.
    pooling: str = "mean"  # default method with bidirectional attention
    causal_pooling: str = "last"  # default method with causal attention
    has_own_pooling: bool = False  # pools as in its published code; modules.json is ignored
    pools_prompt: bool = True  # whether to pool the tokens of a prompt, if no file says
    embed_mark: str | None = None  # mean pooling starts after this text
    # Scores and generation.
    score_prompts: tuple[str, ...] = ()  # prompts of its rerankers, named in checkpoint/rerankers.py
    is_listwise: bool = False  # scores a whole list of documents in one row
    why_whole_rows: str | None = None  # why a row cannot be split over several steps; None: it can
    generates_by_default: bool = False  # the bare class has a language-model head and is intended to generate

    @property
    def is_divided(self) -> bool:
        """Whether tensor parallelism divides its layers."""
        return self.builder in _DIVIDED

    @property
    def reads_images(self) -> bool:
        return self.is_dual or self.has_siglip or self.qwen_vision is not None

    @property
    def mixes_images(self) -> bool:
        """Whether a row can contain both text and images."""
        return self.reads_images and not self.is_dual

    @property
    def has_rope_axes(self) -> bool:
        """Whether image tokens have positions in time, down and across (M-RoPE)."""
        return self.qwen_vision is not None

    def is_causal(self, config: Mapping[str, Any]) -> bool:
        """Whether attention is causal, from config.json or otherwise the family's default."""
        if not self.is_decoder:
            return False
        if (causal := _boolean(config, "is_causal")) is not None:
            return causal
        if (both_ways := _boolean(config, "use_bidirectional_attention")) is not None:
            return not both_ways
        if self.both_ways_key is not None and config.get(self.both_ways_key) is not None:
            return False
        return not self.attends_both_ways


def _encoder(name: str, class_prefix: str, builder: str, **facts: Any) -> Family:
    return Family(name=name, class_prefix=class_prefix, builder=builder, **facts)


def _decoder(name: str, class_prefix: str, builder: str, **facts: Any) -> Family:
    own: dict[str, Any] = {"heads": _DECODER_HEADS, "has_rotary_positions": True, **facts}
    return Family(name=name, class_prefix=class_prefix, builder=builder, is_decoder=True, **own)


_XLM_R_MARKERS = ("[QueryMarker]", "[DocumentMarker]")
_GRITLM_MARK = "<|embed|>\n"
_DISTILBERT_KEYS = ConfigKeys(
    hidden_size=("dim",),
    num_layers=("n_layers",),
    num_heads=("n_heads",),
    intermediate_size=("hidden_dim",),
)
_GPT2_KEYS = ConfigKeys(
    hidden_size=("n_embd",),
    num_layers=("n_layer",),
    num_heads=("n_head",),
    intermediate_size=("n_inner",),
    max_positions=("n_positions", "n_ctx"),
)
_NOMIC_KEYS = ConfigKeys(
    hidden_size=("hidden_size", "n_embd"),
    num_layers=("num_hidden_layers", "n_layer"),
    num_heads=("num_attention_heads", "n_head"),
    intermediate_size=("intermediate_size", "n_inner"),
    max_positions=("n_positions", "max_position_embeddings"),
    trained_positions="max_trained_positions",
)
_T5_KEYS = ConfigKeys(
    hidden_size=("d_model",),
    num_layers=("num_layers",),
    num_heads=("num_heads",),
    intermediate_size=("d_ff",),
    max_positions=(),
    head_dim=("d_kv",),
)
_T5_FACTS: dict[str, Any] = {
    "keys": _T5_KEYS,
    "heads": frozenset(),
    "max_row_length": 1 << 15,
    "trained_row_length": 512,
}
_EMBEDDING_GEMMA2_FACTS: dict[str, Any] = {  # a backbone without heads
    "trained_row_length": 8192,  # its model card; positions go to 262144
    "attends_both_ways": True,
    "heads": frozenset(),
    "default_head_dim": 256,
    "keys": ConfigKeys(output_size=("embedding_dim",)),
}
_GEMMA_FACTS: dict[str, Any] = {"score_prompts": ("bge-reranker-v2-gemma",), "default_head_dim": 256}
_GEMMA3_TOWER_DEFAULTS: dict[str, Any] = {  # defaults of transformers; published files omit most of these
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_LFM2_FACTS: dict[str, Any] = {
    "heads": frozenset(),
    "keys": ConfigKeys(intermediate_size=("block_ff_dim", "intermediate_size")),
    "why_whole_rows": "the state of its convolutions is not kept between steps",
}
_QWEN3_FACTS: dict[str, Any] = {
    "score_prompts": ("qwen3-reranker", "zerank", "ctxl-rerank-v2"),
    "default_head_dim": 128,
}
_QWEN_VL_FACTS: dict[str, Any] = {"is_nested": True, "heads": frozenset({Task.GENERATE})}
_QWEN2_VL_FACTS = _QWEN_VL_FACTS | {"qwen_vision": "qwen2_vl"}
_QWEN2_5_VL_FACTS = _QWEN_VL_FACTS | {"qwen_vision": "qwen2_5_vl"}
_QWEN3_VL_FACTS = _QWEN_VL_FACTS | {
    "qwen_vision": "qwen3_vl",
    "default_head_dim": 128,
    "score_prompts": ("qwen3-vl-reranker",),
}
_RETRIEVER: dict[str, Any] = {"heads": frozenset()}  # a backbone without heads
_CLIP_SIZES: dict[str, Any] = {"num_hidden_layers": 12, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
_CLIP_FACTS: dict[str, Any] = {
    "is_nested": True,
    "is_dual": True,
    "heads": frozenset(),
    "pooling": "last",
    "keys": ConfigKeys(output_size=("projection_dim",)),
    "outer_keys": ("projection_dim",),
    "nested_defaults": {
        **_CLIP_SIZES,
        "vocab_size": 49_408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "projection_dim": 512,
        "eos_token_id": 49_407,
    },
    "vision_defaults": {
        **_CLIP_SIZES,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 32,
    },
}
_SIGLIP_SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
_SIGLIP_FACTS: dict[str, Any] = {
    "is_nested": True,
    "is_dual": True,
    "heads": frozenset(),
    "pooling": "last",
    "keys": ConfigKeys(output_size=("projection_size",)),
    "nested_defaults": {**_SIGLIP_SIZES, "vocab_size": 32_000, "max_position_embeddings": 64},
}
_SIGLIP_VISION: dict[str, Any] = {**_SIGLIP_SIZES, "num_channels": 3, "patch_size": 16}
_PALIGEMMA_FACTS: dict[str, Any] = {
    "attends_both_ways": True,  # image, prompt and query are all part of the prefix
    "is_nested": True,
    "has_siglip": True,
    "begins_with_bos": True,
    "default_head_dim": 256,
    "nested_defaults": {"max_position_embeddings": 8192},
    "vision_defaults": {**_SIGLIP_VISION, "image_size": 224},
}
_MODERNVBERT_FACTS: dict[str, Any] = {
    "is_nested": True,
    "has_siglip": True,
    "has_rotary_positions": True,
    "heads": frozenset(),
    "nested_defaults": {
        "vocab_size": 50_368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "pixel_shuffle_factor": 4,
    },
    "vision_defaults": {**_SIGLIP_VISION, "image_size": 224},
}
_RECORDS = (
    _encoder("albert", "Albert", "encoder:albert", shares_layers=True, default_num_segments=2),
    _encoder("bert", "Bert", "encoder:bert", default_num_segments=2),
    _decoder(
        "bidirectional_pplx_qwen3",
        "PPLXQwen3",
        "decoder:qwen3",
        attends_both_ways=True,
        heads=frozenset(),
        default_head_dim=128,
    ),
    # colpali-engine's classes: Bi* give one vector, Col* one for each token. transformers' own retriever
    # classes nest a model of any of the three kinds in vlm_config.
    _decoder("BiQwen2", "BiQwen2", "qwen_vl:qwen2_vl", **_QWEN2_VL_FACTS | _RETRIEVER),
    _decoder("BiQwen2_5", "BiQwen2_5", "qwen_vl:qwen2_5_vl", **_QWEN2_5_VL_FACTS | _RETRIEVER),
    _decoder("BiQwen3", "BiQwen3", "qwen_vl:qwen3_vl", **_QWEN3_VL_FACTS | _RETRIEVER),
    _encoder("camembert", "Camembert", "encoder:roberta", positions_follow_padding=True),
    _encoder(
        "ColModernVBert", "ColModernVBert", "modernvbert:col_modernvbert", page_dim=128, **_MODERNVBERT_FACTS
    ),
    _decoder("ColPali", "ColPali", "paligemma:col_pali", page_dim=128, **_PALIGEMMA_FACTS | _RETRIEVER),
    _decoder("ColQwen2", "ColQwen2", "qwen_vl:col_qwen2", page_dim=128, **_QWEN2_VL_FACTS | _RETRIEVER),
    _decoder(
        "ColQwen2_5", "ColQwen2_5", "qwen_vl:col_qwen2_5", page_dim=128, **_QWEN2_5_VL_FACTS | _RETRIEVER
    ),
    _decoder("ColQwen3", "ColQwen3", "qwen_vl:col_qwen3", page_dim=320, **_QWEN3_VL_FACTS | _RETRIEVER),
    _encoder("clip", "CLIP", "dual:clip", **_CLIP_FACTS),
    _encoder("deberta-v2", "DebertaV2", "deberta:deberta"),
    _encoder("distilbert", "DistilBert", "encoder:distilbert", keys=_DISTILBERT_KEYS),
    _encoder("electra", "Electra", "encoder:electra", default_num_segments=2),
    _decoder(
        "embedding_gemma2",
        "EmbeddingGemma2",
        "embedding_gemma2:embedding_gemma2",
        is_nested=True,
        has_gemma_vision=True,
        **_EMBEDDING_GEMMA2_FACTS,
    ),
    _decoder(
        "embedding_gemma2_text",
        "EmbeddingGemma2Text",
        "embedding_gemma2:embedding_gemma2",
        **_EMBEDDING_GEMMA2_FACTS,
    ),
    _encoder("ernie", "Ernie", "encoder:bert", default_num_segments=2),
    _decoder("eurobert", "EuroBert", "eurobert:eurobert", attends_both_ways=True, heads=_ENCODER_HEADS),
    _decoder("exaone4", "Exaone4", "decoder:exaone4"),
    _decoder("gemma", "Gemma", "decoder:gemma", **_GEMMA_FACTS),
    _decoder("gemma2", "Gemma2", "decoder:gemma2", **_GEMMA_FACTS),
    _decoder("gemma3", "Gemma3", "decoder:gemma3", **_GEMMA_FACTS),
    _decoder("gemma3_text", "Gemma3Text", "decoder:gemma3", **_GEMMA_FACTS),
    _decoder(
        "Gemma3ForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "decoder:gemma3_tower",
        is_nested=True,
        nested_defaults=_GEMMA3_TOWER_DEFAULTS,
        generates_by_default=True,
        **_GEMMA_FACTS,
    ),
    _decoder("GmeQwen2VL", "GmeQwen2VL", "qwen_vl:qwen2_vl", **_QWEN2_VL_FACTS | _RETRIEVER),
    _encoder("GLiClass", "GLiClass", "gliclass:gliclass", heads=frozenset({Task.ZERO_SHOT})),
    _encoder("gliner", "GLiNER", "gliner:gliner", heads=frozenset({Task.ENTITIES})),
    _decoder(
        "gpt2",
        "GPT2",
        "gpt2:gpt2",
        keys=_GPT2_KEYS,
        heads=_DECODER_HEADS - {Task.REWARD, Task.SPARSE},
        has_rotary_positions=False,
    ),
    _decoder("gpt_oss", "GptOss", "decoder:gpt_oss", default_head_dim=64),
    _decoder("granite", "Granite", "decoder:granite", heads=frozenset({Task.GENERATE})),
    _decoder(
        "GritLM",
        "GritLM",
        "decoder:gritlm",
        attends_both_ways=True,
        generates_by_default=True,
        embed_mark=_GRITLM_MARK,
        instruction_template="<|user|>\n{instruction}\n" + _GRITLM_MARK,
    ),
    _encoder("gte", "Gte", "gte:gte", has_rotary_positions=True),
    _encoder("jina_embeddings_v3", "JinaEmbeddingsV3", "jina:jina_embeddings_v3", has_rotary_positions=True),
    _decoder(
        "JinaEmbeddingsV4",
        "JinaEmbeddingsV4",
        "jina_v4:jina_embeddings_v4",
        adapters_key="task_names",
        requires_adapter=True,
        has_own_pooling=True,
        causal_pooling="mean",
        token_dim_key="multi_vector_projector_dim",
        trained_row_length=1 << 15,
        prompts={"query": "Query: ", "passage": "Passage: "},
        query_adapters=("text-matching",),
        **_QWEN2_5_VL_FACTS | _RETRIEVER,
    ),
    _decoder(
        "jina_embeddings_v5",
        "JinaEmbeddingsV5",
        "jina_v5:jina_embeddings_v5",
        both_ways_key="mask_token_id",  # set for the nano size (EuroBERT); the other is causal (Qwen3)
        adapters_key="task_names",
        requires_adapter=True,
        has_own_pooling=True,
        heads=frozenset(),
        pooling="last",
    ),
    _encoder("JinaBert", "JinaBert", "jina_bert:jina_bert", default_num_segments=2),
    _decoder(
        "JinaForRanking",
        "JinaForRanking",
        "decoder:jina_ranking",
        heads=frozenset({Task.SCORE}),
        default_head_dim=128,
        is_listwise=True,
    ),
    _decoder("lfm2", "Lfm2", "lfm2:lfm2", **_LFM2_FACTS),
    _decoder("lfm2_bidirectional", "Lfm2Bidirectional", "lfm2:lfm2", attends_both_ways=True, **_LFM2_FACTS),
    _decoder("llama", "Llama", "decoder:llama"),
    _decoder(
        "llama_bidirec",
        "LlamaBidirectional",
        "decoder:llama_bidirectional",
        attends_both_ways=True,
        score_prompts=("nemotron-rerank",),
    ),
    _decoder("ministral", "Ministral", "decoder:mistral"),
    _decoder("ministral3", "Ministral3", "decoder:ministral3", default_head_dim=128),
    _decoder("mistral", "Mistral", "decoder:mistral", score_prompts=("ctxl-rerank-v2",)),
    _decoder(
        "Mistral3ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "decoder:mistral3_tower",
        is_nested=True,
        generates_by_default=True,
    ),
    _encoder("modernbert", "ModernBert", "modernbert:modernbert", has_rotary_positions=True),
    _encoder("modernvbert", "ModernVBert", "modernvbert:modernvbert", **_MODERNVBERT_FACTS),
    _encoder("mpnet", "MPNet", "encoder:mpnet", positions_follow_padding=True),
    _encoder("mt5", "MT5Encoder", "t5:mt5", **_T5_FACTS),
    _encoder("new", "New", "gte:new", has_rotary_positions=True),
    _encoder("nomic_bert", "NomicBert", "nomic:nomic", keys=_NOMIC_KEYS, has_rotary_positions=True),
    _decoder(
        "nvembed",
        "NVEmbed",
        "nv_embed:nv_embed",
        attends_both_ways=True,
        heads=frozenset(),
        is_nested=True,
        pools_prompt=False,
        appends_eos=True,
        instruction_template="Instruct: {instruction}\nQuery: ",
    ),
    _decoder("olmo2", "Olmo2", "decoder:olmo"),
    _decoder("olmo3", "Olmo3", "decoder:olmo"),
    _decoder(
        "openai_privacy_filter",
        "OpenAIPrivacyFilter",
        "decoder:privacy_filter",
        attends_both_ways=True,
        heads=frozenset({Task.TOKEN_CLASSIFY}),
        default_head_dim=64,
    ),
    _decoder("phi3", "Phi3", "decoder:phi3"),
    _decoder("qwen2", "Qwen2", "decoder:qwen2", score_prompts=("mxbai-rerank-v2",)),
    _decoder("qwen2_5_vl", "Qwen2_5_VL", "qwen_vl:qwen2_5_vl", **_QWEN2_5_VL_FACTS),
    _decoder("qwen2_vl", "Qwen2VL", "qwen_vl:qwen2_vl", **_QWEN2_VL_FACTS),
    _decoder("qwen3", "Qwen3", "decoder:qwen3", **_QWEN3_FACTS),
    _decoder("qwen3_moe", "Qwen3Moe", "decoder:qwen3_moe", has_experts=True, **_QWEN3_FACTS),
    _decoder("qwen3_vl", "Qwen3VL", "qwen_vl:qwen3_vl", **_QWEN3_VL_FACTS),
    _encoder("roberta", "Roberta", "encoder:roberta", positions_follow_padding=True),
    _encoder(
        "siglip",
        "Siglip",
        "dual:siglip",
        vision_defaults={**_SIGLIP_VISION, "image_size": 224},
        **_SIGLIP_FACTS,
    ),
    _encoder(
        "siglip2",
        "Siglip2",
        "dual:siglip",
        vision_defaults={**_SIGLIP_VISION, "num_patches": 256},
        **_SIGLIP_FACTS,
    ),
    _decoder("smollm3", "SmolLM3", "decoder:smollm3"),
    _encoder("t5", "T5Encoder", "t5:t5", **_T5_FACTS),
    _decoder(
        "VoyageQwen3BidirectionalEmbed",
        "VoyageQwen3BidirectionalEmbed",
        "decoder:voyage",
        attends_both_ways=True,
        keys=ConfigKeys(output_size=("num_labels",)),
        heads=frozenset(),
        default_head_dim=128,
    ),
    _encoder(
        "xlm-roberta",
        "XLMRoberta",
        "jina:xlm_roberta",
        positions_follow_padding=True,
        colbert_markers=_XLM_R_MARKERS,
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _RECORDS}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The architecture that config.json names: a class of a family, or only a family's model_type."""

    name: str
    family: Family
    suffix: str = ""  # class suffix; "" for a model_type, and for classes without one

    @property
    def head(self) -> Task | None:
        """The head of the checkpoint, according to its class."""
        return CLASS_SUFFIXES.get(self.suffix)

    @property
    def classifies_sequences(self) -> bool:
        return self.suffix == "ForSequenceClassification"

    @property
    def classifies_tokens(self) -> bool:
        return self.suffix == "ForTokenClassification"

    @property
    def is_reward_model(self) -> bool:
        return self.head is Task.REWARD

    @property
    def is_process_reward_model(self) -> bool:
        """Whether it rewards each step of a text instead of the whole text."""
        return self.suffix == "ForProcessRewardModel"

    @property
    def is_masked_language_model(self) -> bool:
        return self.suffix in ("ForMaskedLM", "ForPreTraining")

    @property
    def has_language_head(self) -> bool:
        if self.suffix in ("ForCausalLM", "LMHeadModel"):
            return True
        if self.suffix == "ForConditionalGeneration":
            return Task.GENERATE in self.family.heads
        return self.family.generates_by_default and self.name == self.family.class_prefix

    @property
    def is_colbert(self) -> bool:
        return self.name == COLBERT_CLASS


_PROJECTED_QWEN3 = "VoyageQwen3BidirectionalEmbedModel"  # vLLM's name for the class


def read_architecture(file: Path, config: Mapping[str, Any], *, native: bool = True) -> Architecture:
    """The architecture that `config`, from `file`, names.

    If `native`, an architecture without a record is refused; otherwise transformers runs it.
    """
    name = _named(file, config)
    return find_architecture(name, config) if native else _any_architecture(name, config)


_ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"})


def text_tower(architecture: Architecture, file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the part that reads text: all of `config`, unless the family nests it.

    Keys of text_config take precedence, except those that name the architecture and the family's
    `outer_keys`.
    """
    if architecture.family.page_dim is not None and "vlm_config" in config:
        config = _unwrapped(file, config)
    nested = config.get("text_config")
    if nested is None and not architecture.family.is_dual:
        return config
    nested = {} if nested is None else nested
    if not architecture.family.is_nested:
        raise ModelLoadError(
            f"{file} has a text_config: {architecture.name} reads more than text, which is not supported",
            param="model",
        )
    if not isinstance(nested, dict):
        raise ModelLoadError(f"{file} has text_config = {nested!r}; it has to be an object", param="model")
    hidden = {"text_config"}
    if any(nested.get(key) for key in _ROPE_KEYS):  # these keys are only meaningful together
        hidden |= _ROPE_KEYS
        _report_rope(file, config, nested)
    outer = {key: value for key, value in config.items() if key not in hidden}
    named: dict[str, Any] = {key: config[key] for key in ("architectures", "model_type") if key in config}
    named["text_model_type"] = nested.get("model_type")
    family = architecture.family
    if family.qwen_vision is not None and outer.get("tie_word_embeddings"):
        named["tie_word_embeddings"] = True  # older files say so in text_config, newer ones beside it
    named |= {key: config.get(key, family.nested_defaults.get(key)) for key in family.outer_keys}
    return {**family.nested_defaults, **outer, **nested, **named}


def _report_rope(file: Path, config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Warn about top-level rotary options that differ from those in text_config."""
    newer = nested.get("rope_parameters")
    within = {**(newer if isinstance(newer, dict) else {}), **nested}
    if ignored := [key for key in sorted(_ROPE_KEYS) if config.get(key) not in (None, within.get(key))]:
        log.warning(
            "%s has %s beside its text_config, which says itself how tokens rotate; only that counts",
            file,
            " and ".join(ignored),
        )


def _unwrapped(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Merge the configuration of a retriever's model, which transformers nests in vlm_config, with the
    retriever's own keys."""
    inner = config["vlm_config"]
    if not isinstance(inner, dict):
        raise ModelLoadError(f"{file} has vlm_config = {inner!r}; it has to be an object", param="model")
    own = {key: value for key, value in config.items() if key != "vlm_config"}
    return {**inner, **own, "vlm_model_type": inner.get("model_type")}


def find_architecture(name: str, config: Mapping[str, Any]) -> Architecture:
    """The record for a class name or a model_type; raises `ModelLoadError` if there is none."""
    if name == COLBERT_CLASS:
        backbone = FAMILIES.get(str(config.get("model_type")))
        if backbone is None:
            raise _unsupported(f"{name} on model_type {config.get('model_type')!r}", name, config)
        return Architecture(name, backbone)
    if name in FAMILIES:
        return Architecture(name, FAMILIES[name])
    for family in FAMILIES.values():
        suffix = name.removeprefix(family.class_prefix)
        is_known = suffix in CLASS_SUFFIXES or (family.mixes_images and suffix in IMAGE_SUFFIXES)
        if not name.startswith(family.class_prefix) or not is_known:
            continue
        head = CLASS_SUFFIXES.get(suffix)
        if head is None or head in family.heads:
            return Architecture(name, family, suffix)
    raise _unsupported(repr(name), name, config)


def _any_architecture(name: str, config: Mapping[str, Any]) -> Architecture:
    """The architecture of a model that transformers runs. Without a record, the closest one is used."""
    try:
        return find_architecture(name, config)
    except ModelLoadError:
        pass
    suffix = next((suffix for suffix in CLASS_SUFFIXES if name.endswith(suffix)), "")
    known = [family for family in FAMILIES.values() if name.startswith((family.class_prefix, family.name))]
    nearest = max(known, key=lambda family: len(family.class_prefix), default=None)
    if nearest is None:
        follows = config.get("model_type") in _COUNT_FROM_PADDING
        return Architecture(
            name, _encoder("", "", "", keys=ANY_KEYS, positions_follow_padding=follows), suffix
        )
    return Architecture(name, replace(nearest, keys=ANY_KEYS), suffix)


def _named(file: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ModelLoadError(
            f'{file} has architectures = {names!r}; it has to be a list of class names such as ["BertModel"]',
            param="model",
        )
    name = names[0] if names else config.get("model_type")
    if not isinstance(name, str) or not name:
        raise ModelLoadError(
            f"{file} names neither architectures nor model_type; name a class with "
            """--hf-overrides '{"architectures": ["BertModel"]}'""",
            param="model",
        )
    return _PROJECTED_QWEN3 if _projects_both_ways(name, config) else name


def _projects_both_ways(name: str, config: Mapping[str, Any]) -> bool:
    """Whether config.json names voyage-4-nano's own class, in `architectures` or in auto_map.

    `architectures` may name Qwen3's class, which lacks the projection.
    """
    code = config.get("auto_map")
    places = code.values() if isinstance(code, dict) else ()
    named = [name, *(str(place).rpartition(".")[2] for place in places)]
    return config.get("model_type") == "qwen3" and "Qwen3BidirectionalModel" in named


def _unsupported(what: str, name: str, config: Mapping[str, Any]) -> ModelLoadError:
    prefixes = ", ".join(f"{prefix}*" for prefix in sorted(f.class_prefix for f in FAMILIES.values()))
    return ModelLoadError(
        f"architecture {what} is not supported because {why_unsupported(name, config)}; supported: "
        f"{prefixes}, where * is one of {', '.join(CLASS_SUFFIXES)}; --model-impl transformers runs others "
        "that transformers knows",
        param="model",
    )


def _boolean(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"config.json has {name} = {value!r}; it has to be true or false")
    return value
