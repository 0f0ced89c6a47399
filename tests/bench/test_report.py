from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.load.fleet import Outcome, WorkerCost
from penstock.bench.load.plan import Traffic
from penstock.bench.load.samples import OK, Recorder, join
from penstock.bench.options import ReportOptions
from penstock.bench.report.metrics import Summary, goals_of, metrics_of, percentiles_of, summarise
from penstock.bench.report.page import compare_page, run_page, sweep_page
from penstock.bench.report.result import result_of
from penstock.bench.report.save import NotSaved, result_path, save_json
from penstock.bench.report.table import table, warnings
from penstock.errors import BadValue


def outcome(generates: bool = False, failures: int = 0) -> Outcome:
    """Ten requests, one every 0.1 s from 100 s on, with latencies of 10, 20, … 100 ms."""
    recorder = Recorder()
    for i in range(10):
        start, took = 100 + i / 10, (i + 1) / 100
        gaps = [took / 8] * 4 if generates else []
        first, last = (start + took / 2, start + took) if generates else (0.0, 0.0)
        outputs = 5 if generates else 0
        recorder.add(
            (
                i % 2,
                start,
                start,
                start + took / 2,
                start + took,
                first,
                last,
                200,
                OK,
                7,
                outputs,
                50,
                len(gaps),
            ),
            gaps,
        )
    for _ in range(failures):
        error = recorder.message("no")
        recorder.add((0, 100.5, 100.5, 0.0, 100.6, 0.0, 0.0, 500, error, -1, 0, 0, 0))
    costs = [WorkerCost(0.1, 5), WorkerCost(0.2, 5)]
    return Outcome(join([recorder.flush()]), 100.0, 10 + failures, costs)


def summary(generates: bool = False, failures: int = 0, **goals: float) -> Summary:
    return summarise(outcome(generates, failures), [1, 3], [50, 99], goals, generates)


def test_throughput_is_measured_until_the_last_response() -> None:
    found = summary()
    assert found.duration_s == pytest.approx(1.0)
    assert found.request_throughput == pytest.approx(10)
    assert found.input_sequence_throughput == pytest.approx(20)  # one and three rows, alternating
    assert found.total_token_throughput == pytest.approx(70)


def test_latencies_are_milliseconds_to_the_end_of_the_body() -> None:
    e2el = summary().spreads["e2el"]
    assert e2el.mean == pytest.approx(55)
    assert e2el.median == pytest.approx(55)
    assert e2el.percentiles["99"] == pytest.approx(99.1)
    assert summary().spreads["ttfb"].mean == pytest.approx(27.5)


def test_generation_has_its_own_metrics() -> None:
    found = summary(generates=True)
    assert found.total_output_tokens == 50
    assert found.spreads["ttft"].mean == pytest.approx(27.5)
    assert found.spreads["tpot"].mean == pytest.approx(27.5 / 4)
    assert found.spreads["itl"].mean == pytest.approx(55 / 8, rel=1e-5)
    assert found.peak_output_tokens_per_s > 0


def test_goodput_counts_requests_within_every_goal() -> None:
    assert summary(e2el=50.1).request_goodput == pytest.approx(5)
    assert summary(generates=True, e2el=50.1, ttft=10.1).request_goodput == pytest.approx(2)
    with pytest.raises(BadValue, match="only generation"):
        summary(ttft=10.0)


