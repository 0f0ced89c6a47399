"""Which file builds which architecture. Model files are imported only when they are needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.checkpoint.late import STANFORD
from penstock.checkpoint.quantization import block_format
from penstock.errors import ModelLoadError
from penstock.types import Task

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.layers.batch import Batch
    from penstock.layers.build import LayerBuilder
    from penstock.layers.head import TaskHead

# Family, a model_type where it has one: (prefix of the class names in config.json, file:function that
# builds it).
FAMILIES: dict[str, tuple[str, str]] = {
    "bert": ("Bert", "encoder:bert"),
    "camembert": ("Camembert", "encoder:roberta"),
    "deberta-v2": ("DebertaV2", "deberta:deberta"),
    "distilbert": ("DistilBert", "encoder:distilbert"),
    "gemma": ("Gemma", "decoder:gemma"),
    "gemma2": ("Gemma2", "decoder:gemma2"),
    "gemma3": ("Gemma3", "decoder:gemma3"),
    "gemma3_text": ("Gemma3Text", "decoder:gemma3"),
    "GritLM": ("GritLM", "decoder:gritlm"),
    "gpt2": ("GPT2", "gpt2:gpt2"),
    "gte": ("Gte", "gte:gte"),
    "JinaForRanking": ("JinaForRanking", "decoder:jina_ranking"),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", "jina:jina"),
    "llama": ("Llama", "decoder:llama"),
    "llama_bidirec": ("LlamaBidirectional", "decoder:llama_bidirectional"),
    "ministral": ("Ministral", "decoder:mistral"),
    "mistral": ("Mistral", "decoder:mistral"),
    "modernbert": ("ModernBert", "modernbert:modernbert"),
    "mpnet": ("MPNet", "encoder:mpnet"),
    "new": ("New", "gte:gte"),
    "nomic_bert": ("NomicBert", "nomic:nomic"),
    "phi3": ("Phi3", "decoder:phi3"),
    "qwen2": ("Qwen2", "decoder:qwen2"),
    "qwen3": ("Qwen3", "decoder:qwen3"),
    "qwen3_moe": ("Qwen3Moe", "decoder:qwen3_moe"),
    "roberta": ("Roberta", "encoder:roberta"),
    "xlm-roberta": ("XLMRoberta", "jina:xlm_roberta"),
}
# What follows the prefix: the head that the weights carry.
HEADS: dict[str, Task | None] = {
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
LATE = STANFORD  # a class name that says nothing of its backbone: model_type does


class Model(Protocol):
    """A backbone with the heads of its checkpoint. `unneeded` marks tensors that may stay unread."""

    hidden_size: int
    causal: bool  # no token sees one that comes after it
    trims_last_layer: bool  # it finishes the needed tokens of a batch alone, where not all are
    heads: dict[Task, TaskHead]
    unneeded: tuple[str, ...]

    def __call__(self, batch: Batch) -> Tensor:
        """The last hidden states, [tokens, hidden]: of the needed tokens, where it narrows."""
        ...


class CausalModel(Model, Protocol):
    """A model whose rows can go on over steps."""

    kv_shape: tuple[int, int, int]  # layers, key/value heads, head size


def build_model(
    architecture: str,
    config: Mapping[str, Any],
    build: LayerBuilder,
    *,
    splade: bool = False,
    score_tokens: Sequence[int] = (),
    generates: bool = False,
) -> Model:
    """Builder functions take (layer builder, config.json, head task or None).

    `splade` asks for the masked-language head, which most checkpoints carry without a use for it;
    `score_tokens`, for these rows of a decoder's language-model head; `generates`, for all of it.
    """
    builder, head = find_family(backbone_of(architecture, config))
    if stored := block_format(config):
        build.stored = stored.covers
    if splade:
        head = Task.SPARSE
    elif score_tokens:
        head = None
    module, function = builder.split(":")
    make = getattr(importlib.import_module(f"penstock.models.{module}"), function)
    model: Model = make(build, config, head)
    if splade and Task.SPARSE not in model.heads:
        raise ModelLoadError(f"SPLADE is not supported on {architecture}", param="model")
    if head is not None and head not in model.heads:
        raise ModelLoadError(f"task {head.value!r} is not supported on {architecture}", param="model")
    if architecture == LATE:
        from penstock.models.heads import add_token_projection

        add_token_projection(model, build, config)
    if score_tokens:
        heads = importlib.import_module("penstock.models.heads")
        heads.add_token_head(model, build, config, score_tokens)
    if generates:
        heads = importlib.import_module("penstock.models.heads")
        heads.add_language_head(model, build, config)
    build.weights.finish(model.unneeded)
    return model


def backbone_of(architecture: str, config: Mapping[str, Any]) -> str:
    """The class name or model_type that decides which file builds the model."""
    return str(config.get("model_type")) if architecture == LATE else architecture


def find_family(architecture: str) -> tuple[str, Task | None]:
    """(builder, head) of a class name or a model_type."""
    if architecture in FAMILIES:
        return FAMILIES[architecture][1], None
    for prefix, builder in FAMILIES.values():
        suffix = architecture.removeprefix(prefix)
        if architecture.startswith(prefix) and suffix in HEADS:
            return builder, HEADS[suffix]
    raise ModelLoadError(
        f"architecture {architecture!r} is not supported; supported: "
        + ", ".join(f"{prefix}*" for prefix, _ in sorted(FAMILIES.values()))
        + f", each with {', '.join(HEADS)}; --model-impl transformers runs what transformers knows",
        param="model",
    )
