"""Parts that only some decoders have give the same answers on CUDA as on the CPU: wide heads, sinks,
convolutions, norms over all heads, layers without positions.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from penstock import Engine
from tests.gpu.decoders import cosine
from tests.parity.decoders import FAMILIES, MORE_FAMILIES, ROWS, Family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ALL = FAMILIES | MORE_FAMILIES
NAMES = (
    "embeddinggemma2",
    "exaone4-windows",
    "gemma3-tower",
    "gpt-oss",
    "granite",
    "lfm2",
    "lfm2-bidirectional",
    "olmo2",
    "olmo3",
    "privacy-filter",
    "smollm3",
)
# The real head sizes of EmbeddingGemma 2.
WIDE = {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def need(family: Family) -> None:
    if not hasattr(transformers, family.model):
        pytest.skip(f"transformers {transformers.__version__} has no {family.model}")


def compare(folder: Path, dtype: str, least: float, share: float = 0.0) -> None:
    """Compare CUDA with the CPU. A `share` of the tokens may differ: rounding may change their experts."""
    with Engine(str(folder), device="cpu", dtype="float32") as cpu:
        expected = np.concatenate(cpu.token_embed(ROWS, normalize=False))
    with Engine(str(folder), device="cuda", dtype=dtype, max_num_batched_tokens=1024) as cuda:
        for _ in range(4):  # later steps may be replayed from a graph
            got = np.concatenate(cuda.token_embed(ROWS, normalize=False))
            near = np.sort([cosine(a[None], b[None]) for a, b in zip(got, expected, strict=True)])
            assert near[int(share * len(near))] >= least


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.998), ("float32", 0.99999)])
@pytest.mark.parametrize("name", NAMES)
def test_cuda_equals_the_cpu(name: str, dtype: str, least: float, tmp_path: Path) -> None:
    need(ALL[name])
    has_experts = name in ("gpt-oss", "privacy-filter")
    compare(ALL[name].write(tmp_path), dtype, least, 0.05 if has_experts and dtype == "bfloat16" else 0.0)


def test_heads_of_512_numbers_run_in_the_kernel(tmp_path: Path) -> None:
    family: Family = FAMILIES["embeddinggemma2"]
    need(family)
    settings: dict[str, Any] = family.settings | WIDE
    folder = Family(family.model, settings, family.says, nested=True).write(tmp_path)
    compare(folder, "float32", 0.99999)
    compare(folder, "bfloat16", 0.99)  # for the worst token; on a CPU, bf16 is as far from fp32
