"""Jobs on Ray give the rows of a plain run, whichever process dies."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import BadValue
from penstock.scale.data import Pool, PoolSize, settle_pool
from tests.cli.runs import error_of, invoke, read_jsonl, write_jsonl
from tests.scale.job_cluster import JobCluster, kill, start_cluster, wait_until

NULL = ("--device", "null", "--dimensions", 4)
PATIENCE_S = 300


def test_a_pool_has_an_engine_for_each_gpu_or_node() -> None:
    assert settle_pool(Pool(), {"CPU": 16.0, "GPU": 4.0}, nodes=2) == PoolSize(4, 1.0, 1.0)
    assert settle_pool(Pool(gpus_per_worker=0.5), {"CPU": 16.0, "GPU": 1.0}, nodes=1) == PoolSize(2, 0.5, 1.0)
    assert settle_pool(Pool(), {"CPU": 16.0}, nodes=2) == PoolSize(2, 0.0, 8.0)
    assert settle_pool(Pool(workers=4), {"CPU": 8.0}, nodes=1) == PoolSize(4, 0.0, 2.0)


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadValue, match="4 workers with 1 GPUs each need 4 GPUs, but the cluster has 2"):
        settle_pool(Pool(workers=4), {"CPU": 8.0, "GPU": 2.0}, nodes=1)
    with pytest.raises(BadValue, match="has 2 CPUs, too few for 3 workers"):
        settle_pool(Pool(workers=3), {"CPU": 2.0}, nodes=1)


def test_stdin_is_not_read_by_several_processes(tmp_path: Path) -> None:
    message = error_of("embed", "-", "--format", "text", "-o", tmp_path / "o.jsonl", "--ray", *NULL)
    assert "--ray cannot read stdin" in message


@pytest.fixture(scope="module")
def cluster() -> Iterator[JobCluster]:
    with start_cluster(head_cpus=2) as cluster:
        yield cluster


def write_lines(file: Path, rows: int) -> Path:
    file.write_text("".join(f"line {i}\n" for i in range(rows)))
    return file


def finish(process: subprocess.Popen[bytes]) -> str:
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors.decode()
    return errors.decode()


def num_parts(output: Path) -> int:
    return len(list(output.with_name(output.name + ".parts").glob("0*")))


def ids(output: Path) -> list[int]:
    return [row["id"] for row in read_jsonl(output)]


@pytest.mark.ray
@pytest.mark.timeout(PATIENCE_S)
def test_rows_are_those_of_a_plain_run(tmp_path: Path, cluster: JobCluster) -> None:
    texts = [None if i == 30 else f"text {i}" for i in range(100)]
    for name, rows in (("a", texts[:60]), ("b", texts[60:])):
        pq.write_table(
            pa.table({"text": rows, "n": [f"n{i}" for i in range(len(rows))]}),
            tmp_path / f"in-{name}.parquet",
        )
    args = (tmp_path / "in-*.parquet", "--keep", "n", "--batch-rows", 7, "--on-error", "skip", *NULL)
    assert invoke("embed", *args, "-o", tmp_path / "plain.parquet").exit_code == 0
    shown = finish(cluster.embed(*args, "-o", tmp_path / "ray.parquet", stderr=subprocess.PIPE))
    plain, ray = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("plain", "ray"))
    assert plain.equals(ray) and ray["id"].to_pylist() == [i for i in range(100) if i != 30]
    listed = [read_jsonl(tmp_path / f"{name}.parquet.errors.jsonl") for name in ("plain", "ray")]
    assert listed[0] == listed[1] and listed[0][0]["row"] == 30
    assert "99 rows, " in shown and "1 bad rows are listed" in shown


@pytest.mark.ray
@pytest.mark.timeout(2 * PATIENCE_S)
def test_killed_workers_and_drivers_lose_no_row_and_repeat_none(tmp_path: Path, cluster: JobCluster) -> None:
    source, output = write_lines(tmp_path / "in.txt", 60_000), tmp_path / "out.jsonl"
    args = (source, "-o", output, *NULL, "--batch-rows", 100, "--resume")

    driver = cluster.embed(*args, stderr=subprocess.DEVNULL)
    wait_until(lambda: num_parts(output) > 20)
    for pid in cluster.workers():
        kill(pid)
    done = num_parts(output)
    wait_until(lambda: num_parts(output) > done + 20 or output.exists())
    kill(driver.pid)
    driver.wait()
    assert not output.exists(), "the run finished before it was killed"

    shown = finish(cluster.embed(*args, stderr=subprocess.PIPE))
    assert "rows were embedded before" in shown
    assert ids(output) == list(range(60_000))
    assert not output.with_name("out.jsonl.parts").exists()


@pytest.mark.ray
@pytest.mark.timeout(PATIENCE_S)
def test_errors_of_workers_and_readers_reach_the_user(tmp_path: Path, cluster: JobCluster) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}, {"text": 3}])
    process = cluster.embed(source, "-o", tmp_path / "o.jsonl", *NULL, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and b"row 1 (line 2): 'text' is a number, not a text" in errors
    (tmp_path / "long.txt").write_text("word " * 300)
    process = cluster.embed(
        tmp_path / "long.txt", "-o", tmp_path / "o.jsonl", *NULL, "--no-truncate", stderr=subprocess.PIPE
    )
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and b"row 0 has 302 tokens" in errors


@pytest.mark.ray
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_killed_node_loses_no_row(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.txt", 40_000), tmp_path / "out.jsonl"
    with start_cluster(head_cpus=1, nodes=1) as cluster:
        args = (source, "-o", output, *NULL, "--batch-rows", 100, "--workers", 2)
        driver = cluster.embed(*args, stderr=subprocess.PIPE)
        wait_until(lambda: len(cluster.workers()) == 2 and num_parts(output) > 20)
        cluster.kill_node()
        finish(driver)
    assert ids(output) == list(range(40_000))


@pytest.mark.ray
@pytest.mark.timeout(PATIENCE_S)
def test_a_dataset_gets_a_column_of_vectors(cluster: JobCluster) -> None:
    import ray

    from penstock import Engine
    from penstock.scale.data import embed_dataset

    texts = ["a river", "a turbine", "a gate"]
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        found = embed_dataset(
            ray.data.from_items([{"text": text} for text in texts]), device="cpu"
        ).to_pandas()
    finally:
        ray.shutdown()
    with Engine(device="cpu") as engine:
        expected = dict(zip(texts, engine.embed(texts), strict=True))
    for text, vector in zip(found["text"], found["vector"], strict=True):
        np.testing.assert_allclose(vector, expected[text], atol=2e-5)
