"""Heads: classifiers, masked-language and language-model heads, token projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.labels import label_count
from penstock.checkpoint.late import COLBERT_DIM
from penstock.checkpoint.pages import PROJECTIONS
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.head import Stack, TaskHead
from penstock.layers.linear import Linear, make_linear
from penstock.layers.parallel import ModuleShare, Shard, VocabularyParallelLinear, pad_vocabulary
from penstock.types import Task
from penstock.weights.stream import Wanted


@dataclass(frozen=True, slots=True)
class MaskedLMNames:
    """The tensor names of a family's masked-language head."""

    dense: str
    norm: str
    decoder: str
    bias: str


BERT_MLM = MaskedLMNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
ROBERTA_MLM = MaskedLMNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
NOMIC_MLM = replace(BERT_MLM, norm="cls.predictions.transform.layer_norm")
MODERNBERT_MLM = MaskedLMNames("head.dense", "head.norm", "decoder", "decoder.bias")
DEBERTA_MLM = MaskedLMNames(  # the newer layout, always tied to the word table; the older one is `BERT_MLM`
    "lm_predictions.lm_head.dense",
    "lm_predictions.lm_head.LayerNorm",
    "lm_predictions.lm_head",
    "lm_predictions.lm_head.bias",
)
ELECTRA_MLM = MaskedLMNames(
    "generator_predictions.dense",
    "generator_predictions.LayerNorm",
    "generator_lm_head",
    "generator_lm_head.bias",
)
ALBERT_MLM = MaskedLMNames(
    "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
)
DISTILBERT_MLM = MaskedLMNames(
    "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLMShape:
    names: MaskedLMNames
    act: str
    eps: float
    dense_bias: bool = True
    norm_bias: bool = True
    decoder_bias: bool = True


class HasHeads(Protocol):
    hidden_size: int
    heads: dict[Task, TaskHead]


class Backbone(HasHeads, Protocol):
    prefix: str  # prefix of the backbone's tensor names


def add_head(
    model: Backbone,
    build: LayerBuilder,
    config: Mapping[str, Any],
    head: Task,
    name: str,
    *before: Callable[[Tensor], Tensor],
    method: str = "cls",
) -> None:
    """Add a projection to the labels after the layers in `before`; `method` pools sequences."""
    labels = label_count(config)
    project = Stack(*before, build.linear(name, model.hidden_size, labels))
    model.heads[head] = TaskHead(method if head is Task.CLASSIFY else "all", project, labels)


def add_token_projection(model: HasHeads, build: LayerBuilder, config: Mapping[str, Any]) -> None:
    """Add ColBERT's projection of every hidden state to a short vector. It is stored next to the backbone."""
    dim: int = config[COLBERT_DIM]
    weight = build.weights.take("linear.weight", dim, model.hidden_size)  # small, so never quantised
    project = build.adapted(Linear(weight, None), ["linear"], [dim], bias=False)
    model.heads[Task.TOKEN_EMBED] = TaskHead("all", project, dim)


def add_page_projection(model: HasHeads, build: LayerBuilder, config: Mapping[str, Any]) -> None:
    """Add the token projection of a page retriever. It is small, so it is never quantised."""
    prefix, dim = build.weights.prefix_of(*(f"{name}.weight" for name in PROJECTIONS)), config[COLBERT_DIM]
    name = next((each for each in PROJECTIONS if build.weights.has(f"{prefix}{each}.weight")), PROJECTIONS[0])
    plain = LayerBuilder(build.weights).linear(prefix + name, model.hidden_size, dim)
    project = build.adapted(plain, [prefix + name], [dim], bias=True)
    model.heads[Task.TOKEN_EMBED] = TaskHead("all", project, dim)


def add_masked_lm_head(
    model: Backbone,
    build: LayerBuilder,
    config: Mapping[str, Any],
    words: Tensor,
    shape: MaskedLMShape,
) -> None:
    """Add vocabulary logits for every token. Their weight is the word table, unless config.json unties it."""
    names = shape.names
    vocabulary, width = words.shape
    tied = config.get("tie_word_embeddings", True)
    if tied:
        build.weights.check_tied(vocabulary, (names.decoder,))
    weight = words if tied else build.table(names.decoder, vocabulary, width)
    decoder_bias = f"{names.decoder}.bias"  # if tied, equal to the head's bias and often left out
    bias = names.bias if tied and build.weights.has(names.bias) else decoder_bias
    project = Stack(
        build.linear(names.dense, model.hidden_size, width, shape.act, bias=shape.dense_bias),
        build.norm(names.norm, width, shape.eps, bias=shape.norm_bias),
        build.tied(weight, bias if shape.decoder_bias else None),
    )
    build.share_table(weight, names.decoder)
    model.heads[Task.SPARSE] = TaskHead("all", project, vocabulary)


def add_pooler_head(
    model: Backbone, build: LayerBuilder, config: Mapping[str, Any], head: Task | None
) -> None:
    """Add BERT's classifier. It reads sequences through the backbone's pooler, and tokens directly."""
    if head is Task.CLASSIFY:
        hidden = model.hidden_size
        dense = build.linear(model.prefix + "pooler.dense", hidden, hidden, "tanh")
        add_head(model, build, config, head, "classifier", dense)
    elif head is Task.TOKEN_CLASSIFY:
        add_head(model, build, config, head, "classifier")


def add_two_step_head(
    model: Backbone,
    build: LayerBuilder,
    config: Mapping[str, Any],
    head: Task | None,
    act: str = "tanh",
) -> None:
    """Add RoBERTa's classifier: a dense layer and a projection for sequences, one layer for tokens."""
    if head is Task.CLASSIFY:
        dense = build.linear("classifier.dense", model.hidden_size, model.hidden_size, act)
        add_head(model, build, config, head, "classifier.out_proj", dense)
    elif head is Task.TOKEN_CLASSIFY:
        add_head(model, build, config, head, "classifier")


class WordTable(Protocol):
    hidden_size: int
    is_causal: bool
    embedding: Tensor  # [vocabulary, hidden]
    heads: dict[Task, TaskHead]


def add_token_head(
    model: WordTable, build: LayerBuilder, config: Mapping[str, Any], tokens: Sequence[int]
) -> None:
    """Add next-token logits of only these `tokens`, in fp32. No other row of the head is read."""
    words = getattr(model, "embedding", None)
    if not isinstance(words, Tensor) or not model.is_causal:
        raise ModelLoadError("only a causal decoder can answer with tokens")
    if max(tokens) >= len(words):
        raise ModelLoadError(f"token {max(tokens)} is outside the vocabulary of {len(words)} tokens")
    words = _output_weight(words, build, config)
    build.share_table(words, *_OUTPUT_NAMES)
    rows = words[list(tokens)].float()
    project: Callable[[Tensor], Tensor] = _scaled(lambda x: F.linear(x.float(), rows), config)
    model.heads[Task.SCORE] = TaskHead("last", project, len(rows))


_OUTPUT_NAMES = ("lm_head", "language_model.lm_head")  # the second in models with an image tower


def _output_name(build: LayerBuilder, config: Mapping[str, Any]) -> str | None:
    """The name of the language-model head; None if it is tied to the word table."""
    name = next((name for name in _OUTPUT_NAMES if build.has_weight(name)), _OUTPUT_NAMES[0])
    return None if config.get("tie_word_embeddings", not build.has_weight(name)) else name


def _output_weight(words: Tensor, build: LayerBuilder, config: Mapping[str, Any]) -> Tensor:
    """The weight of the language-model head: the word table if the two are tied."""
    if (name := _output_name(build, config)) is not None:
        return build.plain_weight(name, *words.shape)
    build.weights.check_tied(len(words), _OUTPUT_NAMES)
    return words


def _scaled(project: Callable[[Tensor], Tensor], config: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """Apply config.json's divisor and soft cap to the logits. Gemma2 has a cap by default."""
    divisor = config.get("logits_scaling") or 1
    cap = config.get("final_logit_softcapping", 30.0 if config.get("model_type") == "gemma2" else None)
    if divisor != 1:
        project = Stack(project, lambda x: x.div_(divisor))
    return project if cap is None else Stack(project, lambda x: torch.tanh(x / cap).mul_(cap))


def add_language_head(
    model: WordTable,
    build: LayerBuilder,
    config: Mapping[str, Any],
    task: Task = Task.GENERATE,
    *,
    bias: bool = False,
) -> None:
    """Add logits of the whole vocabulary, in the model's precision, scaled and capped according to
    config.json. Generation reads them at the last token, sparse weights at every token."""
    words = getattr(model, "embedding", None)
    if not isinstance(words, Tensor):
        raise ModelLoadError("this architecture has no language-model head")
    added = build.weights.take("lm_head.bias", len(words)) if bias else None
    project: Callable[[Tensor], Tensor]
    if task is Task.GENERATE and build.shard is not None:
        project = _divided_head(words, added, build, config, build.shard)
    else:
        weight = _output_weight(words, build, config)
        build.share_table(weight)
        layer = make_linear(weight, added, "identity", None)
        project = build.adapted(layer, [_OUTPUT_NAMES[0]], [len(words)], bias=bias)
    model.heads[task] = TaskHead(
        "last" if task is Task.GENERATE else "all", _scaled(project, config), len(words)
    )


def _divided_head(
    words: Tensor, bias: Tensor | None, build: LayerBuilder, config: Mapping[str, Any], shard: Shard
) -> VocabularyParallelLinear:
    """The language-model head of a tensor-parallel model: each rank computes a share of the vocabulary."""
    vocabulary = len(words)
    begin, end = shard.vocabulary(vocabulary)
    if (name := _output_name(build, config)) is None:
        build.weights.check_tied(vocabulary, _OUTPUT_NAMES)
        build.share_table(words)
        own = words[begin:end]
    else:
        own = build.weights.join([Wanted(f"{name}.weight", tuple(words.shape), ((begin, end),))])
    added = None if bias is None else pad_vocabulary(bias[begin:end], shard, vocabulary)
    layer = make_linear(pad_vocabulary(own, shard, vocabulary), added, "identity", None)
    inputs, outputs = layer.in_features, layer.out_features
    share = ModuleShare(vocabulary, inputs, ((begin, end),), (0, inputs))
    part = build.adapted(layer, [_OUTPUT_NAMES[0]], [outputs], bias=bias is not None, shares=[share])
    return VocabularyParallelLinear(part, shard.group, vocabulary)
