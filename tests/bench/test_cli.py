"""The bench commands from the command line: flags, tables, errors and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import serve as serve_module
from penstock.bench.options import BackendName, DatasetName
from penstock.cli.command import repeat_flags
from penstock.cli.main import app
from tests.bench.stub import Stub, stub
from tests.command_line import CliRunner
from tests.waiting import PATIENCE_S


def bench(*args: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def embeddings(server: Stub, prompts: Path, *more: object) -> Any:
    return bench(
        *("serve", "--backend", "openai-embeddings", "--endpoint", "/v1/embeddings"),
        *("--base-url", server.url, "--model", "gritlm-7b"),
        *("--dataset-name", "custom", "--dataset-path", prompts, "--skip-chat-template"),
        *more,
    )


S1 = """serve --backend openai-embeddings --endpoint /v1/embeddings --base-url http://127.0.0.1:8000
  --model gritlm-7b --dataset-name custom --dataset-path gritlm_bench.jsonl --skip-chat-template
  --custom-output-len 1 --num-prompts 2000 --num-warmups 100 --request-rate inf"""
S3 = """serve --model qwen3-30b-a3b --dataset-name random --host 127.0.0.1 --port 9256 --random-input-len 2
  --random-output-len 512 --request-rate inf --num-prompts 128 --num-warmups 16"""
S4 = """serve --model colbert-large --backend vllm-rerank --endpoint /v1/rerank --host 127.0.0.1 --port 9256
  --dataset-name random-rerank --num-prompts 2000 --request-rate inf --max-concurrency 64 --seed 0
  --random-input-len 2048 --random-range-ratio 0.5 --percentile-metrics e2el --metric-percentiles 50,95,99"""


@pytest.mark.parametrize(
    ("command", "backend", "dataset", "count"),
    [
        (S1, BackendName.OPENAI_EMBEDDINGS, DatasetName.CUSTOM, 2000),
        (S3, BackendName.OPENAI, DatasetName.RANDOM, 128),
        (S4, BackendName.VLLM_RERANK, DatasetName.RANDOM_RERANK, 2000),
    ],
)
def test_commands_of_vllm_bench_are_understood(
    command: str, backend: BackendName, dataset: DatasetName, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(serve_module, "bench_serve", lambda *groups: seen.extend(groups) or 0)
    result = bench(*command.split())
    assert result.exit_code == 0, result.output
    server, data, traffic, *_ = seen
    assert (server.backend, data.dataset_name, data.num_prompts) == (backend, dataset, count)
    assert traffic.request_rate == float("inf")


def test_the_first_scenario_runs_at_small_size(server: Stub, prompts: Path) -> None:
    flags = ("--custom-output-len", 1, "--num-prompts", 30, "--num-warmups", 10, "--request-rate", "inf")
    result = embeddings(server, prompts, *flags)
    assert result.exit_code == 0, result.output
    assert "============ Serving Benchmark Result ============" in result.stdout
    assert re.search(r"Successful requests: +30\b", result.stdout)
    assert re.search(r"Failed requests: +0\b", result.stdout)
    assert "CPU share of the machine (%)" in result.stdout
    assert "Own ceiling, estimated (req/s)" in result.stdout
    assert len(server.bodies) == 1 + 10 + 30  # trial request, warm-up, run


def test_the_second_scenario_runs_at_small_size(server: Stub, tmp_path: Path) -> None:
    repeats = (8, 12, 16)
    texts = ["retrieval benchmark sentence " * n for n in repeats]
    file = tmp_path / "s2.jsonl"
    file.write_text(json.dumps({"prompt": texts}))
    body = '{"task": "token_embed", "encoding_format": "base64"}'
    result = bench(
        *("serve", "--backend", "vllm-pooling", "--base-url", server.url, "--model", "m"),
        *("--dataset-name", "custom", "--dataset-path", file, "--num-prompts", 1, "--skip-chat-template"),
        *("--extra-body", body, "--max-concurrency", 4, "--duration", 0.3, "--no-keepalive"),
        *("--metric-percentiles", "50,95,99"),
    )
    assert result.exit_code == 0, result.output
    route, sent = server.bodies[-1]
    assert route == "/pooling"
    assert (sent["task"], sent["truncate_prompt_tokens"], len(sent["input"])) == ("token_embed", -1, 3)
    for word in ("P50 E2EL", "P95 E2EL", "P99 E2EL", "Input throughput (inputs/s)"):
        assert word in result.stdout


def test_the_fourth_scenario_runs_at_small_size(server: Stub, model: Path) -> None:
    result = bench(
        *("serve", "--model", model, "--backend", "vllm-rerank", "--endpoint", "/v1/rerank"),
        *("--host", "127.0.0.1", "--port", server.port, "--dataset-name", "random-rerank"),
        *("--num-prompts", 20, "--max-concurrency", 4, "--random-input-len", 64),
        *("--random-range-ratio", 0.5, "--percentile-metrics", "e2el", "--metric-percentiles", "50,95,99"),
    )
    assert result.exit_code == 0, result.output
    assert re.search(r"Total input tokens: +220\b", result.stdout)


def test_generation_is_reported_by_its_tokens(server: Stub, model: Path) -> None:
    result = bench(
        *("serve", "--model", model, "--port", server.port, "--random-input-len", 8),
        *("--random-output-len", 6, "--num-prompts", 5, "--temperature", 0),
    )
    assert result.exit_code == 0, result.output
    assert re.search(r"Total generated tokens: +30\b", result.stdout)
    for word in ("Mean TTFT", "P99 TPOT", "Median ITL"):
        assert word in result.stdout
    assert server.bodies[-1][1]["ignore_eos"] is True


def test_everything_is_saved(server: Stub, prompts: Path, tmp_path: Path) -> None:
    flags = ("--num-prompts", 20, "--save-result", "--result-dir", tmp_path / "out", "--label", "mine")
    result = embeddings(server, prompts, *flags)
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "out").glob("mine-*.json")
    saved = json.loads(file.read_text())
    assert saved["complete"] and saved["valid"]
    assert saved["completed"] == len(saved["e2els"]) == 20
    assert file.with_suffix(".html").read_text().startswith("<!doctype html>")


def test_a_missing_server_is_reported_in_one_line(prompts: Path) -> None:
    with stub() as server:
        gone = server
    result = embeddings(gone, prompts)
    assert result.exit_code == 2
    assert "error: no server answers at http://127.0.0.1" in result.stderr


def test_waiting_for_a_server_ends_after_the_timeout(prompts: Path) -> None:
    with stub() as server:
        gone = server
    result = embeddings(gone, prompts, "--ready-check-timeout-sec", 0.3)
    assert result.exit_code == 2
    assert "no server answers" in result.stderr


def test_a_wrong_endpoint_is_reported(server: Stub, prompts: Path) -> None:
    result = embeddings(server, prompts, "--endpoint", "/v1/nothing")
    assert result.exit_code == 2
    assert "404" in result.stderr
    assert "--endpoint" in result.stderr


@pytest.mark.parametrize(
    ("content", "said"), [(None, "there is no such file"), ("{broken", "line 1 is not JSON")]
)
def test_bad_data_is_reported(content: str | None, said: str, server: Stub, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content)
    result = embeddings(server, file)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_run_with_many_failures_is_saved_as_not_valid(prompts: Path, tmp_path: Path) -> None:
    with stub(fail_every=2) as server:
        flags = ("--num-prompts", 20, "--max-concurrency", 2, "--save-result")
        result = embeddings(server, prompts, *flags, "--result-dir", tmp_path, "--result-filename", "r.json")
    assert result.exit_code == 1
    assert re.search(r"Failed requests: +10\b", result.stdout)
    assert "10 × HTTP 500 Internal Server Error: made to fail" in result.stderr
    assert "NOT VALID" in result.stderr
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["completed"], saved["failed"], saved["valid"]) == (10, 10, False)


def test_max_failed_allows_failures(prompts: Path) -> None:
    with stub(fail_every=2) as server:
        result = embeddings(server, prompts, "--num-prompts", 10, "--max-failed", 0.6)
    assert result.exit_code == 0, result.output


def test_on_a_full_disk_the_figures_are_still_printed(server: Stub, prompts: Path) -> None:
    flags = ("--num-prompts", 5, "--save-result", "--result-dir", "/dev", "--result-filename", "full")
    result = embeddings(server, prompts, *flags)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "Serving Benchmark Result" in result.stdout
    assert '"completed":5' in result.stdout
    assert not Path("/dev/full").is_file()


def test_ctrl_c_keeps_the_measurements(prompts: Path, tmp_path: Path) -> None:
    with stub(delay_s=0.02) as server:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from penstock.cli.main import main; main()", "bench", "serve"),
                *("--backend", "openai-embeddings", "--base-url", server.url, "--model", "m"),
                *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
                *("--max-concurrency", "4", "--duration", "60", "--save-result"),
                *("--result-dir", str(tmp_path), "--result-filename", "r.json"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while len(server.bodies) < 40 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # signal the whole group, like a terminal
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "the run was interrupted" in err
    assert "Successful requests" in out
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["complete"] is False
    assert saved["completed"] >= 20


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--metric-percentiles", "x"), "--metric-percentiles"),
        (("--percentile-metrics", "speed"), "--percentile-metrics"),
        (("--percentile-metrics", "ttft"), "--percentile-metrics"),
        (("--goodput", "e2el"), "--goodput"),
        (("--goodput", "ttft:5"), "only generation"),
        (("--request-rate", "0"), "--request-rate"),
        (("--num-processes", "0"), "--num-processes"),
        (("--header", "x"), "--header"),
        (("--sweep", "speed"), "--sweep"),
        (("--sweep", "rate", "--request-rate", "5"), "leave out --request-rate"),
    ],
)
def test_invalid_flags_are_refused(flags: tuple[str, ...], said: str, server: Stub, prompts: Path) -> None:
    result = embeddings(server, prompts, *flags)
    assert result.exit_code == 2
    assert said in result.stderr


def test_several_values_may_follow_one_flag() -> None:
    given = ["--goodput", "e2el:1", "ttft:2", "--header", "a=b", "--seed", "1"]
    repeatable = {"--goodput", "--header"}
    assert repeat_flags(given, repeatable) == [
        "--goodput",
        "e2el:1",
        "--goodput",
        "ttft:2",
        "--header",
        "a=b",
        "--seed",
        "1",
    ]


def test_a_sweep_prints_and_saves_its_points(server: Stub, prompts: Path, tmp_path: Path) -> None:
    flags = (
        "--sweep",
        "concurrency=1,2,4",
        "--duration",
        0.2,
        "--goodput",
        "e2el:600000",
        "--num-prompts",
        10,
    )
    result = embeddings(
        server, prompts, *flags, "--save-result", "--result-dir", tmp_path, "--result-filename", "s.json"
    )
    assert result.exit_code == 0, result.output
    assert "← knee" in result.stdout
    assert "Highest load within e2el:600000 for 99% of requests: concurrency 4" in result.stdout
    saved = json.loads((tmp_path / "s.json").read_text())
    assert [point["load"] for point in saved["points"]] == [1, 2, 4]
    assert all(point["e2els"] for point in saved["points"])
    assert "Latency against load" in (tmp_path / "s.html").read_text()


def test_the_client_measures_itself(model: Path) -> None:
    flags = ("--random-input-len", 8, "--num-prompts", 5, "--duration", 0.3, "--tokenizer", model)
    for backend in ("openai-embeddings", "openai", "tei"):
        result = bench("serve", "--self-test", "--backend", backend, *flags)
        assert result.exit_code == 0, result.output
        assert "Load Client Self-Test" in result.stdout
        assert "Ceiling beside a null server (req/s)" in result.stdout
        assert ("Ceiling beside a null server (tok/s)" in result.stdout) == (backend == "openai")


def test_the_load_client_needs_no_torch() -> None:
    code = (
        "import sys, penstock.cli.bench, penstock.bench.serve, penstock.bench.compare\n"
        "import penstock.bench.selftest, penstock.bench.load.worker\n"
        "print(*sorted({'torch', 'transformers', 'scipy', 'sentence_transformers'} & sys.modules.keys()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert ran.stdout.strip() == ""
