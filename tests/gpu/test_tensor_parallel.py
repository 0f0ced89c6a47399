"""Tensor parallel on one GPU: NCCL with one rank, and two ranks that share the GPU.

pytest -m gpu tests/gpu/test_tensor_parallel.py

Each NCCL rank needs a GPU of its own. Two ranks on one GPU exchange tensors through the host instead. Their
kernels and processes are the same as on two GPUs; only the transport differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from penstock import Engine, SamplingParams
from penstock.kernels.experts import run_experts
from penstock.runner import load
from penstock.runner.parallel import load as parallel_load
from penstock.runner.parallel.runner import ParallelRunner
from penstock.weights.stream import SafetensorsSource, Wanted
from tests.parallel.adapter_folders import sites_of, write_adapter
from tests.parallel.answers import TEXTS, cosines, scores, tokens, vectors
from tests.parallel.checkpoints import EXPERTS, LLAMA, QWEN3, RERANKER, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIDE = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 512, "moe_intermediate_size": 128}
OPTIONS: dict[str, Any] = {"device": "cuda", "kv_cache_gb": 0.25, "max_num_seqs": 32, "enforce_eager": True}
MIN_COSINE = 0.9995  # for bfloat16 sums in another order


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parallel")
    configs = {"embedder": QWEN3, "llama": LLAMA, "reranker": RERANKER, "experts": EXPERTS}
    return {
        name: write_checkpoint(
            root / name,
            config | WIDE,
            pooling="lasttoken" if name == "embedder" else None,
            dtype=torch.bfloat16,
        )
        for name, config in configs.items()
    }


@contextmanager
def one_rank() -> Iterator[None]:
    """Run one rank as if there were several: with a process group and with divided layers."""
    with mock.patch.object(load, "is_parallel", return_value=True):
        yield


@contextmanager
def two_ranks_on_one_gpu() -> Iterator[None]:
    machine = msgspec.structs.replace(load.this_machine("cuda"), num_gpus=2)
    with (
        mock.patch.object(load, "this_machine", return_value=machine),
        mock.patch.object(parallel_load, "rank_devices", return_value=["cuda:0"] * 2),
    ):
        yield


SETUPS = {"NCCL with one rank": (one_rank, 1), "two ranks on one GPU": (two_ranks_on_one_gpu, 2)}


@pytest.fixture(params=SETUPS, scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    setup, size = SETUPS[request.param]
    with setup():
        yield OPTIONS | {"tensor_parallel_size": size}


CHUNKED = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 32}
EXACT = {"dtype": "float32"}  # the order of sums does not change the tokens


def likelihoods(folder: Path, **options: Any) -> NDArray[np.float32]:
    """Log probabilities of the first generated tokens, and of the prompts."""
    sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=1)
    found = []
    with Engine(str(folder), **options) as engine:
        for each in engine.generate(TEXTS, sampling):
            assert each.logprobs is not None and each.prompt_logprobs is not None
            found += [each.logprobs.values[:, 0], each.prompt_logprobs.values[:, 0]]
    return np.concatenate(found)


@pytest.fixture(scope="module")
def on_one_device(folders: dict[str, Path]) -> dict[str, Any]:
    """The expected answers, from one device without ranks."""
    with mock.patch.object(load, "is_parallel", return_value=False):
        return {
            "vectors": vectors(folders["embedder"], **OPTIONS),
            "scores": scores(folders["reranker"], **OPTIONS),
            "llama": tokens(folders["llama"], **OPTIONS, **EXACT),
            "experts": tokens(folders["experts"], **OPTIONS, **EXACT),
            "likelihoods": likelihoods(folders["experts"], **OPTIONS),
        }


def test_vectors_are_those_of_one_device(
    folders: dict[str, Path], on_one_device: dict[str, Any], ranks: dict[str, Any]
) -> None:
    with Engine(str(folders["embedder"]), **ranks, **CHUNKED) as engine:
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ParallelRunner)
        assert runner._group.uses_nccl is (ranks["tensor_parallel_size"] == 1)
        found = np.concatenate([engine.embed(TEXTS), engine.embed(TEXTS[:1])])
    assert cosines(on_one_device["vectors"], found).min() > MIN_COSINE


def test_scores_are_those_of_one_device(
    folders: dict[str, Path], on_one_device: dict[str, Any], ranks: dict[str, Any]
) -> None:
    np.testing.assert_allclose(scores(folders["reranker"], **ranks), on_one_device["scores"], atol=0.02)


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_greedy_tokens_are_those_of_one_device(
    folders: dict[str, Path], on_one_device: dict[str, Any], ranks: dict[str, Any], name: str
) -> None:
    assert tokens(folders[name], **ranks, **EXACT) == on_one_device[name]


def test_experts_in_bfloat16_find_tokens_as_likely_as_on_one_device(
    folders: dict[str, Path], on_one_device: dict[str, Any], ranks: dict[str, Any]
) -> None:
    """A sum in another order may be rounded differently, and then a router may choose another expert for a
    token. A few tokens may differ; in float32 none does (above)."""
    difference = np.abs(likelihoods(folders["experts"], **ranks) - on_one_device["likelihoods"])
    assert np.median(difference) < 0.03
    assert np.mean(difference < 0.1) > 0.9


ADAPTERS = {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 2, "enable_lora": True}


def adapted_vectors(folder: Path, adapters: dict[str, str], **options: Any) -> NDArray[np.float32]:
    """Vectors of the texts with each adapter and with none. There are more adapters than slots."""
    with Engine(str(folder), **options, **ADAPTERS, lora_modules=adapters) as engine:
        names = [*adapters, None, *reversed(adapters)]
        return np.concatenate([engine.embed(TEXTS, adapter=name) for name in names])


def adapted_tokens(folder: Path, adapters: dict[str, str], **options: Any) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with Engine(str(folder), **options, **ADAPTERS, lora_modules=adapters) as engine:
        found = [engine.generate(TEXTS, sampling, adapter=name) for name in (*adapters, None, *adapters)]
    return [list(each.token_ids) for every in found for each in every]


def adapters_for(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write low-rank adapters for all layers and tables, including a language model's head; one has DoRA."""
    sites, found = sites_of(config | WIDE), {}
    for number, rank in enumerate((4, 8, 3)):
        name = f"a{number}"
        write_adapter(folder / name, sites, rank=rank, use_dora=number == 2, seed=number)
        found[name] = str(folder / name)
    return found


