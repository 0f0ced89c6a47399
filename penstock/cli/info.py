"""`penstock info`: shows what a model is and what would be loaded, from its files alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.checkpoint.dense import DenseSpec
from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE_AND_ARGUMENT, EngineFields
from penstock.config import EngineConfig, from_mapping

if TYPE_CHECKING:
    from penstock.checkpoint.spec import ModelSpec

_SIZES = {  # our name → the names in config.json files
    "layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "hidden": ("hidden_size", "dim", "d_model", "n_embd"),
    "heads": ("num_attention_heads", "n_heads", "num_heads", "n_head"),
    "intermediate": ("intermediate_size", "hidden_dim", "d_ff", "n_inner"),
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@with_options(ENGINE_AND_ARGUMENT)
def info(
    engine: EngineFields,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's tasks, sizes, pooling and limits.

    Also shows what these flags would load on this machine. Reads the model's files only; loads no weights.

    \b
    Example:
      penstock info BAAI/bge-base-en-v1.5 --device cpu
    """
    facts = gather(from_mapping(EngineConfig, engine))
    print(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else as_text(facts))


def gather(config: EngineConfig) -> dict[str, Any]:
    from penstock.checkpoint.describe import describe
    from penstock.checkpoint.weight_files import model_weight_files

    spec = describe(config)
    weights = weight_facts(model_weight_files(spec))
    return {
        "name": spec.name,
        "folder": str(spec.root_path),
        "architecture": spec.architecture,
        "tasks": [task.value for task in spec.tasks],
        **{name: _first(spec.config, keys) for name, keys in _SIZES.items()},
        "vocabulary": spec.vocab_size,
        **weights,
        "max_tokens": spec.max_model_len,
        "positions": spec.max_positions,
        "embedding_dimension": spec.embed_dim,
        "late_interaction": _late(spec),
        "pooling": _pooling(spec),
        "similarity": spec.similarity,
        "prompts": spec.prompts,
        "default_prompt": spec.default_prompt_name,
        "draft_model": None if spec.draft is None else spec.draft.name,
        "load": _load(config, spec, weights["parameters"]),
    }


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _pooling(spec: ModelSpec) -> dict[str, Any]:
    return {
        "methods": list(spec.pooling.methods),
        "include_prompt": spec.pooling.include_prompt,
        "normalize": spec.pooling.normalize,
        "dense": [
            {"in": dense.in_features, "out": dense.out_features, "activation": dense.activation}
            for dense in spec.pooling.modules
            if isinstance(dense, DenseSpec)
        ],
    }


def _late(spec: ModelSpec) -> dict[str, Any] | None:
    if (late := spec.late) is None:
        return None
    lengths = {"query_length": late.query_length, "document_length": late.document_length}
    return {"dimension": late.dim, **lengths}


def _load(config: EngineConfig, spec: ModelSpec, parameters: int | None) -> dict[str, Any] | None:
    """The resolved settings; None if torch is missing and "auto" cannot be resolved."""
    from penstock.runner.load import settle

    try:
        settings = settle(config, spec)
    except ImportError:
        return None
    plain_size = _BYTES[settings.dtype] * parameters if parameters and not settings.quantization else None
    return {
        "device": settings.device,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "threads": settings.threads,
        "weight_bytes": plain_size,
    }


def weight_facts(files: list[Path]) -> dict[str, Any]:
    """Parameters and bytes, from the headers of the files. The parameters of a pickle are unknown until it is
    converted."""
    from penstock.checkpoint.convert import converted_file
    from penstock.checkpoint.files import PICKLES
    from penstock.checkpoint.tensors import stored_tensors

    readable = [converted_file(file) if file.suffix in PICKLES else file for file in files]
    is_known = bool(files) and all(file.is_file() for file in readable)
    tensors = [
        tensor
        for file in readable
        if is_known
        for name, tensor in stored_tensors(file).items()
        if not name.endswith("position_ids")  # a buffer
    ]
    return {
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors) if is_known else None,
        "stored_as": sorted({tensor.dtype for tensor in tensors}) if is_known or not files else ["pickle"],
        "file_bytes": sum(file.stat().st_size for file in files),
    }


