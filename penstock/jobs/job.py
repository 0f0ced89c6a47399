"""One run of `penstock embed`: source → embedder → output.

Only a few chunks are in memory at a time, however many rows the input has. Runs in this process and runs on
Ray share `OpenedJob`: the plan of blocks, the output, and the report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.errors import BadValue, ClientError
from penstock.jobs.blocks import Block, VectorColumns
from penstock.jobs.embedder import Embedder, PreparedChunk, VectorOptions
from penstock.jobs.formats import InputFormat, OnError, OutputFormat, VectorKind
from penstock.jobs.images import DEFAULT_PDF_DPI
from penstock.jobs.inputs import InputFile, describe_files, find_files, open_inputs
from penstock.jobs.outputs import (
    BlockWriter,
    CheckSink,
    OpenSink,
    Output,
    RunFlags,
    SinkOutput,
    check_file_or_folder,
    check_folder,
    open_output,
)
from penstock.jobs.parts import Cut, Span, read_manifest
from penstock.jobs.plan import first_missing, read_chunks, without_committed
from penstock.jobs.progress import report_line, show_progress
from penstock.jobs.rows import Chunk, Columns, Source, choose_columns
from penstock.jobs.storage import open_folder
from penstock.jobs.vectors import check_storable
from penstock.types import OutputDtype


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The input, options and output of a job. `penstock embed` has a flag for each field. Picklable."""

    inputs: tuple[str, ...]  # files, folders, patterns and URIs, or - for stdin
    output: str  # a file, a folder, or a URI of a folder; with a sink, the folder of its progress
    engine: dict[str, Any]  # fields of `EngineConfig`
    input_format: InputFormat | None = None
    output_format: OutputFormat | None = None
    column: str | None = None
    id_column: str | None = None
    keep: Sequence[str] = ()
    limit: int | None = None
    vectors: tuple[VectorKind, ...] = (VectorKind.DENSE,)
    dimensions: int | None = None
    normalize: bool | None = None
    embed_dtype: str = OutputDtype.FLOAT32
    prompt_name: str | None = None
    adapter: str | None = None
    prompt: str | None = None
    truncate: bool = True
    truncation_side: Literal["left", "right"] = "right"
    on_error: OnError = OnError.FAIL
    resume: bool = False
    overwrite: bool = False
    batch_rows: int = 2048
    pdf_dpi: int = DEFAULT_PDF_DPI

    @property
    def reads_stdin(self) -> bool:
        return self.inputs == ("-",)

    @property
    def skips_bad_rows(self) -> bool:
        return self.on_error is OnError.SKIP

    def vector_options(self) -> VectorOptions:
        return VectorOptions(
            kinds=tuple(dict.fromkeys(self.vectors)),
            dimensions=self.dimensions,
            normalize=self.normalize,
            dtype=OutputDtype(self.embed_dtype),
            prompt_name=self.prompt_name,
            adapter=self.adapter,
            prompt=self.prompt,
            truncate=self.truncate,
            truncation_side=self.truncation_side,
        )

    def embedder(self) -> Embedder:
        return Embedder(self.engine, self.vector_options(), skips_bad_rows=self.skips_bad_rows)


class Sink(msgspec.Struct, frozen=True, kw_only=True):
    """A vector store as the output. Picklable."""

    label: str  # its name in messages, as given by the user
    open: OpenSink
    check: CheckSink