def test_peak_concurrency_is_counted() -> None:
    recorder = Recorder()
    for start, end in ((0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (2.0, 4.0)):
        recorder.add((0, start, start, end, end, 0.0, 0.0, 200, OK, 1, 0, 1, 0))
    found = summarise(Outcome(join([recorder.flush()]), 0.0, 4, []), [1], [], {}, False)
    assert found.peak_concurrency == 3


def test_a_run_without_responses_has_figures() -> None:
    empty = summarise(Outcome(join([]), 0.0, 0, []), [1], [99], {"e2el": 1.0}, False)
    assert (empty.completed, empty.request_throughput) == (0, 0.0)
    assert "Successful requests:                     0" in table(empty, Traffic(), ["e2el"], [99], False)


def test_the_cost_of_the_client_is_reported() -> None:
    cost = summary().client
    assert cost.busiest == pytest.approx(0.2)
    assert cost.ceiling == pytest.approx(5 / 0.1 + 5 / 0.2)
    assert warnings(summary(), {}) == []


def test_the_table_has_the_known_layout() -> None:
    text = table(summary(failures=1), Traffic(max_concurrency=4, request_rate=9.5), ["e2el"], [50, 99], False)
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    for line in (
        "Successful requests:                     10        ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             4         ",
        "Request rate configured (RPS):           9.50      ",
        "Total input tokens:                      70        ",
        "Request throughput (req/s):              10.00     ",
        "Total token throughput (tok/s):          70.00     ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          55.00     ",
        "P99 E2EL (ms):                           99.10     ",
    ):
        assert line in lines


def test_the_table_of_generation_has_tokens_and_their_times() -> None:
    text = table(summary(generates=True), Traffic(), ["ttft", "tpot", "itl"], [99], True)
    for word in ("Total generated tokens", "Output token throughput", "Mean TTFT", "P99 TPOT", "Median ITL"):
        assert word in text


def test_the_result_holds_every_sample() -> None:
    run = outcome(generates=True, failures=2)
    result = result_of({"label": "x"}, Traffic(), run, summary(True, 2), valid=False)
    assert result["request_rate"] == "inf"
    assert result["completed"] == 10
    assert len(result["e2els"]) == len(result["errors"]) == len(result["itls"]) == 12
    assert sorted(set(result["errors"])) == ["", "no"]
    assert result["p99_e2el_ms"] > 0
    assert result["valid"] is False


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (percentiles_of, "50,x"),
        (percentiles_of, "101"),
        (percentiles_of, ""),
        (goals_of, ["e2el"]),
        (goals_of, ["e2el:-3"]),
        (goals_of, ["itl:3"]),
        (lambda text: metrics_of(text, True), "e2el,latency"),
    ],
)
def test_invalid_report_flags_are_refused(call: Any, argument: Any) -> None:
    with pytest.raises(BadValue):
        call(argument)


def test_pages_are_self_contained() -> None:
    run = outcome(generates=True)
    points = [
        {"load": load, "request_throughput": load * 9, "median_e2el_ms": 5.0, "p99_e2el_ms": 9.0 + load}
        for load in (1.0, 2.0, 4.0)
    ]
    pages = {
        "run": run_page("a <title>", "table", run.samples, run.began_s, True),
        "sweep": sweep_page("t", "table", "concurrency", points),
        "compare": compare_page("t", "table", {"a": [1.0, 2.0], "b": [3.0, 4.0]}, "req/s"),
        "nothing": run_page("t", "table", join([]), 0.0, False),
    }
    for page in pages.values():
        assert not re.search(r"(?:src|href)=|https?://|@import|url\(", page)
        assert "<title>" in page
        assert "nan" not in page
    assert "a &lt;title&gt;" in pages["run"]
    for title in ("Throughput over time", "Latency distribution", "Latency CDF"):
        assert title in pages["run"]
    assert "Latency against load" in pages["sweep"]


def test_results_are_written_whole(tmp_path: Path) -> None:
    path = result_path(ReportOptions(result_dir=str(tmp_path / "new")), "a name/with: signs")
    save_json(path, {"e2els": [1.0], "completed": 1})
    assert path.name == "a-name-with--signs.json"
    assert json.loads(path.read_text()) == {"e2els": [1.0], "completed": 1}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_an_unwritable_folder_is_refused_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BadValue, match="cannot be created"):
        result_path(ReportOptions(result_dir=str(file / "below")), "x")
    with pytest.raises(BadValue, match="cannot be written"):
        result_path(ReportOptions(result_dir=str(tmp_path), result_filename="."), "x")


def test_on_a_full_disk_the_figures_are_still_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotSaved, match="No space left on device"):
        save_json(Path("/dev/full"), {"completed": 3, "e2els": [0.1] * 10})
    assert json.loads(capsys.readouterr().out) == {"completed": 3}


def test_on_a_nearly_full_disk_the_figures_are_kept_without_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.bench.report import save

    write = save.write

    def small_only(path: Path, data: bytes) -> None:
        if len(data) > 100:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(save, "write", small_only)
    with pytest.raises(NotSaved, match="without the samples"):
        save_json(tmp_path / "r.json", {"completed": 3, "e2els": [0.1] * 100})
    assert json.loads((tmp_path / "r.figures.json").read_text()) == {"completed": 3}
