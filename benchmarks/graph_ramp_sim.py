"""Simulate which steps of the first seconds have a graph. Needs neither a GPU nor a server.

    python benchmarks/graph_ramp_sim.py [--connections 64 256] [--seconds 6] [--model bge-base]

A closed loop of connections sends texts of natural lengths. One thread launches steps with all waiting rows,
two in flight, as the engine does. `GraphPolicy` decides as in the runner. The times of steps and captures are
linear fits to measurements on an H200. For every second the script counts steps with their own graph, with a
borrowed graph and without one, and the buckets that have occurred so far.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.runner.buckets import bucket_of
from penstock.runner.graph_keys import Key
from penstock.runner.graph_policy import GraphPolicy
from penstock.runner.likely_shapes import MEDIAN_LENGTH, SPREAD, likely_buckets
from penstock.types import PoolingParams

OUTSIDE_S = 0.004  # mean time of a request outside the engine: HTTP, tokenising, the wire
REPLAY_HOST_S = 0.0003
CAPTURE_PAUSE = 4.0  # as in the runner


class Costs(NamedTuple):
    """Seconds that steps of a model take on one H200."""

    host_s: float  # launch of a step without a graph
    base_s: float  # fixed device time of a step
    token_s: float
    capture_s: float
    first_touch_s: float  # added to the first step with a number of tokens: the library loads its kernels
    max_length: int
    max_tokens: int

    def device_s(self, tokens: int) -> float:
        return self.base_s + tokens * self.token_s


MODELS = {
    "bge-base": Costs(0.0027, 0.00034, 2.7e-7, 0.0055, 0.012, 512, 16_384),
    "qwen3-embed-0.6b": Costs(0.0068, 0.0007, 1.55e-6, 0.0135, 0.010, 32_768, 16_384),
}


@dataclass
class Second:
    kinds: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    latencies: list[float] = field(default_factory=list)
    num_buckets: int = 0  # buckets that have occurred so far
    num_graphs: int = 0


class Simulation:
    def __init__(self, costs: Costs, connections: int, capture_s: float, seed: int = 0) -> None:
        self.costs, self.policy = costs, GraphPolicy()
        self.draw = np.random.default_rng(seed)
        self.captured: dict[Key, None] = {}
        self.touched: set[int] = set()
        self.seconds: list[Second] = []
        self.not_before_s = 0.0
        self.policy.times.ran_eagerly(64, costs.host_s, costs.host_s)
        for tokens in (64, 1024, 4096, 8192):
            self.policy.times.replayed(tokens, costs.device_s(tokens))
        self._warm_up(capture_s)
        # Requests as (when they reach the engine, when they were sent, tokens).
        self.arriving = [self._request(0.0) for _ in range(connections)]
        heapq.heapify(self.arriving)

    def _warm_up(self, seconds: float) -> None:
        costs = self.costs
        counts = likely_buckets(costs.max_length, costs.max_tokens, 1024)
        gain_s = self.policy.times.gain_s
        order = sorted(counts, key=lambda each: counts[each] * gain_s(each.tokens), reverse=True)
        self.policy.plan(Key(bucket, False, False, PoolingParams()) for bucket in order)
        while seconds > 0 and (key := self.policy.next_planned(self.captured.keys())) is not None:
            seconds -= self._capture(key)
        self.policy.uses.clear()

    def _capture(self, key: Key) -> float:
        elapsed = self.costs.capture_s + self._touch(key.bucket.tokens)
        self.captured[key] = None
        self.policy.captured(key, elapsed)
        return elapsed

    def _touch(self, tokens: int) -> float:
        is_first = tokens not in self.touched
        self.touched.add(tokens)
        return self.costs.first_touch_s if is_first else 0.0

    def _request(self, now: float) -> tuple[float, float, int]:
        length = int(self.draw.lognormal(np.log(MEDIAN_LENGTH), SPREAD))
        length = min(max(length, 1), self.costs.max_length)
        return now + self.draw.exponential(OUTSIDE_S), now, length

    def run(self, seconds: int) -> list[Second]:
        self.seconds = [Second() for _ in range(seconds)]
        now, device_free, in_flight = 0.0, 0.0, []
        while now < seconds:
            while in_flight and in_flight[0][0] <= now:
                ended, requests = in_flight.pop(0)
                self._answer(ended, requests)
            waits = bool(self.arriving) and self.arriving[0][0] <= now
            if waits and len(in_flight) < 2:
                requests = self._schedule(now)
                host_s, device_s = self._step(now, [length for _, _, length in requests])
                # Kernels launched one by one keep the device waiting until the last launch.
                began = max(device_free, now + min(host_s, REPLAY_HOST_S))
                device_free = max(began + device_s, now + host_s)
                in_flight.append((device_free, requests))
                now += host_s
                continue
            upcoming = [in_flight[0][0]] if in_flight else []
            if self.arriving and len(in_flight) < 2:
                upcoming.append(self.arriving[0][0])
            now = max(now, min(upcoming))
        return self.seconds

    def _schedule(self, now: float) -> list[tuple[float, float, int]]:
        requests, room = [], self.costs.max_tokens
        while self.arriving and self.arriving[0][0] <= now and self.arriving[0][2] <= room:
            requests.append(heapq.heappop(self.arriving))
            room -= requests[-1][2]
        return requests

    def _answer(self, now: float, requests: list[tuple[float, float, int]]) -> None:
        for _, sent, _ in requests:
            if now < len(self.seconds):
                self.seconds[int(now)].answers += 1
                self.seconds[int(now)].latencies.append(now - sent)
            heapq.heappush(self.arriving, self._request(now))

    def _step(self, now: float, lengths: list[int]) -> tuple[float, float]:
        """Host time and device time of a step."""
        costs, second = self.costs, self.seconds[int(now)]
        bucket = bucket_of(sum(lengths), len(lengths), max(lengths))
        if bucket is None:
            second.kinds["no bucket"] += 1
            return costs.host_s, costs.device_s(sum(lengths))
        key, policy = Key(bucket, False, False, PoolingParams()), self.policy
        policy.note_use(key)
        second.num_buckets, second.num_graphs = len(policy.uses), len(self.captured)
        if key in self.captured:
            second.kinds["own"] += 1
            return REPLAY_HOST_S, costs.device_s(bucket.tokens)
        serving = [other for other in self.captured if other.serves(key)]
        larger = min(serving, key=lambda other: other.bucket, default=None)
        if larger is not None and not policy.may_borrow(key, larger):
            larger = None
        if policy.is_due(key, larger) and now >= self.not_before_s:
            elapsed = self._capture(key)
            self.not_before_s = now + elapsed * (1 + CAPTURE_PAUSE)
            second.kinds["captured"] += 1
            return elapsed, costs.device_s(bucket.tokens)
        if larger is not None:
            second.kinds["borrowed"] += 1
            return REPLAY_HOST_S, costs.device_s(larger.bucket.tokens)
        second.kinds["eager"] += 1
        return costs.host_s + self._touch(bucket.tokens), costs.device_s(sum(lengths))


def show(name: str, seconds: list[Second]) -> None:
    print(f"\n{name}\n\n| second | req/s | p99 ms | own | borrowed | eager | captured | no bucket |", end="")
    print(" buckets so far | graphs |\n|---|---|---|---|---|---|---|---|---|---|")
    for number, each in enumerate(seconds, 1):
        p99 = sorted(each.latencies)[int(0.99 * len(each.latencies))] * 1000 if each.latencies else 0.0
        kinds = [each.kinds[kind] for kind in ("own", "borrowed", "eager", "captured", "no bucket")]
        print(f"| {number} | {each.answers:,} | {p99:.1f} | ", end="")
        print(" | ".join(map(str, kinds)), f"| {each.num_buckets} | {each.num_graphs} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--connections", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--model", choices=MODELS, default="bge-base")
    parser.add_argument("--capture-seconds", type=float, nargs="+", default=[0.0, 2.0])
    options = parser.parse_args()
    for connections in options.connections:
        for capture_s in options.capture_seconds:
            run = Simulation(MODELS[options.model], connections, capture_s).run(options.seconds)
            show(f"{options.model}, {connections} connections, {capture_s:g} s for captures", run)


if __name__ == "__main__":
    main()
