"""`penstock plan`: estimates what a corpus and its queries cost. This module reads the flags and files;
`planning` has the cost model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock.cli.command import with_options
from penstock.cli.flags import ENGINE, EngineFields
from penstock.config import EngineConfig, cuda_step_tokens, from_mapping
from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat

if TYPE_CHECKING:
    from penstock.checkpoint.spec import ModelSpec
    from penstock.planning.plan import Corpus, Outputs
    from penstock.planning.predict import Rate
    from penstock.planning.report import Memory, Plan

_CORPUS, _RATE, _STORED, _QUERIES = "Corpus", "Rate", "Vectors", "Queries"
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_SAMPLE_ROWS = 1_000_000
_SAMPLE_CHUNK = 2048
_MEASURED_ROWS = 8192
_USABLE_MEMORY = 0.95  # usable share of a GPU's memory


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    docs: Annotated[
        str, typer.Option(help="Number of texts, such as 1e9, 250M or 1.5B.", rich_help_panel=_CORPUS)
    ]
    tokens: Annotated[
        str | None,
        typer.Option(help="Mean number of tokens in a text.", rich_help_panel=_CORPUS),
    ] = None
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File of texts like yours, instead of --tokens. The model's tokenizer counts their tokens.",
            rich_help_panel=_CORPUS,
        ),
    ] = None
    input_format: Annotated[
        InputFormat | None,
        typer.Option(
            "--format",
            help="Format of --sample.",
            show_default="by the file's extension",
            rich_help_panel=_CORPUS,
        ),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            help="Column of --sample that holds the texts.",
            show_default="text, or the only column with text",
            rich_help_panel=_CORPUS,
        ),
    ] = None
    sample_rows: Annotated[
        int,
        typer.Option(min=1, max=_MAX_SAMPLE_ROWS, help="Rows of --sample to read.", rich_help_panel=_CORPUS),
    ] = 10_000
    bytes_per_token: Annotated[
        float | None,
        typer.Option(
            help="Bytes of text that a token stands for.",
            show_default="4.5, or that of --sample",
            rich_help_panel=_CORPUS,
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU to plan for, such as h200, or cpu with --measure or --rate. Only h200 was measured; "
            "others are estimates by published figures.",
            rich_help_panel=_RATE,
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="TOK_PER_S",
            help="Tokens per second of one GPU that you have measured, such as 850k.",
            rich_help_panel=_RATE,
        ),
    ] = None
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Load the model here and measure its rate.", rich_help_panel=_RATE),
    ] = False
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="How long --measure measures.", rich_help_panel=_RATE)
    ] = 5.0
    gpus: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="GPUs that work on the texts.", rich_help_panel=_RATE)
    ] = 1
    hours: Annotated[
        float | None,
        typer.Option(help="Also say how many GPUs finish within this many hours.", rich_help_panel=_RATE),
    ] = None
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Price of a GPU for an hour.", rich_help_panel=_RATE),
    ] = None
    dimensions: Annotated[
        int | None,
        typer.Option(min=1, help="Numbers of a stored vector.", show_default="all", rich_help_panel=_STORED),
    ] = None
    sparse_terms: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Non-zero weights of a sparse vector.",
            show_default="200 for SPLADE; one a token for lexical weights",
            rich_help_panel=_STORED,
        ),
    ] = None
    qps: Annotated[
        str | None,
        typer.Option(help="Queries per second to answer beside the texts.", rich_help_panel=_QUERIES),
    ] = None
    query_tokens: Annotated[
        float, typer.Option(min=1, help="Tokens of a query.", rich_help_panel=_QUERIES)
    ] = 16
    utilization: Annotated[
        float,
        typer.Option(help="Share of a GPU's capacity that queries may use.", rich_help_panel=_QUERIES),
    ] = 0.6
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@with_options(PlanOptions, ENGINE)
def plan(options: PlanOptions, engine: EngineFields) -> None:
    """Estimate GPU hours, cost, storage and network for a corpus.

    Rates come from recorded measurements on an H200, from --rate, or from --measure, which runs the model
    here. Reads the model's files only, unless it measures.

    \b
    Examples:
      penstock plan --docs 1e9 --tokens 200 --model BAAI/bge-base-en-v1.5 --gpu h200 --gpus 8
      penstock plan --docs 20M --sample texts.jsonl --gpu cpu --measure
    """
    made = make_plan(options, engine)
    print(json.dumps(made.as_json(), indent=2, ensure_ascii=False) if options.as_json else made.as_text())


def make_plan(options: PlanOptions, engine: dict[str, Any]) -> Plan:
    from penstock.checkpoint.describe import describe
    from penstock.planning import plan as planning
    from penstock.planning.quantities import read_quantity
    from penstock.planning.report import Plan

    _check(options, engine)
    config = from_mapping(EngineConfig, engine)
    spec = describe(config)
    texts, corpus = _corpus(options, spec, config)
    memory = _memory(options, spec, config)
    rate = _rate(options, engine, spec, corpus, texts)
    serving = None
    if options.qps is not None:
        host = None if options.rate or options.measure else _serving_host()
        qps = read_quantity(options.qps, "--qps")
        serving = planning.serving(qps, options.query_tokens, options.utilization, rate, host)
    stored = planning.storage(corpus, _outputs(options, spec, corpus))
    return Plan(
        model=spec.name,
        gpu=options.gpu,
        corpus=corpus,
        rate=rate,
        compute=planning.compute(corpus, rate, options.gpus, options.price),
        stored=stored,
        traffic=planning.traffic(corpus, stored),
        memory=memory,
        serving=serving,
        within_hours=options.hours,
        notes=(*rate.notes, *_notes(spec, corpus, rate)),
    )


def _check(options: PlanOptions, engine: dict[str, Any]) -> None:
    from penstock.planning.rates import recorded_rates

    known = ", ".join(sorted(recorded_rates().gpu))
    if (options.tokens is None) == (options.sample is None):
        raise BadValue("give either --tokens, such as --tokens 200, or --sample FILE", param="--tokens")
    if options.rate is not None and options.measure:
        raise BadValue("--rate and --measure exclude one another; leave one out", param="--rate")
    if options.rate is None and not options.measure:
        if options.gpu is None:
            raise BadValue(f"give --gpu ({known}), --rate TOK_PER_S, or --measure", param="--gpu")
        if options.gpu == "cpu":
            raise BadValue(
                "no rates of CPUs are recorded: give --measure, or --rate TOK_PER_S", param="--gpu"
            )
        if engine.get("quantization") is not None:
            raise BadValue(
                f"rates were recorded in bf16, not with --quantization {engine['quantization']}; measure "
                "with --measure, or give --rate",
                param="--quantization",
            )
    for flag, value in (("--hours", options.hours), ("--bytes-per-token", options.bytes_per_token)):
        if value is not None and not value > 0:
            raise BadValue(f"{flag} is {value:g}; give a number above 0", param=flag)


def _corpus(options: PlanOptions, spec: ModelSpec, config: EngineConfig) -> tuple[list[str] | None, Corpus]:
    """The texts of the sample, if there is one, and a description of the corpus."""
    from penstock.planning.plan import BYTES_PER_TOKEN, Corpus
    from penstock.planning.quantities import read_count, read_quantity

    docs = read_count(options.docs, "--docs")
    limit = config.max_model_len or spec.max_model_len
    if spec.late is not None and spec.late.document_length is not None:
        limit = min(limit, spec.late.document_length)
    if options.sample is None:
        tokens = read_quantity(options.tokens or "", "--tokens")
        if tokens < 1:
            raise BadValue(f"--tokens is {options.tokens}; give at least 1", param="--tokens")
        kept = min(round(tokens), limit)
        size = tokens * (options.bytes_per_token or BYTES_PER_TOKEN)
        return None, Corpus(docs, [kept], size, int(kept < round(tokens)))
    texts = _read_sample(options)
    counts = _token_counts(texts, spec)
    kept_counts = [max(1, min(count, limit)) for count in counts]
    size = sum(len(text.encode()) for text in texts) / len(texts)
    if options.bytes_per_token is not None:
        size = options.bytes_per_token * sum(counts) / len(counts)
    num_truncated = sum(count > limit for count in counts)
    return texts, Corpus(docs, kept_counts, size, num_truncated, from_sample=True)


def _read_sample(options: PlanOptions) -> list[str]:
    from penstock.jobs.inputs import open_source
    from penstock.jobs.rows import choose_columns

    assert options.sample is not None
    with open_source(options.sample, options.input_format) as rows:
        columns = choose_columns(rows, options.column, None, ())
        chunks = rows.chunks(columns, start=0, stop=options.sample_rows, size=_SAMPLE_CHUNK)
        texts = [text for chunk in chunks for text in chunk.texts]
    if not texts:
        raise BadValue(f"{options.sample} has no texts", param="--sample")
    return texts


def _token_counts(texts: list[str], spec: ModelSpec) -> list[int]:
    """Tokens of each text, with the model's default prompt and special tokens."""
    from penstock.inputs.prompts import choose_prompt
    from penstock.tasks.model import TextModel

    prompt = choose_prompt(spec, prompt_name=None, prompt=None) or ""
    model = TextModel(spec)
    try:
        return [len(row) for row in model.tokenizer.encode([prompt + text for text in texts])]
    finally:
        model.close()


