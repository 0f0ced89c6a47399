"""The subjects of the parity table: checkpoints by family, layout and task, and the reference's answers."""

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
from sentence_transformers.sentence_transformer import modules
from torch import nn

from penstock.config import PoolerConfig
from penstock.types import TEXT_MARK, Task
from tests.checkpoints import wordpiece_tokenizer
from tests.parity import decoders, embedders, encoders, labelled, quantized
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
SCALE = 0.1  # of the encoders' weights; at 0.2, layers amplify rounding and a bf16 figure says little


@dataclass(frozen=True)
class Question:
    """A checkpoint on disk, rows, and a function that computes the reference's answers in any precision."""

    folder: Path
    model: nn.Module
    rows: list[list[int]]
    answer: Callable[[nn.Module], Vectors]  # [rows or tokens, width]
    options: dict[str, Any] = field(default_factory=dict)  # engine options
    overrides: Settings = field(default_factory=dict)
    segments: list[int] | None = None
    marks: list[int] | None = None  # for models with labels: which tokens stand for labels and words
    num_labels: int = 0


@dataclass(frozen=True)
class Subject:
    family: str  # name in the registry, or name of real weights
    layout: str
    task: Task
    reference: str
    ask: Callable[[Path], Question]
    missing: str = ""  # reason why the subject cannot be compared


def subjects() -> Iterator[Subject]:
    yield from _classics()
    yield from _encoders()
    yield from _labelled()
    yield from _decoders()
    yield Subject("static", "StaticEmbedding", Task.EMBED, "sentence-transformers", _ask_static)
    yield from _quantized()
    yield from _embedders()


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
    """Run each row alone, so that the reference pads nothing."""
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


# A table of token vectors.


def _ask_static(folder: Path) -> Question:
    tokenizer = wordpiece_tokenizer()
    weights = torch.randn(tokenizer.get_vocab_size(), 64, generator=torch.Generator().manual_seed(4))
    table = modules.StaticEmbedding(tokenizer, embedding_weights=weights)
    reference = SentenceTransformer(modules=[table, modules.Normalize()], device="cpu")
    reference.save(str(folder / "model"), create_model_card=False)
    texts = [text for text in make_texts(40) if text]
    rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return Question(folder / "model", reference, rows, partial(encoded, texts))


# ModernBERT, NomicBERT, GTE, Jina's XLM-R, DeBERTa.

_ENCODERS = {
    "modernbert": "modernbert",
    "nomic": "nomic_bert",
    "gte": "gte",
    "gte-original": "new",
    "gte-unpacked": "new",
    "jina": "jina_embeddings_v3",
    "jina-flash": "xlm-roberta",
    "jina-bert": "JinaBert",
    "flash": "xlm-roberta",
    "deberta": "deberta-v2",
    "albert": "albert",
    "electra": "electra",
    "ernie": "ernie",
    "t5": "t5",
    "mt5": "mt5",
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
    )  # few logits per row, so more rows
    rows = encoders.make_rows(lengths)
    if task is Task.EMBED:
        return Question(folder, model, rows, partial(pooled, rows=rows), overrides=case.overrides)
    return _headed(folder, model, rows, task)


# Models that read labels from the prompt.

_NUM_LABELS = 3
_LABELLED = {
    ("gliner", "markerV0"): ("markerV0", "deberta-v2"),
    ("gliner", "token-level"): ("token_level", "deberta-v2"),
    ("gliner", "modernbert"): ("markerV0", "modernbert"),
    ("GLiClass", "deberta"): ("simple", "deberta-v2"),
    ("GLiClass", "modernbert"): ("weighted-dot", "modernbert"),
}


def _labelled() -> Iterator[Subject]:
    for (family, layout), (mode, kind) in _LABELLED.items():
        task = Task.ENTITIES if family == "gliner" else Task.ZERO_SHOT
        ask = _ask_gliner if family == "gliner" else _ask_gliclass
        yield Subject(family, layout, task, "its published description", partial(ask, mode, kind))


def _ask_gliner(mode: str, kind: str, folder: Path) -> Question:
    written = labelled.write_gliner(folder, mode, kind, SCALE)
    rows, marks = labelled.make_rows(written, ("<<ENT>>", "<<SEP>>"), _NUM_LABELS, TEXT_MARK)
    answer = partial(labelled.entity_scores, rows=rows, marks=marks)
    return Question(
        folder, written.model, rows, answer, marks=[m for row in marks for m in row], num_labels=_NUM_LABELS
    )


