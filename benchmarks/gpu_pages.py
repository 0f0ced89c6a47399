"""Pages per second of a Qwen-VL model on one GPU, with random weights: device time of steps of pages, and the
share of it that the products of tower and decoder would take alone.

    python benchmarks/gpu_pages.py [--layers 28] [--pages 4] [--side 1024]

Without a folder it writes the configuration of Qwen3-VL-Embedding-2B to a temporary one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock import Engine
from penstock.inputs.images.positions import rope_positions
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolPlan, Request, RequestImages
from tests.parity.qwen_vl import qwen_tokenizer

VISION = {
    "deepstack_visual_indexes": [5, 11, 17],
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
}
VISION |= {"num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16}
TEXT = {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
TEXT |= {"head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 32768}
TEXT |= {"rope_theta": 5e6, "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": True}}
CONFIG = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 5}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
TEXT_TOKENS = 24  # around the image of a page
BF16_FLOPS = 989e12  # of an H100 or H200, without sparsity


def write_folder(folder: Path, layers: int) -> Path:
    config = CONFIG | {"text_config": TEXT | {"num_hidden_layers": layers}, "vision_config": VISION}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"temporal_patch_size": 2}))
    qwen_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def pages(count: int, side: int, seed: int) -> Request:
    """Rows with one square image each, of `side` pixels."""
    grid = side // 16
    patches, image_tokens = grid * grid, grid * grid // 4
    length = image_tokens + TEXT_TOKENS
    draw = np.random.default_rng(seed)
    rows = np.arange(count, dtype=np.int32)
    starts = np.full(count, TEXT_TOKENS // 2, dtype=np.int32)
    lengths = np.full(count, length, dtype=np.int32)
    grids = np.full((count, 2), grid, dtype=np.int32)
    images = RequestImages(
        draw.integers(0, 256, (count * patches, 768), np.uint8),
        grids,
        rows,
        starts,
        np.full(count, image_tokens, dtype=np.int32),
        draw.integers(0, 256, (count, 16), np.uint8),
    )
    ids = draw.integers(7, 300, count * length).astype(np.int32)
    rope = rope_positions(lengths, rows, starts, grids // 2)
    return Request(f"pages-{seed}", ids, lengths, images=images, rope_positions=rope)


def plan_of(count: int, side: int, seed: int, features: int) -> PoolPlan:
    request = pages(count, side, seed)
    scheduled = [ScheduledRows(request, np.arange(count, dtype=np.int32))]
    return build_plan(scheduled, image_cache=ImageCache(features))


def product_flops(plan: PoolPlan, layers: int) -> float:
    """Of the linear layers of tower and decoder; attention and mergers are left out."""
    assert plan.images is not None
    tower = VISION["depth"] * (4 * 1024 * 1024 + 2 * 1024 * 4096)
    decoder = layers * (2048 * 128 * (16 + 8 + 8 + 16) + 3 * 2048 * 6144)
    return 2.0 * (plan.images.num_patches * tower + plan.num_tokens * decoder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--side", type=int, default=1024, help="pixels of a page, a multiple of 32")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, pages of {options.side} x {options.side} pixels")
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), options.layers)
        more = {"enable_generation": False, "max_num_batched_tokens": 16384, "max_model_len": 16384}
        with Engine(str(folder), device="cuda", dtype="bfloat16", load_format="dummy", **more) as engine:
            core = engine.local.engine.core
            cache = core.scheduler.image_cache
            assert cache is not None
            for count in options.pages:
                plan = plan_of(count, options.side, count, cache.size)
                for _ in range(3):
                    core.runner.launch(plan).result()
                runs = [core.runner.launch(plan).result().device_s for _ in range(options.repeats)]
                seconds = statistics.median(runs)
                floor = product_flops(plan, options.layers) / BF16_FLOPS
                patches = 0 if plan.images is None else plan.images.num_patches
                print(
                    f"{count} pages: {patches} patches, {plan.num_tokens} tokens, {seconds * 1000:.1f} ms, "
                    f"{count / seconds:.0f} pages/s, products alone {floor / seconds:.0%} of it"
                )


if __name__ == "__main__":
    main()
