"""What the files of a late-interaction (ColBERT) model say: its projection, and how it reads texts.

Two layouts: stanford's `HF_ColBERT`, with one projection beside the backbone's tensors and an
optional `artifact.metadata`, and PyLate's modules with `config_sentence_transformers.json`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.dense import DenseSpec, read_dense
from penstock.checkpoint.files import integer, optional_json
from penstock.errors import ModelLoadError

STANFORD = "HF_ColBERT"
QUERY_LENGTH = 32
_PYLATE_KEYS = (
    "query_length",
    "document_length",
    "query_prefix",
    "document_prefix",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "skiplist_words",
)
_STANFORD_KEYS = (
    "query_maxlen",
    "doc_maxlen",
    "query_token_id",
    "doc_token_id",
    "mask_punctuation",
    "attend_to_mask_tokens",
    "do_query_expansion",
)
# Tokenizers of these have other markers than BERT's unused words.
_MARKERS = {"xlm-roberta": ("[QueryMarker]", "[DocumentMarker]")}
_BERT_MARKERS = ("[unused0]", "[unused1]")
_NAMED_TOKENS = ("mask_token", "eos_token", "pad_token")  # the first that there is stands for expansion


class LateSpec(msgspec.Struct, frozen=True, kw_only=True):
    dense: tuple[DenseSpec, ...]  # hidden states → token vectors, one after another
    query_length: int  # queries are cut to it, and expanded to it
    document_length: int | None  # documents are cut to it; None: nothing is said, the model's limit holds
    query_marker: str  # the token behind the first one; "": none
    document_marker: str
    expand: bool  # whether queries are filled up with `expansion_token`
    attend: bool  # whether that is attended to
    expansion_token: str | None
    unknown_token: str | None
    skip_words: tuple[str, ...] = ()  # tokens of documents that no query is compared with

    @property
    def dim(self) -> int:
        return self.dense[-1].out_features


def read_late(
    folder: Path,
    config: Mapping[str, Any],
    modules: list[tuple[str, str]],
    table: Mapping[str, Any],
    overrides: Mapping[str, Any],
    hidden: int,
) -> LateSpec | None:
    """None where the files describe another kind of model. `table` is config_sentence_transformers.json;
    what `overrides` names by the files' own words stands above them."""
    late: LateSpec | None = None
    if _is_pylate(modules, table):
        values = {**table, **{key: overrides[key] for key in _PYLATE_KEYS if key in overrides}}
        late = _pylate(folder, modules, values)
    elif STANFORD in (config.get("architectures") or ()):
        metadata = optional_json(folder / "artifact.metadata")
        values = {**metadata, **{key: overrides[key] for key in _STANFORD_KEYS if key in overrides}}
        late = _stanford(folder, config, values, hidden)
    if late is not None:
        _check(folder, late, hidden)
    return late


def _is_pylate(modules: list[tuple[str, str]], table: Mapping[str, Any]) -> bool:
    kinds = [kind for kind, _ in modules]
    if "Dense" not in kinds:
        return False
    named = table.get("model_type") == "ColBERT" or any(key in table for key in _PYLATE_KEYS)
    return named or "Pooling" not in kinds


def _pylate(folder: Path, modules: list[tuple[str, str]], values: Mapping[str, Any]) -> LateSpec:
    expand = _flag(values, "do_query_expansion", True)
    skip = values.get("skiplist_words")
    return LateSpec(
        dense=tuple(
            read_dense(folder, path, reads="token_embeddings", activation="identity")
            for kind, path in modules
            if kind == "Dense"
        ),
        query_length=_length(values, "query_length") or QUERY_LENGTH,
        document_length=_length(values, "document_length") or 180,
        query_marker=_text(values, "query_prefix", "[Q] "),
        document_marker=_text(values, "document_prefix", "[D] "),
        expand=expand,
        attend=expand and _flag(values, "attend_to_expansion_tokens", False),
        skip_words=tuple(string.punctuation if skip is None else map(str, skip)),
        **_special_tokens(folder),
    )


def _stanford(folder: Path, config: Mapping[str, Any], values: Mapping[str, Any], hidden: int) -> LateSpec:
    query, document = _MARKERS.get(str(config.get("model_type")), _BERT_MARKERS)
    expand = _flag(values, "do_query_expansion", True)
    return LateSpec(
        dense=(DenseSpec("", hidden, integer(config, "dim"), bias=False, activation="identity"),),
        query_length=_length(values, "query_maxlen") or QUERY_LENGTH,
        document_length=_length(values, "doc_maxlen"),
        query_marker=_text(values, "query_token_id", query),
        document_marker=_text(values, "doc_token_id", document),
        expand=expand,
        attend=expand and _flag(values, "attend_to_mask_tokens", False),
        skip_words=tuple(string.punctuation) if _flag(values, "mask_punctuation", True) else (),
        **_special_tokens(folder),
    )


def _special_tokens(folder: Path) -> dict[str, str | None]:
    """The names of the tokens that expand a query and stand for unknown words."""
    known = optional_json(folder / "special_tokens_map.json")
    known |= optional_json(folder / "tokenizer_config.json")
    names = {key: _token_text(known.get(key)) for key in (*_NAMED_TOKENS, "unk_token")}
    expansion = next((names[key] for key in _NAMED_TOKENS if names[key]), None)
    return {"expansion_token": expansion, "unknown_token": names["unk_token"]}


def _token_text(value: Any) -> str | None:
    """A token by itself, or with its properties."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _check(folder: Path, late: LateSpec, hidden: int) -> None:
    width = hidden
    for dense in late.dense:
        if dense.in_features != width:
            raise ModelLoadError(
                f"{folder / dense.folder} projects {dense.in_features} numbers, but {width} come before it"
            )
        width = dense.out_features


def _length(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is not None and (not isinstance(value, int) or value < 4):
        raise ModelLoadError(f"{name} is {value!r}; it has to be an integer of 4 tokens or more")
    return value


def _text(values: Mapping[str, Any], name: str, default: str) -> str:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(f"{name} is {value!r}; it has to be the text of a token")
    return default if value is None else value


def _flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"{name} is {value!r}; it has to be true or false")
    return default if value is None else value
