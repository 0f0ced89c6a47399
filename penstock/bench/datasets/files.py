"""Prompts from files: JSON lines (`custom`), ShareGPT conversations, Parquet tables."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from penstock.bench.datasets.item import Item, item_of
from penstock.bench.datasets.tokens import PromptTokenizer
from penstock.bench.options import DataOptions
from penstock.errors import BadValue

_TEXT_COLUMNS = ("prompt", "text", "content", "document", "passage", "sentence", "query")
_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOTAL_TOKENS = 4, 1024, 2048  # limits for a ShareGPT pair


def custom_items(options: DataOptions) -> list[Item]:
    path = existing(options.dataset_path, "custom")
    rows = list(json_lines(path))
    items = [_custom(row, place, options.custom_output_len) for place, row in rows]
    return _fill(items, options, path)


def parquet_items(options: DataOptions) -> list[Item]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = existing(options.dataset_path, "parquet")
    try:
        names = pq.read_schema(path).names
        column = _column(options.dataset_column, names, path)
        values = pq.read_table(path, columns=[column])[column].to_pylist()
    except pa.ArrowInvalid as error:
        raise BadValue(f"{path} is not a Parquet file: {error}", param="dataset_path") from None
    for place, value in enumerate(values):
        if not isinstance(value, (str, list)):
            raise BadValue(f"{path}, row {place}: {column} is {type(value).__name__}, not a text or a list")
    return _fill([item_of(value, options.custom_output_len) for value in values], options, path)


def sharegpt_items(options: DataOptions, tokenizer: PromptTokenizer) -> list[Item]:
    """The first question and answer of each conversation, without very short and very long ones."""
    path = existing(options.dataset_path, "sharegpt")
    try:
        entries = orjson.loads(path.read_bytes())
        pairs = [
            (str(turns[0]["value"]), str(turns[1]["value"]))
            for turns in (entry.get("conversations", []) for entry in entries)
            if len(turns) >= 2
        ]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BadValue(
            f"{path} is not a list of ShareGPT conversations: {error}", param="dataset_path"
        ) from None
    prompts = tokenizer.encode([prompt for prompt, _ in pairs])
    answers = tokenizer.encode([answer for _, answer in pairs])
    items = []
    for (prompt, _), ids, answer in zip(pairs, prompts, answers, strict=True):
        wanted = options.sharegpt_output_len or len(answer)
        enough = len(ids) >= _MIN_TOKENS and (options.sharegpt_output_len or wanted >= _MIN_TOKENS)
        if enough and len(ids) <= _MAX_PROMPT_TOKENS and len(ids) + wanted <= _MAX_TOTAL_TOKENS:
            items.append(Item(prompt, tokens=len(ids), output_tokens=wanted))
    return _fill(items, options, path)


def existing(path: str | None, name: str) -> Path:
    if path is None:
        raise BadValue(f"--dataset-name {name} needs --dataset-path", param="dataset_path")
    if not Path(path).is_file():
        raise BadValue(f"--dataset-path {path}: there is no such file", param="dataset_path")
    return Path(path)


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) for each line that is not empty; `.gz` files are decompressed."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                place = f"{path}, line {number}"
                try:
                    value = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise BadValue(f"{place} is not JSON: {error}", param="dataset_path") from None
                if not isinstance(value, dict):
                    raise BadValue(f"{place} is {type(value).__name__}, not an object", param="dataset_path")
                yield place, value
    except (OSError, EOFError) as error:
        raise BadValue(f"{path} cannot be read: {error}", param="dataset_path") from None


def _custom(row: dict[str, Any], place: str, output_len: int) -> Item:
    wanted = row.get("output_tokens") if output_len < 0 else output_len
    if not isinstance(wanted, int) or wanted < 0:
        raise BadValue(f"{place}: --custom-output-len -1 needs integer output_tokens", param="dataset_path")
    if "query" in row and "documents" in row:
        return ranking(row["query"], row["documents"], place)
    prompt = row.get("prompt")
    if not prompt or not isinstance(prompt, (str, list, dict)):
        raise BadValue(
            f"{place}: each line needs a `prompt` (a text, a list, or an object), or `query` and `documents`",
            param="dataset_path",
        )
    return item_of(prompt, wanted)


def ranking(query: Any, documents: Any, place: str) -> Item:
    if not isinstance(query, str) or not isinstance(documents, list) or not documents:
        raise BadValue(f"{place}: `query` is a text, `documents` a list of texts", param="dataset_path")
    return Item(documents, rows=len(documents), query=query)


def _column(wanted: str | None, names: list[str], path: Path) -> str:
    if wanted is not None and wanted not in names:
        raise BadValue(f"{path} has no column {wanted!r}; it has {', '.join(names)}", param="dataset_column")
    found = wanted or next((name for name in _TEXT_COLUMNS if name in names), None)
    if found is None:
        raise BadValue(
            f"{path} has none of the columns {', '.join(_TEXT_COLUMNS)}; name one with --dataset-column "
            f"(it has {', '.join(names)})",
            param="dataset_column",
        )
    return found


def _fill(items: list[Item], options: DataOptions, path: Path) -> list[Item]:
    """Shuffle by the seed, then truncate or repeat to the number of prompts."""
    if not items:
        raise BadValue(f"{path} holds no usable prompt", param="dataset_path")
    if options.num_prompts < 1:
        raise BadValue("--num-prompts must be at least 1", param="num_prompts")
    if not options.disable_shuffle:
        random.Random(options.seed).shuffle(items)
    repeats = -(-options.num_prompts // len(items))
    return (items * repeats)[: options.num_prompts]
