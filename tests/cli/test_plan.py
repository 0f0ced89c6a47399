"""`penstock plan`: its figures, its samples, and its errors."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from penstock.planning.rates import recorded_rates
from tests.checkpoints import write_bert, write_cross_encoder, write_late, write_m3, write_splade
from tests.cli.runs import error_of, invoke, write_jsonl
from tests.planning.shapes import with_config

BERT_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
}


def plan(*args: object) -> dict[str, Any]:
    result = invoke("plan", *args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def bert_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a model with measured rates, without weights."""
    folder = with_config(tmp_path_factory.mktemp("bert-base"), **BERT_BASE)
    (folder / "modules.json").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("tiny"))


def test_a_measured_model_is_planned_by_its_recorded_rate(bert_base: Path) -> None:
    made = plan("--docs", "1e9", "--tokens", "128", "--model", bert_base, "--gpu", "h200", "--gpus", 4)
    recorded = next(model for model in recorded_rates().measured[0].model if model.name == "bge-base")
    measured = statistics.geometric_mean(recorded.tokens_per_s[128])
    expected = min(measured, recorded_rates().host.tokens_per_s)
    assert made["rate"]["basis"] == "measured"
    assert made["rate"]["tokens_per_s"] == pytest.approx(expected)
    assert made["gpu_hours"] == pytest.approx(128e9 / expected / 3600)
    assert made["wall_hours"] == pytest.approx(made["gpu_hours"] / 4)
    assert made["cost"] is None
    assert [kind["bytes"] for kind in made["storage"]] == [3072e9, 1536e9, 768e9, 96e9]


def test_the_table_has_what_json_has(bert_base: Path) -> None:
    flags = ("--docs", "250M", "--tokens", "200", "--model", bert_base, "--gpu", "a100", "--price", "2.5")
    text = invoke("plan", *flags, "--qps", "2k", "--hours", "12").stdout
    for part in ("250,000,000 of 200 tokens", "estimate, not measured", "GPU hours", "cost", "dense, binary"):
        assert part in text
    assert "GPUs for 12 hours" in text and "queries" in text and "note: no rate was measured on a100" in text


def test_a_sample_gives_the_lengths(tiny: Path, tmp_path: Path) -> None:
    sample = write_jsonl(
        tmp_path / "s.jsonl", [{"text": "the water"}, {"text": "the " * 18}, {"text": "oil " * 900}]
    )
    made = plan("--docs", "30", "--sample", sample, "--model", tiny, "--rate", "1k")
    limit = 64
    lengths = [4, 20, limit]  # including [CLS] and [SEP]
    assert made["tokens"]["total"] == pytest.approx(10 * sum(lengths))
    assert made["tokens"]["from_sample"]
    assert made["network"]["text_bytes"] == pytest.approx(10 * (9 + 72 + 3600))
    assert "33.3% of the sample is longer" in made["notes"][0]


def test_measuring_runs_the_model(tiny: Path) -> None:
    flags = (
        "--docs",
        "1M",
        "--tokens",
        "16",
        "--model",
        tiny,
        "--measure",
        "--seconds",
        "0.1",
        "--device",
        "null",
    )
    made = plan(*flags)
    assert made["rate"]["basis"] == "measured here"
    assert made["rate"]["tokens_per_s"] > 0 and made["gpu_hours"] > 0


def test_measuring_reads_the_sample(tiny: Path, tmp_path: Path) -> None:
    sample = write_jsonl(tmp_path / "s.jsonl", [{"body": f"the water {number}"} for number in range(20)])
    flags = ("--measure", "--seconds", "0.1", "--device", "null", "--column", "body")
    assert plan("--docs", "1M", "--sample", sample, "--model", tiny, *flags)["rate"]["tokens_per_s"] > 0


def test_each_kind_of_output_is_stored(tmp_path: Path) -> None:
    rate = ("--docs", "10", "--tokens", "20", "--rate", "1M")
    kinds = {
        write: {kind["kind"] for kind in plan(*rate, "--model", write(tmp_path / write.__name__))["storage"]}
        for write in (write_bert, write_late, write_splade, write_m3, write_cross_encoder)
    }
    assert kinds[write_bert] == {"dense"}
    assert kinds[write_late] == {"multi-vector"}
    assert kinds[write_splade] == {"sparse"}
    assert kinds[write_m3] == {"dense", "multi-vector", "sparse"}
    assert kinds[write_cross_encoder] == {"scores"}


def test_dimensions_and_terms_can_be_fewer(tiny: Path, tmp_path: Path) -> None:
    rate = ("--docs", "10", "--tokens", "20", "--rate", "1M")
    assert plan(*rate, "--model", tiny, "--dimensions", "8")["storage"][0]["bytes_per_doc"] == 32
    splade = write_splade(tmp_path / "splade")
    assert plan(*rate, "--model", splade, "--sparse-terms", "50")["storage"][0]["bytes_per_doc"] == 400


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--docs", "many", "--tokens", "9", "--gpu", "h200"), "--docs is 'many'"),
        (("--docs", "1e9", "--tokens", "0", "--gpu", "h200"), "--tokens is 0"),
        (("--docs", "1e9", "--gpu", "h200"), "either --tokens"),
        (("--docs", "1e9", "--tokens", "9", "--sample", "x.txt", "--gpu", "h200"), "either --tokens"),
        (("--docs", "1e9", "--sample", "nothing.txt", "--gpu", "h200"), "there is no file nothing.txt"),
        (("--docs", "1e9", "--tokens", "9"), "give --gpu (a10, "),
        (("--docs", "1e9", "--tokens", "9", "--gpu", "k80"), "--gpu k80 is not known"),
        (("--docs", "1e9", "--tokens", "9", "--gpu", "cpu"), "--measure"),
        (("--docs", "1e9", "--tokens", "9", "--rate", "1k", "--measure"), "exclude one another"),
        (("--docs", "1e9", "--tokens", "9", "--rate", "fast"), "--rate is 'fast'"),
        (
            ("--docs", "1e9", "--tokens", "9", "--gpu", "h200", "--dimensions", "9999"),
            "vectors of 32 numbers",
        ),
        (("--docs", "1e9", "--tokens", "9", "--gpu", "h200", "--quantization", "fp8"), "recorded in bf16"),
        (("--docs", "1e9", "--tokens", "9", "--rate", "1k", "--hours", "-1"), "--hours is -1"),
        (
            ("--docs", "1e9", "--tokens", "9", "--rate", "1k", "--qps", "5", "--utilization", "2"),
            "--utilization",
        ),
    ],
)
def test_misuse_is_one_line_that_names_the_flag(tiny: Path, flags: tuple[str, ...], message: str) -> None:
    assert message in error_of("plan", "--model", tiny, *flags)


def test_a_model_beyond_the_gpu_is_refused_unless_its_rate_is_given(tmp_path: Path) -> None:
    folder = with_config(tmp_path, hidden_size=8192, num_hidden_layers=80, intermediate_size=65536)
    (folder / "modules.json").unlink(missing_ok=True)
    flags = ("--docs", "1e9", "--tokens", "9", "--model", folder, "--gpu", "l4")
    assert "give --rate" in error_of("plan", *flags)
    assert plan(*flags, "--rate", "100")["gpu_hours"] > 0
