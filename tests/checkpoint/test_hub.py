"""Hub ids: the standard cache, offline mode, and downloads from a fake hub.

Each test runs `find` in a separate process, because huggingface_hub reads its settings on import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.checkpoint.hub import select_files
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
    "2_Dense/model.safetensors": b"dense",
    "2_Dense/pytorch_model.bin": b"dense pickle",
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
    "2_Dense/model.safetensors",
}
PICKLED = {
    "config.json": b"{}",
    "pytorch_model.bin": b"weights " * 50_000,
    "sparse_linear.pt": b"head",
    "2_Dense/pytorch_model.bin": b"dense",
    "optimizer.pt": b"momentum",
    "training_args.bin": b"settings",
    "onnx/model.onnx": b"onnx",
}

FIND = """
import json, sys
from penstock.checkpoint.find import find
from penstock.errors import ModelLoadError
for model, *options in json.loads(sys.argv[1]):
    try:
        print(find(model, *options))
    except ModelLoadError as error:
        print("ModelLoadError:", " ".join(str(error).split()))
"""
NO_WAIT = "import time\ntime.sleep = lambda seconds: None\n"  # no pause between attempts
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise SystemExit(f"the network was touched: {args}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
"""


def run_find(
    home: Path, asked: Sequence[tuple[str | None, ...]], *, before: str = "", **environment: str
) -> list[str]:
    """The results of `find` for each (model, revision, download folder), with the hub's cache under
    `home`."""
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
    """Write the cache's layout: refs/<revision> names a commit, snapshots/<commit> has the files."""
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
    with serve({"org/model": {"main": FILES, "v2": newer}, "org/pickled": {"main": PICKLED}}) as hub:
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
    assert found.startswith("ModelLoadError: org/model has no revision 'v9'; see http://127.0.0.1")


def test_a_hub_that_can_not_be_reached_is_an_error_that_says_so(tmp_path: Path) -> None:
    (found,) = run_find(tmp_path, [("org/model", None)], HF_ENDPOINT="http://127.0.0.1:9")
    assert found.startswith("ModelLoadError: org/model could not be fetched and is not cached")


@pytest.mark.parametrize("how", ["refuse", "cut"])
def test_a_download_that_breaks_off_is_an_error_that_says_so(tmp_path: Path, hub: Hub, how: str) -> None:
    hub.break_downloads = how
    (found,) = run_find(tmp_path, [("org/model", None)], before=NO_WAIT, HF_ENDPOINT=hub.address)
    assert found.startswith("ModelLoadError: org/model could not be fetched")


def test_pickles_are_downloaded_only_where_there_are_no_safetensors(tmp_path: Path, hub: Hub) -> None:
    (found,) = run_find(tmp_path, [("org/pickled", None)], HF_ENDPOINT=hub.address)
    wanted = {"config.json", "pytorch_model.bin", "sparse_linear.pt", "2_Dense/pytorch_model.bin"}
    assert hub.downloads() == wanted == contents(found).keys()


def test_a_cut_download_is_resumed_where_it_ended(tmp_path: Path, hub: Hub) -> None:
    hub.cut_once = {"pytorch_model.bin"}
    small_chunks = "import huggingface_hub.constants as c\nc.DOWNLOAD_CHUNK_SIZE = 1000\n"
    (found,) = run_find(
        tmp_path, [("org/pickled", None)], before=NO_WAIT + small_chunks, HF_ENDPOINT=hub.address
    )
    assert (Path(found) / "pytorch_model.bin").read_bytes() == PICKLED["pytorch_model.bin"]
    (resumed,) = hub.ranges
    assert int(resumed.removeprefix("bytes=").partition("-")[0]) > 0


