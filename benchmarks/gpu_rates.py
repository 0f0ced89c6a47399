"""Tokens per second of the offline engine by model shape and row length. `penstock plan` is fitted to these.

    python benchmarks/gpu_rates.py --models DIR [--seconds 1.5] [--only PATTERN] [--save PATH]

DIR holds model folders (configuration and tokenizer; weights are random). Rows are random token ids of equal
length. Texts are measured too: the difference is the cost of tokenising on this host.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from texts import natural_texts

from penstock import Engine
from penstock.offline.throughput import measure, random_rows

LENGTHS = (8, 32, 128, 512, 2048)
TEXTS = 6144
SMALL = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name: folder, changes to its config.json
    "minilm-l6": ("bge-base", {**SMALL, "num_hidden_layers": 6}),
    "bge-small": ("bge-base", {**SMALL, "num_hidden_layers": 12}),
    "bge-base": ("bge-base", {}),
    "xlmr-large": ("xlmr-large", {}),
    "qwen3-embed-0.6b": ("qwen3-embed-0.6b", {}),
    "qwen3-4b": ("qwen3-4b", {}),
    "gritlm-7b": ("gritlm-7b", {}),
    "qwen3-8b": ("qwen3-4b", {"hidden_size": 4096, "intermediate_size": 12288}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", {}),
}
WITH_TEXTS = ("minilm-l6", "bge-base", "qwen3-embed-0.6b")


def measured(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    folder, overrides = MODELS[name]
    config: dict[str, Any] = {"device": options.device, "load_format": "dummy", "share_identical": False}
    if options.device == "cuda":
        config["dtype"] = "bfloat16"
    config |= {"hf_overrides": overrides, "enable_generation": False}
    records = []
    with Engine(str(options.models / folder), **config) as engine:
        for length in options.lengths:
            if length > engine.spec.max_model_len:
                continue
            rows = random_rows(engine, [length] * min(options.rows, max(256, 2_000_000 // length)))
            best = measure(engine, rows, [length] * len(rows), options.seconds)
            records.append(_record(name, length, "ids", best.tokens_per_s))
        if name in WITH_TEXTS:
            records.append(_with_texts(name, engine, options))
    return records


def _with_texts(name: str, engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    texts = natural_texts(min(options.rows, TEXTS))
    encoded = engine.tokenize(texts)
    lengths = [min(len(ids), engine.spec.max_model_len) for ids in encoded]
    result = measure(engine, texts, lengths, options.seconds)
    rows = [ids[:length] for ids, length in zip(encoded, lengths, strict=True)]
    same = measure(engine, rows, lengths, options.seconds)
    mean = round(sum(lengths) / len(lengths))
    return _record(name, mean, "texts", result.tokens_per_s) | {"same_as_ids": round(same.tokens_per_s)}


def _record(name: str, length: int, rows: str, rate: float) -> dict[str, Any]:
    record = {"model": name, "tokens": length, "input": rows, "tokens_per_s": round(rate)}
    print(json.dumps(record), flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--only", default="", help="regular expression over model names")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rows", type=int, default=16_384, help="maximum number of distinct rows")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    records = []
    for name in MODELS:
        if re.search(options.only, name):
            began = time.perf_counter()
            try:
                records += measured(name, options)
            except Exception as error:  # measure the other models all the same
                print(f"{name} failed: {type(error).__name__}: {error}")
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    if options.save:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        about = {"date": str(date.today()), "gpu": gpu, "torch": torch.__version__, "rates": records}
        options.save.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