def _outputs(options: PlanOptions, spec: ModelSpec, corpus: Corpus) -> Outputs:
    from penstock.planning.plan import SPARSE_TERMS, Outputs
    from penstock.types import Task

    is_splade = spec.sparse is not None and spec.sparse.kind == "splade"
    embeds = Task.EMBED in spec.tasks and spec.late is None and spec.score is None and not is_splade
    dense = spec.embed_dim if embeds else None
    token_vector = spec.token_dim if spec.late is not None or spec.multi_vector is not None else None
    width = dense or token_vector
    if options.dimensions is not None:
        if width is None or options.dimensions > width:
            known = "gives no vectors" if width is None else f"gives vectors of {width} numbers"
            raise BadValue(
                f"--dimensions is {options.dimensions}, but {spec.name} {known}", param="--dimensions"
            )
        dense = dense and options.dimensions
        token_vector = token_vector and min(token_vector, options.dimensions)
    terms = None
    if spec.sparse is not None:
        terms = corpus.mean_tokens if spec.sparse.kind == "lexical" else float(SPARSE_TERMS)
        terms = options.sparse_terms or terms
    scores = max(1, len(spec.labels)) if dense is None and token_vector is None and terms is None else None
    return Outputs(dense, token_vector, terms, scores)


def _memory(options: PlanOptions, spec: ModelSpec, config: EngineConfig) -> Memory:
    from penstock.checkpoint.weight_files import model_weight_files
    from penstock.cli.info import weight_facts
    from penstock.planning.rates import recorded_rates
    from penstock.planning.report import CPU, Memory
    from penstock.planning.shape import model_shape

    parameters = weight_facts(model_weight_files(spec))["parameters"] or spec.sizes.min_parameters
    on_cpu = options.gpu == CPU
    dtype = config.dtype if config.dtype != "auto" else ("float32" if on_cpu else "bfloat16")
    weights = float(parameters * _WEIGHT_BYTES[dtype])
    gpu = recorded_rates().gpu.get(options.gpu or "")
    activations = None
    if not on_cpu and spec.static is None and config.model_impl != "transformers":
        step = config.max_num_batched_tokens or cuda_step_tokens(spec.hidden_size, spec.num_layers)
        activations = model_shape(spec).step_bytes(step)
    device = None if gpu is None else gpu.memory * 1e9
    needed = weights + (activations or 0)
    if device is not None and needed > _USABLE_MEMORY * device and options.rate is None:
        raise BadValue(
            f"{spec.name} needs {needed / 1e9:,.0f} GB and one {options.gpu} has {device / 1e9:,.0f} GB: one "
            "copy takes several GPUs, for which no rates are recorded; give --rate",
            param="--gpu",
        )
    return Memory(parameters, weights, activations, device)


