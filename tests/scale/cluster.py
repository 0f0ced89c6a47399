"""A Ray cluster of several nodes on this machine, with Ray Serve and a Penstock application."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
APP = "penstock"
PATIENCE_S = 150.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "PYTHONPATH": str(ROOT),  # inherited by Ray's processes
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class RayCluster:
    port: int
    cluster: Any  # ray.cluster_utils.Cluster
    nodes: list[Any] = field(default_factory=list)  # without the head node

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, config: Mapping[str, Any], *, wait: bool = True) -> None:
        """Deploy an application, or update it. Without `wait`, return at once."""
        from ray import serve

        from penstock.scale.serve import build_app

        application = build_app(config)
        if wait:
            serve.run(application, name=APP, route_prefix="/")
        else:
            serve._run(application, name=APP, route_prefix="/", _blocking=False)

    def wait_updated(self) -> None:
        """Wait until the last update is complete."""
        wait_for(lambda: self.status() == "RUNNING" and not self.is_stopping(), self.explain)

    def status(self) -> str:
        from ray import serve

        return str(serve.status().applications[APP].status.value)

    def replicas(self, deployment: str) -> dict[str, int]:
        """The number of replicas of a deployment in each state."""
        from ray import serve

        states = serve.status().applications[APP].deployments[deployment].replica_states
        return {str(getattr(state, "value", state)): count for state, count in states.items()}

    def is_stopping(self) -> bool:
        from ray import serve

        deployments = serve.status().applications[APP].deployments
        return any(set(self.replicas(name)) - {"RUNNING"} for name in deployments)

    def num_running(self, deployment: str) -> int:
        return self.replicas(deployment).get("RUNNING", 0)

    def pids(self, deployment: str) -> list[int]:
        """Process ids of a deployment's replicas, on the nodes of this cluster."""
        raylets = {pid for node in (self.cluster.head_node, *self.nodes) for pid in raylet_pids(node)}
        title = re.compile(rf"^ray::ServeReplica:{APP}:{re.escape(deployment)}\b")
        return [pid for pid in _pids() if title.match(_title(pid)) and _parent(pid) in raylets]

    def node_of(self, pid: int) -> Any:
        """The node of a replica; None if it is the head node."""
        return next((node for node in self.nodes if _parent(pid) in raylet_pids(node)), None)

    def kill_node(self, node: Any) -> None:
        """Kill all processes of a node at once."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def add_node(self, num_cpus: int = 1) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=num_cpus, object_store_memory=80 << 20, num_gpus=0))

    def explain(self) -> str:
        from ray import serve

        return repr(serve.status().applications)


def raylet_pids(node: Any) -> list[int]:
    return [each.process.pid for each in node.all_processes.get("raylet", [])]


@contextlib.contextmanager
def start_cluster(workers: int, *, head_cpus: int = 1, worker_cpus: int = 1) -> Iterator[RayCluster]:
    """Start a head node and workers in their own folder. Stop them at the end of the context."""
    folder = tempfile.mkdtemp(prefix="rs", dir="/tmp")  # a short path for Unix sockets
    (Path(folder) / "ray").mkdir()
    os.environ.update(ENVIRONMENT, RAY_TMPDIR=folder)  # Ray also writes the cluster's address there
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    arguments = {
        "num_cpus": head_cpus,
        "num_gpus": 0,
        "object_store_memory": 100 << 20,
        "include_dashboard": False,
        "gcs_server_port": free_port(),
    }
    cluster = Cluster(initialize_head=True, head_node_args=arguments, shutdown_at_exit=True)
    running = RayCluster(free_port(), cluster)
    try:
        for _ in range(workers):
            running.add_node(worker_cpus)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": running.port})
        yield running
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], object], explain: Callable[[], str] = lambda: "") -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the condition did not become true\n{explain()}")
        time.sleep(0.1)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
