"""Loading speed of weights from memory-backed files onto a GPU.

    python benchmarks/gpu_loading.py [experts] [dense] [--folder /dev/shm/penstock-loading] [--tree PATH]

Writes checkpoints of random bytes in published layouts and loads them with the engine's loader: `experts` has
31 GB in the layout of Qwen3-30B-A3B-FP8, `dense` 15 GB in the layout of Qwen2-7B in bf16. Some of the loaded
tensors are compared with the files. `--tree` loads with another source tree, for comparison. `--keep` keeps
the files for the next run. `--device cpu --scale 16` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

SHARD_BYTES = 4 << 30
POOL_BYTES = 64 << 20  # random bytes; each tensor takes a different slice
BLOCK = 128
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


class Entry(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[self.dtype]


def linear(name: str, outputs: int, inputs: int, fp8: bool) -> Iterator[Entry]:
    yield Entry(f"{name}.weight", "F8_E4M3" if fp8 else "BF16", (outputs, inputs))
    if fp8:
        yield Entry(f"{name}.weight_scale_inv", "BF16", (-(-outputs // BLOCK), -(-inputs // BLOCK)))


def entries(config: dict[str, Any]) -> Iterator[Entry]:
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    rows, kv_rows = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    fp8 = "quantization_config" in config
    yield Entry("model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden))
    yield Entry("model.norm.weight", "BF16", (hidden,))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Entry(f"{prefix}{name}.weight", "BF16", (hidden,))
        for name, outputs in (("q", rows), ("k", kv_rows), ("v", kv_rows)):
            yield from linear(f"{prefix}self_attn.{name}_proj", outputs, hidden, fp8)
            if not experts:
                yield Entry(f"{prefix}self_attn.{name}_proj.bias", "BF16", (outputs,))
        yield from linear(f"{prefix}self_attn.o_proj", hidden, rows, fp8)
        if not experts:
            yield from feed_forward(f"{prefix}mlp", hidden, config["intermediate_size"], fp8)
            continue
        for name in ("q_norm", "k_norm"):
            yield Entry(f"{prefix}self_attn.{name}.weight", "BF16", (dim,))
        yield Entry(f"{prefix}mlp.gate.weight", "BF16", (experts, hidden))
        for expert in range(experts):
            width = config["moe_intermediate_size"]
            yield from feed_forward(f"{prefix}mlp.experts.{expert}", hidden, width, fp8)


def feed_forward(prefix: str, hidden: int, width: int, fp8: bool) -> Iterator[Entry]:
    yield from linear(f"{prefix}.down_proj", hidden, width, fp8)
    yield from linear(f"{prefix}.gate_proj", width, hidden, fp8)
    yield from linear(f"{prefix}.up_proj", width, hidden, fp8)


def checkpoint(kind: str, scale: int) -> dict[str, Any]:
    """The configuration, with `scale` times fewer layers and experts."""
    config = dict(QWEN3_MOE if kind == "experts" else QWEN2)
    config["num_hidden_layers"] = max(1, config["num_hidden_layers"] // scale)
    config["vocab_size"] //= scale
    if kind == "experts":
        config["num_experts"] = max(8, config["num_experts"] // scale)
        layers = range(config["num_hidden_layers"])
        norms = ("input_layernorm", "post_attention_layernorm", "mlp.gate")
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"]
            + [f"model.layers.{layer}.{name}" for layer in layers for name in norms],
        }
    return config


def write(folder: Path, config: dict[str, Any]) -> int:
    """Write the checkpoint unless it exists; returns the size of its tensors in bytes."""
    wanted = list(entries(config))
    total = sum(entry.size for entry in wanted)
    mark = folder / "complete"
    if mark.is_file() and mark.read_text() == str(total):
        return total
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shards: list[list[Entry]] = [[]]
    held = 0
    for entry in wanted:
        if shards[-1] and held + entry.size > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += entry.size
    pool = memoryview(os.urandom(POOL_BYTES))
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda job: write_shard(folder / job[0], job[1], pool), zip(names, shards, strict=True)
            )
        )
    index = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    mark.write_text(str(total))
    return total


def write_shard(file: Path, shard: list[Entry], pool: memoryview) -> None:
    # In the order of safetensors: widest data type first.
    shard = sorted(shard, key=lambda entry: entry.dtype != "BF16")
    header: dict[str, Any] = {}
    end = 0
    for entry in shard:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [end, end + entry.size],
        }
        end += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for entry in shard:
            draw, left = random.Random(entry.name), entry.size
            while left:
                begin = draw.randrange(len(pool) // 2)
                left -= out.write(pool[begin : begin + min(left, len(pool) // 2)])


def compare(folder: Path, config: dict[str, Any], device: str, samples: int = 24) -> int:
    """Find the rows of some stored weights in the tensors on the device; returns how many weights matched."""
    import torch
    from safetensors import safe_open

    loaded = {
        (tensor.data_ptr(), tensor.shape): tensor
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == torch.device(device).type
    }
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    weights = [entry for entry in entries(config) if entry.name.endswith("proj.weight")]
    for entry in random.Random(0).sample(weights, min(samples, len(weights))):
        with safe_open(folder / where[entry.name], framework="pt") as file:
            stored = file.get_tensor(entry.name)
        wanted = stored.view(torch.uint8).to(device)
        tensors = [
            t for t in loaded.values() if t.dtype == stored.dtype and t.shape[-1:] == stored.shape[-1:]
        ]
        if not any(holds(tensor, wanted) for tensor in tensors):
            raise SystemExit(f"{entry.name} is not on the device as it is in the file")
    return samples


def holds(tensor: Any, wanted: Any) -> bool:
    import torch

    if tensor.ndim < 2 or not tensor.is_contiguous():
        return False
    rows = tensor.view(torch.uint8).view(-1, wanted.shape[-1])
    first = (rows[:, :16] == wanted[0, :16]).all(1).nonzero().flatten().tolist()
    return any(torch.equal(rows[begin : begin + len(wanted)], wanted) for begin in first)


def load(folder: Path, device: str) -> Any:
    """Load the model; returns it and the seconds without imports and the start of the GPU."""
    import torch

    from penstock.checkpoint.describe import describe
    from penstock.config import EngineConfig
    from penstock.layers import build  # noqa: F401
    from penstock.models import registry  # noqa: F401
    from penstock.runner.load import settle

    try:
        from penstock.runner.load_weights import read_model
    except ImportError:  # another tree, in which `load` did this
        from penstock.runner.load import read_model  # type: ignore[attr-defined, no-redef]

    dtype = "bfloat16"
    config = EngineConfig(model=str(folder), device=device, dtype=dtype, enable_generation=False)
    spec = describe(config)
    settings = settle(config, spec)
    torch.zeros(1, device=device)
    began = time.perf_counter()
    model = read_model(spec, settings, torch.device(settings.device))
    if device != "cpu":
        torch.cuda.synchronize()
    return model, time.perf_counter() - began


def measure(kind: str, folder: Path, options: argparse.Namespace) -> None:
    import torch

    import penstock

    config = checkpoint(kind, options.scale)
    total = sum(entry.size for entry in entries(config))
    print(f"{kind}: {total / 1e9:.1f} GB, {Path(penstock.__file__).parent}", flush=True)
    for number in range(options.repeats):
        model, seconds = load(folder, options.device)
        is_as_stored = options.device != "cpu"  # on a CPU, weights are dequantised or packed
        matched = compare(folder, config, options.device) if number == 0 and is_as_stored else 0
        checked = f", {matched} sampled tensors as in the files" if matched else ""
        print(f"  {seconds:6.2f} s, {total / 1e9 / seconds:5.1f} GB/s{checked}", flush=True)
        del model
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["experts", "dense"])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/penstock-loading"))
    parser.add_argument("--tree", type=Path, action="append", help="source tree to load with; repeatable")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divides layers, experts and vocabulary")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for kind in options.kinds:
        folder = options.folder / f"{kind}-{options.scale}"
        if options.child:
            measure(kind, folder, options)
            continue
        began = time.perf_counter()
        write(folder, checkpoint(kind, options.scale))
        print(f"wrote {folder} in {time.perf_counter() - began:.0f} s", flush=True)
        for tree in options.tree or [Path(__file__).resolve().parents[1]]:
            command = [sys.executable, __file__, kind, "--child", "--folder", str(options.folder)]
            command += ["--device", options.device, "--scale", str(options.scale)]
            command += ["--repeats", str(options.repeats)]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree.resolve())}, check=True)
        if not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
