"""Late-interaction (ColBERT) models: their projection, and how they read texts.

Page retrievers are read by `pages`. Text retrievers have three layouts. Stanford's `HF_ColBERT` stores one
projection with the backbone's tensors and an optional `artifact.metadata`. PyLate has modules and
`config_sentence_transformers.json`. The MultiVectorEncoder of sentence-transformers has modules, and its
markers are prompts.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.checkpoint.dense import MAX_FEATURES, DenseSpec, read_dense
from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import (
    MASK_MODULE,
    TRANSFORMER_MODULES,
    CheckpointFiles,
    optional_integer,
    optional_json,
    positive_integer,
)
from penstock.checkpoint.identity import Identity
from penstock.checkpoint.pages import page_dim, page_query_end
from penstock.checkpoint.tokenizer_settings import special_tokens, token_text
from penstock.errors import ModelLoadError

QUERY_LENGTH = 32
COLBERT_DIM = "colbert_dim"  # key of the token vectors' width in `ModelSpec.config`
STANFORD_DIM = 128  # default width of token vectors
_ENCODER_KEYS = ("query_length", "document_length", "query_expansion")
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
_PAGE_MODULES = ("Dense", MASK_MODULE, "Normalize")
_EXPANSION_TOKENS = ("mask_token", "eos_token", "pad_token")  # the first that exists expands queries


class LateSpec(msgspec.Struct, frozen=True, kw_only=True):
    dense: tuple[DenseSpec, ...]  # hidden states → token vectors, applied in order
    dim: int  # width of a token vector
    query_length: int | None  # queries are truncated to it; None: to the model's limit
    document_length: int | None  # documents are truncated to it; None: to the model's limit
    expand_to: int | None  # shorter queries are padded with `expansion_token` to it; None: no padding
    attend: bool = False  # attention includes the expansion tokens
    expansion_token: str | None = None
    query_marker: str = ""  # inserted after the first token; "": none
    document_marker: str = ""
    skip_words: tuple[str, ...] = ()  # document tokens that are left out of the comparison
    skip_queries: bool = False  # leave them out of queries too
    unknown_token: str | None = None  # replaces skip words that are not tokens; None: these are ignored
    normalize: bool = True
    strip: bool = True  # remove spaces around a text
    query_end: str = ""  # appended to every query before it is tokenised


def read_late(
    files: CheckpointFiles, architecture: Architecture, identity: Identity, hidden_size: int
) -> LateSpec | None:
    """Read a late-interaction model; None for other models. Overrides have the same keys as the files."""
    late: LateSpec | None = None
    if architecture.family.page_dim is not None:
        late = _pages(files, architecture, architecture.family.page_dim, identity)
    elif _is_multi_vector(files):
        _refuse_messages(files, architecture)
        late = _multi_vector(files, _overridden(files.transformer, files, _ENCODER_KEYS), hidden_size)
    elif _is_pylate(files):
        late = _pylate(files, _overridden(files.sentence_transformers, files, _PYLATE_KEYS))
    elif architecture.is_colbert:
        metadata = optional_json(files.root / "artifact.metadata")
        values = _overridden(metadata, files, _STANFORD_KEYS)
        late = _stanford(files, architecture, values, hidden_size)
    if late is not None:
        _check(files.root, late, hidden_size)
    return late


def _overridden(values: Mapping[str, Any], files: CheckpointFiles, keys: Sequence[str]) -> dict[str, Any]:
    return {**values, **{key: files.overrides[key] for key in keys if key in files.overrides}}


def _is_multi_vector(files: CheckpointFiles) -> bool:
    named = files.sentence_transformers.get("model_type") == "MultiVectorEncoder"
    return named or files.has_module(MASK_MODULE)


def _is_pylate(files: CheckpointFiles) -> bool:
    if not files.has_module("Dense"):
        return False
    table = files.sentence_transformers
    named = table.get("model_type") == "ColBERT" or any(key in table for key in _PYLATE_KEYS)
    return named or not files.has_module("Pooling")


def _pylate(files: CheckpointFiles, values: Mapping[str, Any]) -> LateSpec:
    expand = _flag(values, "do_query_expansion", True)
    skip, tokens = values.get("skiplist_words"), _special_tokens(files.folder)
    length, dense = _length(values, "query_length") or QUERY_LENGTH, dense_modules(files)
    return LateSpec(
        dense=dense,
        dim=dense[-1].out_features,
        query_length=length,
        document_length=_length(values, "document_length") or 180,
        expand_to=length if expand else None,
        attend=expand and _flag(values, "attend_to_expansion_tokens", False),
        expansion_token=tokens.expansion,
        query_marker=_text(values, "query_prefix", "[Q] "),
        document_marker=_text(values, "document_prefix", "[D] "),
        skip_words=tuple(string.punctuation if skip is None else map(str, skip)),
        unknown_token=tokens.unknown,
    )


def _pages(files: CheckpointFiles, architecture: Architecture, default: int, identity: Identity) -> LateSpec:
    """Read a page retriever. Its model class projects and normalises token vectors and formats queries.
    Modules of sentence-transformers, if there are any, only repeat this."""
    dim = page_dim(files, default)
    for dense in dense_modules(files):
        if dense.out_features != dim:
            raise ModelLoadError(
                f"{files.root / dense.folder} makes vectors of {dense.out_features} numbers, but those of "
                f"{architecture.name} have {dim}",
                param="model",
            )
    if more := sorted({module.kind for module in files.modules} - {*_PAGE_MODULES, *TRANSFORMER_MODULES}):
        raise ModelLoadError(
            f"{files.root / 'modules.json'} has {', '.join(more)}, which {architecture.name} does not have; "
            f"supported: Transformer, {', '.join(_PAGE_MODULES)}",
            param="model",
        )
    if _mask(files).get("skiplist_words") or files.transformer.get("query_expansion"):
        raise ModelLoadError(
            f"{files.root} has skiplist_words or query_expansion, which are not supported for "
            f"{architecture.name}",
            param="model",
        )
    return LateSpec(
        dense=(),
        dim=dim,
        query_length=_length(files.transformer, "query_length"),
        document_length=_length(files.transformer, "document_length"),
        expand_to=None,
        query_end=page_query_end(files, architecture.family.name, identity),
        strip=False,
    )


def _refuse_messages(files: CheckpointFiles, architecture: Architecture) -> None:
    """Refuse inputs formatted by a chat template, which may add text that the prompts do not have."""
    if architecture.family.reads_images and "message" in (files.transformer.get("modality_config") or {}):
        raise ModelLoadError(
            f"{files.root} makes a vector for each token of messages, which is not supported for "
            f"{architecture.name}; supported: classes of colpali-engine and transformers, such as ColQwen2",
            param="model",
        )


def _mask(files: CheckpointFiles) -> dict[str, Any]:
    mask: dict[str, Any] = {}
    for module in files.modules_of(MASK_MODULE):
        mask = files.module_config(module)
    if mask.get("keep_only_token_ids"):
        raise ModelLoadError(f"{files.folder}: a {MASK_MODULE} with keep_only_token_ids is not supported")
    return mask


def _multi_vector(files: CheckpointFiles, values: Mapping[str, Any], hidden_size: int) -> LateSpec:
    mask = _mask(files)
    expansion = values.get("query_expansion") or {}
    strategy = expansion.get("strategy", "fixed")
    if strategy not in ("fixed", "min"):
        raise ModelLoadError(
            f"{files.folder}: query_expansion has strategy = {strategy!r}, which is not supported; "
            "supported: fixed, min"
        )
    expand_to, dense = _length(expansion, "length"), dense_modules(files)
    max_query_length = _length(values, "query_length")
    tasks = mask.get("skiplist_tasks") or ["document"]
    return LateSpec(
        dense=dense,
        dim=dense[-1].out_features if dense else hidden_size,
        query_length=expand_to if expansion and strategy == "fixed" else max_query_length,
        document_length=_length(values, "document_length"),
        expand_to=expand_to,
        attend=_flag(expansion, "attend", False),
        expansion_token=token_text(expansion.get("token")) or _special_tokens(files.folder).expansion,
        skip_words=tuple(map(str, mask.get("skiplist_words") or ())),
        skip_queries="query" in tasks,
        normalize=files.has_module("Normalize"),
        strip=False,
    )


def dense_modules(files: CheckpointFiles) -> tuple[DenseSpec, ...]:
    return tuple(
        read_dense(files.root, module.path, reads="token_embeddings", activation="identity")
        for module in files.modules_of("Dense")
    )


def _stanford(
    files: CheckpointFiles, architecture: Architecture, values: Mapping[str, Any], hidden_size: int
) -> LateSpec:
    query, document = architecture.family.colbert_markers
    expand, tokens = _flag(values, "do_query_expansion", True), _special_tokens(files.folder)
    length, dim = _length(values, "query_maxlen"), _stanford_dim(files, architecture, values)
    return LateSpec(
        dense=(DenseSpec("", hidden_size, dim, bias=False, activation="identity"),),
        dim=dim,
        query_length=length,
        document_length=_length(values, "doc_maxlen"),
        expand_to=(length or QUERY_LENGTH) if expand else None,
        attend=expand and _flag(values, "attend_to_mask_tokens", False),
        expansion_token=tokens.expansion,
        query_marker=_text(values, "query_token_id", query),
        document_marker=_text(values, "doc_token_id", document),
        skip_words=tuple(string.punctuation) if _flag(values, "mask_punctuation", True) else (),
        unknown_token=tokens.unknown,
    )


def _stanford_dim(files: CheckpointFiles, architecture: Architecture, values: Mapping[str, Any]) -> int:
    """The width of token vectors: `dim` in artifact.metadata, or in config.json if it is not hidden_size."""
    if "dim" in values:
        file = files.folder / "artifact.metadata"
        return positive_integer(values, "dim", file=file, high=MAX_FEATURES)
    if "dim" in architecture.family.keys.hidden_size:
        return STANFORD_DIM
    return optional_integer(files.config, "dim") or STANFORD_DIM


class _Tokens(NamedTuple):
    expansion: str | None
    unknown: str | None


def _special_tokens(folder: Path) -> _Tokens:
    """The tokens that expand a query and that replace unknown words."""
    settings = optional_json(folder / "special_tokens_map.json")
    known = special_tokens(settings | optional_json(folder / "tokenizer_config.json"))
    expansion = next((known[key] for key in _EXPANSION_TOKENS if known.get(key)), None)
    return _Tokens(expansion, known.get("unk_token"))


def _check(folder: Path, late: LateSpec, hidden: int) -> None:
    width = hidden
    for dense in late.dense:
        if dense.in_features != width:
            raise ModelLoadError(
                f"{folder / dense.folder} has in_features = {dense.in_features}, but its input has {width}"
            )
        width = dense.out_features


def _length(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is not None and (not isinstance(value, int) or value < 4):
        raise ModelLoadError(f"{name} is {value!r}; it has to be an integer of at least 4")
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
