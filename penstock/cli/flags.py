"""Flags that several commands share, and the step from their values to an engine's options."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import ConfigError

_PANEL = "Engine"


class InputFormat(enum.StrEnum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    TEXT = "text"


class OutputFormat(enum.StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"


class Quantization(enum.StrEnum):
    INT8 = "int8"
    FP8 = "fp8"


class ModelImpl(enum.StrEnum):
    AUTO = "auto"
    PENSTOCK = "penstock"
    TRANSFORMERS = "transformers"


class LoadFormat(enum.StrEnum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=_PANEL)
]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda, cuda:N, or null (computes nothing; for tests).", rich_help_panel=_PANEL
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16: what the model runs in.", rich_help_panel=_PANEL),
]
Quantize = Annotated[
    Quantization | None,
    typer.Option(
        "--quantization", help="Run linear layers in int8 (CPU) or fp8 (CUDA).", rich_help_panel=_PANEL
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of a row; default: the model's limit.", rich_help_panel=_PANEL),
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of one step.", rich_help_panel=_PANEL)
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads; default: the cores this process may use.", rich_help_panel=_PANEL),
]
LoadAs = Annotated[
    LoadFormat,
    typer.Option("--load-format", help="dummy runs on random weights.", rich_help_panel=_PANEL),
]
Impl = Annotated[
    ModelImpl,
    typer.Option(
        "--model-impl",
        help="transformers runs the Hugging Face module, for architectures that are not native.",
        rich_help_panel=_PANEL,
    ),
]
PoolerConfigJson = Annotated[
    str | None,
    typer.Option(
        "--pooler-config",
        metavar="JSON",
        help='Overrides of the model\'s pooling, such as \'{"pooling_type": "cls", "normalize": true}\'.',
        rich_help_panel=_PANEL,
    ),
]
HfOverridesJson = Annotated[
    str | None,
    typer.Option(
        "--hf-overrides", metavar="JSON", help="Overrides of keys in config.json.", rich_help_panel=_PANEL
    ),
]
ScoreTemplate = Annotated[
    str | None,
    typer.Option(
        "--score-template",
        metavar="TEXT|FILE",
        help="What a reranker reads, with {query} and {document}; \\n is a new line. Or a known name, "
        "such as qwen3-reranker.",
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of dummy weights.", rich_help_panel=_PANEL)]


def json_object(flag: str, text: str | None) -> dict[str, Any] | None:
    """The value of a flag that takes a JSON object."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}", param=flag) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} takes a JSON object, not {text}", param=flag)
    return value


def score_template(given: str | None) -> str | None:
    """The value of --score-template: what a file holds, or the text itself."""
    if given is None or "{document}" in given:
        return None if given is None else given.replace("\\n", "\n").replace("\\t", "\t")
    file = Path(given)
    return file.read_text(encoding="utf-8").removesuffix("\n") if file.is_file() else given


def engine_options(
    *,
    pooler_config: str | None = None,
    hf_overrides: str | None = None,
    template: str | None = None,
    **given: Any,
) -> dict[str, Any]:
    """`EngineConfig` by name, with what was left out absent."""
    options = {
        **given,
        "pooler_config": json_object("--pooler-config", pooler_config),
        "hf_overrides": json_object("--hf-overrides", hf_overrides),
        "score_template": score_template(template),
    }
    plain = {name: value.value if isinstance(value, enum.Enum) else value for name, value in options.items()}
    return {name: value for name, value in plain.items() if value is not None}
