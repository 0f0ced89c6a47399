"""How a model computes sparse weights: SPLADE with a language-model head, or BGE-M3's lexical layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.checkpoint.dense import refuse_unknown_keys
from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import CheckpointFiles
from penstock.checkpoint.pooling import SPLADE, is_pooling_type
from penstock.config import PoolerConfig
from penstock.errors import ModelLoadError
from penstock.types import Task

_LEXICAL_LAYER = "sparse_linear"  # BGE-M3 stores each of these two layers in a separate file
_MULTI_VECTOR_LAYER = "colbert_linear"
_SPLADE_KEYS = (
    "pooling_strategy",
    "activation_function",
    "embedding_dimension",
    "word_embedding_dimension",
    "chunk_size",
)
_LOGS = {"relu": 1, "log1p_relu": 2}


class SparseSpec(msgspec.Struct, frozen=True):
    """The kind of sparse weights.

    splade: log(1 + relu) of the vocabulary's logits, reduced over the row's tokens by `reduce`; with
    `logs` 2 the logarithm is taken twice. lexical: one weight per input token, from the layer in `file`.
    """

    kind: Literal["splade", "lexical"]
    reduce: Literal["max", "sum"] = "max"
    logs: int = 1
    file: str = ""


def read_sparse(
    files: CheckpointFiles, architecture: Architecture, pooler: PoolerConfig
) -> SparseSpec | None:
    """Read how sparse weights are computed; None for a model without them."""
    module = next(files.modules_of("SpladePooling"), None)
    if module is not None or is_pooling_type(pooler, SPLADE):
        has_head = architecture.is_masked_language_model or architecture.has_language_head
        if not has_head or Task.SPARSE not in architecture.family.heads:
            raise ModelLoadError(
                "SPLADE needs a masked-language model, such as BertForMaskedLM, or a decoder with a "
                f"language-model head, such as Qwen3ForCausalLM; {architecture.name} is neither",
                param="model",
            )
        if module is None:
            return SparseSpec("splade")
        _check_all_tokens(files)
        values = files.module_config(module)
        refuse_unknown_keys(files.root / module.path / "config.json", values, _SPLADE_KEYS)
        return _splade(values)
    file = _layer_file(files.folder, _LEXICAL_LAYER)
    if file is None or architecture.suffix not in ("Model", "ForMaskedLM"):
        return None
    return SparseSpec("lexical", file=file)


def multi_vector_file(folder: Path) -> str | None:
    """The file with BGE-M3's projection of token vectors, if the folder has one."""
    return _layer_file(folder, _MULTI_VECTOR_LAYER)


def _layer_file(folder: Path, name: str) -> str | None:
    names = (f"{name}.safetensors", f"{name}.pt")
    return next((file for file in names if (folder / file).is_file()), None)


def _check_all_tokens(files: CheckpointFiles) -> None:
    """Refuse a Transformer module that passes only some tokens' logits to SpladePooling.

    Modules for text generation keep only the last token's logits by default.
    """
    if files.transformer.get("transformer_task") not in ("text-generation", "any-to-any"):
        return
    options = files.transformer.get("processing_kwargs") or {}
    kept = (options.get("text") or {}).get("logits_to_keep", 1)
    if kept != 0:
        raise ModelLoadError(
            f"the Transformer module in {files.folder} keeps the logits of {kept} tokens, and SpladePooling "
            "over these is not supported; set processing_kwargs.text.logits_to_keep to 0, for all tokens",
            param="model",
        )


def _splade(values: Mapping[str, Any]) -> SparseSpec:
    strategy, activation = values.get("pooling_strategy", "max"), values.get("activation_function", "relu")
    if strategy not in ("max", "sum"):
        raise ModelLoadError(
            f"the SpladePooling module has pooling_strategy = {strategy!r}, which is not supported; "
            "supported: max, sum"
        )
    if activation not in _LOGS:
        raise ModelLoadError(
            f"the SpladePooling module has activation_function = {activation!r}, which is not supported; "
            f"supported: {', '.join(_LOGS)}"
        )
    return SparseSpec("splade", strategy, _LOGS[activation])
