"""Weights that are read onto a GPU in bulk equal those in the files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from penstock.weights.bulk import BulkReader
from penstock.weights.stream import SafetensorsSource
from tests.weights.samples import some_tensors, write_shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_chunk_bytes", [1000, 8 << 20])
def test_tensors_on_the_gpu_equal_those_in_the_files(
    tmp_path: Path, dtype: torch.dtype, max_chunk_bytes: int
) -> None:
    tensors = list(some_tensors().items())
    folder = write_shards(tmp_path, [dict(tensors[number::3]) for number in range(3)])
    device = torch.device("cuda")
    reader = BulkReader(device, threads=4, max_chunk_bytes=max_chunk_bytes)
    with torch.inference_mode(), closing(SafetensorsSource(folder, dtype, device, reader)) as source:
        for _ in range(20):  # reuses buffers and freed memory
            for name, tensor in tensors:
                found = source.read(name, tensor.shape)
                assert found.is_cuda and torch.equal(found.cpu().float(), tensor.float())
            fused = source.fuse(["v", "q", "k"], [3, 6, 2], 50) * 2
            wanted = torch.cat([dict(tensors)[name].to(dtype) for name in ("v", "q", "k")])
            assert torch.equal(fused.cpu(), wanted * 2)


def test_a_large_tensor_arrives_whole_while_the_gpu_is_busy(tmp_path: Path) -> None:
    large = torch.randint(0, 2**15, (64 << 20,), dtype=torch.int16)
    folder = write_shards(tmp_path, [{"large": large.view(8192, 8192)}])
    device = torch.device("cuda")
    busy = torch.randn(8192, 8192, device=device)
    with closing(SafetensorsSource(folder, torch.bfloat16, device)) as source:
        for _ in range(4):
            other = busy @ busy  # the next tensor reuses the memory of the last product
            del other
            assert torch.equal(source.read("large", (8192, 8192)).cpu().view(-1), large)