@dataclass(slots=True)
class RunStats:
    """Counts of a run, for the summary line at its end."""

    rows: int = 0  # rows with vectors
    bad: int = 0
    tokens: int = 0
    truncated: int = 0  # rows that exceeded the model's limit

    def add(self, prepared: PreparedChunk) -> None:
        self.rows += len(prepared.chunk.texts)
        self.bad += len(prepared.chunk.bad)
        self.tokens += prepared.num_tokens
        self.truncated += prepared.num_truncated

    def as_dict(self) -> dict[str, int]:
        return {"rows": self.rows, "bad": self.bad, "tokens": self.tokens, "truncated": self.truncated}

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add the counts of another process."""
        self.rows += counts["rows"]
        self.bad += counts["bad"]
        self.tokens += counts["tokens"]
        self.truncated += counts["truncated"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockMaker:
    """Turns embedded chunks into blocks of the output. Picklable."""

    columns: Columns
    vectors: VectorColumns
    id_name: str  # name of the id column in the output

    def block(self, chunk: Chunk, vectors: dict[VectorKind, Any]) -> Block:
        carried = dict(chunk.carried)
        if self.columns.id is None:
            ids: Any = np.array(chunk.numbers, dtype=np.int64)
        else:
            ids = carried.pop(self.columns.id)
        bad = chunk.bad
        if self.columns.id is None:
            bad = tuple(msgspec.structs.replace(each, id=each.row) for each in bad)
        filled = vectors or self.vectors.empty()
        return Block(Span(chunk.first, chunk.count), {self.id_name: ids, **carried}, filled, bad)


@dataclass(frozen=True, slots=True, eq=False)
class OpenedJob:
    """A job whose input, model and output have been checked. Weights are not loaded yet."""

    job: Job
    files: list[InputFile]
    source: Source
    columns: Columns
    embedder: Embedder
    maker: BlockMaker
    output: Output

    @property
    def writer(self) -> BlockWriter:
        return self.output.writer

    @property
    def cut(self) -> Cut:
        """The limits of blocks, as set by the run that began this output."""
        return self.output.parts.manifest.cut

    def missing_chunks(self) -> Iterator[Chunk]:
        """Yield the chunks that are not committed yet."""
        start = first_missing(self.output.parts.spans)
        chunks = read_chunks(self.source, self.columns, self.cut, start, self.job.limit)
        return without_committed(chunks, self.output.parts.spans)

    def finish(self) -> None:
        """Complete the output. An input without rows produces an output without rows."""
        parts = self.output.parts
        if parts.is_running and not parts.spans:
            empty = self.source.empty_chunk(self.columns)
            self.writer.commit(self.maker.block(empty, {}))
            parts.refresh()
        self.output.finish()


def run(job: Job, sink: Sink | None = None) -> None:
    """Run a job in this process, and report the result on stderr."""
    began_s = time.monotonic()
    with open_job(job, sink) as opened:
        stats, before = RunStats(), opened.output.parts.rows
        with keep_parts(opened):
            if opened.output.parts.is_running:
                _embed_rows(opened, stats)
            total = opened.output.parts.rows
            opened.finish()
        report(opened, stats, before, total, time.monotonic() - began_s)


@contextmanager
def open_job(job: Job, sink: Sink | None = None) -> Iterator[OpenedJob]:
    """Check input, model and output, cheapest checks first, and begin the output."""
    if job.reads_stdin and job.resume:
        raise BadValue(
            "stdin cannot be resumed, because it cannot be read again; use a file", param="--resume"
        )
    form = _check_output(job, sink)
    files = find_files(job.inputs, job.input_format)
    with ExitStack() as stack:
        source = stack.enter_context(open_inputs(files, job.input_format, pdf_dpi=job.pdf_dpi))
        source.skips_bad_rows = job.skips_bad_rows
        columns = choose_columns(source, job.column, job.id_column, job.keep)
        if sink is not None and columns.id is not None and "id" in columns.keep:
            raise BadValue("a store keeps the ids in 'id'; leave out --keep id", param="--keep")
        embedder = job.embedder()
        vectors = embedder.columns()
        settings = {**_input_settings(job, files, columns), "output": form, **embedder.fingerprint()}
        flags = RunFlags(
            settings=settings, cut=Cut(rows=job.batch_rows), resume=job.resume, overwrite=job.overwrite
        )
        if sink is not None:
            vectors = _named_as_in_stores(vectors)
            _check_sink(sink, BlockMaker(columns, vectors, "id"), source.empty_chunk(columns), job)
            output: Output = SinkOutput(sink.label, sink.open, Path(job.output), vectors, flags)
        else:
            assert form is not None
            output = open_output(job.output, form, vectors, flags)
        stack.enter_context(output)
        id_name = columns.id if columns.id is not None and sink is None else "id"
        yield OpenedJob(job, files, source, columns, embedder, BlockMaker(columns, vectors, id_name), output)


def _check_sink(sink: Sink, maker: BlockMaker, empty: Chunk, job: Job) -> None:
    """Refuse early what the store would refuse, and row numbers as ids that would replace existing rows."""
    schema = maker.vectors.table(maker.block(empty, {})).schema
    num_rows = sink.check(schema, maker.vectors.stamp)
    is_continued = job.resume and read_manifest(open_folder(job.output)) is not None
    if num_rows and maker.columns.id is None and not (is_continued or job.overwrite):
        raise BadValue(
            f"{sink.label} has {num_rows:,} rows, and row numbers as ids would replace some of them; give "
            "--id-column, or --overwrite to replace them",
            param="--id-column",
        )


def _named_as_in_stores(vectors: VectorColumns) -> VectorColumns:
    return VectorColumns(vectors.widths, vectors.dtype, vectors.stamp, dense_name="vector")


def _check_output(job: Job, sink: Sink | None) -> OutputFormat | None:
    if sink is not None:
        check_folder(job.output, job.resume, job.overwrite)
        return None
    form = check_file_or_folder(job.output, job.output_format, resume=job.resume, overwrite=job.overwrite)
    check_storable(form, OutputDtype(job.embed_dtype))
    return form


def _embed_rows(opened: OpenedJob, stats: RunStats) -> None:
    """Embed the rows that are not committed yet. The first chunk is read before the weights are loaded."""
    chunks = opened.missing_chunks()
    first = next(chunks, None)
    if first is None:
        return
    parts, maker = opened.output.parts, opened.maker
    with opened.embedder as embedder, show_progress(parts.rows) as advance:
        for prepared, vectors in embedder.embed(chain([first], chunks), opened.columns):
            block = maker.block(prepared.chunk, vectors)
            opened.writer.commit(block)
            parts.spans.add(block.span)
            stats.add(prepared)
            advance(block.span.num_rows, prepared.chunk.read)


@contextmanager
def keep_parts(opened: OpenedJob) -> Iterator[None]:
    """If a run fails, report which rows are saved, or remove a folder that cannot be resumed."""
    parts = opened.output.parts
    try:
        yield
    except BaseException as error:
        if opened.job.reads_stdin or (parts.rows == 0 and parts.is_running):
            parts.discard()
        elif not isinstance(error, ClientError):  # the same flags may succeed later
            report_line(f"{parts.rows:,} rows are safe in {parts.folder.location}; continue with --resume")
        raise


def _input_settings(job: Job, files: list[InputFile], columns: Columns) -> dict[str, Any]:
    return {
        **(describe_files(files) if files else {"input": "-"}),
        "format": job.input_format,
        "column": columns.text,
        "id_column": columns.id,
        "keep": columns.keep,
        "limit": job.limit,
        **({"pdf_dpi": job.pdf_dpi} if any(file.form is InputFormat.PDF for file in files) else {}),
    }


def report(opened: OpenedJob, stats: RunStats, before: int, total: int, seconds: float) -> None:
    """Write one line to stderr that summarises the run."""
    label, parts = opened.output.label, opened.output.parts
    if total == 0:
        report_line(f"{' '.join(opened.job.inputs)} has no rows; {label} is empty")
        return
    rate = stats.rows / seconds if seconds else 0.0
    said = [f"{stats.rows:,} rows, {stats.tokens:,} tokens in {seconds:.1f} s ({rate:,.0f} rows/s)"]
    if before:
        said.append(f"{before:,} rows were embedded before")
    if stats.truncated:
        limit = opened.embedder.spec.max_model_len
        said.append(f"{stats.truncated:,} rows were truncated to {limit} tokens")
    bad = parts.manifest.bad_rows or stats.bad
    if bad:
        said.append(f"{bad:,} bad rows are listed in {opened.output.errors_file}")
    report_line("; ".join(said) + f" → {label}")
