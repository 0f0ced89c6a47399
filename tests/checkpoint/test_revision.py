"""The revision of a model changes with everything that changes its results, and with little else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.checkpoint import revision
from penstock.checkpoint.describe import describe
from penstock.checkpoint.revision import (
    SCHEDULING_SETTINGS,
    UNRELATED_TO_ROWS,
    loaded_revision,
    portable_revision,
)
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, Machine, PoolerConfig, Resolved, resolve
from tests.checkpoints import BERT_CONFIG, bert_tensors, write_bert

MACHINE = Machine(cpus=2, cuda=False)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bert(tmp_path / "model")


def served(folder: Path, **options: Any) -> tuple[ModelSpec, dict[str, Any]]:
    config = EngineConfig(model=str(folder), device="cpu", **options)
    spec = describe(config)
    return spec, msgspec.to_builtins(resolve(config, spec.facts, MACHINE))


def loaded(folder: Path, **options: Any) -> str:
    return loaded_revision(*served(folder, **options))


def portable(folder: Path, **options: Any) -> str:
    spec, settings = served(folder, **options)
    return portable_revision(spec, settings, loaded_revision(spec, settings))


def test_a_model_has_the_same_revision_as_long_as_nothing_changes(folder: Path) -> None:
    assert loaded(folder) == loaded(folder) != ""
    assert portable(folder) == portable(folder) != ""


def test_a_copy_of_a_model_has_the_same_portable_revision(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "other name"))
    assert loaded(copy) != loaded(folder)
    assert portable(copy) == portable(folder)


def test_other_weights_of_the_same_size_and_time_are_another_revision(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before, stat = (loaded(folder), portable(folder)), weights.stat()
    write_bert(folder, tensors=bert_tensors(BERT_CONFIG, seed=1))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.stat().st_size == stat.st_size
    assert loaded(folder) != before[0] and portable(folder) != before[1]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"max_model_len": 32},
        {"hf_overrides": {"layer_norm_eps": 0.1}},
        {"pooler_config": PoolerConfig(pooling_type="CLS")},
        {"pooler_config": PoolerConfig(normalize=False)},
        {"load_format": "dummy", "seed": 1},
    ],
    ids=str,
)
def test_settings_that_change_results_change_the_revision(folder: Path, options: dict[str, Any]) -> None:
    assert loaded(folder, **options) != loaded(folder)
    assert portable(folder, **options) != portable(folder)


@pytest.mark.parametrize(
    "options",
    [{"served_model_name": "other"}, {"threads": 1}, {"max_num_seqs": 3}, {"default_prompt": "query: "}],
    ids=str,
)
def test_settings_that_change_no_result_of_a_row_leave_the_revision(
    folder: Path, options: dict[str, Any]
) -> None:
    assert portable(folder, **options) == portable(folder)


def test_the_lists_of_settings_name_settings_that_exist() -> None:
    assert set(Resolved.__struct_fields__) >= SCHEDULING_SETTINGS
    assert set(ModelSpec.__struct_fields__) >= UNRELATED_TO_ROWS


def test_every_gpu_of_a_machine_computes_alike(folder: Path) -> None:
    spec, settings = served(folder)
    revisions = {loaded_revision(spec, settings | {"device": name}) for name in ("cuda", "cuda:0", "cuda:1")}
    assert len(revisions) == 1 and loaded_revision(spec, settings) not in revisions


def test_another_version_of_the_program_is_another_revision(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = portable(folder)
    monkeypatch.setattr(revision, "__version__", "999")
    assert portable(folder) != before


def test_files_that_no_engine_reads_do_not_matter(folder: Path) -> None:
    before = loaded(folder), portable(folder)
    (folder / "README.md").write_text("words")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(bytes(10))
    assert (loaded(folder), portable(folder)) == before
    (folder / "1_Pooling" / "more.json").write_text("{}")
    assert loaded(folder) != before[0] and portable(folder) != before[1]


def test_files_that_changed_since_they_were_loaded_have_no_portable_revision(folder: Path) -> None:
    spec, settings = served(folder)
    before = loaded_revision(spec, settings)
    write_bert(folder, tensors=bert_tensors(BERT_CONFIG, seed=1))
    assert portable_revision(spec, settings, before) == ""
    assert portable_revision(spec, settings, "") == ""


def test_files_that_are_gone_have_no_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, settings = served(folder)
    before = loaded_revision(spec, settings)
    monkeypatch.setattr(revision, "MAX_FILES", 1)
    assert loaded_revision(spec, settings) == portable_revision(spec, settings, before) == ""
    shutil.rmtree(folder)
    assert loaded_revision(spec, settings) == portable_revision(spec, settings, before) == ""


def test_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = portable(folder)
    monkeypatch.setattr(revision, "_hash_file", None)
    assert portable(folder) == first


def test_a_cache_folder_that_cannot_be_written_only_costs_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = portable(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert portable(folder) == first


def test_reading_files_can_be_stopped(folder: Path) -> None:
    spec, settings = served(folder)
    assert portable_revision(spec, settings, loaded_revision(spec, settings), lambda: True) == ""
