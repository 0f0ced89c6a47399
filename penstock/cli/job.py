"""One run of `penstock embed`: source → embedder → parts → output.

Memory holds a handful of chunks, however many rows there are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from penstock.cli.embed import EmbedOptions, Side
from penstock.cli.embedder import Embedder
from penstock.cli.flags import EngineFields
from penstock.cli.parts import Parts, check_output
from penstock.cli.rows import STDIN, Chunk, Columns, Source, by_extension, choose_columns, open_source
from penstock.cli.vectors import BY_EXTENSION, VectorFormat, Vectors, check_storable, vector_format
from penstock.errors import BadValue, ClientError
from penstock.inputs.processor import InputOptions
from penstock.types import OutputDtype, PoolingParams, Task

Advance = Callable[[int, float | None], None]


class Job(EmbedOptions, frozen=True, kw_only=True):
    """The command's flags."""

    engine: EngineFields


@dataclass(slots=True)
class Tally:
    """What this run did, for the line at its end."""

    rows: int = 0
    tokens: int = 0
    cut: int = 0  # rows that were longer than the model's limit


def run(job: Job) -> None:
    began_s = time.monotonic()
    if job.source == STDIN and job.resume:
        raise BadValue("stdin cannot be resumed: what was read is gone; use a file", param="--resume")
    check_output(job.output, resume=job.resume, overwrite=job.overwrite)
    form = job.output_format or by_extension(job.output, BY_EXTENSION, "--output-format")
    check_storable(form, _params(job).dtype)
    with open_source(job.source, job.input_format) as source:
        columns = choose_columns(source, job.column, job.id_column, job.keep)
        embedder = Embedder(job.engine, _params(job), _options(job))
        writer = vector_format(form, embedder.params.dtype, embedder.about)
        settings = {**_of_input(job, columns), "output": form, **embedder.fingerprint()}
        with Parts(job.output, writer.suffix, settings, resume=job.resume, overwrite=job.overwrite) as parts:
            resumed_at, tally = parts.rows, Tally()
            with _kept_for_later(parts, resumable=job.source != STDIN):
                if not parts.joined:
                    _embed_rows(job, source, columns, embedder, parts, writer, tally)
                total = parts.rows
                parts.finish(writer.join)
    _report(job, embedder, tally, resumed_at, total, time.monotonic() - began_s)


def _params(job: Job) -> PoolingParams:
    return PoolingParams(Task.EMBED, job.dimensions, job.normalize, OutputDtype(job.embed_dtype))


def _options(job: Job) -> InputOptions:
    return InputOptions(
        prompt_name=job.prompt_name,
        prompt=job.prompt,
        truncate_prompt_tokens=-1 if job.truncate else None,
        truncation_side="left" if job.truncation_side is Side.LEFT else "right",
    )


def _embed_rows(
    job: Job,
    source: Source,
    columns: Columns,
    embedder: Embedder,
    parts: Parts,
    writer: VectorFormat,
    tally: Tally,
) -> None:
    """Everything that is not on disk yet. The first chunk is read before the weights are."""
    chunks = source.chunks(columns, start=parts.rows, stop=job.limit, size=job.batch_rows)
    first = next(chunks, None)
    if first is None:
        if parts.rows == 0:
            nothing = np.zeros((0, embedder.width), embedder.params.dtype.numpy)
            parts.add(0, partial(_write, writer, source.nothing(columns), columns, nothing))
        return
    with embedder, _progress(parts.rows) as advance:
        for prepared, vectors in embedder.embed(chain([first], chunks)):
            chunk = prepared.chunk
            parts.add(len(chunk.texts), partial(_write, writer, chunk, columns, vectors))
            tally.rows += len(chunk.texts)
            tally.tokens += prepared.request.num_tokens
            tally.cut += prepared.cut
            advance(len(chunk.texts), chunk.read)


def _write(writer: VectorFormat, chunk: Chunk, columns: Columns, vectors: Vectors, file: Path) -> None:
    carried = chunk.carried
    if columns.id is None:
        carried = {"id": np.arange(chunk.first, chunk.first + len(chunk.texts), dtype=np.int64), **carried}
    writer.write(file, carried, vectors)


@contextmanager
def _kept_for_later(parts: Parts, *, resumable: bool) -> Iterator[None]:
    """When a run breaks off: say what is safe, or remove a folder that is of no use."""
    try:
        yield
    except BaseException as error:
        if not resumable or parts.rows == 0:
            parts.discard()
        elif not isinstance(error, ClientError):  # then the same flags can succeed
            _say(f"{parts.rows:,} rows are safe in {parts.folder}; continue with --resume")
        raise


def _of_input(job: Job, columns: Columns) -> dict[str, Any]:
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


def _report(job: Job, embedder: Embedder, tally: Tally, resumed_at: int, total: int, seconds: float) -> None:
    if total == 0:
        _say(f"{job.source} has no rows; {job.output} is empty")
        return
    rate = tally.rows / seconds if seconds else 0.0
    parts = [f"{tally.rows:,} rows, {tally.tokens:,} tokens in {seconds:.1f} s ({rate:,.0f} rows/s)"]
    if resumed_at:
        parts.append(f"{resumed_at:,} rows were done before")
    if tally.cut:
        parts.append(f"{tally.cut:,} rows were cut at {embedder.spec.max_model_len} tokens")
    _say("; ".join(parts) + f" → {job.output}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def _progress(rows: int) -> Iterator[Advance]:
    """A bar on a terminal, and nothing elsewhere."""
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
