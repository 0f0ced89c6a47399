"""`penstock embed --ray` with kills: is every row written exactly once, is memory flat, what does Ray cost?

    python -m benchmarks.embed_job --save              # 1,000,000 rows on the null engine, 20,000 on MiniLM
    python -m benchmarks.embed_job --rows 20000 --real-rows 500

There are three runs per engine: plain `penstock embed`, the same on a local Ray cluster, and one on Ray with
kills: its driver is killed twice with SIGKILL and resumed, and its workers are killed at random. All write a
folder of Parquet parts. The rate of a run covers the rows after its first part, so start-up is not counted.
The disk is synced before each run, so that no run pays for unwritten data of the previous one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tests.scale.job_cluster import ENVIRONMENT, JobCluster, kill, resident_bytes, start_cluster

WORDS = (
    "river",
    "turbine",
    "water",
    "flow",
    "gate",
    "valve",
    "pipe",
    "head",
    "pressure",
    "power",
    "dam",
    "rotor",
)
RESULTS = Path(__file__).parent / "results" / "embed_job.md"


@dataclass
class Memory:
    """Resident bytes over time, of the driver and of the largest worker."""

    driver: list[tuple[float, int]] = field(default_factory=list)
    workers: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def growth(self, samples: list[tuple[float, int]]) -> tuple[float, float]:
        """Medians of the second and of the last fifth of the samples, in MB."""
        values = [size for _, size in samples if size]
        fifth = max(1, len(values) // 5)
        second, last = values[fifth : 2 * fifth] or values, values[-fifth:]
        return float(np.median(second)) / 2**20, float(np.median(last)) / 2**20


@dataclass
class Run:
    seconds: float
    rate: float  # rows/s between the first part and the last
    driver_kills: int = 0
    worker_kills: int = 0
    memory: Memory = field(default_factory=Memory)


def write_texts(file: Path, rows: int) -> None:
    source = random.Random(7)
    with file.open("w") as stream:
        for row in range(rows):
            words = " ".join(source.choice(WORDS) for _ in range(source.randint(4, 16)))
            stream.write(json.dumps({"key": f"k{row}", "text": f"{words} {row}"}) + "\n")


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("0*.parquet")) if folder.is_dir() else []


def rows_done(folder: Path) -> int:
    return sum(int(part.stem.split("-")[1]) for part in parts(folder))


def rate(folder: Path) -> float:
    """Rows per second between the first and the last part, from the files' modification times."""
    found = sorted((part.stat().st_mtime, int(part.stem.split("-")[1])) for part in parts(folder))
    if len(found) < 2:
        return float("nan")
    return sum(count for _, count in found[1:]) / (found[-1][0] - found[0][0])


def arguments(source: Path, folder: Path, engine: list[str], batch_rows: int) -> list[object]:
    args: list[object] = [source, "-o", f"{folder}/", "--id-column", "key", "--column", "text", *engine]
    return [*args, "--batch-rows", batch_rows]


def run_plain(args: list[object], folder: Path) -> Run:
    os.sync()
    began_s = time.monotonic()
    command = [sys.executable, "-m", "penstock", "embed", *map(str, args)]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})
    return Run(time.monotonic() - began_s, rate(folder))


def run_ray(cluster: JobCluster, args: list[object], folder: Path, rows: int, *, kills: bool) -> Run:
    """Run the job on Ray. With kills, the driver dies at about 1/4 and 1/2 of the rows."""
    os.sync()
    began_s = time.monotonic()
    run = Run(0.0, 0.0)
    chance = random.Random(11)
    for share in (0.25, 0.5, None) if kills else (None,):
        resume = ["--resume"] if run.driver_kills else []
        driver = cluster.embed(*args, *resume)
        next_kill_s = 0.0
        while driver.poll() is None:
            time.sleep(1.0)  # a plain run does not spend time on finding workers
            workers = cluster.workers()
            sample(workers, driver.pid, run.memory)
            if kills and workers and not next_kill_s:
                next_kill_s = time.monotonic() + chance.uniform(3, 8)  # the first kill under this driver
            if kills and workers and time.monotonic() > next_kill_s:
                next_kill_s = time.monotonic() + chance.uniform(10, 30)
                kill(chance.choice(workers))
                run.worker_kills += 1
            if share is not None and rows_done(folder) >= share * rows:
                kill(driver.pid)
                driver.wait()
                run.driver_kills += 1
        if share is None and driver.returncode != 0:
            raise SystemExit(f"the run failed with exit code {driver.returncode}")
    run.seconds, run.rate = time.monotonic() - began_s, rate(folder)
    return run


