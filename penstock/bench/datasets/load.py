"""Loads the items of a run from the data flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.bench.datasets import chat
from penstock.bench.datasets.files import custom_items, parquet_items, sharegpt_items
from penstock.bench.datasets.item import Item
from penstock.bench.datasets.random import random_items, random_rerank_items
from penstock.bench.datasets.tokens import PromptTokenizer
from penstock.bench.options import DataOptions, DatasetName
from penstock.errors import BadValue

FindTokenizer = Callable[[], PromptTokenizer]


def load_items(options: DataOptions, find_tokenizer: FindTokenizer) -> list[Item]:
    """Load or generate the items. The tokenizer is loaded only if it is needed."""
    generated = options.dataset_name in (DatasetName.RANDOM, DatasetName.RANDOM_RERANK)
    if generated and options.dataset_path is not None:
        raise BadValue(
            f"--dataset-name {options.dataset_name} is generated; to read {options.dataset_path} use "
            "custom, sharegpt or parquet",
            param="dataset_path",
        )
    if options.send_token_ids and not generated:
        raise BadValue("--send-token-ids works with --dataset-name random", param="send_token_ids")
    match options.dataset_name:
        case DatasetName.RANDOM:
            return random_items(options, find_tokenizer())
        case DatasetName.RANDOM_RERANK:
            return random_rerank_items(options, find_tokenizer())
        case DatasetName.CUSTOM:
            return custom_items(options)
        case DatasetName.PARQUET:
            return parquet_items(options)
        case DatasetName.SHAREGPT:
            return sharegpt_items(options, find_tokenizer())


def templated(items: list[Item], tokenizer: PromptTokenizer) -> list[Item] | None:
    """Render plain-text prompts with the model's chat template; None if it has none."""
    config = tokenizer.config()
    template = chat.chat_template(config)
    if template is None:
        return None
    plain = [item for item in items if isinstance(item.prompt, str)]
    rendered = iter(chat.apply(template, config, [str(item.prompt) for item in plain]))
    return [replace(item, prompt=next(rendered)) if isinstance(item.prompt, str) else item for item in items]


def count_tokens(items: list[Item], tokenizer: PromptTokenizer) -> list[int]:
    """Input tokens of each item. Unknown counts are found by encoding the texts; a query counts once for each
    document."""
    unknown = {i: item.texts for i, item in enumerate(items) if item.tokens is None}
    counts = iter(
        len(ids) for ids in tokenizer.encode([text for texts in unknown.values() for text in texts])
    )
    totals = {}
    for i, texts in unknown.items():
        lengths = [next(counts) for _ in texts]
        if items[i].query is None:
            totals[i] = sum(lengths) or _ids(items[i])
        else:
            totals[i] = lengths[0] * (len(lengths) - 1) + sum(lengths[1:])
    return [totals[i] if item.tokens is None else item.tokens for i, item in enumerate(items)]


def _ids(item: Item) -> int:
    prompt = item.prompt
    if not isinstance(prompt, list):
        return 0
    return sum(len(part) if isinstance(part, list) else isinstance(part, int) for part in prompt)
