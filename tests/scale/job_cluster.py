"""A Ray cluster for jobs, runs of `penstock embed --ray` on it, and their processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_metrics_collection": "false",
    "RAY_raylet_start_wait_time_s": "300",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
WORKER = "ray::MapWorker(MapBatches(JobWorker))"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class JobCluster:
    """Nodes on this machine. Each has its own raylet, whose children are workers."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, num_cpus: int) -> None:
        self.nodes.append(
            self._cluster.add_node(num_cpus=num_cpus, num_gpus=0, object_store_memory=100 << 20)
        )

    def kill_node(self) -> None:
        """Kill all processes of a node at once."""
        self._cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def workers(self) -> list[int]:
        """Process ids of the workers that hold a job's engine."""
        raylets = {
            process.process.pid
            for node in (self._cluster.head_node, *self.nodes)
            for process in node.all_processes.get("raylet", [])
        }
        pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
        return [pid for pid in pids if title(pid).startswith(WORKER) and parent(pid) in raylets]

    def embed(self, *args: object, **options: Any) -> subprocess.Popen[bytes]:
        """Start `penstock embed --ray` on this cluster."""
        command = [sys.executable, "-m", "penstock", "embed", *map(str, args)]
        command += ["--ray", "--ray-address", self.address]
        return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, **options)


@contextlib.contextmanager
def start_cluster(*, head_cpus: int = 1, nodes: int = 0) -> Iterator[JobCluster]:
    """Start a head node and further nodes of one CPU in their own folder; stop them at the end."""
    folder = tempfile.mkdtemp(prefix="rd", dir="/tmp")  # a short path for Unix sockets
    (Path(folder) / "ray").mkdir()
    os.environ.update(ENVIRONMENT, RAY_TMPDIR=folder)
    from ray.cluster_utils import Cluster

    arguments = {
        "num_cpus": head_cpus,
        "num_gpus": 0,
        "object_store_memory": 200 << 20,
        "include_dashboard": False,
        "gcs_server_port": _free_port(),
    }
    cluster = Cluster(initialize_head=True, head_node_args=arguments, shutdown_at_exit=True)
    running = JobCluster(cluster)
    try:
        for _ in range(nodes):
            running.add_node(1)
        yield running
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until(condition: Any, patience_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the condition did not become true")
        time.sleep(0.05)


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
