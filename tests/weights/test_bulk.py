"""Bulk reading of tensors, with staging buffers in ordinary memory."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.fp8_blocks import ExpertStack
from penstock.weights import stream
from penstock.weights.bulk import BulkReader, Part
from penstock.weights.stream import SafetensorsSource, Wanted
from tests.weights.samples import EXPERTS, FP8, INPUTS, OUTPUTS, some_tensors, write_shards

CPU = torch.device("cpu")


@pytest.fixture
def reader() -> Iterator[BulkReader]:
    """A reader whose chunks are smaller than most tensors and larger than some."""
    with closing(BulkReader(CPU, threads=3, max_chunk_bytes=100)) as reader:
        yield reader


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_several_files_fill_a_tensor_in_order(tmp_path: Path, reader: BulkReader, seed: int) -> None:
    draw = random.Random(seed)
    files = [tmp_path / f"{number}" for number in range(3)]
    contents = [draw.randbytes(2000) for _ in files]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    parts, wanted = [], b""
    for _ in range(draw.randrange(40)):
        number, begin, size = (
            draw.randrange(3),
            draw.randrange(1500),
            draw.choice((0, 1, 7, 99, 100, 101, 400)),
        )
        parts.append(Part(files[number], begin, size))
        wanted += contents[number][begin : begin + size]
    out = torch.zeros(len(wanted), dtype=torch.uint8)
    reader.fill(out, parts)
    assert bytes(out.tolist()) == wanted


def test_adjacent_parts_of_a_file_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(bytes(range(100)))
    other.write_bytes(bytes(range(100, 200)))
    reads = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((offset, len(buffers[0])))
        return read(descriptor, buffers, offset)

    read = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    out = torch.zeros(60, dtype=torch.uint8)
    parts = [
        Part(file, 10, 20),
        Part(file, 30, 10),
        Part(other, 40, 10),
        Part(other, 0, 10),
        Part(file, 40, 10),
    ]
    with closing(BulkReader(CPU, threads=1)) as reader:
        reader.fill(out, parts)
    assert reads == [(10, 30), (40, 10), (0, 10), (40, 10)]
    assert out.tolist() == [*range(10, 40), *range(140, 150), *range(100, 110), *range(40, 50)]


def test_parts_of_another_size_than_the_tensor_are_an_error(tmp_path: Path, reader: BulkReader) -> None:
    with pytest.raises(ValueError, match="7 bytes do not fill a tensor of 8 bytes"):
        reader.fill(torch.zeros(2), [Part(tmp_path / "file", 0, 7)])


@pytest.mark.parametrize("size", [50, 5000], ids=["here", "in threads"])
def test_a_file_that_ends_early_is_named_and_the_reader_goes_on(
    tmp_path: Path, reader: BulkReader, size: int
) -> None:
    short, whole = tmp_path / "short", tmp_path / "whole"
    short.write_bytes(b"x" * (size - 1))
    whole.write_bytes(b"y" * size)
    out = torch.zeros(size, dtype=torch.uint8)
    with pytest.raises(ModelLoadError, match=f"{short} ended while it was read"):
        reader.fill(out, [Part(short, 0, size)])
    reader.fill(out, [Part(whole, 0, size)])
    assert out.eq(ord("y")).all()


def test_a_file_that_is_gone_is_named(tmp_path: Path, reader: BulkReader) -> None:
    with pytest.raises(ModelLoadError, match="gone cannot be read: No such file"):
        reader.fill(torch.zeros(1), [Part(tmp_path / "gone", 0, 4)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = list(some_tensors().items())
    return write_shards(tmp_path, [dict(tensors[number::3]) for number in range(3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_read_in_bulk_equal_those_mapped_from_files(
    folder: Path, reader: BulkReader, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_MAX_CONVERTED_BYTES", 500)
    bulk, mapped = SafetensorsSource(folder, dtype, CPU, reader), SafetensorsSource(folder, dtype, CPU)
    for name, tensor in some_tensors().items():
        found = bulk.read(name, tensor.shape)
        assert found.dtype == tensor.dtype and torch.equal(found.float(), tensor.float())
    for name in ("q", "k", "v"):
        shape = some_tensors()[name].shape
        assert torch.equal(bulk.take(name, *shape), mapped.take(name, *shape))
    names, rows = ["v", "q", "none", "k", "q"], [3, 6, 0, 2, 6]
    assert torch.equal(bulk.fuse(names, rows, 50), mapped.fuse(names, rows, 50))
    assert bulk.fuse(names, rows, 50).dtype == dtype


def test_formats_and_shapes_are_checked_before_bytes_are_read(folder: Path, reader: BulkReader) -> None:
    bulk = SafetensorsSource(folder, torch.float32, CPU, reader)
    for ask in (lambda: bulk.take("fp8", 4, 4), lambda: bulk.fuse(["fp8"], 4, 4)):
        with pytest.raises(ModelLoadError, match="'fp8' is stored in fp8"):
            ask()
    with pytest.raises(ModelLoadError, match=r"'ids' is stored as torch\.int64"):
        bulk.take("ids", 7)
    with pytest.raises(ModelLoadError, match="'q' has scales, but is stored as torch"):
        bulk.fill(torch.empty((6, 50), dtype=FP8), [Wanted("q", (6, 50))])
    with pytest.raises(ModelLoadError, match="'q' has shape"):
        bulk.fill(torch.empty(300), [Wanted("q", (50, 6))])
    with pytest.raises(ModelLoadError, match="no tensor 'z'"):
        bulk.fill(torch.empty(300), [Wanted("z", (50, 6))])


def test_tensors_that_were_filled_count_as_read(folder: Path, reader: BulkReader) -> None:
    bulk = SafetensorsSource(folder, torch.float32, CPU, reader)
    bulk.fill(torch.empty(300), [Wanted("q", (6, 50))])
    with pytest.raises(ModelLoadError) as raised:
        bulk.check_all_read(("experts", "plain"))
    assert "fp8, ids, k, none, one, v;" in raised.value.message


@pytest.mark.parametrize("has_reader", [True, False])
@pytest.mark.parametrize("stored", ["experts", "plain"])
def test_a_stack_of_experts_holds_each_weight_in_its_place(
    folder: Path, reader: BulkReader, stored: str, has_reader: bool
) -> None:
    source = SafetensorsSource(folder, torch.bfloat16, CPU, reader if has_reader else None)
    modules = [f"{stored}.{number}.{part}_proj" for number in range(EXPERTS) for part in ("gate", "up")]
    stack = ExpertStack(EXPERTS, 2, OUTPUTS, INPUTS, source, blocks=stored == "experts")
    stack.fill(modules)
    tensors = some_tensors()
    for number, module in enumerate(modules):
        expert, half = divmod(number, 2)
        rows, wanted = slice(half * OUTPUTS, (half + 1) * OUTPUTS), tensors[f"{module}.weight"]
        if isinstance(stack.all, Tensor):
            assert torch.equal(stack.all[expert, rows], wanted)
            continue
        assert torch.equal(stack.all.values[expert, rows].float(), wanted.float())
        scales = tensors[f"{module}.weight_scale_inv"].float()
        assert torch.equal(stack.all.scales[expert, 2 * half : 2 * half + 2], scales)


def test_experts_in_one_tensor_fill_the_stack(tmp_path: Path, reader: BulkReader) -> None:
    joined = torch.randn(EXPERTS, 2 * OUTPUTS, INPUTS)
    save_file({"all": joined}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, torch.bfloat16, CPU, reader)
    stack = ExpertStack(EXPERTS, 2, OUTPUTS, INPUTS, source, blocks=False)
    stack.fill_joined(Wanted("all", tuple(joined.shape)))
    assert isinstance(stack.all, Tensor) and torch.equal(stack.all, joined.bfloat16())


def test_a_model_built_in_inference_mode_is_filled_by_threads(folder: Path, reader: BulkReader) -> None:
    with torch.inference_mode():
        found = SafetensorsSource(folder, torch.float32, CPU, reader).fuse(["q", "k"], [6, 2], 50)
        assert torch.equal(found[:6], some_tensors()["q"])
