"""What is recorded of a published model: its files as far as they say how it is read, and how it has to be
read. Weights and vocabularies are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Any
MODULE_PATHS = {
    "Transformer": "",
    "MLMTransformer": "",
    "Pooling": "1_Pooling",
    "SpladePooling": "1_SpladePooling",
    "Dense": "2_Dense",
    "Normalize": "2_Normalize",
}


@dataclass(frozen=True, kw_only=True)
class Reads:
    """How the model's authors, and the library that its files name, read it."""

    task: str  # what it is for: the first task
    score: str | None = None  # cross, bi, late, list; None: it scores nothing
    dimension: int | None = None
    pooling: tuple[str, ...] | None = None
    normalize: bool | None = None
    max_tokens: int
    causal: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of the prompt of a text whose kind is not told
    end: str = ""  # follows a text, or a query of a retriever of pages, before its tokens are read
    labels: int = 0
    generates: bool = False
    answers: tuple[str | int, ...] = ()  # tokens that a decoder reranker answers with, relevant first
    markers: tuple[str, str] = ("", "")  # of queries and documents, for late interaction
    is_sliced: bool = True  # the first values of a vector are a smaller vector
    adapters: tuple[str, ...] = ()  # that a request may choose


@dataclass(frozen=True, kw_only=True)
class Published:
    id: str
    config: dict[str, Json] | None  # config.json; None: it has none at its root
    files: dict[str, Json] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()  # special tokens of its vocabulary that its reading depends on
    tokenizer_folder: str = ""  # where its tokenizer is
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)  # that its reading depends on
    reads: Reads | None = None
    refused: str = ""  # a part of the message; for a model that is not served
    source: str = ""  # where its facts were read, where that is not its repository
    unverified: str = ""  # what of the record could not be checked against the published files


def modules(
    *kinds: str, package: str = "sentence_transformers.models", **paths: str
) -> list[dict[str, Json]]:
    """modules.json; `paths` names folders that are not the usual ones."""
    return [
        {
            "idx": number,
            "name": str(number),
            "path": paths.get(kind, MODULE_PATHS.get(kind, f"{number}_{kind}")),
            "type": f"{package}.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]


def pooling(method: str, width: int, *, include_prompt: bool | None = None) -> dict[str, Json]:
    """1_Pooling/config.json in the form of flags."""
    flags = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    values: dict[str, Json] = {f"pooling_mode_{flag}": flag == method for flag in flags}
    return (
        {"word_embedding_dimension": width}
        | values
        | ({} if include_prompt is None else {"include_prompt": include_prompt})
    )


def sentence_transformer(
    method: str, width: int, max_seq_length: int, *, normalize: bool = True, **files: Json
) -> dict[str, Json]:
    """The files of the usual layout: Transformer, Pooling, Normalize."""
    kinds = ("Transformer", "Pooling", "Normalize") if normalize else ("Transformer", "Pooling")
    return {
        "modules.json": modules(*kinds),
        "1_Pooling/config.json": pooling(method, width),
        "sentence_bert_config.json": {"max_seq_length": max_seq_length, "do_lower_case": False},
    } | files
