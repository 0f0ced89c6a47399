"""Random prompts of given lengths.

Lengths and offsets are drawn in the order in which `vllm bench serve` draws them, so that one seed gives
both clients the same lengths.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.bench.datasets.item import Item
from penstock.bench.datasets.tokens import PromptTokenizer
from penstock.bench.options import DataOptions
from penstock.errors import BadValue

_MAX_TRIES = 10  # rounds, because a text may not encode to the tokens that it was decoded from
Lengths = NDArray[np.int64]


def random_items(options: DataOptions, tokenizer: PromptTokenizer) -> list[Item]:
    check(options)
    rng = np.random.default_rng(options.seed)
    inputs, outputs, offsets = _draw(
        rng, options, tokenizer, options.num_prompts, options.random_input_len, options.random_output_len
    )
    prefix = tokenizer.ordinary[rng.integers(0, len(tokenizer.ordinary), options.random_prefix_len)]
    if options.random_prefix_len + int(inputs.min()) < 1:
        raise BadValue(
            f"--random-input-len {options.random_input_len} leaves no room for tokens besides the "
            f"{tokenizer.num_special} special ones",
            param="random_input_len",
        )
    rows = [
        np.concatenate([prefix, _run(tokenizer, int(offset) + i, int(length))])
        for i, (length, offset) in enumerate(zip(inputs, offsets, strict=True))
    ]
    prompts: list[Any]
    if options.send_token_ids:
        prompts = [[*tokenizer.opening, *row.tolist(), *tokenizer.closing] for row in rows]
    else:
        prompts = texts_of(rows, tokenizer, rng)
    tokens = [len(row) + tokenizer.num_special for row in rows]
    return _batched(prompts, tokens, [int(n) for n in outputs], options.random_batch_size)


def random_rerank_items(options: DataOptions, tokenizer: PromptTokenizer) -> list[Item]:
    """One query for all requests, and documents that fill each pair to its length."""
    check(options)
    if options.send_token_ids:
        raise BadValue("--send-token-ids: rerank requests carry texts", param="send_token_ids")
    if options.random_prefix_len:
        raise BadValue("--random-prefix-len: not for random-rerank", param="random_prefix_len")
    rng = np.random.default_rng(options.seed)
    lengths, _, offsets = _draw(rng, options, tokenizer, 1, options.random_input_len // 2 - 1, 0)
    query_length, query_offset = int(lengths[0]), int(offsets[0])
    rest = options.random_input_len - query_length - 1
    lengths, _, offsets = _draw(rng, options, tokenizer, options.num_prompts, rest, 0)
    if query_length < 1 or int(lengths.min()) < 1:
        raise BadValue(
            f"--random-input-len {options.random_input_len} is too short for a query and a document",
            param="random_input_len",
        )
    rows = [_run(tokenizer, query_offset, query_length)]
    rows += [
        _run(tokenizer, int(offset) + i + 1, int(length))
        for i, (length, offset) in enumerate(zip(lengths, offsets, strict=True))
    ]
    query, *documents = texts_of(rows, tokenizer, rng)
    size = options.random_batch_size
    return [
        Item(
            documents[i : i + size],
            rows=len(documents[i : i + size]),
            tokens=sum(query_length + 1 + int(n) for n in lengths[i : i + size]),
            query=query,
        )
        for i in range(0, len(documents), size)
    ]


def check(options: DataOptions) -> None:
    for name in ("num_prompts", "random_input_len", "random_batch_size"):
        if getattr(options, name) < 1:
            raise BadValue(f"--{name.replace('_', '-')} must be at least 1", param=name)
    if options.random_prefix_len < 0:
        raise BadValue("--random-prefix-len must not be negative", param="random_prefix_len")


def range_ratios(text: str) -> tuple[float, float]:
    """(input, output) from one number or from {"input": a, "output": b}."""
    try:
        value = orjson.loads(text)
        pair = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        ratios = float(pair[0]), float(pair[1])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise BadValue(
            f'--random-range-ratio {text!r}: give a number, or {{"input": a, "output": b}}',
            param="random_range_ratio",
        ) from None
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise BadValue(
            f"--random-range-ratio {text}: it must be at least 0 and below 1", param="random_range_ratio"
        )
    return ratios


def texts_of(rows: list[Lengths], tokenizer: PromptTokenizer, rng: np.random.Generator) -> list[str]:
    """Texts that encode to the lengths of `rows`, adjusted over a few rounds."""
    wanted = [len(row) for row in rows]
    ids = [row.tolist() for row in rows]
    texts = [""] * len(rows)
    pending = list(range(len(rows)))
    for last in [False] * _MAX_TRIES + [True]:
        made = tokenizer.decode([ids[i] for i in pending])
        again = tokenizer.encode(made, add_special_tokens=False)
        off = []
        for i, text, row in zip(pending, made, again, strict=True):
            texts[i] = text
            missing = wanted[i] - len(row)
            if missing and not last:
                extra = tokenizer.ordinary[rng.integers(0, len(tokenizer.ordinary), max(0, missing))]
                ids[i] = row[: wanted[i]] + extra.tolist()
                off.append(i)
        pending = off
        if not pending:
            break
    return texts


def _draw(
    rng: np.random.Generator,
    options: DataOptions,
    tokenizer: PromptTokenizer,
    count: int,
    input_len: int,
    output_len: int,
) -> tuple[Lengths, Lengths, Lengths]:
    """(input lengths without special tokens, output lengths, offsets into the vocabulary)."""
    input_ratio, output_ratio = range_ratios(options.random_range_ratio)
    real = max(0, input_len - tokenizer.num_special)
    low, high = math.floor(real * (1 - input_ratio)), math.ceil(real * (1 + input_ratio))
    out_low = max(1, math.floor(output_len * (1 - output_ratio)))
    out_high = max(1, math.ceil(output_len * (1 + output_ratio)))
    return (
        rng.integers(low, high + 1, size=count),
        rng.integers(out_low, out_high + 1, size=count),
        rng.integers(0, tokenizer.vocab_size, size=count),
    )


def _run(tokenizer: PromptTokenizer, offset: int, length: int) -> Lengths:
    """Consecutive tokens of the vocabulary, so that no two prompts share a prefix."""
    ordinary = tokenizer.ordinary
    return ordinary[(offset + np.arange(length)) % len(ordinary)]


def _batched(prompts: list[Any], tokens: list[int], outputs: list[int], size: int) -> list[Item]:
    if size == 1:
        return [Item(p, 1, t, o) for p, t, o in zip(prompts, tokens, outputs, strict=True)]
    starts = range(0, len(prompts), size)
    return [
        Item(prompts[i : i + size], len(prompts[i : i + size]), sum(tokens[i : i + size])) for i in starts
    ]