def _ask_gliclass(scorer: str, kind: str, folder: Path) -> Question:
    written = labelled.write_gliclass(folder, kind, SCALE, prompt_first=True, scorer_type=scorer)
    rows, marks = labelled.make_rows(written, ("<<LABEL>>", "<<SEP>>"), _NUM_LABELS, 0)
    for row in marks:
        row[0] = TEXT_MARK  # the first token is pooled
    ids = (written.token("<<LABEL>>"), written.token("<<SEP>>"))
    answer = partial(labelled.label_scores, rows=rows, ids=ids)
    return Question(
        folder, written.model, rows, answer, marks=[m for row in marks for m in row], num_labels=_NUM_LABELS
    )


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
    "ministral3": "ministral3",
    "eurobert": "eurobert",
    "pplx": "bidirectional_pplx_qwen3",
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
        if family.settings.get("num_labels") != 1:  # a cosine of one number is meaningless
            task = Task.TOKEN_CLASSIFY if name.endswith("-tokens") else Task.CLASSIFY
            yield _decoder(name, task, partial(_ask_head, family))
    yield _decoder("nemotron", Task.CLASSIFY, _ask_nemotron)
    for name, family in decoders.LANGUAGE_HEADS.items():
        yield _decoder(name, Task.SPARSE, partial(_ask_terms, family))


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


def _ask_terms(family: decoders.Family, folder: Path) -> Question:
    family.write(folder)
    model = getattr(transformers, family.model).from_pretrained(folder, dtype=torch.float32).eval()
    answer = partial(reference_terms, rows=decoders.ROWS)
    return Question(folder, model, decoders.ROWS, answer, SPLADE)


def _ask_nemotron(folder: Path) -> Question:
    """Follow the published code: pool the hidden states of a bidirectional Llama, then project."""
    decoders.NEMOTRON_RERANKER.write(folder, num_labels=LABELS)
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(model: Any) -> Vectors:
        states = decoders.states_of(model.model, full=True)
        pooled = torch.from_numpy(np.stack([row.mean(0) for row in states])).to(model.score.weight.dtype)
        return (model.score(pooled).float() / 0.2).numpy()  # type: ignore[no-any-return]

    return Question(folder, model, decoders.ROWS, answer)


# Quantised checkpoints, compared with their dequantised weights.


def _quantized() -> Iterator[Subject]:
    for name, stored in quantized.FORMATS.items():
        family = "qwen3_moe" if stored.family is quantized.EXPERTS else "qwen3"
        ask = partial(_ask_quantized, name)
        yield Subject(family, f"quantised-{name}", Task.TOKEN_EMBED, "transformers, dequantised", ask)


def _ask_quantized(name: str, folder: Path) -> Question:
    stored, plain = quantized.write_quantized(name, folder)
    model = decoders.open_backbone(quantized.FORMATS[name].family, plain)
    return Question(stored, model, decoders.ROWS, partial(tokens_of, rows=decoders.ROWS))


# Embedders that are published with their own code.

_EMBEDDERS = {
    "voyage": "VoyageQwen3BidirectionalEmbed",
    "voyage-published": "VoyageQwen3BidirectionalEmbed",
    "nv-embed": "nvembed",
    "jina-v5-small": "jina_embeddings_v5",
    "jina-v5-nano": "jina_embeddings_v5",
}


def _embedders() -> Iterator[Subject]:
    for name, embedder in embedders.EMBEDDERS.items():
        for task in (Task.EMBED, Task.TOKEN_EMBED):
            yield Subject(
                _EMBEDDERS[name], name, task, "its published code", partial(_ask_published, embedder, task)
            )


def _ask_published(embedder: embedders.Embedder, task: Task, folder: Path) -> Question:
    def answer(model: Any) -> Vectors:
        states = model.token_states(decoders.ROWS)
        return np.concatenate(states) if task is Task.TOKEN_EMBED else unit(embedder.pooled(states))

    return Question(folder, embedder.write(folder), decoders.ROWS, answer, overrides=embedder.overrides)
