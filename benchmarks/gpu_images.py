"""Images per second on one GPU, offline, with random weights: the step alone, and the whole engine.

    python benchmarks/gpu_images.py [--only siglip] [--save]

Writes the configurations itself; needs no files and no network. The floor is the time of the model's matrix
products at the rate of one large bf16 product, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock import Engine
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, PreparedImage, Task

SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
SIGLIP_SO400M = {
    "architectures": ["SiglipModel"],
    "model_type": "siglip",
    "text_config": {**SO400M, "vocab_size": 32000, "projection_size": 1152, "max_position_embeddings": 64},
    "vision_config": {**SO400M, "image_size": 384, "patch_size": 14},
}
CLIP_L = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 768,
    "text_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "eos_token_id": 49407,
    },
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
}
QWEN_VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
QWEN3_VL_2B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        "tie_word_embeddings": True,
    },
    "vision_config": {"model_type": "qwen3_vl", **QWEN_VISION},
}
SIGLIP_PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": 384, "width": 384},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 3,
}
CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}
QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
PAGE = (56, 40)  # patches of 16 pixels: a page of 896 × 640, 560 tokens


@dataclass(frozen=True)
class Subject:
    name: str
    config: dict[str, Any]
    processor: dict[str, Any]
    grid: tuple[int, int]  # patches of one image, down and across
    images: tuple[int, ...]  # in one step, for each measurement
    special: dict[int, str]  # special tokens: id → text
    modules: tuple[dict[str, str], ...] = ()
    task: Task = Task.EMBED

    def write(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "preprocessor_config.json").write_text(json.dumps(self.processor))
        self._write_tokenizer(folder)
        if self.modules:
            (folder / "modules.json").write_text(json.dumps(list(self.modules)))
            (folder / "1_Pooling").mkdir()
            pooling = {"word_embedding_dimension": 2048, "pooling_mode_lasttoken": True}
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))

    def _write_tokenizer(self, folder: Path) -> None:
        text = self.config["text_config"]
        vocabulary = {f"w{number}": number for number in range(text.get("vocab_size", 49408))}
        for number, token in self.special.items():
            del vocabulary[f"w{number}"]
            vocabulary[token] = number
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(list(self.special.values()))
        end = self.special[max(self.special)] if len(self.special) == 1 else ""
        if end:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"$A {end}", special_tokens=[(end, vocabulary[end])]
            )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"pad_token": end, "padding_side": "right"} if end else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    def page(self, seed: int) -> PreparedImage:
        """An image of random pixels, as the image processor would prepare it."""
        height, width = self.grid
        values = 3 * self.config["vision_config"]["patch_size"] ** 2
        draw = np.random.default_rng(seed)
        patches = draw.integers(0, 256, (height * width, values), dtype=np.uint8)
        tokens = height * width // 4 if "Qwen" in self.name else 0
        return PreparedImage(patches, self.grid, tokens, seed.to_bytes(16, "little"))

    @property
    def flops(self) -> float:
        """FLOPs of the matrix products for one image, in the layers of tower and text model."""
        patches, vision = self.grid[0] * self.grid[1], self.config["vision_config"]
        total = layer_flops(
            patches,
            vision["hidden_size"],
            vision["intermediate_size"],
            vision.get("num_hidden_layers") or vision["depth"],
        )
        if "Qwen" not in self.name:
            return total
        text, tokens = self.config["text_config"], patches / 4
        hidden, heads = text["hidden_size"], text["num_attention_heads"] * text["head_dim"]
        kv = text["num_key_value_heads"] * text["head_dim"]
        weights = hidden * (2 * heads + 2 * kv) + 3 * hidden * text["intermediate_size"]
        merged = 4 * vision["hidden_size"]
        merger = (1 + len(vision["deepstack_visual_indexes"])) * merged * (merged + hidden)
        total += 2 * tokens * (text["num_hidden_layers"] * weights + merger)
        return total + 2 * tokens * tokens * heads * text["num_hidden_layers"]  # causal attention


def layer_flops(tokens: int, hidden: int, inner: int, layers: int) -> float:
    weights = 4 * hidden * hidden + 2 * hidden * inner
    return layers * (2.0 * tokens * weights + 4.0 * tokens * tokens * hidden)


QWEN_TOKENS = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
    151652: "<|vision_start|>",
    151653: "<|vision_end|>",
    151655: "<|image_pad|>",
}
SUBJECTS = (
    Subject(
        "SigLIP so400m-patch14-384",
        SIGLIP_SO400M,
        SIGLIP_PROCESSOR,
        (27, 27),
        (1, 8, 32),
        {1: "</s>"},
    ),
    Subject("CLIP ViT-L/14-336", CLIP_L, CLIP_PROCESSOR, (24, 24), (1, 8, 32), {49407: "<|endoftext|>"}),
    Subject(
        "Qwen3-VL-Embedding-2B",
        QWEN3_VL_2B,
        QWEN_PROCESSOR,
        PAGE,
        (1, 4, 12),
        QWEN_TOKENS,
        modules=(
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ),
    ),
    Subject(
        "ColQwen3 on Qwen3-VL-2B",
        {**QWEN3_VL_2B, "architectures": ["ColQwen3"]},
        QWEN_PROCESSOR,
        PAGE,
        (1, 4, 12),
        QWEN_TOKENS,
        task=Task.TOKEN_EMBED,
    ),
)


def gemm_rate(seconds: float = 1.0) -> float:
    """FLOP/s of a large bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192.0**3 / timed(lambda: torch.mm(a, b), seconds)