LOGGED = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
"""


def test_a_download_says_how_much_it_fetches_and_a_second_start_fetches_nothing(
    tmp_path: Path, hub: Hub
) -> None:
    asked = [("org/pickled", None, str(tmp_path / "models"))]
    lines = run_find(tmp_path, asked, before=LOGGED, HF_ENDPOINT=hub.address)
    assert f"fetching org/pickled: 4 files, 400.0 kB, into {tmp_path / 'models'}" in lines
    assert any(line.startswith("org/pickled: 400.0 kB of 400.0 kB") for line in lines)
    hub.asked.clear()
    lines = run_find(tmp_path, asked, before=LOGGED, HF_ENDPOINT=hub.address)
    assert not any("fetching" in line for line in lines) and not hub.downloads()


def test_a_download_folder_is_used_online_and_offline(tmp_path: Path, hub: Hub) -> None:
    asked = [("org/model", None, str(tmp_path / "models"))]
    (found,) = run_find(tmp_path, asked, HF_ENDPOINT=hub.address)
    assert Path(found).is_relative_to(tmp_path / "models" / "models--org--model")
    assert not (tmp_path / "hub").exists()
    assert run_find(tmp_path, asked, before=NO_NETWORK, HF_HUB_OFFLINE="1") == [found]


def test_a_gated_model_says_where_to_accept_its_licence(tmp_path: Path, hub: Hub) -> None:
    hub.gated = True
    at = {"HF_ENDPOINT": hub.address}
    (without,) = run_find(tmp_path, [("org/model", None)], **at)
    assert without.endswith(
        f"accept its licence at {hub.address}/org/model; set HF_TOKEN to your access token"
    )
    (refused,) = run_find(tmp_path, [("org/model", None)], HF_TOKEN=hub.token, **at)
    assert refused.endswith("/org/model; the account of your token has no access yet")


def test_a_token_that_the_hub_refuses_is_named(tmp_path: Path, hub: Hub) -> None:
    (found,) = run_find(tmp_path, [("org/model", None)], HF_TOKEN="hf_old", HF_ENDPOINT=hub.address)
    assert "the hub refused the access token" in found and "set HF_TOKEN" in found and "hf_old" not in found


def test_a_model_without_room_on_the_disk_is_not_fetched(tmp_path: Path, hub: Hub) -> None:
    full = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=1000)\n"
    (found,) = run_find(tmp_path, [("org/pickled", None)], before=full, HF_ENDPOINT=hub.address)
    assert (
        "org/pickled needs 400.0 kB in" in found and "1.0 kB are free" in found and "--download-dir" in found
    )
    assert not hub.downloads()


def test_a_disk_that_fills_up_is_an_error_that_says_so(tmp_path: Path, hub: Hub) -> None:
    full = """
import huggingface_hub
def full(*args, **kwargs):
    raise OSError(28, "No space left on device", "x")
huggingface_hub.snapshot_download = full
"""
    (found,) = run_find(tmp_path, [("org/model", None)], before=full, HF_ENDPOINT=hub.address)
    assert "org/model could not be fetched: the disk is full" in found and "--download-dir" in found


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin.index.json"], ["model.safetensors"]),
        (["model-1-of-1.safetensors", "pytorch_model-1-of-1.bin"], ["model-1-of-1.safetensors"]),
        (["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"], None),
        (["head.safetensors", "head.pt", "colbert_linear.pt"], ["head.safetensors", "colbert_linear.pt"]),
        (["adapters/retrieval/adapter_config.json", "adapters/retrieval/adapter_model.safetensors"], None),
        (["query_0_SparseStaticEmbedding/config.json", "document_0_MLMTransformer/model.safetensors"], None),
        (["gliner_config.json", "tokenizer.model", "chat_template.jinja", "README.md"], None),
        (["1_Pooling/README.md", "model.gguf", "tf_model.h5", "flax_model.msgpack", "modeling.py"], []),
        (["onnx/config.json", "openvino/openvino_model.bin", "checkpoint-500/model.safetensors"], []),
        ([".gitattributes", "rng_state_0.pt", "a/b/c/d/config.json", "original/params.json"], []),
    ],
)  # fmt: skip
def test_each_file_of_a_repository_is_fetched_or_left(names: list[str], wanted: list[str] | None) -> None:
    assert select_files(names) == (names if wanted is None else wanted)
