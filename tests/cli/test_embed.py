"""`penstock embed` end to end: the engine's own vectors, in every format, after any interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Engine
from penstock.cli.vector_flags import EmbedDtype
from penstock.types import OutputDtype
from tests.cli.runs import (
    NULL,
    error_of,
    invoke,
    peak_memory,
    read_jsonl,
    run,
    run_interrupted,
    run_killed,
    spawn,
    write_jsonl,
)
from tests.thinning import thorough

TEXTS = [f"{word} number {i} " * (1 + i % 7) for i in range(20) for word in ("river", "turbine")]
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu") as engine:
        yield engine


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A thousand short lines, for runs on the null device."""
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    return file


def vectors(file: Path) -> np.ndarray:
    column = pq.read_table(file)["embedding"].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)


def ids(file: Path) -> list[int]:
    return (
        [row["id"] for row in read_jsonl(file)]
        if file.suffix == ".jsonl"
        else pq.read_table(file)["id"].to_pylist()
    )


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "txt"])
def test_vectors_are_the_engines_for_every_input_format(
    tmp_path: Path, output: Path, engine: Engine, form: str
) -> None:
    source = tmp_path / f"in.{form}"
    if form == "jsonl":
        write_jsonl(source, [{"text": text} for text in TEXTS])
    elif form == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), source)
    else:
        source.write_text("".join(f"{line}\n" for line in (["text"] if form == "csv" else []) + TEXTS))
    result = invoke("embed", source, "-o", output, *CPU, "--batch-rows", 16)
    assert result.exit_code == 0, result.output
    assert ids(output) == list(range(len(TEXTS)))
    np.testing.assert_allclose(vectors(output), engine.embed(TEXTS), atol=2e-5)
    assert list(tmp_path.glob("*.parts")) == []


def test_jsonl_output_holds_the_same_vectors(tmp_path: Path, engine: Engine) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"key": f"k{i}", "body": t, "n": i} for i, t in enumerate(TEXTS)]
    )
    output = tmp_path / "out.jsonl"
    args = ("--column", "body", "--id-column", "key", "--keep", "n", "--keep", "body")
    assert invoke("embed", source, "-o", output, *CPU, *args).exit_code == 0
    rows = read_jsonl(output)
    assert [list(row) for row in rows] == [["key", "n", "body", "embedding"]] * len(TEXTS)
    assert [(row["key"], row["n"], row["body"]) for row in rows] == [
        (f"k{i}", i, t) for i, t in enumerate(TEXTS)
    ]
    np.testing.assert_allclose([row["embedding"] for row in rows], engine.embed(TEXTS), atol=2e-5)


def test_flags_reach_the_engine(tmp_path: Path, output: Path, engine: Engine) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    args = ("--dimensions", 64, "--no-normalize", "--prompt", "query: ", "--max-model-len", 12)
    args = (*args, "--truncation-side", "left")
    result = invoke("embed", source, "-o", output, *CPU, *args, "--limit", 30)
    assert result.exit_code == 0
    with Engine(device="cpu", max_model_len=12) as short:
        expected = short.embed(
            TEXTS[:30],
            dimensions=64,
            normalize=False,
            prompt="query: ",
            truncate_prompt_tokens=-1,
            truncation_side="left",
        )
    np.testing.assert_allclose(vectors(output), expected, atol=1e-4)
    assert "rows were truncated to 12 tokens" in result.stderr


def test_pooler_config_changes_the_pooling(tmp_path: Path, output: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS[:3]])
    pooler = '{"pooling_type": "cls", "normalize": false}'
    assert invoke("embed", source, "-o", output, *CPU, "--pooler-config", pooler).exit_code == 0
    with Engine(device="cpu", pooler_config={"pooling_type": "cls", "normalize": False}) as cls:
        np.testing.assert_allclose(vectors(output), cls.embed(TEXTS[:3]), atol=1e-4)


def test_every_output_dtype_of_the_engine_has_a_flag_value() -> None:
    assert [dtype.value for dtype in EmbedDtype] == [dtype.value for dtype in OutputDtype]


@pytest.mark.parametrize("dtype", ["float16", "int8", "ubinary"])
def test_dimensions_and_dtype_make_vectors_smaller(
    tmp_path: Path, output: Path, engine: Engine, dtype: str
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS[:4]])
    assert invoke("embed", source, "-o", output, *CPU, "--embed-dtype", dtype).exit_code == 0
    stored, expected = vectors(output), engine.embed(TEXTS[:4], dtype=dtype)
    assert stored.dtype == expected.dtype and stored.shape == expected.shape
    if dtype != "ubinary":
        np.testing.assert_allclose(stored.astype(float), expected.astype(float), atol=1.01)