def test_adapters_are_those_of_one_device(
    folders: dict[str, Path], ranks: dict[str, Any], tmp_path: Path
) -> None:
    adapters = adapters_for(QWEN3, tmp_path)
    found = adapted_vectors(folders["embedder"], adapters, **ranks)
    exact = adapted_vectors(folders["embedder"], adapters, **ranks, **EXACT)
    with mock.patch.object(load, "is_parallel", return_value=False):
        on_one = OPTIONS | {"tensor_parallel_size": 1}
        expected = adapted_vectors(folders["embedder"], adapters, **on_one)
        np.testing.assert_allclose(
            exact, adapted_vectors(folders["embedder"], adapters, **on_one, **EXACT), atol=1e-3
        )
    assert cosines(expected, found).min() > 0.999
    first, plain = expected[: len(TEXTS)], expected[3 * len(TEXTS) : 4 * len(TEXTS)]
    assert cosines(first, plain).min() < 0.999  # the adapters change the vectors


def test_greedy_tokens_with_adapters_are_those_of_one_device(
    folders: dict[str, Path], ranks: dict[str, Any], tmp_path: Path
) -> None:
    adapters = adapters_for(LLAMA, tmp_path)
    found = adapted_tokens(folders["llama"], adapters, **ranks, **EXACT)
    with mock.patch.object(load, "is_parallel", return_value=False):
        on_one = OPTIONS | EXACT | {"tensor_parallel_size": 1}
        assert found == adapted_tokens(folders["llama"], adapters, **on_one)


@pytest.mark.parametrize("tokens", [1, 7, 130, 1000])
def test_the_kernels_of_some_experts_add_up_to_all(tokens: int) -> None:
    experts, hidden, inner, chosen = 16, 256, 128, 4
    gate_up = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) / 16
    down = torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16) / 11
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(tokens, experts, device="cuda")
    options: dict[str, Any] = {"chosen": chosen, "normalize": True, "act": "silu"}
    whole = run_experts(x, logits, gate_up, down, **options).float()
    parts = [
        run_experts(
            x,
            logits,
            gate_up[first : first + 4].contiguous(),
            down[first : first + 4].contiguous(),
            **options,
            first_expert=first,
        ).float()
        for first in range(0, experts, 4)
    ]
    assert F.cosine_similarity(sum(parts, torch.zeros_like(whole)), whole, dim=1).min() > 0.999


def test_a_rank_reads_its_slices_of_the_files(folders: dict[str, Path]) -> None:
    cuda = SafetensorsSource(folders["llama"], torch.bfloat16, torch.device("cuda"))
    cpu = SafetensorsSource(folders["llama"], torch.bfloat16, torch.device("cpu"))
    name = next(name for name in cpu._tensors if name.endswith("layers.1.mlp.down_proj.weight"))
    shape = cpu._tensors[name].shape
    for ranges in (((64, 128),), ((0, shape[0]), (128, 384)), ((3, 5), (7, 9))):
        wanted = [Wanted(name, shape, ranges), Wanted(name, shape, ranges)]
        assert torch.equal(cuda.join(wanted).cpu(), cpu.join(wanted))
    cuda.close()
