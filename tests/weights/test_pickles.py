"""Pickled weights are converted once, read as safetensors, and cannot run code."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint.convert import cache_folder
from penstock.checkpoint.files import weight_files
from penstock.checkpoint.generation import _has_head
from penstock.errors import ModelLoadError
from penstock.weights import pickles
from penstock.weights.pickles import converted, load_pickle, read_tensors
from penstock.weights.stream import open_weights
from tests.pickles import pickle_weights, write_malicious
from tests.waiting import PATIENCE_S

CPU = torch.device("cpu")
KINDS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder() / "weights"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def some_tensors() -> dict[str, Tensor]:
    tensors = {f"layer.{kind}".replace("torch.", ""): torch.randn(5, 3).to(kind) for kind in KINDS}
    return tensors | {"odd": torch.arange(3, dtype=torch.uint8), "position_ids": torch.arange(4)[None]}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in wanted.items()
    )


def read_all(folder: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    source = open_weights(folder, "auto", 0, torch.float32, CPU)
    found = {name: source.read(name, tensor.shape) for name, tensor in wanted.items()}
    source.check_all_read(())
    return found


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_weights_are_read_as_they_were_saved(folder: Path, shards: int, legacy: bool) -> None:
    save_file(some_tensors(), folder / "model.safetensors")
    wanted = pickle_weights(folder, shards=shards, legacy=legacy)
    assert same(read_all(folder, wanted), wanted)


def test_a_pickle_is_converted_once(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(wanted := some_tensors(), folder / "pytorch_model.bin")
    assert same(read_all(folder, wanted), wanted)
    (cached,) = own_cache.glob("*.safetensors")
    assert same(load_file(cached), wanted)
    monkeypatch.setattr(pickles, "load_pickle", lambda file: pytest.fail(f"{file} was opened again"))
    assert same(read_all(folder, wanted), wanted)


def test_a_changed_pickle_is_converted_again(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    for value in (1.0, 2.0):
        torch.save({"a": torch.full((3,), value)}, file)
        os.utime(file, ns=(0, int(value)))
        assert read_all(folder, {"a": torch.zeros(3)})["a"].tolist() == [value] * 3


def test_shared_transposed_and_empty_tensors_are_converted(folder: Path) -> None:
    table = torch.randn(4, 3)
    wanted = {"embed": table, "lm_head": table, "rows": table[1:3], "turned": table.T, "none": torch.zeros(0)}
    torch.save(wanted, folder / "pytorch_model.bin")
    assert same(read_all(folder, wanted), wanted)


def test_safetensors_win_over_a_pickle(folder: Path, tmp_path: Path) -> None:
    write_malicious(folder / "pytorch_model.bin", tmp_path / "mark")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    assert weight_files(folder) == [folder / "model.safetensors"]
    assert read_all(folder, {"a": torch.zeros(2)})["a"].tolist() == [1, 1]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "shard", "sparse_linear.pt"])
def test_a_malicious_pickle_runs_nothing_and_is_refused_by_name(
    folder: Path, tmp_path: Path, own_cache: Path, name: str, legacy: bool
) -> None:
    mark = tmp_path / "mark"
    if name == "shard":
        save_file(some_tensors(), folder / "model.safetensors")
        pickle_weights(folder, shards=2, legacy=legacy)
        name = "pytorch_model-00002-of-00002.bin"
    write_malicious(folder / name, mark, legacy=legacy)
    with pytest.raises(ModelLoadError, match=rf"{name} was not loaded: it holds (io|_io)\.open") as raised:
        read_tensors(folder / name) if name.endswith(".pt") else open_weights(
            folder, "auto", 0, KINDS[2], CPU
        )
    assert "safetensors" in raised.value.message and "weights_only" not in raised.value.message
    assert not mark.exists()
    torch.load(folder / name, weights_only=False)  # shows that the file does run code with plain torch
    assert mark.exists()
    assert not any(file.name.endswith(f"{name}.safetensors") for file in own_cache.glob("*"))


def test_the_setting_that_lets_torch_run_code_is_overruled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    write_malicious(folder / "pytorch_model.bin", tmp_path / "mark")
    with pytest.raises(ModelLoadError, match="could run code"):
        load_pickle(folder / "pytorch_model.bin")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epoch": 3, "model": {"a": torch.ones(1)}}, r"has 'epoch', a int; supported are files that hold"),
        ({"model": {"a": torch.ones(1)}}, r"has 'model', a dict; supported are files that hold tensors"),
        ([torch.ones(1)], "holds a list, not tensors by name"),
        (torch.ones(1), "holds a Tensor, not tensors by name"),
        ({3: torch.ones(1)}, "has 3, a Tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "'a' as torch.strided torch.complex64"),
        ({"a": torch.eye(2).to_sparse()}, "'a' as torch.sparse_coo"),
    ],
)
def test_a_pickle_that_is_not_tensors_by_name_is_refused(folder: Path, values: Any, words: str) -> None:
    torch.save(values, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=words):
        converted(folder / "pytorch_model.bin")


def test_parameters_and_a_lone_state_dict_are_read(folder: Path) -> None:
    state = OrderedDict(a=torch.nn.Parameter(torch.ones(2)))
    torch.save({"state_dict": state}, folder / "head.pt")
    assert read_tensors(folder / "head.pt")["a"].tolist() == [1, 1]


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 cut off", b"\x80\x02."])
def test_a_file_that_torch_did_not_write_is_named(folder: Path, content: bytes) -> None:
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is not a readable PyTorch file"):
        open_weights(folder, "auto", 0, torch.float32, CPU)


def test_a_truncated_pickle_is_named(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    torch.save({"a": torch.randn(1000)}, file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is not a readable PyTorch file"):
        open_weights(folder, "auto", 0, torch.float32, CPU)


def test_a_missing_shard_of_a_pickle_is_named(folder: Path) -> None:
    save_file(some_tensors(), folder / "model.safetensors")
    pickle_weights(folder, shards=2)
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(ModelLoadError, match=r"pytorch_model-00001-of-00002\.bin cannot be read: No such"):
        open_weights(folder, "auto", 0, torch.float32, CPU)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_without_a_writable_cache_the_pickle_is_read_directly(
    folder: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    torch.save(wanted := some_tensors(), folder / "pytorch_model.bin")
    assert same(read_all(folder, wanted), wanted)
    assert os.strerror(number) in caplog.text
    assert ("set XDG_CACHE_HOME to another disk" in caplog.text) is (number == errno.ENOSPC)
    assert not [*own_cache.glob("*.part"), *own_cache.glob("*.safetensors")]


def test_a_cache_that_is_no_folder_does_not_prevent_reading(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    torch.save(wanted := some_tensors(), folder / "pytorch_model.bin")
    assert same(read_all(folder, wanted), wanted)


def test_of_two_that_start_at_once_one_converts_and_both_read_the_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock belongs to an open file, so it works between threads as well as between processes."""
    file, write = folder / "pytorch_model.bin", pickles._write
    torch.save({"a": torch.randn(8)}, file)
    both, writes = Barrier(2), []

    def counted(tensors: Any, cached: Path) -> None:
        writes.append(cached)
        write(tensors, cached)

    def convert(_: int) -> Path | None:
        both.wait(PATIENCE_S)
        return converted(file)

    monkeypatch.setattr(pickles, "_write", counted)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(convert, range(2))
    assert first == second and writes == [first]


def test_a_draft_that_a_killed_process_left_is_removed(folder: Path, own_cache: Path) -> None:
    torch.save({"a": torch.ones(3)}, folder / "pytorch_model.bin")
    cached = converted(folder / "pytorch_model.bin")
    assert cached is not None
    left = cached.with_suffix(".123.part")
    cached.rename(left)
    assert converted(folder / "pytorch_model.bin") == cached and not left.exists()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("has_head", [True, False])
def test_a_language_head_is_found_without_unpickling(
    folder: Path, shards: int, legacy: bool, has_head: bool
) -> None:
    save_file(
        some_tensors() | ({"lm_head.weight": torch.ones(1)} if has_head else {}), folder / "model.safetensors"
    )
    pickle_weights(folder, shards=shards, legacy=legacy)
    assert _has_head(folder) is has_head