def test_an_empty_text_has_a_vector(tmp_path: Path, output: Path, engine: Engine) -> None:
    (tmp_path / "in.txt").write_text("one\n\nthree\n")
    assert invoke("embed", tmp_path / "in.txt", "-o", output, *CPU).exit_code == 0
    np.testing.assert_allclose(vectors(output), engine.embed(["one", "", "three"]), atol=2e-5)


def test_the_summary_counts_rows_and_tokens(lines: Path, output: Path) -> None:
    shown = invoke("embed", lines, "-o", output, *NULL, "--batch-rows", 300).stderr
    assert shown.startswith("1,000 rows, ") and "tokens in " in shown and shown.count("\n") == 1


def test_stdin_is_read_without_a_file(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    ran = run("embed", "-", "--format", "csv", "--column", "t", "-o", output, *NULL, stdin=b"n,t\n1,a\n2,b\n")
    assert ran.returncode == 0, ran.stderr
    assert ids(output) == [0, 1]


def test_the_null_device_runs_without_torch(lines: Path, output: Path) -> None:
    program = (
        "import sys; from penstock.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as stopped: assert stopped.code == 0\n"
        "assert 'torch' not in sys.modules and 'starlette' not in sys.modules"
    )
    args = ["embed", str(lines), "-o", str(output), *NULL]
    ran = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr


# Interruptions


def test_a_run_that_is_killed_and_resumed_writes_the_same_rows(tmp_path: Path) -> None:
    rows = [{"key": i * 7, "text": TEXTS[i % len(TEXTS)] + str(i)} for i in range(240)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    whole, broken = tmp_path / "whole.parquet", tmp_path / "broken.parquet"
    args = (*CPU, "--id-column", "key", "--batch-rows", 32)
    run_killed(4, "embed", source, "-o", broken, *args)
    done = 32 * 4
    assert not broken.exists()

    resumed = invoke("embed", source, "-o", broken, *args, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert f"{done:,} rows were embedded before" in resumed.stderr
    assert resumed.stderr.startswith(f"{len(rows) - done:,} rows, ")  # no row was embedded twice

    assert invoke("embed", source, "-o", whole, *args).exit_code == 0
    assert pq.read_table(broken)["key"].to_pylist() == [row["key"] for row in rows]
    assert pq.read_table(broken).drop(["embedding"]) == pq.read_table(whole).drop(["embedding"])
    np.testing.assert_allclose(vectors(broken), vectors(whole), atol=2e-5)


def test_a_run_that_is_killed_repeatedly_still_completes(tmp_path: Path) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"line {i}\n" for i in range(20_000)))
    folder = tmp_path / "out.jsonl.parts"
    for parts in (1, 39, 50):
        args = ("embed", source, "-o", output, *NULL, "--dimensions", 4, "--batch-rows", 50, "--resume")
        run_killed(parts, *args)
        assert not output.exists()
    assert len(list(folder.glob("0*"))) == 90
    assert invoke(*args[:-3], "--batch-rows", 1111, "--resume").exit_code == 0  # the size may change
    assert ids(output) == list(range(20_000))
    assert not folder.exists()


def test_ctrl_c_says_how_to_continue(tmp_path: Path, lines: Path) -> None:
    args = ("embed", lines, "-o", tmp_path / "out.jsonl", *NULL, "--batch-rows", 10)
    ran = run_interrupted(signal.SIGINT, 3, *args)
    assert ran.returncode == 130
    assert b"30 rows are safe in" in ran.stderr and b"continue with --resume" in ran.stderr
    assert b"Traceback" not in ran.stderr


def test_resuming_with_other_settings_is_refused(tmp_path: Path, lines: Path) -> None:
    output = tmp_path / "out.jsonl"
    args = ("embed", lines, "-o", output, *NULL, "--batch-rows", 100)
    run_killed(1, *args)
    assert "unfinished run; continue with --resume" in error_of(*args)
    assert "(dimensions: none, now 8)" in error_of(*args, "--resume", "--dimensions", 8)
    lines.write_text(lines.read_text() + "one more\n")
    assert "input_size" in error_of(*args, "--resume")
    assert invoke(*args, "--overwrite").exit_code == 0
    assert ids(output) == list(range(1001))


def test_resume_without_anything_to_resume_starts_from_the_beginning(lines: Path, output: Path) -> None:
    assert invoke("embed", lines, "-o", output, *NULL, "--resume").exit_code == 0
    assert ids(output) == list(range(1000))


def test_a_run_that_fails_at_once_leaves_no_files(tmp_path: Path, output: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}, {"text": 1}])
    error_of("embed", source, "-o", output, *NULL)
    assert list(tmp_path.iterdir()) == [source]