def _rate(
    options: PlanOptions, engine: dict[str, Any], spec: ModelSpec, corpus: Corpus, texts: list[str] | None
) -> Rate:
    from penstock.planning.predict import given_rate, predicted_rate
    from penstock.planning.quantities import read_quantity
    from penstock.planning.shape import model_shape

    if options.rate is not None:
        return given_rate(read_quantity(options.rate, "--rate"))
    if options.measure:
        return _measured_rate(options, engine, corpus, texts)
    if engine.get("model_impl") == "transformers":
        raise BadValue(
            "rates were recorded with Penstock's own models, not with --model-impl transformers; measure "
            "with --measure, or give --rate",
            param="--model-impl",
        )
    assert options.gpu is not None
    return predicted_rate(options.gpu, model_shape(spec), _span(corpus))


def _span(corpus: Corpus) -> list[float]:
    """Row lengths that the rate has to cover: 1st percentile, mean and 99th percentile."""
    return sorted({corpus.quantile(0.01), corpus.mean_tokens, corpus.quantile(0.99)})


def _measured_rate(
    options: PlanOptions, engine: dict[str, Any], corpus: Corpus, texts: list[str] | None
) -> Rate:
    """Run the model here on the sample, or on random token ids of the mean length."""
    from penstock.offline.engine import Engine
    from penstock.offline.throughput import measure, random_rows
    from penstock.planning.predict import MEASURED_HERE, Rate

    config = {"share_identical": False, **engine}
    if options.gpu is not None:
        config.setdefault("device", "cpu" if options.gpu == "cpu" else "cuda")
    with Engine(**config) as opened:
        if texts is None:
            lengths = list(corpus.lengths) * _MEASURED_ROWS
            found = measure(opened, random_rows(opened, lengths), lengths, options.seconds)
        else:
            found = measure(opened, texts, corpus.lengths, options.seconds)
        where = opened.settings.device
    note = f"measured on this machine ({where}) for {found.seconds:.1f} s: {found.rows:,} rows"
    return Rate(MEASURED_HERE, tokens_per_s=found.tokens_per_s, notes=(note,))


def _serving_host() -> Any:
    from penstock.planning.rates import recorded_rates

    return recorded_rates().serving


def _notes(spec: ModelSpec, corpus: Corpus, rate: Rate) -> list[str]:
    from penstock.planning.rates import recorded_rates

    notes = []
    if corpus.num_truncated and corpus.from_sample:
        share = corpus.num_truncated / len(corpus.lengths)
        notes.append(f"{share:.1%} of the sample is longer than the model reads, and counts as truncated")
    elif corpus.num_truncated:
        notes.append(
            f"the model reads {corpus.lengths[0]:,} tokens of a text at most; texts count as truncated"
        )
    if rate.is_limited_by_host(corpus.mean_tokens):
        host = recorded_rates().host
        notes.append(
            f"tokenising is the limit: one process on {host.cores} cores did {host.tokens_per_s:,.0f} "
            "tokens/s. The GPU alone would take less time: give it more cores, or send token ids"
        )
    return notes
