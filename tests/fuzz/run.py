"""`make fuzz`: hostile requests against every route of a server for each kind of model.

Fails if a reply is 5xx, a connection is closed without a reply, a request hangs, an error echoes its input,
another client gets a wrong answer, or that client's p99 exceeds three times that of the idle server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.e2e.server import API, ENGINE, Server, serving
from tests.fuzz.cases import Case, Schema, as_case, make_case
from tests.fuzz.exchange import SLOW_S, exchange
from tests.fuzz.fleet import TARGETS, Target
from tests.fuzz.pacing import Pacer
from tests.fuzz.probe import ProbeResult, probing
from tests.fuzz.report import MAX_SHOWN, Run, save, table

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
IDLE_S = 5.0
Attack = Callable[[Run, Pacer], None]
NICENESS = 5  # priority of the load generator, so that it does not take the servers' cores


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end too
    work = Path(tempfile.mkdtemp(prefix="penstock-fuzz-"))
    targets = [each for each in TARGETS if not options.servers or each.name in options.servers]
    if options.case:
        return _repeat(options.case, options.seed, work)
    total_share = sum(each.share for each in targets)
    runs: list[Run] = []
    for target in targets:
        num_cases = round(options.cases * target.share / total_share)
        with serving(*target.flags(work)) as server:
            runs += _fuzz(server, target, num_cases, options, work)
    print("\n" + table(runs))
    if options.save:
        save(runs, RESULTS, " ".join(sys.argv[1:]))
    broken = [line for run in runs for line in run.broken()]
    print("\n".join(f"BROKEN {line}" for line in broken) or "every promise held")
    return 1 if broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="cases of each source, over all servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("own", "schemathesis"))
    parser.add_argument("--servers", nargs="*", choices=[each.name for each in TARGETS], help="default: all")
    parser.add_argument("--rate", type=float, default=50.0, help="cases a second, at most")
    parser.add_argument("--workers", type=int, default=3, help="own cases in flight")
    parser.add_argument("--case", help="repeat one case, as SERVER/NUMBER")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/fuzz.md and fuzz.json")
    return parser.parse_args()


def _fuzz(
    server: Server, target: Target, num_cases: int, options: argparse.Namespace, work: Path
) -> list[Run]:
    """Measure the idle server, then fuzz it from each source."""
    before_fuzz = _probe_idle(server, target)
    schema = Schema(server.http.get("/openapi.json").json())
    attacks: dict[str, Attack] = {}
    if options.only != "schemathesis":
        make = partial(make_case, schema, options.seed, target.name)
        attacks["own"] = partial(_send_all, server, make, num_cases, options, work)
        if target.name == "llama" and find_spec("tests.fuzz.generation") is not None:
            bodies = _generation_cases(options.seed)
            attacks["generation"] = partial(
                _send_all, server, lambda _: next(bodies), num_cases, options, work
            )
    if options.only != "own":
        attacks["schemathesis"] = partial(
            _send_schema_cases, server, num_cases, options.seed + zlib.crc32(target.name.encode())
        )
    runs = []
    for source, attack in attacks.items():
        run, pacer = Run(target.name, source), Pacer(options.rate)
        before = _memory_mb(server)
        probe = probing(server.port, target.route, target.body, before_fuzz.reference)
        with probe as probed, _niced(partial(attack, run, pacer)):
            pass
        run.seconds = time.monotonic() - pacer.began_s
        run.memory_mb = before, _memory_mb(server)
        run.idle, run.busy = pacer.split(probed)
        runs.append(run)
    after_fuzz = _probe_idle(server, target)
    for run in runs:
        run.idle.latencies_ms += before_fuzz.latencies_ms + after_fuzz.latencies_ms
        _show(run, server, work)
    return runs


def _probe_idle(server: Server, target: Target) -> ProbeResult:
    """Probe the server while it is otherwise idle."""
    with probing(server.port, target.route, target.body) as idle:
        time.sleep(IDLE_S)
    return idle


@contextmanager
def _niced(attack: Callable[[], None]) -> Iterator[None]:
    """Run the attack on a low-priority thread, and wait for it."""
    failed: list[BaseException] = []

    def body() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            attack()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    yield
    thread.join()
    if failed:
        raise failed[0]


def _send_all(
    server: Server,
    make: Callable[[int], Case],
    num_cases: int,
    options: argparse.Namespace,
    work: Path,
    run: Run,
    pacer: Pacer,
) -> None:
    """Send the cases at a steady rate, several at a time."""
    numbers = iter(range(num_cases))

    async def worker() -> None:
        for number in numbers:
            await asyncio.sleep(pacer.wait_s())
            case = make(number)
            outcome = await exchange(server.port, case)
            repeat = ""
            if outcome.fault is not None or outcome.seconds >= SLOW_S:
                file = work / f"{run.server}-{run.source}-{number}.http"
                file.write_bytes(case.raw)
                again = f"--seed {options.seed} --case {run.server}/{number}" if run.source == "own" else ""
                repeat = f"{again} {file}".strip()
            run.count(case.name, case.route, outcome, repeat)

    async def workers() -> None:
        await asyncio.gather(*(worker() for _ in range(options.workers)))

    asyncio.run(workers())


def _generation_cases(seed: int) -> Iterator[Case]:
    from tests.fuzz.generation import bodies

    return (as_case("generation", route, body) for route, body in bodies(seed))


def _send_schema_cases(server: Server, num_cases: int, seed: int, run: Run, pacer: Pacer) -> None:
    from tests.fuzz.schema_cases import run_schema_cases

    run_schema_cases(server.url, num_cases, seed, pacer, run.count)


def _memory_mb(server: Server) -> int:
    """Resident memory of the server's processes."""
    pids = [server.process.pid, *server.children(ENGINE), *server.children(API)]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024


def _show(run: Run, server: Server, work: Path) -> None:
    print(table([run]).splitlines()[-1], f"in {run.seconds:.0f} s", flush=True)
    for each in run.slowest:
        print("  slow: " + json.dumps(each)[:1500], flush=True)
    for example in run.examples[:MAX_SHOWN]:
        print("  " + json.dumps(example)[:1500], flush=True)
    if run.examples:
        (work / f"{run.server}.log").write_text("".join(server.log))
        (work / f"{run.server}-{run.source}.json").write_text(json.dumps(run.examples, indent=1))
        print(f"  all faults and the server's log: {work}", flush=True)


def _repeat(which: str, seed: int, work: Path) -> int:
    """Send one case again, and print its outcome and the server's log."""
    name, number = which.split("/")
    (target,) = [each for each in TARGETS if each.name == name]
    with serving(*target.flags(work)) as server:
        case = make_case(Schema(server.http.get("/openapi.json").json()), seed, name, int(number))
        print(case.name, case.raw[:2000])
        outcome = asyncio.run(exchange(server.port, case))
        print(outcome, *server.log, sep="\n")
    return 0 if outcome.fault is None else 1


if __name__ == "__main__":
    sys.exit(main())
