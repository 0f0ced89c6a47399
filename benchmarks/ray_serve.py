"""Penstock on a local Ray cluster of several nodes, under a load with every answer checked.

    python benchmarks/ray_serve.py [--model FOLDER] [--clients 8] [--seconds 20] [--parts kill,node,...]
                                   [--save FILE]

A replica is killed, a node is killed, the application is updated twice, replicas are scaled by queued tokens,
and the same load runs on a plain `penstock serve`. Exit code 1: a wrong answer, a failed request in a part
that allows none, or replicas that do not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from checked_load import (
    CheckedModel,
    Question,
    Reply,
    Sample,
    closed_loop,
    command_line,
    complaints_of,
    embed_questions,
    exchange,
    finish,
    for_seconds,
    heading,
    latency,
    model_entry,
    rate,
    read_answer,
    start_models,
    statuses,
    table,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.scale.cluster import RayCluster, kill, start_cluster, wait_for  # noqa: E402

NAME = "m"
ENGINE = f"engine-{NAME}"
PARTS = ("kill", "node", "update", "scale", "overhead")
HEAD = (
    "event",
    "requests",
    "failed",
    "run again",
    "wrong",
    "longest without an answer (s)",
    "recovered (s)",
    "ms p50 / p99 / max",
)


class RayModel(CheckedModel):
    """Sends the request id in a header too: Ray Serve's proxies use that id in the answer."""

    async def _post(self, question: Question, number: int) -> Reply:
        own = {"request_id": self._id(number), "cache_salt": str(number)}
        body = json.dumps(question.fields | own).encode()
        return await exchange(self.port, "POST", question.path, body, {"X-Request-ID": self._id(number)})


def configuration(args: argparse.Namespace, device: str, **ray: Any) -> dict[str, Any]:
    entry = model_entry(NAME, args.model, {"device": device, "threads": 1})
    return {"models": [entry], "ray": {"min_replicas": 2, "wait_for_replica_s": 30, **ray}}


async def retried(port: int) -> int:
    page = (await exchange(port, "GET", "/metrics")).body.decode()
    return int(
        sum(
            float(value)
            for value in re.findall(r"^penstock_retried_requests_total{[^}]*} (\S+)$", page, re.M)
        )
    )


def silence(samples: Sequence[Sample]) -> float:
    """The longest time without a correct answer."""
    times = sorted(sample.answered_s for sample in samples if sample.is_right)
    return max((after - before for before, after in pairwise(times)), default=float("nan"))


async def during(
    model: CheckedModel, clients: int, lead_s: float, event: Callable[[], None], is_over: Callable[[], bool]
) -> tuple[list[Sample], float]:
    """Run a load, trigger an event in the middle of it, and return the samples and the seconds until
    `is_over`."""
    done = asyncio.Event()
    load = asyncio.create_task(closed_loop(model, clients, done.is_set))
    await asyncio.sleep(lead_s)
    began_s = time.monotonic()
    await asyncio.to_thread(event)
    await asyncio.to_thread(wait_for, is_over)
    recovered_s = time.monotonic() - began_s
    await asyncio.sleep(lead_s)
    done.set()
    await load
    return model.taken(), recovered_s


def row(name: str, samples: list[Sample], again: int, recovered_s: float) -> list[object]:
    failed = [sample for sample in samples if sample.status != 200]
    wrong = [sample for sample in samples if sample.status == 200 and sample.complaint]
    failures = f"{len(failed)}" + (f" ({statuses(failed)})" if failed else "")
    return [
        *(name, f"{len(samples):,}", failures, again, len(wrong)),
        *(f"{silence(samples):.1f}", f"{recovered_s:.1f}", latency(samples)),
    ]


class Report:
    def __init__(self) -> None:
        self.rows: list[list[object]] = []
        self.complaints: list[str] = []
        self.notes: list[str] = []

    def add(self, name: str, samples: list[Sample], again: int, recovered_s: float, *, may_fail: int) -> None:
        self.rows.append(row(name, samples, again, recovered_s))
        failed = sum(sample.status != 200 for sample in samples)
        wrong = [sample for sample in samples if sample.status == 200 and sample.complaint]
        self.complaints += complaints_of(name, wrong)
        if failed > may_fail:
            self.complaints.append(f"{name}: {failed} requests failed, at most {may_fail} may")
        print(self.rows[-1], flush=True)


async def kill_replica(
    cluster: RayCluster, model: CheckedModel, args: argparse.Namespace, report: Report
) -> None:
    before = await retried(cluster.port)

    def event() -> None:
        kill(cluster.pids(ENGINE)[0])
        wait_for(lambda: cluster.num_running(ENGINE) < 2)

    samples, seconds = await during(
        model, args.clients, args.seconds / 4, event, lambda: cluster.num_running(ENGINE) == 2
    )
    again = await retried(cluster.port) - before
    report.add("an engine replica is killed (SIGKILL)", samples, again, seconds, may_fail=args.clients)


async def kill_node(
    cluster: RayCluster, model: CheckedModel, args: argparse.Namespace, report: Report
) -> None:
    before = await retried(cluster.port)
    ingress = [cluster.node_of(pid) for pid in cluster.pids("ingress")]
    nodes = [cluster.node_of(pid) for pid in cluster.pids(ENGINE)]
    victim = next(node for node in nodes if node is not None and node not in ingress)

    def event() -> None:
        cluster.kill_node(victim)
        wait_for(lambda: cluster.num_running(ENGINE) < 2)

    samples, seconds = await during(
        model, args.clients, args.seconds / 4, event, lambda: cluster.num_running(ENGINE) == 2
    )
    again = await retried(cluster.port) - before
    report.add("a node with an engine replica is killed", samples, again, seconds, may_fail=args.clients)
    cluster.add_node()


