"""What the parity table compares: checkpoints by family, layout and task, and the reference's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from torch import nn

from penstock.config import PoolerConfig
from penstock.types import Task
from tests.parity import decoders, encoders
from tests.parity.encoders import Settings, reference_terms
from tests.parity.reference import (
    FAMILIES,
    LIMIT,
    Vectors,
    make_texts,
    with_head,
    write_sentence_transformer,
    write_transformer,
)

KINDS = {
    Task.CLASSIFY: "ForSequenceClassification",
    Task.TOKEN_CLASSIFY: "ForTokenClassification",
    Task.SPARSE: "ForMaskedLM",
}
SPLADE = {"pooler_config": PoolerConfig(pooling_type="splade")}
LABELS = 5
SCALE = 0.1  # of the encoders' weights: at 0.2 a layer amplifies rounding, and bf16 says little


@dataclass(frozen=True)
class Question:
    """A checkpoint on disk and what the reference, in whatever precision it is now, answers to the rows."""

    folder: Path
    model: nn.Module
    rows: list[list[int]]
    answer: Callable[[nn.Module], Vectors]  # [rows or tokens, width]
    options: dict[str, Any] = field(default_factory=dict)  # of the engine
    overrides: Settings = field(default_factory=dict)
    segments: list[int] | None = None


@dataclass(frozen=True)
class Subject:
    family: str  # as in the registry, or the name of real weights
    layout: str
    task: Task
    reference: str
    ask: Callable[[Path], Question]
    missing: str = ""  # why there is nothing to ask


def subjects() -> Iterator[Subject]:
    yield from _classics()
    yield from _encoders()
    yield from _decoders()


# Answers of a reference.


@torch.inference_mode()
def tokens_of(model: nn.Module, rows: list[list[int]]) -> Vectors:
    return np.concatenate(_states(model, rows))


@torch.inference_mode()
def pooled(model: nn.Module, rows: list[list[int]], last: bool = False) -> Vectors:
    return unit(np.stack([states[-1] if last else states.mean(0) for states in _states(model, rows)]))


@torch.inference_mode()
def logits_of(model: nn.Module, rows: list[list[int]], segments: list[list[int]] | None = None) -> Vectors:
    more: list[dict[str, Any]] = [{} for _ in rows]
    if segments is not None:
        more = [{"token_type_ids": torch.tensor([each])} for each in segments]
    found = []
    for row, options in zip(rows, more, strict=True):
        mask = torch.ones(1, len(row), dtype=torch.long)
        logits = model(input_ids=torch.tensor([row]), attention_mask=mask, **options).logits
        found.append(logits.float().reshape(-1, logits.shape[-1]).numpy())
    return np.concatenate(found)


def unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _states(model: nn.Module, rows: list[list[int]]) -> list[Vectors]:
    """Each row alone, so that the reference pads nothing."""
    answers = [model(input_ids=torch.tensor([row])).last_hidden_state for row in rows]
    return [answer[0].float().numpy() for answer in answers]


# BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, MPNet.


def _classics() -> Iterator[Subject]:
    for name in FAMILIES:
        yield Subject(name, name, Task.EMBED, "sentence-transformers", partial(_ask_embedder, name))
        for task in (Task.TOKEN_EMBED, *KINDS):
            yield Subject(name, name, task, "transformers", partial(_ask_classic, name, task))


def _ask_embedder(name: str, folder: Path) -> Question:
    reference = write_sentence_transformer(folder, FAMILIES[name])
    texts = [text for text in make_texts(40) if text]
    rows = [reference.tokenizer(text, truncation=True)["input_ids"] for text in texts]
    return Question(folder / "model", reference, rows, partial(encoded, texts))


def encoded(texts: list[str], model: nn.Module) -> Vectors:
    assert isinstance(model, SentenceTransformer)
    return (
        model.encode(texts, batch_size=8, normalize_embeddings=True, convert_to_tensor=True).float().numpy()
    )


def _ask_classic(name: str, task: Task, folder: Path) -> Question:
    family = FAMILIES[name] if task is Task.TOKEN_EMBED else with_head(name, KINDS[task])
    write_transformer(folder, family, seed=1, num_labels=LABELS)
    model = family.model.from_pretrained(folder, dtype=torch.float32).eval()
    draw = np.random.default_rng(2)
    lengths = (1, 2, 3, 5, 5, 16, 17, 33, LIMIT, LIMIT)
    rows = [draw.integers(5, model.config.vocab_size, length).tolist() for length in lengths]
    return _headed(folder, model, rows, task)


def _headed(folder: Path, model: nn.Module, rows: list[list[int]], task: Task) -> Question:
    answer = {Task.TOKEN_EMBED: tokens_of, Task.SPARSE: reference_terms}.get(task, logits_of)
    options = SPLADE if task is Task.SPARSE else {}
    return Question(folder, model, rows, partial(answer, rows=rows), options)


# ModernBERT, NomicBERT, GTE, Jina's XLM-R, DeBERTa.

_ENCODERS = {
    "modernbert": "modernbert",
    "nomic": "nomic_bert",
    "gte": "gte",
    "gte-original": "new",
    "gte-unpacked": "new",
    "jina": "jina_embeddings_v3",
    "jina-flash": "xlm-roberta",
    "flash": "xlm-roberta",
    "deberta": "deberta-v2",
}


def _encoders() -> Iterator[Subject]:
    for name in encoders.CASES:
        for task in (Task.EMBED, Task.TOKEN_EMBED, *KINDS):
            yield _encoder(name, task)
    for name in encoders.BACKBONES:
        yield from (_encoder(name, task) for task in (Task.EMBED, Task.TOKEN_EMBED))
    for name in encoders.MASKED_LM:
        yield _encoder(name, Task.SPARSE)


def _encoder(name: str, task: Task) -> Subject:
    family = next(_ENCODERS[key] for key in sorted(_ENCODERS, key=len, reverse=True) if name.startswith(key))
    return Subject(family, name, task, "transformers", partial(_ask_encoder, name, task))


def _ask_encoder(name: str, task: Task, folder: Path) -> Question:
    case = (encoders.CASES | encoders.BACKBONES | encoders.MASKED_LM)[name]
    model = case.write(folder, KINDS.get(task, "Model"), scale=SCALE)
    lengths = (
        encoders.LENGTHS * 4 if task is Task.CLASSIFY else encoders.LENGTHS
    )  # few logits a row: more rows
    rows = encoders.make_rows(lengths)
    if task is Task.EMBED:
        return Question(folder, model, rows, partial(pooled, rows=rows), overrides=case.overrides)
    return _headed(folder, model, rows, task)


# Decoders.

_DECODERS = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gpt2": "gpt2",
    "gemma3-tower": "Gemma3ForConditionalGeneration",
    "mistral3-tower": "Mistral3ForConditionalGeneration",
    "gpt-oss": "gpt_oss",
    "privacy-filter": "openai_privacy_filter",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "exaone4": "exaone4",
    "lfm2": "lfm2",
    "lfm2-bidirectional": "lfm2_bidirectional",
    "phi3": "phi3",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3_moe",
    "qwen2": "qwen2",
    "reward": "qwen2",
    "llama": "llama",
    "mistral": "mistral",
    "ministral": "ministral",
    "gemma3": "gemma3_text",
    "gemma3-causal-lm": "gemma3",
    "embeddinggemma": "gemma3_text",
    "embeddinggemma2": "embedding_gemma2",
    "embeddinggemma2-text": "embedding_gemma2_text",
    "nemotron": "llama_bidirec",
    "gritlm": "GritLM",
}


def _decoders() -> Iterator[Subject]:
    for name, family in (decoders.FAMILIES | decoders.MORE_FAMILIES).items():
        for task in (Task.EMBED, Task.TOKEN_EMBED):
            yield _decoder(name, task, partial(_ask_states, name, family, task))
    for name, family in (decoders.HEADS | decoders.MORE_HEADS).items():
        if family.settings.get("num_labels") != 1:  # a cosine of one number says nothing
            task = Task.TOKEN_CLASSIFY if name.endswith("-tokens") else Task.CLASSIFY
            yield _decoder(name, task, partial(_ask_head, family))
    yield _decoder("nemotron", Task.CLASSIFY, _ask_nemotron)


def _decoder(name: str, task: Task, ask: Callable[[Path], Question]) -> Subject:
    family = next(_DECODERS[key] for key in sorted(_DECODERS, key=len, reverse=True) if name.startswith(key))
    return Subject(family, name, task, "transformers", ask)


def _ask_states(name: str, family: decoders.Family, task: Task, folder: Path) -> Question:
    family.write(folder)
    ahead = name.startswith(decoders.LOOK_AHEAD)

    def answer(model: nn.Module) -> Vectors:
        states = decoders.states_of(model, family.full)
        if task is Task.TOKEN_EMBED:
            return np.concatenate(states)
        return unit(np.stack([row.mean(0) if ahead else row[-1] for row in states]))

    return Question(folder, decoders.open_backbone(family, folder), decoders.ROWS, answer)


def _ask_head(family: decoders.Family, folder: Path) -> Question:
    family.write(folder, **{"num_labels": LABELS} | family.settings)
    model = getattr(transformers, family.model).from_pretrained(folder, dtype=torch.float32).eval()
    return Question(folder, model, decoders.ROWS, partial(logits_of, rows=decoders.ROWS))


def _ask_nemotron(folder: Path) -> Question:
    """Its own code pools the states of a Llama that looks ahead, then projects: so done here."""
    decoders.NEMOTRON_RERANKER.write(folder, num_labels=LABELS)
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(model: Any) -> Vectors:
        states = decoders.states_of(model.model, full=True)
        pooled = torch.from_numpy(np.stack([row.mean(0) for row in states])).to(model.score.weight.dtype)
        return (model.score(pooled).float() / 0.2).numpy()  # type: ignore[no-any-return]

    return Question(folder, model, decoders.ROWS, answer)