# Size


@thorough
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    with source.open("w") as stream:
        stream.writelines(f"row {i}\n" for i in range(160_000))
    args = ("embed", source, *NULL)
    few = peak_memory(*args, "-o", tmp_path / "few.parquet", "--limit", 50_000)
    many = peak_memory(*args, "-o", tmp_path / "many.parquet")
    assert pq.ParquetFile(tmp_path / "many.parquet").metadata.num_rows == 160_000
    extra_vectors = 110_000 * 384 * 4
    assert many - few < extra_vectors / 4


def test_a_terminal_gets_a_progress_bar(lines: Path, output: Path) -> None:
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    process = spawn("embed", lines, "-o", output, *NULL, "--batch-rows", 100, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while data := os.read(master, 4096):
            shown += data
    except OSError:
        pass  # the other end closed
    os.close(master)
    assert process.wait() == 0
    assert b"\x1b[" in shown and b"1,000 rows, " in shown


# Bad usage


def test_an_input_without_rows_gives_an_empty_output(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": pa.array([], pa.string()), "n": pa.array([], pa.int16())}), tmp_path / "in.parquet"
    )
    (tmp_path / "in.jsonl").write_text("")
    for source in ("in.parquet", "in.jsonl"):
        result = invoke(
            "embed", tmp_path / source, "-o", tmp_path / "out.parquet", *NULL, "--keep", "n", "--overwrite"
        )
        assert result.exit_code == 0 and "has no rows" in result.stderr
        schema = pq.read_schema(tmp_path / "out.parquet")
        assert schema.names == ["id", "n", "embedding"]
        assert schema.field("embedding").type == pa.list_(pa.float32(), 384)
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0
    assert invoke("embed", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NULL).exit_code == 0
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_usage_errors_are_reported_before_anything_is_loaded(
    tmp_path: Path, lines: Path, output: Path
) -> None:
    for args, message in [
        ((tmp_path / "none.txt", "-o", output), "there is no file"),
        ((lines, "-o", tmp_path / "out.npy"), "out.npy has no known extension (.parquet, .jsonl"),
        ((lines, "-o", tmp_path / "none" / "out.jsonl"), "there is no folder"),
        ((lines, "-o", output, "--column", "body"), "no column 'body' for --column; it has: text"),
        ((lines, "-o", output, "--embed-dtype", "bfloat16"), "Parquet has no bfloat16"),
        (
            (lines, "-o", output, "--model", "no/such/model"),
            "'no/such/model' is neither a folder nor a hub id",
        ),
        ((lines, "-o", output, "--dimensions", 1000), "dimensions is 1000, but the model's vectors have 384"),
        ((lines, "-o", output, "--prompt-name", "query"), "has no prompt named 'query'"),
        ((lines, "-o", output, "--prompt-name", "a", "--prompt", "b"), "exclude each other"),
        ((lines, "-o", output, "--pooler-config", "{"), "--pooler-config is not valid JSON"),
        ((lines, "-o", output, "--hf-overrides", "[1]"), "--hf-overrides takes a JSON object"),
        ((lines, "-o", output, "--pooler-config", '{"x": 1}'), "unknown field `x`"),
        ((lines, "-o", output, "--max-model-len", 9999), "but the model has positions for"),
        (("-", "-o", output), "stdin needs --format"),
        (("-", "--format", "text", "-o", output, "--resume"), "stdin cannot be resumed"),
    ]:
        assert message in error_of("embed", *args, *NULL), args
    assert not output.exists() and list(tmp_path.glob("*.parts")) == []


def test_an_existing_output_is_not_replaced_without_overwrite(lines: Path, output: Path) -> None:
    output.write_text("precious")
    assert "replace it with --overwrite" in error_of("embed", lines, "-o", output, *NULL)
    assert output.read_text() == "precious"
    assert invoke("embed", lines, "-o", output, *NULL, "--overwrite").exit_code == 0
    assert len(ids(output)) == 1000


def test_an_error_about_a_long_text_names_its_row(tmp_path: Path, output: Path) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"text": "word " * (300 if i == 7 else 3)} for i in range(10)]
    )
    message = error_of("embed", source, "-o", output, *NULL, "--batch-rows", 5, "--no-truncate")
    assert "row 7 has 302 tokens, but the model takes at most 256" in message
