"""`penstock bench serve`: one run, or a sweep over loads, printed and saved."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from penstock.bench.console import print_note, print_result
from penstock.bench.load.plan import Traffic
from penstock.bench.options import BodyOptions, DataOptions, ReportOptions, ServerOptions, TrafficOptions
from penstock.bench.prepare import Prepared
from penstock.bench.report.metrics import metrics_of, percentiles_of
from penstock.bench.report.page import run_page, sweep_page
from penstock.bench.report.result import result_of, settings_of
from penstock.bench.report.save import result_path, save
from penstock.bench.report.sweep import sweep_points, sweep_result, sweep_table
from penstock.bench.report.table import table
from penstock.bench.run import Run, checked_goals, prepare_and_warm_up, run_once, traffic_of, warnings_for
from penstock.bench.sweep import Sweep, parse, sweep, traffic_at
from penstock.errors import BadValue


def bench_serve(
    server: ServerOptions,
    data: DataOptions,
    traffic: TrafficOptions,
    body: BodyOptions,
    report: ReportOptions,
) -> int:
    """Run one load, print and save the result; return the exit code."""
    settled = traffic_of(traffic, data.seed)
    check_report(report)
    load = prepare_and_warm_up(server, data, body, traffic)
    generates = load.backend.generates
    metrics = metrics_of(report.percentile_metrics, generates)
    checked_goals(report, generates)
    path = result_path(report, run_name(report, load, settled)) if report.save_result else None
    run = run_once(load, settled, traffic.num_processes, report)
    percentiles = percentiles_of(report.metric_percentiles)
    text = table(run.summary, run.traffic, metrics, percentiles, generates)
    print_result(text)
    for line in warnings_for(run, report):
        print_note(line)
    if path is not None:
        settings = settings_of(load, data, report)
        result = result_of(settings, run.traffic, run.outcome, run.summary, run.is_valid)
        page = run_page(title_of(load), text, run.outcome.samples, run.outcome.began_s, generates)
        save(path, result, page)
    return run.exit_code


def bench_sweep(
    server: ServerOptions,
    data: DataOptions,
    traffic: TrafficOptions,
    body: BodyOptions,
    report: ReportOptions,
    loads_flag: str,
) -> int:
    """Run several loads; return the worst exit code."""
    unit, loads = parse(loads_flag)
    base = traffic_of(traffic, data.seed)
    if base.ramp_up is not None or (unit == "rate" and base.request_rate != float("inf")):
        raise BadValue("--sweep sets the load; leave out --request-rate and --ramp-up-strategy")
    check_report(report)
    load = prepare_and_warm_up(server, data, body, traffic)
    goals = checked_goals(report, load.backend.generates)
    path = result_path(report, f"sweep-{run_name(report, load, base)}") if report.save_result else None

    def measure(at: float) -> Run:
        print_note(f"{unit} {at:g}")
        return run_once(load, traffic_at(unit, at, base), traffic.num_processes, report)

    found = sweep(unit, loads, goals, measure)
    text = sweep_table(found)
    print_result(text)
    for line in {line for point in found.points for line in warnings_for(point.run, report)}:
        print_note(line)
    if path is not None:
        save(path, sweep_result(found, settings_of(load, data, report)), _sweep_page(load, text, found))
    return max((point.run.exit_code for point in found.points), default=1)


def _sweep_page(load: Prepared, text: str, found: Sweep) -> str:
    return sweep_page(title_of(load), text, found.unit, sweep_points(found))


def check_report(report: ReportOptions) -> None:
    """Check the flags of the report before anything is sent."""
    percentiles_of(report.metric_percentiles)
    metrics_of(report.percentile_metrics, True)
    checked_goals(report, True)


def run_name(report: ReportOptions, load: Prepared, traffic: Traffic) -> str:
    concurrency = f"-concurrency{traffic.max_concurrency}" if traffic.max_concurrency else ""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    model = Path(load.model).name
    return f"{report.label or load.name}-{traffic.request_rate:g}qps{concurrency}-{model}-{now}"


def title_of(load: Prepared) -> str:
    return f"penstock bench serve · {load.model} · {load.name}"
