"""`penstock embed --to`: the engine's own vectors in every store, each id once after any interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Engine
from penstock.jobs.parts import PartWriter
from penstock.offline.open import DescribedModel
from penstock.stores import open_store
from tests.checkpoints import write_m3
from tests.cli.runs import error_of, invoke, write_jsonl
from tests.stores.contents import contents
from tests.stores.opensearch_stand_in import StandIn

TEXTS = {
    f"doc {i}": f"{word} number {i} of the water"
    for i, word in enumerate(["people", "oil", "time", "way"] * 6)
}
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_m3(tmp_path_factory.mktemp("models") / "m3")


@pytest.fixture(scope="module")
def vectors(model: Path) -> dict[str, np.ndarray]:
    with Engine(str(model), device="cpu") as engine:
        return dict(zip(TEXTS, engine.embed(list(TEXTS.values())), strict=True))


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


@pytest.fixture
def docs(tmp_path: Path, in_folder: None) -> Path:
    rows = [{"key": key, "text": text, "size": len(text)} for key, text in TEXTS.items()]
    return write_jsonl(tmp_path / "docs.jsonl", rows)


def embed(docs: Path, model: Path, url: str, *flags: object) -> Any:
    result = invoke("embed", docs, "--to", url, "--model", model, *CPU, "--id-column", "key", *flags)
    assert result.exit_code == 0, result.output
    return result


def test_vectors_in_the_store_are_the_engines(
    url: str, docs: Path, model: Path, vectors: dict[str, np.ndarray], opensearch: StandIn, tmp_path: Path
) -> None:
    result = embed(docs, model, url, "--keep", "text", "--keep", "size", "--batch-rows", 7)
    assert url.partition("?")[0] in result.stderr
    held = contents(url, opensearch)
    assert held.keys() == vectors.keys()
    for each, vector in vectors.items():
        assert held[each] == pytest.approx(vector, abs=1e-6)
    assert not list(tmp_path.glob("*.parts"))  # the progress of a finished run is removed


def test_a_run_that_failed_between_write_and_commit_continues_and_every_id_is_there_once(
    url: str,
    docs: Path,
    model: Path,
    vectors: dict[str, np.ndarray],
    opensearch: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit, commits = PartWriter.commit, iter([True, True, False])

    def failing(self: PartWriter, *args: Any) -> None:
        if not next(commits, True):
            raise OSError("the machine is gone")  # after the rows were stored, before the progress was
        commit(self, *args)

    monkeypatch.setattr(PartWriter, "commit", failing)
    flags = ("--to", url, "--model", model, *CPU, "--id-column", "key", "--batch-rows", 5)
    assert invoke("embed", docs, *flags).exit_code == 1
    assert len(contents(url, opensearch)) == 15
    assert "holds an unfinished run; continue with --resume" in error_of("embed", docs, *flags)
    result = invoke("embed", docs, *flags, "--resume")
    assert "10 rows were embedded before" in result.stderr
    held = contents(url, opensearch)
    assert held.keys() == vectors.keys()
    assert all(held[each] == pytest.approx(vector, abs=1e-6) for each, vector in vectors.items())


def test_all_three_kinds_of_vectors_go_into_qdrant(
    new_url: Callable[[str], str], docs: Path, model: Path
) -> None:
    url = new_url("qdrant")
    kinds = [flag for kind in ("dense", "sparse", "multi-vector") for flag in ("--vectors", kind)]
    embed(docs, model, url, *kinds)
    with Engine(str(model), device="cpu") as engine:
        text = TEXTS["doc 3"]
        wanted = engine.outputs([text], ["embed", "sparse", "token_embed"])
    store: Any = open_store(url)
    with store:
        points, _ = store._client.scroll(store.location.collection, limit=100, with_vectors=True)
        assert store.find().num_rows == len(TEXTS)
    (point,) = [point for point in points if point.payload["id"] == "doc 3"]
    assert point.vector["vector"] == pytest.approx(wanted["embed"][0], abs=1e-6)
    held = dict(zip(point.vector["sparse"].indices, point.vector["sparse"].values, strict=True))
    assert held == pytest.approx(wanted["sparse"][0], abs=1e-5)
    assert np.array(point.vector["multi_vector"]) == pytest.approx(wanted["token_embed"][0], abs=1e-5)


def test_what_a_store_cannot_hold_is_refused_before_weights_are_loaded(
    new_url: Callable[[str], str], docs: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DescribedModel, "load", lambda *_: pytest.fail("weights were loaded"))

    def refusal(kind: str, *flags: str) -> str:
        return error_of("embed", docs, "--to", new_url(kind), "--model", model, *CPU, *flags)

    assert "lancedb holds no sparse vectors" in refusal("lancedb", "--vectors", "sparse")
    assert "opensearch holds no multi-vectors" in refusal("opensearch", "--vectors", "multi-vector")
    assert "qdrant holds no bits vectors; use --embed-dtype" in refusal("qdrant", "--embed-dtype", "binary")
    assert "has no hamming distance" in error_of(
        "embed", docs, "--to", new_url("qdrant") + "?metric=hamming", "--model", model, *CPU
    )
    assert "names no vector store" in error_of("embed", docs, "--to", "redis:x", "--model", model)
    assert "give --output for a file, or --to" in error_of("embed", docs, "--model", model)
    assert "--adopt is for vector stores" in error_of("embed", docs, "-o", "x.jsonl", "--adopt")


def test_another_prompt_is_another_kind_of_vectors(
    new_url: Callable[[str], str], docs: Path, model: Path
) -> None:
    url = new_url("lancedb")
    embed(docs, model, url)
    words = error_of(
        "embed", docs, "--to", url, "--model", model, *CPU, "--id-column", "key", "--prompt", "query: "
    )
    assert "must not mix" in words and 'prompt is "" and "query: "' in words
    embed(docs, model, url)  # equal settings replace each row by an equal one
    assert contents(url).keys() == TEXTS.keys()


def test_row_numbers_as_ids_never_replace_other_rows(
    new_url: Callable[[str], str], docs: Path, model: Path
) -> None:
    url = new_url("lancedb")
    flags = ("--to", url, "--model", model, *CPU)
    assert invoke("embed", docs, *flags).exit_code == 0
    assert "row numbers as ids would replace some of them; give --id-column" in error_of(
        "embed", docs, *flags
    )
    assert invoke("embed", docs, *flags, "--overwrite").exit_code == 0
    assert contents(url).keys() == set(range(len(TEXTS)))


def test_progress_holds_no_secrets(
    opensearch: StandIn, docs: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*_: object) -> None:
        raise OSError("full")

    url = f"opensearch:{opensearch.address.replace('http://', 'http://me:geheim@')}/secret_docs"
    flags = ("--to", url, "--model", model, *CPU, "--id-column", "key", "--batch-rows", 5)
    commit, left = PartWriter.commit, [1]
    monkeypatch.setattr(
        PartWriter, "commit", lambda self, *args: commit(self, *args) if left and left.pop() else failing()
    )
    result = invoke("embed", docs, *flags)
    assert result.exit_code == 1
    assert {name.lower(): value for name, value in opensearch.headers[-1].items()}["authorization"]
    files = [file for file in (tmp_path / "secret_docs.opensearch.parts").rglob("*") if file.is_file()]
    assert len(files) > 1
    assert all(b"geheim" not in file.read_bytes() for file in files)
    assert "geheim" not in result.output + json.dumps(opensearch.indices["secret_docs"])


@pytest.mark.stores
@pytest.mark.parametrize("kind", ["lancedb", "qdrant", "pgvector"])
def test_a_run_killed_twice_leaves_every_id_once(
    kind: str, new_url: Callable[[str], str], docs: Path, model: Path, vectors: dict[str, np.ndarray]
) -> None:
    url = new_url(kind)
    flags = (
        "embed",
        docs,
        "--to",
        url,
        "--model",
        model,
        *CPU,
        "--id-column",
        "key",
        "--batch-rows",
        3,
        "--resume",
    )
    for step in ("before the write", "after the write"):
        command = [sys.executable, "-c", _KILLS_ITSELF, step, *map(str, flags)]
        done = subprocess.run(command, capture_output=True, timeout=180, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    result = invoke(*flags)
    assert "9 rows were embedded before" in result.stderr
    held = contents(url)
    assert held.keys() == vectors.keys()
    assert all(held[each] == pytest.approx(vector, abs=1e-6) for each, vector in vectors.items())


_KILLS_ITSELF = """
import os, signal, sys
from penstock.cli.main import main
from penstock.stores.base import VectorStore
step, write, left = sys.argv.pop(1), VectorStore.write, [1, 2, 3]
def killed(self, table):
    if step == "before the write" and len(left) == 1 or not left:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, table)
    left.pop()
    if step == "after the write" and len(left) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
VectorStore.write = killed
main()
"""
