"""One load on one server: trial request, warm-up, measurement, summary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.bench.console import print_note
from penstock.bench.load.fleet import Outcome, run_load
from penstock.bench.load.plan import Traffic
from penstock.bench.load.samples import Samples
from penstock.bench.options import BodyOptions, DataOptions, ReportOptions, ServerOptions, TrafficOptions
from penstock.bench.prepare import Prepared, prepare, send_trial_request
from penstock.bench.probe import wait_for_server
from penstock.bench.report.live import live
from penstock.bench.report.metrics import Summary, goals_of, percentiles_of, summarise
from penstock.bench.report.table import warnings
from penstock.bench.target import target_of
from penstock.errors import BadValue

OK, NOT_VALID, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A finished run. It is valid if it is complete and at most --max-failed of its requests failed."""

    load: Prepared
    traffic: Traffic
    outcome: Outcome
    summary: Summary
    is_valid: bool

    @property
    def exit_code(self) -> int:
        if self.outcome.interrupted:
            return INTERRUPTED
        return OK if self.is_valid else NOT_VALID


def traffic_of(options: TrafficOptions, seed: int) -> Traffic:
    return Traffic(
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        duration_s=options.duration,
        ramp_up=None if options.ramp_up_strategy is None else options.ramp_up_strategy.value,
        ramp_start=options.ramp_up_start_rps or 0.0,
        ramp_end=options.ramp_up_end_rps or 0.0,
        keepalive=not options.no_keepalive,
        timeout_s=options.request_timeout,
        seed=seed,
    )


def prepare_and_warm_up(
    server: ServerOptions, data: DataOptions, body: BodyOptions, traffic: TrafficOptions
) -> Prepared:
    """Prepare the load, send a trial request and warm up the server."""
    if server.ready_check_timeout_sec > 0:
        wait_for_server(target_of(server), server.ready_check_timeout_sec)
    load = prepare(server, data, body)
    for note in load.notes:
        print_note(note)
    send_trial_request(load, traffic.request_timeout)
    warm_up(load, traffic)
    return load


def warm_up(load: Prepared, options: TrafficOptions) -> None:
    """Send the first request repeatedly, as fast as the concurrency allows."""
    if options.num_warmups < 1:
        return
    message = load.target.message("POST", load.route, load.bodies[0])
    traffic = Traffic(max_concurrency=options.max_concurrency, timeout_s=options.request_timeout)
    messages = [message] * options.num_warmups
    with live("warming up ") as watch:
        outcome = run_load(messages, load.target.address, load.reader, traffic, options.num_processes, watch)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if errors := outcome.samples.errors():
        failed = sum(errors.values())
        print_note(f"warm-up: {failed} of {options.num_warmups} requests failed: {next(iter(errors))}")


def run_once(load: Prepared, traffic: Traffic, processes: int | None, report: ReportOptions) -> Run:
    percentiles = sorted({*percentiles_of(report.metric_percentiles), 99.0})
    goals = checked_goals(report, load.backend.generates)
    with live("", traffic.duration_s) as watch:
        outcome = run_load(load.messages(), load.target.address, load.reader, traffic, processes, watch)
    outcome = _fill_token_counts(outcome, load)
    rows = [item.rows for item in load.items]
    summary = summarise(outcome, rows, percentiles, goals, load.backend.generates)
    complete = outcome.problem is None and not outcome.interrupted
    valid = complete and summary.completed > 0 and summary.failed_share <= report.max_failed
    return Run(load, traffic, outcome, summary, valid)


def checked_goals(report: ReportOptions, generates: bool) -> dict[str, float]:
    goals = goals_of(report.goodput)
    if not generates and (wrong := [name for name in goals if name != "e2el"]):
        raise BadValue(f"--goodput {wrong[0]}: only generation has it; use e2el", param="goodput")
    return goals


def warnings_for(run: Run, report: ReportOptions) -> list[str]:
    """Warnings to print below the table."""
    lines = warnings(run.summary, run.outcome.samples.errors())
    if run.outcome.interrupted:
        lines.append("the run was interrupted: the figures cover the part before")
    elif run.outcome.problem:
        lines.append(f"the run is NOT VALID, because it is incomplete: {run.outcome.problem}")
    elif not run.is_valid:
        share = f"{run.summary.failed_share:.1%} of its requests failed"
        lines.append(f"the run is NOT VALID: {share} (--max-failed {report.max_failed:g})")
    return lines


def _fill_token_counts(outcome: Outcome, load: Prepared) -> Outcome:
    """Fill in the client's token counts where the server returned none."""
    samples = outcome.samples
    unknown = samples.ok & (samples.columns["input_tokens"] < 0)
    if not unknown.any() or (counts := load.count_input_tokens()) is None:
        return outcome
    tokens = samples.columns["input_tokens"].copy()
    tokens[unknown] = np.asarray(counts, np.int32)[samples.columns["request"][unknown]]
    columns = samples.columns | {"input_tokens": tokens}
    return replace(outcome, samples=Samples(columns, samples.gaps, samples.messages))