def as_text(facts: dict[str, Any]) -> str:
    lines = [(label, value) for label, value in _lines(facts) if value is not None]
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:<{width}}{value}" for label, value in lines)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [
        ("model", facts["name"]),
        ("folder", facts["folder"]),
        ("architecture", facts["architecture"]),
        ("tasks", ", ".join(facts["tasks"])),
        ("layers", _number(facts["layers"])),
        ("hidden", _number(facts["hidden"])),
        ("heads", _number(facts["heads"])),
        ("vocabulary", _number(facts["vocabulary"])),
        ("parameters", _number(facts["parameters"]) or _unknown_parameters(facts)),
        ("weight files", _files_line(facts)),
        ("max tokens", _limit_line(facts)),
        *_vector_lines(facts),
        ("similarity", facts["similarity"]),
        ("prompts", _prompts_line(facts)),
        ("draft model", facts["draft_model"]),
        ("would load", _load_line(facts["load"])),
    ]


def _unknown_parameters(facts: dict[str, Any]) -> str:
    return (
        "known after the first load, which converts the pickle" if facts["file_bytes"] else "no weight files"
    )


def _vector_lines(facts: dict[str, Any]) -> list[tuple[str, str | None]]:
    """The lines about vectors of texts, of tokens, or both."""
    lines: list[tuple[str, str | None]] = []
    if (late := facts["late_interaction"]) is not None:
        lengths = [late[name] or facts["max_tokens"] for name in ("query_length", "document_length")]
        read = "queries of {:,} tokens, documents of {:,}".format(*lengths)
        lines.append(("token vectors", f"{late['dimension']:,} numbers; {read}"))
    if late is None or "embed" in facts["tasks"]:
        lines.append(("dimension", _number(facts["embedding_dimension"])))
        lines.append(("pooling", _pooling_line(facts["pooling"])))
    return lines


def _number(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _limit_line(facts: dict[str, Any]) -> str:
    more = (
        f" ({facts['positions']:,} with --max-model-len)" if facts["positions"] > facts["max_tokens"] else ""
    )
    return f"{facts['max_tokens']:,}{more}"


def _files_line(facts: dict[str, Any]) -> str | None:
    if not facts["file_bytes"]:
        return None
    return f"{megabytes(facts['file_bytes'])} ({', '.join(facts['stored_as'])})"


def _pooling_line(pooling: dict[str, Any]) -> str:
    steps = [" + ".join(pooling["methods"])]
    steps += [f"dense {dense['in']} → {dense['out']} ({dense['activation']})" for dense in pooling["dense"]]
    steps += ["normalize"] if pooling["normalize"] else []
    steps += [] if pooling["include_prompt"] else ["without the prompt"]
    return ", ".join(steps)


def _prompts_line(facts: dict[str, Any]) -> str:
    if not facts["prompts"]:
        return "none"
    default = facts["default_prompt"]
    return ", ".join(f"{name}{' (default)' if name == default else ''}" for name in facts["prompts"])


def _load_line(load: dict[str, Any] | None) -> str:
    if load is None:
        return "nothing: torch is not installed"
    kind = f"{load['dtype']}, {load['quantization']}" if load["quantization"] else load["dtype"]
    size = f", {megabytes(load['weight_bytes'])} of weights" if load["weight_bytes"] else ""
    ranks = load["tensor_parallel_size"]
    device = load["device"] if ranks == 1 else f"{ranks} ranks of {load['device']}"
    return (
        f"on {device} as {kind}{size}; up to {load['max_model_len']:,} tokens a row, "
        f"{load['max_num_batched_tokens']:,} tokens and {load['max_num_seqs']:,} rows a step"
    )


def megabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
