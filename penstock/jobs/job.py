"""One run of `penstock embed`: source → embedder → parts → output.

Memory holds a few chunks at a time, however many rows the file has.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.errors import BadValue, ClientError
from penstock.inputs.processor import InputOptions
from penstock.jobs.embedder import Embedder
from penstock.jobs.formats import InputFormat, OutputFormat
from penstock.jobs.parts import Parts, check_output
from penstock.jobs.rows import STDIN, Chunk, Columns, Source, by_extension, choose_columns, open_source
from penstock.jobs.vectors import BY_EXTENSION, VectorFormat, Vectors, check_storable, vector_format
from penstock.types import OutputDtype, PoolingParams, Task

Advance = Callable[[int, float | None], None]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to embed, how and to where. `penstock embed` has a flag for each field."""

    source: str  # a file, or - for stdin
    output: Path
    engine: dict[str, Any]  # fields of `EngineConfig`
    input_format: InputFormat | None = None
    output_format: OutputFormat | None = None
    column: str | None = None
    id_column: str | None = None
    keep: Sequence[str] = ()
    limit: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    embed_dtype: str = OutputDtype.FLOAT32
    prompt_name: str | None = None
    prompt: str | None = None
    truncate: bool = True
    truncation_side: Literal["left", "right"] = "right"
    resume: bool = False
    overwrite: bool = False
    batch_rows: int = 2048


@dataclass(slots=True)
class RunStats:
    """Counts of this run, for the summary line at its end."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0  # rows beyond the model's limit


def run(job: Job) -> None:
    began_s = time.monotonic()
    if job.source == STDIN and job.resume:
        raise BadValue(
            "stdin cannot be resumed, because it cannot be read again; use a file", param="--resume"
        )
    check_output(job.output, resume=job.resume, overwrite=job.overwrite)
    form = job.output_format or by_extension(job.output, BY_EXTENSION, "--output-format")
    check_storable(form, _params(job).dtype)
    with open_source(job.source, job.input_format) as source:
        columns = choose_columns(source, job.column, job.id_column, job.keep)
        embedder = Embedder(job.engine, _params(job), _options(job))
        writer = vector_format(form, embedder.params.dtype, embedder.about)
        settings = {**_input_settings(job, columns), "output": form, **embedder.fingerprint()}
        with Parts(job.output, writer.suffix, settings, resume=job.resume, overwrite=job.overwrite) as parts:
            resumed_at, stats = parts.rows, RunStats()
            with _keep_parts(parts, resumable=job.source != STDIN):
                if not parts.joined:
                    _embed_rows(job, source, columns, embedder, parts, writer, stats)
                total = parts.rows
                parts.finish(writer.join)
    _report(job, embedder, stats, resumed_at, total, time.monotonic() - began_s)


def _params(job: Job) -> PoolingParams:
    return PoolingParams(Task.EMBED, job.dimensions, job.normalize, OutputDtype(job.embed_dtype))


def _options(job: Job) -> InputOptions:
    return InputOptions(
        prompt_name=job.prompt_name,
        prompt=job.prompt,
        truncate_prompt_tokens=-1 if job.truncate else None,
        truncation_side=job.truncation_side,
    )


def _embed_rows(
    job: Job,
    source: Source,
    columns: Columns,
    embedder: Embedder,
    parts: Parts,
    writer: VectorFormat,
    stats: RunStats,
) -> None:
    """Embed the rows that are not on disk yet. The first chunk is read before the weights are loaded."""
    chunks = source.chunks(columns, start=parts.rows, stop=job.limit, size=job.batch_rows)
    first = next(chunks, None)
    if first is None:
        if parts.rows == 0:
            empty = np.zeros((0, embedder.width), embedder.params.dtype.numpy)
            parts.add(0, partial(_write, writer, source.empty_chunk(columns), columns, empty))
        return
    with embedder, _progress(parts.rows) as advance:
        for prepared, vectors in embedder.embed(chain([first], chunks)):
            chunk = prepared.chunk
            parts.add(len(chunk.texts), partial(_write, writer, chunk, columns, vectors))
            stats.rows += len(chunk.texts)
            stats.tokens += prepared.request.num_tokens
            stats.truncated += prepared.num_truncated
            advance(len(chunk.texts), chunk.read)


def _write(writer: VectorFormat, chunk: Chunk, columns: Columns, vectors: Vectors, file: Path) -> None:
    carried = chunk.carried
    if columns.id is None:
        carried = {"id": np.arange(chunk.first, chunk.first + len(chunk.texts), dtype=np.int64), **carried}
    writer.write(file, carried, vectors)


@contextmanager
def _keep_parts(parts: Parts, *, resumable: bool) -> Iterator[None]:
    """When a run fails: say which rows are saved, or remove a folder that cannot be resumed."""
    try:
        yield
    except BaseException as error:
        if not resumable or parts.rows == 0:
            parts.discard()
        elif not isinstance(error, ClientError):  # the same flags can still succeed
            _report_line(f"{parts.rows:,} rows are safe in {parts.folder}; continue with --resume")
        raise


def _input_settings(job: Job, columns: Columns) -> dict[str, Any]:
    about: dict[str, Any] = {"input": job.source}
    if job.source != STDIN:
        file = Path(job.source).resolve()
        stat = file.stat()
        about = {"input": str(file), "input_size": stat.st_size, "input_mtime_ns": stat.st_mtime_ns}
    return {
        **about,
        "format": job.input_format,
        "column": columns.text,
        "id_column": columns.id,
        "keep": columns.keep,
        "limit": job.limit,
    }


def _report(
    job: Job, embedder: Embedder, stats: RunStats, resumed_at: int, total: int, seconds: float
) -> None:
    if total == 0:
        _report_line(f"{job.source} has no rows; {job.output} is empty")
        return
    rate = stats.rows / seconds if seconds else 0.0
    parts = [f"{stats.rows:,} rows, {stats.tokens:,} tokens in {seconds:.1f} s ({rate:,.0f} rows/s)"]
    if resumed_at:
        parts.append(f"{resumed_at:,} rows were embedded before")
    if stats.truncated:
        parts.append(f"{stats.truncated:,} rows were truncated to {embedder.spec.max_model_len} tokens")
    _report_line("; ".join(parts) + f" → {job.output}")


def _report_line(line: str) -> None:
    sys.stderr.write(line + "\n")


@contextmanager
def _progress(rows: int) -> Iterator[Advance]:
    """A progress bar on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda count, read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, rows=rows)

        def advance(count: int, read: float | None) -> None:
            done = bar.tasks[0].fields["rows"] + count
            bar.update(task, rows=done, total=None if read is None else 1.0, completed=read or 0.0)

        yield advance