def sample(workers: list[int], driver: int, memory: Memory) -> None:
    now_s = time.monotonic()
    memory.driver.append((now_s, resident_bytes(driver)))
    for pid in workers:
        memory.workers.setdefault(pid, []).append((now_s, resident_bytes(pid)))


def check(folder: Path, rows: int, expected: Path | None) -> float:
    """Check that every row is there exactly once. Returns the largest difference to the vectors of another
    run."""
    seen = np.zeros(rows, dtype=np.int32)
    worst = 0.0
    for part in parts(folder):
        table = pq.read_table(part)
        numbers = np.array([int(key[1:]) for key in table["key"].to_pylist()])
        np.add.at(seen, numbers, 1)
        if expected is not None:
            other = pq.read_table(expected / part.name)
            assert other["key"] == table["key"], part.name
            mine, theirs = (
                each["embedding"].combine_chunks().flatten().to_numpy() for each in (table, other)
            )
            worst = max(worst, float(np.abs(mine - theirs).max()))
    assert (seen == 1).all(), f"{(seen == 0).sum()} rows are missing and {(seen > 1).sum()} are repeated"
    manifest = json.loads((folder / "_manifest.json").read_text())
    assert manifest["state"] == "complete" and manifest["input_rows"] == rows
    return worst


def measure(
    name: str, rows: int, engine: list[str], workers: int, batch_rows: int, folder: Path
) -> list[str]:
    source = folder / f"{name}.jsonl"
    write_texts(source, rows)
    out = {kind: folder / f"{name}-{kind}" for kind in ("plain", "ray", "kills")}
    plain = run_plain(arguments(source, out["plain"], engine, batch_rows), out["plain"])
    check(out["plain"], rows, None)
    with start_cluster(head_cpus=2) as cluster:
        extra = ["--workers", str(workers)]
        quiet_args = [*arguments(source, out["ray"], engine, batch_rows), *extra]
        quiet = run_ray(cluster, quiet_args, out["ray"], rows, kills=False)
        check(out["ray"], rows, out["plain"])
        killed_args = [*arguments(source, out["kills"], engine, batch_rows), *extra]
        killed = run_ray(cluster, killed_args, out["kills"], rows, kills=True)
        worst = check(out["kills"], rows, out["plain"])
    driver = quiet.memory.growth(quiet.memory.driver)
    worker = max((quiet.memory.growth(each) for each in quiet.memory.workers.values()), default=(0.0, 0.0))
    cells = [
        name,
        f"{rows:,}",
        f"{plain.rate:,.0f}",
        f"{quiet.rate:,.0f}",
        f"{plain.rate / quiet.rate - 1:+.1%}",
        *(f"{run.seconds:,.0f} s" for run in (plain, quiet, killed)),
        f"{killed.driver_kills} + {killed.worker_kills}",
        f"{worst:.1e}",
        f"{driver[0]:.0f} → {driver[1]:.0f} MB",
        f"{worker[0]:.0f} → {worker[1]:.0f} MB",
    ]
    lines = [f"| {' | '.join(cells)} |"]
    print("\n".join(lines), flush=True)
    for each in out.values():
        shutil.rmtree(each)
    return lines


HEADER = """# `penstock embed --ray`: every row once, and what Ray costs

`python -m benchmarks.embed_job --save`. Short texts (5 to 17 words) from one JSONL file to a folder of
Parquet parts, {workers} worker(s), blocks of {batch_rows:,} rows, {cpus} cores, load average {load:.1f} at
the start. "plain" is `penstock embed` without `--ray` on the same texts and flags. Rates count the rows after
the first part until the last; the seconds are whole runs with start-up. In the run with kills the driver is
killed twice with SIGKILL and resumed, and workers are killed at random; afterwards every id is there once
and the vectors equal those of the plain run up to "largest difference". Memory: median resident size in the
second and in the last fifth of the undisturbed run.

| engine | rows | plain rows/s | Ray rows/s | overhead | plain | Ray | with kills | driver + worker kills \
| largest difference | driver memory | worker memory |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows on the null engine; 0 skips it")
    parser.add_argument("--real-rows", type=int, default=20_000, help="rows on MiniLM; 0 skips it")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-rows", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=None, help="output folder; needs about 5 KB per row")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="embed-job-", dir=args.folder))
    lines = []
    try:
        for name, rows, engine in (
            ("null", args.rows, ["--device", "null"]),
            ("MiniLM", args.real_rows, ["--device", "cpu"]),
        ):
            if rows:
                lines += measure(name, rows, engine, args.workers, args.batch_rows, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    header = HEADER.format(workers=args.workers, batch_rows=args.batch_rows, cpus=os.cpu_count(), load=load)
    if args.save:
        RESULTS.write_text(header + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
