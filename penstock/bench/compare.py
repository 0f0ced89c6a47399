"""`penstock bench compare`: the same load on several servers, in turn, over several rounds.

The speed of a machine drifts, which affects all servers of a round alike. The result is the ratio within a
round, and its spread over the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from penstock.bench.console import print_note, print_result
from penstock.bench.contenders import Contender, contenders_of
from penstock.bench.options import (
    BodyOptions,
    ClientOptions,
    CompareOptions,
    DataOptions,
    ReportOptions,
    TrafficOptions,
)
from penstock.bench.prepare import Prepared, prepare, send_trial_request
from penstock.bench.report.comparison import comparison, comparison_result
from penstock.bench.report.page import compare_page
from penstock.bench.report.save import result_path, save
from penstock.bench.run import (
    INTERRUPTED,
    NOT_VALID,
    OK,
    Run,
    run_once,
    traffic_of,
    warm_up,
    warnings_for,
)
from penstock.bench.serve import check_report
from penstock.bench.target import target_of
from penstock.errors import BadValue, PenstockError


def bench_compare(
    client: ClientOptions,
    data: DataOptions,
    traffic: TrafficOptions,
    body: BodyOptions,
    report: ReportOptions,
    compare: CompareOptions,
) -> int:
    check_report(report)
    if compare.rounds < 1:
        raise BadValue("--rounds must be at least 1", param="rounds")
    contenders = contenders_of(client, compare)
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = (
        result_path(report, f"compare-{'-'.join(c.name for c in contenders)}-{now}")
        if report.save_result
        else None
    )
    code = OK
    try:
        with ExitStack() as stack:
            if not compare.one_at_a_time:
                for contender in contenders:
                    stack.enter_context(_running(contender, compare.start_timeout))
            for number, contender in turns(contenders, compare.rounds):
                run = _turn(contender, contenders[0], data, traffic, body, report, compare, number)
                code = max(code, run.exit_code)
                if code == INTERRUPTED:
                    break
    except (KeyboardInterrupt, PenstockError) as error:
        if not all(contender.runs for contender in contenders):
            raise
        print_note(f"stopped, with the rounds before: {str(error) or 'interrupted'}")
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else NOT_VALID
    _report(contenders, data, report, path)
    return code


def _report(
    contenders: Sequence[Contender], data: DataOptions, report: ReportOptions, path: Path | None
) -> None:
    text = comparison(contenders)
    print_result(text)
    if path is not None:
        rounds = {contender.name: contender.values("request_throughput") for contender in contenders}
        page = compare_page("penstock bench compare", text, rounds, "req/s")
        save(path, comparison_result(contenders, data, report), page)


def turns(contenders: Sequence[Contender], rounds: int) -> Iterator[tuple[int, Contender]]:
    """All servers in turn, in reverse order every second round, so that none is always first."""
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            yield number, contender


@contextmanager
def _running(contender: Contender, timeout_s: float) -> Iterator[None]:
    """Start the contender's server if it has a command and is not running, and stop it afterwards."""
    server = contender.server
    if server is None or server.is_running:
        yield
        return
    try:
        seconds = server.start(target_of(contender.options), timeout_s)
        print_note(f"{contender.name} was ready after {seconds:.1f} s")
        yield
    finally:
        server.stop()


def _turn(
    contender: Contender,
    first: Contender,
    data: DataOptions,
    traffic: TrafficOptions,
    body: BodyOptions,
    report: ReportOptions,
    compare: CompareOptions,
    number: int,
) -> Run:
    with _running(contender, compare.start_timeout):
        if contender.load is None:
            contender.load = _prepared(contender, first, data, body)
        if not contender.runs or compare.one_at_a_time:
            send_trial_request(contender.load, traffic.request_timeout)
            warm_up(contender.load, traffic)
        run = run_once(contender.load, traffic_of(traffic, data.seed), traffic.num_processes, report)
    if not run.outcome.interrupted:
        contender.runs.append(run)
    summary = run.summary
    print_note(
        f"round {number + 1}, {contender.name}: {summary.request_throughput:.2f} req/s, "
        f"p50 {summary.spreads['e2el'].median:.1f} ms"
    )
    for line in warnings_for(run, report):
        print_note(f"{contender.name}: {line}")
    return run


def _prepared(contender: Contender, first: Contender, data: DataOptions, body: BodyOptions) -> Prepared:
    """Prepare a load with the texts of the first contender, which are made with its tokenizer."""
    return prepare(contender.options, data, body, same_as=first.load)