def timed(work: Callable[[], object], seconds: float) -> float:
    """Device seconds of one call, after a warm-up."""
    for _ in range(5):
        work()
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        count += 10
    return (time.perf_counter() - began) / count


def step_s(engine: Engine, subject: Subject, count: int, repeats: int = 20) -> float:
    """Device time of a step with `count` different images, from bytes to vectors."""
    inputs = [subject.page(number) for number in range(count)]
    request = engine.local.text.processor.prepare("bench", inputs, PoolingParams(subject.task))
    share = ScheduledRows(request, np.arange(request.num_rows, dtype=np.int32))
    runner = engine.local.engine.core.runner
    slots = request.num_tokens

    def run() -> float:  # a new cache for each step, so that every image runs
        return runner.launch(build_plan([share], image_cache=ImageCache(slots))).result().device_s

    for _ in range(3):
        run()
    return statistics.median(run() for _ in range(repeats))


def engine_rate(engine: Engine, subject: Subject, count: int) -> tuple[float, float]:
    """Images per second through the whole engine, and the share of time in which the device was busy."""
    images = [subject.page(1000 + number) for number in range(count)]
    run = engine.embed if subject.task is Task.EMBED else engine.token_embed
    run([subject.page(number) for number in range(min(32, count))])
    busy: list[float] = []
    core = engine.local.engine.core
    observe, core.observe = core.observe, lambda stats: busy.append(stats.device_s)
    began = time.perf_counter()
    run(images)
    elapsed = time.perf_counter() - began
    core.observe = observe
    return count / elapsed, sum(busy) / elapsed


def rerank_s(
    engine: Engine, subject: Subject, pages: int, query: str = "w1 w2 w3 w4 w5"
) -> tuple[float, float]:
    """Seconds to score pages with a query, the first time and with another query."""
    documents = [subject.page(5000 + number) for number in range(pages)]
    times = []
    for text in (query, query + " w6"):
        began = time.perf_counter()
        engine.score(text, documents)
        times.append(time.perf_counter() - began)
    return times[0], times[1]


def measured(subject: Subject, rate: float, num_images: int, num_pages: int) -> Sequence[str]:
    lines = []
    with tempfile.TemporaryDirectory() as name:
        subject.write(Path(name))
        with Engine(name, device="cuda", load_format="dummy", dtype="bfloat16") as engine:
            for count in subject.images:
                seconds = step_s(engine, subject, count)
                floor = count * subject.flops / rate
                lines.append(
                    f"| {subject.name} | step of {count} | {seconds * 1000:.2f} | {count / seconds:,.0f} | "
                    f"{floor / seconds:.0%} | |"
                )
            per_s, busy = engine_rate(engine, subject, num_images)
            share = per_s * subject.flops / rate
            what = f"engine, {num_images:,} images"
            lines.append(f"| {subject.name} | {what} | | {per_s:,.0f} | {share:.0%} | {busy:.0%} |")
            whats = (f"score of {num_pages} pages", "the same pages, another query")
            for what, seconds in zip(whats, rerank_s(engine, subject, num_pages), strict=True):
                milliseconds, per_s = seconds * 1000, num_pages / seconds
                lines.append(f"| {subject.name} | {what} | {milliseconds:.0f} | {per_s:,.0f} | | |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="run subjects whose name contains this")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=100)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rate = gemm_rate()
    lines = [
        f"One bf16 product of 8192³ runs at {rate / 1e12:,.0f} TFLOP/s.",
        "",
        "| model | what | ms | images/s | share of the product's rate | device busy |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for subject in SUBJECTS:
        if options.only.lower() not in subject.name.lower():
            continue
        num_images = options.images if "Qwen" not in subject.name else options.images // 4
        try:
            found = measured(subject, rate, num_images, options.pages)
        except Exception as error:  # continue with the other subjects
            found = [f"| {subject.name} | failed: {type(error).__name__}: {str(error)[:200]} | | | | |"]
        print("\n".join(found), flush=True)
        lines += found
    if options.save:
        name = torch.cuda.get_device_name()
        versions = f"Python {platform.python_version()} · torch {torch.__version__}"
        head = f"# Images\n\n{date.today()} · {name} · {versions}\n\n"
        command = "`python benchmarks/gpu_images.py --save`\n\n"
        target = Path(__file__).parent / "results" / "images.md"
        target.write_text(head + command + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
