"""Several load processes as one client: starts, watches and stops them, and joins their samples."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

import msgspec

from penstock.bench.load.arrivals import arrivals, check, count_for
from penstock.bench.load.plan import Address, Command, Go, Reader, Stop, Traffic, WorkerPlan
from penstock.bench.load.progress import Progress
from penstock.bench.load.samples import Block, Done, Ready, Report, Samples, join
from penstock.bench.load.signals import Interrupts
from penstock.bench.load.store import write_store, write_tickets
from penstock.bench.load.worker import allow_open_files
from penstock.config import available_cpus
from penstock.errors import BadValue, EngineError
from penstock.isolation import isolated_environment, isolated_python

_START_S = 60.0  # maximum time that a load process may take to start
_STOP_S = 10.0
_SPARE_FILES = 64
Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class WorkerCost:
    cpu_s: float
    completed: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of a run. `problem` says why it is incomplete."""

    samples: Samples
    began_s: float
    planned: int | None  # number of requests; None: the run was limited by time
    costs: list[WorkerCost]
    interrupted: bool = False
    problem: str | None = None

    @property
    def processes(self) -> int:
        return len(self.costs)


def default_processes() -> int:
    """Half of the cores, from 2 to 8: a server on the same machine needs the rest."""
    return min(8, max(2, available_cpus() // 2))


def run_load(
    requests: Sequence[bytes],
    address: Address,
    reader: Reader,
    traffic: Traffic,
    processes: int | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Send `requests` according to `traffic` and wait for every response."""
    check(traffic)
    if not requests:
        raise BadValue("there is no request to send")
    planned = count_for(traffic, len(requests)) if traffic.is_scheduled or not traffic.duration_s else None
    due_s = arrivals(traffic, planned) if traffic.is_scheduled and planned else None
    slots = _slots(traffic, planned, default_processes() if processes is None else processes)
    store_fd = write_store(requests, due_s)
    tickets_fd = None if planned is None else write_tickets(planned)
    try:
        plans = [
            WorkerPlan(
                number=number,
                processes=len(slots),
                address=address,
                store_fd=store_fd,
                tickets_fd=tickets_fd,
                slots=slots[number],
                duration_s=traffic.duration_s,
                keepalive=traffic.keepalive,
                timeout_s=traffic.timeout_s,
                reader=reader,
            )
            for number in range(len(slots))
        ]
        with Interrupts() as interrupts:
            return _Fleet(plans, planned, watch, interrupts).run()
    finally:
        os.close(store_fd)
        if tickets_fd is not None:
            os.close(tickets_fd)


def _slots(traffic: Traffic, planned: int | None, processes: int) -> list[int | None]:
    """The share of the concurrency of each process."""
    if processes < 1:
        raise BadValue(f"--num-processes is {processes}; it must be at least 1")
    total = traffic.max_concurrency
    if total is None and not traffic.is_scheduled:
        if planned is None:
            raise BadValue("--duration at an infinite rate needs --max-concurrency")
        total = planned
    if total is None:
        return [None] * processes
    if planned is not None:
        total = min(total, planned)
    processes = min(processes, total)
    shares = [total // processes + (number < total % processes) for number in range(processes)]
    limit = allow_open_files() - _SPARE_FILES
    if shares[0] > limit:
        raise BadValue(
            f"{total} requests at once need {shares[0]} open files in each of {processes} load processes, "
            f"but the limit is {limit}: raise `ulimit -n`, or lower --max-concurrency"
        )
    return list(shares)


class _Fleet:
    def __init__(
        self, plans: list[WorkerPlan], planned: int | None, watch: Watch | None, interrupts: Interrupts
    ) -> None:
        self.planned, self.watch, self.interrupts = planned, watch, interrupts
        self.blocks: list[Block] = []
        self.done: dict[int, Done] = {}
        self.problem: str | None = None
        self.progress = Progress(planned)
        self._reports: queue.SimpleQueue[tuple[int, Report | None]] = queue.SimpleQueue()
        self._processes = [_start(plan) for plan in plans]
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            threading.Thread(target=self._listen, args=(number, process.stdout), daemon=True).start()

    def run(self) -> Outcome:
        try:
            self._await_ready()
            began_s = time.monotonic() + 0.05
            self._tell(Go(began_s))
            self.progress.began_s = began_s
            self._collect()
        finally:
            self._end()
        costs = [WorkerCost(done.cpu_s, done.completed) for done in self.done.values()]
        return Outcome(
            join(self.blocks), began_s, self.planned, costs, self.interrupts.count > 0, self.problem
        )

    def _listen(self, number: int, pipe: IO[bytes]) -> None:
        decode = msgspec.msgpack.Decoder(Report).decode
        while len(header := pipe.read(4)) == 4:
            size = int.from_bytes(header, "little")
            if len(payload := pipe.read(size)) < size:
                break
            self._reports.put((number, decode(payload)))
        self._reports.put((number, None))

    def _await_ready(self) -> None:
        waiting = set(range(len(self._processes)))
        deadline = time.monotonic() + _START_S
        while waiting:
            try:
                number, report = self._reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise EngineError(f"the load processes did not start within {_START_S:g} s") from None
            if not isinstance(report, Ready):
                raise EngineError("a load process ended while starting; its own message is above")
            waiting.discard(number)

    def _collect(self) -> None:
        stop_by = float("inf")
        while len(self.done) < len(self._processes):
            if self.interrupts.count and stop_by == float("inf"):
                stop_by = time.monotonic() + _STOP_S
                self._tell(Stop())
            if self.interrupts.count > 1 or time.monotonic() > stop_by:
                self.problem = self.problem or "the run was stopped before the load processes reported"
                return
            try:
                self._take(*self._reports.get(timeout=0.1))
            except queue.Empty:
                pass
            if self.watch is not None:
                self.watch(self.progress)

    def _take(self, number: int, report: Report | None) -> None:
        match report:
            case Block():
                self.blocks.append(report)
                self.progress.add(report)
            case Done():
                self.done[number] = report
                self.problem = self.problem or report.given_up_reason
            case None if number not in self.done:
                self.done[number] = Done(0.0, 0)
                self.problem = f"load process {number} died (exit status {self._processes[number].wait()})"
                self._tell(Stop())

    def _tell(self, command: Command) -> None:
        line = msgspec.json.encode(command) + b"\n"
        for process in self._processes:
            try:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            except (BrokenPipeError, ValueError):
                pass  # the process has exited, which `_take` handles

    def _end(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except BrokenPipeError:
                    pass
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(plan: WorkerPlan) -> subprocess.Popen[bytes]:
    """Start a load process in its own session: ctrl-C reaches only the parent, which stops it cleanly."""
    files = [plan.store_fd] + ([] if plan.tickets_fd is None else [plan.tickets_fd])
    process = subprocess.Popen(
        isolated_python("-m", "penstock.bench.load.worker"),
        env=isolated_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=files,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(plan) + b"\n")
    process.stdin.flush()
    return process
