"""A small generative model, with fake graphs whose replay computes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint.pooling import PoolingSpec
from penstock.kvcache.store import KVCache, KVStore
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.capture import Work
from penstock.runner.decode import DecodeGraphs
from penstock.runner.generator import Generator
from penstock.runner.model_runner import ModelRunner
from penstock.types import SamplerParams, Task
from penstock.weights.stream import open_weights
from tests.helpers import make_spec

CPU = torch.device("cpu")
CONFIG = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
SLOTS, LENGTH, BLOCKS = 6, 64, 24
TOKENS = 7  # generated tokens per sequence


def fake(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
    """A fake CUDA graph. A replay computes again and writes into the tensors of the first results."""
    kept = [tensor.clone() for tensor in work()]

    def replay() -> None:
        for old, new in zip(kept, work(), strict=True):
            old.copy_(new)

    return replay, kept


def make_runner(
    graphs: bool,
    capture: object = fake,
    dtype: torch.dtype = torch.float32,
    layers: int = 1,
    max_rows: int = SLOTS,
) -> ModelRunner:
    weights = open_weights(Path("/nowhere"), "dummy", 0, dtype, CPU)
    config = CONFIG | {"num_hidden_layers": layers}
    model = build_model("Qwen3ForCausalLM", config, LayerBuilder(weights), generates=True)
    store = KVStore(layers, BLOCKS * BLOCK_SIZE, 1, 16, dtype, CPU)
    generator = Generator(model.heads[Task.GENERATE], SLOTS, CPU, seed=1)
    generator.max_rows = max_rows
    pooler = Pooler(make_spec(pooling=PoolingSpec(("last",))), {}, [])
    runner = ModelRunner(model, pooler, CPU, 2, KVCache(store, torch.zeros(0, 32)), generator)
    if graphs:
        # In fp32 the reference computes attention. It reads whole block tables, beyond the row's end too.
        slot = runner.staging.pinned_ints
        runner.staging.pinned_ints = lambda size: slot(size).zero_()  # type: ignore[method-assign]
        runner.decode = DecodeGraphs(model, generator, runner.staging, store, capture)  # type: ignore[arg-type]
    return runner


def sampling(**options: object) -> SamplerParams:
    return SamplerParams(max_tokens=TOKENS, ignore_eos=True, **options)  # type: ignore[arg-type]
