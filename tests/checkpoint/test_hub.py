"""Hub ids: the standard cache, offline, and downloads from a stand-in hub.

Each test runs `find` in a process of its own, because huggingface_hub reads its settings on import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.hub import Hub, commit_of, serve

FILES = {
    "config.json": b'{"model_type": "bert"}',
    "modules.json": b"[]",
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b'{"model": {}}',
    "vocab.txt": b"a",
    "artifact.metadata": b"{}",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "README.md": b"# hello",
    "tf_model.h5": b"tf",
}
WANTED = {
    "config.json",
    "modules.json",
    "1_Pooling/config.json",
    "model.safetensors",
    "tokenizer.json",
    "vocab.txt",
    "artifact.metadata",
    "README.md",
}

FIND = """
import json, sys
from penstock.checkpoint.find import find
from penstock.errors import ModelLoadError
for model, revision in json.loads(sys.argv[1]):
    try:
        print(find(model, revision))
    except ModelLoadError as error:
        print("ModelLoadError:", " ".join(str(error).split()))
"""
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise SystemExit(f"the network was touched: {args}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
"""


def run_find(
    home: Path, asked: list[tuple[str, str | None]], *, before: str = "", **environment: str
) -> list[str]:
    """What `find` gave for each (model, revision), with the hub's cache under `home`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    kept |= {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*"} | environment
    ran = subprocess.run(
        [sys.executable, "-c", before + FIND, json.dumps(asked)],
        env=kept,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def cache_by_hand(home: Path, repo: str, revision: str, files: dict[str, bytes]) -> Path:
    """The cache's layout: refs/<revision> names a commit, snapshots/<commit> holds the files."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit_of(revision)
    for name, data in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(data)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit_of(revision))
    return snapshot


@pytest.fixture
def hub() -> Iterator[Hub]:
    newer = FILES | {"config.json": b'{"model_type": "bert", "v": 2}'}
    with serve({"org/model": {"main": FILES, "v2": newer}}) as hub:
        yield hub


def contents(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline_a_model_that_is_not_cached_is_refused_without_touching_the_network(
    tmp_path: Path, value: str
) -> None:
    asked: list[tuple[str, str | None]] = [("org/model", None), ("org/model", "v2")]
    plain, revised = run_find(tmp_path, asked, before=NO_NETWORK, HF_HUB_OFFLINE=value)
    assert plain.startswith("ModelLoadError: org/model is not in the local cache and HF_HUB_OFFLINE is set")
    assert revised.startswith("ModelLoadError: org/model at revision v2 is not in the local cache")


def test_offline_a_cached_snapshot_is_found_without_touching_the_network(tmp_path: Path) -> None:
    snapshot = cache_by_hand(tmp_path, "org/model", "main", {name: FILES[name] for name in WANTED})
    revised = cache_by_hand(tmp_path, "org/model", "v2", {name: FILES[name] for name in WANTED})
    asked: list[tuple[str, str | None]] = [("org/model", None), ("org/model", "v2")]
    found = run_find(tmp_path, asked, before=NO_NETWORK, HF_HUB_OFFLINE="1")
    assert found == [str(snapshot), str(revised)]


def test_a_hub_id_is_downloaded_into_the_standard_cache(tmp_path: Path, hub: Hub) -> None:
    (found,) = run_find(tmp_path, [("org/model", None)], HF_ENDPOINT=hub.address)
    assert Path(found).is_relative_to(tmp_path / "hub" / "models--org--model" / "snapshots")
    assert contents(found) == {name: FILES[name] for name in WANTED}


def test_only_what_penstock_reads_is_downloaded(tmp_path: Path, hub: Hub) -> None:
    run_find(tmp_path, [("org/model", None)], HF_ENDPOINT=hub.address)
    assert hub.downloads() == WANTED


def test_a_revision_is_downloaded_next_to_the_main_one(tmp_path: Path, hub: Hub) -> None:
    asked: list[tuple[str, str | None]] = [
        ("org/model", None),
        ("org/model", "v2"),
        ("org/model", commit_of("v2")),
    ]
    main, revised, by_commit = run_find(tmp_path, asked, HF_ENDPOINT=hub.address)
    assert main != revised == by_commit
    assert b'"v": 2' in (Path(revised) / "config.json").read_bytes()
    assert b'"v": 2' not in (Path(main) / "config.json").read_bytes()


def test_a_downloaded_model_is_found_when_the_hub_is_unreachable(tmp_path: Path, hub: Hub) -> None:
    (first,) = run_find(tmp_path, [("org/model", None)], HF_ENDPOINT=hub.address)
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert run_find(tmp_path, [("org/model", None)], **gone) == [first]
    assert run_find(tmp_path, [("org/model", None)], before=NO_NETWORK, HF_HUB_OFFLINE="1") == [first]


def test_a_model_that_the_hub_does_not_have_is_named(tmp_path: Path, hub: Hub) -> None:
    (found,) = run_find(tmp_path, [("org/other", None)], HF_ENDPOINT=hub.address)
    assert found.startswith("ModelLoadError: the hub has no model 'org/other' (or it is private")


def test_a_revision_that_the_hub_does_not_have_is_named(tmp_path: Path, hub: Hub) -> None:
    (found,) = run_find(tmp_path, [("org/model", "v9")], HF_ENDPOINT=hub.address)
    assert found.startswith("ModelLoadError: org/model at revision v9 could not be fetched")


def test_a_hub_that_can_not_be_reached_is_an_error_that_says_so(tmp_path: Path) -> None:
    (found,) = run_find(tmp_path, [("org/model", None)], HF_ENDPOINT="http://127.0.0.1:9")
    assert found.startswith("ModelLoadError: org/model could not be fetched and is not cached")


@pytest.mark.parametrize("how", ["refuse", "cut"])
def test_a_download_that_breaks_off_is_an_error_that_says_so(tmp_path: Path, hub: Hub, how: str) -> None:
    hub.break_downloads = how
    (found,) = run_find(tmp_path, [("org/model", None)], HF_ENDPOINT=hub.address)
    assert found.startswith("ModelLoadError: org/model could not be fetched")
