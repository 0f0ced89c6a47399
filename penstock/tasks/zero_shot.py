"""Zero-shot classification: how well each of the caller's labels fits a text or an image.

A classifier for natural-language inference (NLI) reads, for each label, the text and a sentence about it, as
in the zero-shot pipeline of transformers. A GLiClass model reads all labels and the text in one row. A model
with a text and a vision tower compares an image, for each label, with a sentence about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.labels import NliLabels, nli_labels
from penstock.errors import BadValue, NotPossible
from penstock.inputs.images.rows import input_items
from penstock.inputs.labelled import LabelledOptions
from penstock.inputs.long_texts import check_expanded
from penstock.inputs.offsets import require_texts
from penstock.inputs.pair_options import PairNames, PairOptions
from penstock.inputs.pairs import prepare_classified_pairs
from penstock.inputs.processor import InputOptions
from penstock.tasks.labels import check_labels
from penstock.tasks.model import TextModel
from penstock.tasks.rows import concatenate
from penstock.tasks.run import Prepared
from penstock.types import PooledOutput, PoolingParams, PreparedImage, Task

DEFAULT_HYPOTHESIS = "This example is {}."
DEFAULT_PHOTO = "This is a photo of {}."  # for images
MAX_LABELS = 4096
_NAMES = PairNames("text", "hypothesis", "input", "labels")
_LOGITS = PoolingParams(Task.CLASSIFY, normalize=False)
_VECTORS = PoolingParams(Task.EMBED, normalize=True)


@dataclass(frozen=True, slots=True)
class LabelScores:
    """The caller's labels with their scores, best first."""

    labels: tuple[str, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShotOptions:
    """How labels are scored. The fields are named like those of the HTTP request."""

    hypothesis_template: str = DEFAULT_HYPOTHESIS
    multi_label: bool = False  # score each label independently; otherwise labels compete
    truncate_prompt_tokens: int | None = None
    cache_salt: str = ""
    max_request_tokens: int | None = None  # total of all rows; None: no limit


DEFAULT_ZERO_SHOT = ZeroShotOptions()


@dataclass(kw_only=True, eq=False)
class ZeroShot:
    """The scores of the labels for each text, by an NLI model: one row for each pair of text and label."""

    texts: str | Sequence[str]
    labels: Sequence[str]
    options: ZeroShotOptions = DEFAULT_ZERO_SHOT
    allows_empty_text: bool = True

    @property
    def num_texts(self) -> int:
        return 1 if isinstance(self.texts, str) else len(self.texts)

    @property
    def num_rows(self) -> int:
        return self.num_texts * len(self.labels)

    def check(self, model: TextModel) -> None:
        check_labels(self.labels, MAX_LABELS)
        _inference_labels(model)
        check_template(self.options.hypothesis_template, DEFAULT_HYPOTHESIS)

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[list[LabelScores]]:
        texts = require_texts(self.texts, allow_empty_text=self.allows_empty_text)
        hypotheses = [self.options.hypothesis_template.replace("{}", label) for label in self.labels]
        repeated = sum(map(len, hypotheses)) * len(texts)
        check_expanded(repeated, "labels")
        pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
        options = PairOptions(
            truncate_prompt_tokens=self.options.truncate_prompt_tokens,
            cache_salt=self.options.cache_salt,
            max_request_tokens=self.options.max_request_tokens,
            cuts_first_only=True,
            names=_NAMES,
        )
        make = partial(prepare_classified_pairs, model.processor, request_id, pairs, _LOGITS, options)
        request = await model.batcher.call(make, sum(map(len, texts)) + repeated)
        return Prepared(request, partial(self._ranked, _inference_labels(model)))

    def _ranked(self, nli: NliLabels, output: PooledOutput) -> list[LabelScores]:
        logits = output.values.astype(np.float32).reshape(-1, len(self.labels), output.values.shape[1])
        if self.options.multi_label or len(self.labels) == 1:
            scores = _softmax(logits[:, :, [nli.contradiction, nli.entailment]])[:, :, 1]
        else:
            scores = _softmax(logits[:, :, nli.entailment])
        return rank_labels(self.labels, scores)

    def windows(self, size: int) -> Iterator[ZeroShot]:
        texts = require_texts(self.texts)
        step = max(1, size * len(texts) // self.num_rows)
        return (replace(self, texts=texts[first : first + step]) for first in range(0, len(texts), step))

    def merge(self, parts: Sequence[list[LabelScores]]) -> list[LabelScores]:
        return concatenate(parts)


class PromptedZeroShot(ZeroShot):
    """The scores of the labels for each text, by a GLiClass model: one row for each text, with all labels."""

    @property
    def num_rows(self) -> int:
        return self.num_texts

    def check(self, model: TextModel) -> None:
        check_labels(self.labels, MAX_LABELS)
        if self.options.hypothesis_template != DEFAULT_HYPOTHESIS:
            raise BadValue(
                f"hypothesis_template does not apply to model {model.spec.name}, which reads the labels "
                "themselves; leave it out",
                param="hypothesis_template",
            )

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[list[LabelScores]]:
        texts = require_texts(self.texts, allow_empty_text=self.allows_empty_text)
        prompts, options = model.processor.label_prompts, self.options
        if prompts is None:
            raise ValueError(f"model {model.spec.name} reads no labels")
        rows = LabelledOptions(options.truncate_prompt_tokens, options.cache_salt, options.max_request_tokens)
        write = partial(prompts.prepare, request_id, texts, self.labels, rows)
        return Prepared(await model.batcher.call(write, sum(map(len, texts))), self._scores)

    def _scores(self, output: PooledOutput) -> list[LabelScores]:
        logits = output.values.astype(np.float32)  # [texts, labels]
        scores = 1 / (1 + np.exp(-logits)) if self.options.multi_label else _softmax(logits)
        return rank_labels(self.labels, scores)


class ImageZeroShot(ZeroShot):
    """The scores of the labels for each image, by a model with a text and a vision tower. The vectors of
    labels and images are compared as in the model's own code."""

    @property
    def num_rows(self) -> int:
        return self.num_images

    @property
    def num_images(self) -> int:
        return len(input_items(self.texts))

    def check(self, model: TextModel) -> None:
        check_labels(self.labels, MAX_LABELS)
        check_template(self._template, DEFAULT_PHOTO)
        dual = model.spec.dual
        if dual is None or dual.logit_scale is None:
            raise NotPossible(
                f"model {model.spec.name} has no logit_scale in safetensors files, which scores need; "
                "convert its weights",
                param="model",
            )
        if self.options.multi_label and dual.activation == "softmax":
            raise BadValue(
                f"multi_label does not apply to model {model.spec.name}, whose labels compete; leave it out",
                param="multi_label",
            )
        if not self.num_images:
            raise BadValue("input is empty; give at least one image", param="input")
        if not all(isinstance(item, PreparedImage) for item in input_items(self.texts)):
            raise BadValue(
                f"model {model.spec.name} classifies images; give images as input, and texts as labels",
                param="input",
            )

    @property
    def _template(self) -> str:
        given = self.options.hypothesis_template
        return DEFAULT_PHOTO if given == DEFAULT_HYPOTHESIS else given

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[list[LabelScores]]:
        hypotheses = [self._template.replace("{}", label) for label in self.labels]
        check_expanded(sum(map(len, hypotheses)), "labels")
        options = InputOptions(
            truncate_prompt_tokens=self.options.truncate_prompt_tokens, cache_salt=self.options.cache_salt
        )
        inputs = [*hypotheses, *input_items(self.texts)]
        make = partial(model.processor.prepare, request_id, inputs, _VECTORS, options)
        request = await model.batcher.call(make, sum(map(len, hypotheses)))
        return Prepared(request, partial(self._compared, model))

    def _compared(self, model: TextModel, output: PooledOutput) -> list[LabelScores]:
        dual, count = model.spec.dual, len(self.labels)
        assert dual is not None and dual.logit_scale is not None
        vectors = output.values.astype(np.float32)
        logits = vectors[count:] @ vectors[:count].T * np.exp(np.float32(dual.logit_scale)) + dual.logit_bias
        scores = _softmax(logits) if dual.activation == "softmax" else 1 / (1 + np.exp(-logits))
        return rank_labels(self.labels, scores)

    def windows(self, size: int) -> Iterator[ZeroShot]:
        items = input_items(self.texts)
        return (replace(self, texts=items[first : first + size]) for first in range(0, len(items), size))


def zero_shot_task(
    model: TextModel,
    texts: Any,
    labels: Sequence[str],
    options: ZeroShotOptions,
    *,
    allows_empty_text: bool = True,
) -> ZeroShot:
    """The zero-shot task for this kind of model."""
    kind = ZeroShot if model.processor.label_prompts is None else PromptedZeroShot
    if model.spec.dual is not None:
        kind = ImageZeroShot
    return kind(texts=texts, labels=labels, options=options, allows_empty_text=allows_empty_text)


def check_template(template: str, example: str) -> None:
    before, mark, after = template.partition("{}")
    if not mark or any(brace in before + after for brace in "{}"):
        raise BadValue(
            f"hypothesis_template is {template!r}; it needs one {{}} for the label, as in {example!r}",
            param="hypothesis_template",
        )


def rank_labels(labels: Sequence[str], scores: NDArray[Any]) -> list[LabelScores]:
    """For each row of scores [texts, labels], the labels from best to worst."""
    order = np.argsort(-scores, axis=1, kind="stable")
    falling = np.take_along_axis(scores, order, axis=1).tolist()
    return [
        LabelScores(tuple(labels[at] for at in row), tuple(values))
        for row, values in zip(order.tolist(), falling, strict=True)
    ]


def _inference_labels(model: TextModel) -> NliLabels:
    spec = model.spec
    if Task.CLASSIFY not in spec.tasks:
        raise NotPossible(
            f"model {spec.name} is no zero-shot classifier; its tasks are: "
            + ", ".join(task.value for task in spec.tasks),
            param="model",
        )
    if (found := nli_labels(spec.labels)) is None:
        raise NotPossible(
            f"model {spec.name} is no zero-shot classifier: its labels are {', '.join(spec.labels[:8])}; "
            "zero-shot needs labels such as entailment, neutral and contradiction, or a GLiClass model",
            param="model",
        )
    return found


def _softmax(values: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return shares