async def update(cluster: RayCluster, model: CheckedModel, args: argparse.Namespace, report: Report) -> None:
    for name, ray, setting in (
        ("a rolling update, one replica after another", {}, 900),
        ("a rolling update that starts new replicas first", {"max_surge_percent": 100}, 800),
    ):
        config = configuration(args, args.device, **ray)
        config["models"][0]["max_num_batched_tokens"] = setting
        samples, seconds = await during(
            model,
            args.clients,
            args.seconds / 4,
            lambda config=config: cluster.deploy(config, wait=False),  # type: ignore[misc]
            lambda: cluster.status() == "RUNNING" and not cluster.is_stopping(),
        )
        report.add(name, samples, 0, seconds, may_fail=0)


async def scale(cluster: RayCluster, args: argparse.Namespace, report: Report) -> None:
    target = 2000
    config = configuration(
        args,
        args.device,
        min_replicas=1,
        max_replicas=2,
        target_queued_tokens=target,
        upscale_delay_s=2,
        downscale_delay_s=5,
    )
    config["max_queue_seconds"] = 0  # queue all requests, however slow this machine is
    await asyncio.to_thread(cluster.deploy, config)
    await asyncio.to_thread(cluster.wait_updated)
    model = RayModel(NAME, cluster.port, embed_questions(NAME, 16, rows=16))
    await model.learn()
    await asyncio.to_thread(wait_for, lambda: cluster.replicas(ENGINE) == {"RUNNING": 1})
    began_s, up_s = time.monotonic(), 0.0
    done = asyncio.Event()
    load = asyncio.create_task(closed_loop(model, args.clients, done.is_set))
    await asyncio.to_thread(wait_for, lambda: cluster.num_running(ENGINE) == 2)
    up_s = time.monotonic() - began_s
    await asyncio.sleep(args.seconds / 4)
    done.set()
    await load
    ended_s = time.monotonic()
    samples = model.taken()
    await asyncio.to_thread(wait_for, lambda: cluster.replicas(ENGINE) == {"RUNNING": 1})
    down_s = time.monotonic() - ended_s
    report.add("scale up, 1 → 2 replicas", samples, 0, up_s, may_fail=0)
    report.notes.append(
        f"Scaling: requests of 16 texts from {args.clients} clients, target {target:,} tokens a replica. The "
        f"second replica ran {up_s:.1f} s after the load began (upscale_delay_s 2), and was gone "
        f"{down_s:.1f} s after it ended (downscale_delay_s 5). Ray averages the tokens over 15 s."
    )


async def measured(port: int, args: argparse.Namespace) -> tuple[list[Sample], list[Sample]]:
    """The samples with one client, then with several."""
    model = RayModel(NAME, port, embed_questions(NAME, 16), tolerance=1.0)
    for question in model.questions:
        reply = await exchange(port, "POST", question.path, json.dumps(question.fields).encode())
        model.expected.append(read_answer(question.path, reply.body))
    await for_seconds(model, 1, 2)
    alone = await for_seconds(model, 1, args.seconds / 2)
    return alone, await for_seconds(model, args.clients, args.seconds / 2)


async def overhead(cluster: RayCluster, args: argparse.Namespace, report: Report) -> str:
    rows = []
    seconds = args.seconds / 2
    for device in ("null", args.device):
        await asyncio.to_thread(cluster.deploy, configuration(args, device, min_replicas=1))
        await asyncio.to_thread(cluster.wait_updated)
        alone, many = await measured(cluster.port, args)
        rows.append(
            (
                f"Ray Serve, 1 replica, device {device}",
                latency(alone),
                latency(many),
                f"{rate(many, seconds):,.0f}",
            )
        )
        with start_models([model_entry(NAME, args.model, {"device": device, "threads": 1})]) as server:
            alone, many = await measured(server.port, args)
        rows.append(
            (f"penstock serve, device {device}", latency(alone), latency(many), f"{rate(many, seconds):,.0f}")
        )
    return table(
        (
            "server",
            "1 client: ms p50 / p99 / max",
            f"{args.clients} clients: ms p50 / p99 / max",
            "requests/s",
        ),
        rows,
    )


@contextmanager
def cluster_of(args: argparse.Namespace) -> Iterator[RayCluster]:
    with start_cluster(workers=3) as cluster:
        cluster.deploy(configuration(args, args.device))
        yield cluster


async def measure(cluster: RayCluster, args: argparse.Namespace, report: Report) -> str:
    """Run all parts. Returns the table of the last one."""
    model = RayModel(NAME, cluster.port, embed_questions(NAME, 16))
    await model.learn()
    await for_seconds(model, args.clients, 2)
    for name, step in {"kill": kill_replica, "node": kill_node, "update": update}.items():
        if name in args.parts:
            await step(cluster, model, args, report)
    if "scale" in args.parts:
        await scale(cluster, args, report)
    return await overhead(cluster, args, report) if "overhead" in args.parts else ""


def run(args: argparse.Namespace) -> int:
    import ray

    title = "A Ray cluster of 4 nodes (a head and 3 workers with 1 CPU each), 2 engine replicas, 1 ingress"
    parts = [*heading(title, command_line())]
    parts[-1] += (
        f" · ray {ray.__version__} · Python {platform.python_version()} · device {args.device}, "
        f"{args.clients} clients"
    )
    report = Report()
    with cluster_of(args) as cluster:
        compared = asyncio.run(measure(cluster, args, report))
    parts += [table(HEAD, report.rows), *report.notes]
    if compared:
        parts += ["The same load on Ray Serve and on a plain server:", compared]
    parts.append(f"Load average at the end: {os.getloadavg()[0]:.1f}.")
    return finish(parts, report.complaints, args.save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of an embedding model; by default the bundled model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--save", type=Path)
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
