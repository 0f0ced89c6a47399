"""The flags of the load commands, in groups; names are those that users of `vllm bench serve` know.

A group is a frozen struct, so the same fields serve the command line and programs that call `bench`.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
import typer

from penstock.config import EngineConfig

DEFAULT_BATCH_SIZE = 32


class BackendName(enum.StrEnum):
    OPENAI_EMBEDDINGS = "openai-embeddings"
    OPENAI_EMBEDDINGS_CHAT = "openai-embeddings-chat"
    VLLM_POOLING = "vllm-pooling"
    VLLM_RERANK = "vllm-rerank"
    COHERE_RERANK = "cohere-rerank"
    TEI = "tei"
    INFINITY = "infinity-embeddings"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"


class DatasetName(enum.StrEnum):
    RANDOM = "random"
    RANDOM_RERANK = "random-rerank"
    CUSTOM = "custom"
    SHAREGPT = "sharegpt"
    PARQUET = "parquet"


class EmbedderName(enum.StrEnum):
    PENSTOCK = "penstock"
    SENTENCE_TRANSFORMERS = "sentence-transformers"
    TRANSFORMERS = "transformers"
    ONNXRUNTIME = "onnxruntime"
    VLLM = "vllm"


class QualityTask(enum.StrEnum):
    EMBED = "embed"
    RERANK = "rerank"
    LATE_INTERACTION = "late-interaction"


class Ramp(enum.StrEnum):
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


def one_of(names: type[enum.StrEnum]) -> str:
    """The values that a flag accepts, for its help."""
    *first, last = names
    return f"One of {', '.join(first)} and {last}."


def _in(panel: str) -> Any:
    def option(text: str, *names: str, metavar: str | None = None) -> Any:
        return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)

    return option


_server, _data, _traffic, _body, _report, _compare, _quality = (
    _in(panel) for panel in ("Server", "Data", "Traffic", "Request body", "Report", "Comparison", "Quality")
)


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, whichever server it goes to."""

    backend: Annotated[BackendName, _server(f"API of the server. {one_of(BackendName)}", metavar="NAME")] = (
        BackendName.OPENAI
    )
    model: Annotated[str | None, _server("The model; by default the first that the server lists.")] = None
    served_model_name: Annotated[
        str | None, _server("The model's name in requests, where it differs from --model.")
    ] = None
    tokenizer: Annotated[str | None, _server("Folder, tokenizer.json or hub id; by default the model's.")] = (
        None
    )
    header: Annotated[list[str], _server("Extra headers.", "--header", metavar="KEY=VALUE…")] = msgspec.field(
        default_factory=list
    )


class ServerOptions(ClientOptions, frozen=True, kw_only=True):
    base_url: Annotated[str | None, _server("Where the server is, instead of --host and --port.")] = None
    host: Annotated[str, _server("The server's host.")] = "127.0.0.1"
    port: Annotated[int, _server("The server's port.")] = 8000
    endpoint: Annotated[str | None, _server("The route; by default the backend's usual one.")] = None
    ready_check_timeout_sec: Annotated[float, _server("Wait this long for the server to come up.")] = 0.0


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which texts."""

    dataset_name: Annotated[DatasetName, _data("What to use.")] = DatasetName.RANDOM
    dataset_path: Annotated[str | None, _data("The file, for custom, sharegpt and parquet.")] = None
    dataset_column: Annotated[str | None, _data("The column of a parquet file that holds the texts.")] = None
    num_prompts: Annotated[int, _data("How many prompts; short data sets are repeated.")] = 1000
    seed: Annotated[int, _data("For lengths, texts, order and arrival times.")] = 0
    random_input_len: Annotated[int, _data("Tokens a prompt, special tokens included.")] = 1024
    random_range_ratio: Annotated[
        str, _data('Lengths vary by ± this share: a number below 1, or {"input": a, "output": b}.')
    ] = "0.0"
    random_prefix_len: Annotated[int, _data("Tokens that all prompts begin with, in addition.")] = 0
    disable_shuffle: Annotated[bool, _data("Keep the order of the file.", "--disable-shuffle")] = False


class DataOptions(TextOptions, frozen=True, kw_only=True):
    """How texts become requests."""

    random_output_len: Annotated[int, _data("Tokens to generate.")] = 128
    random_batch_size: Annotated[int, _data("Prompts (or documents to rank) in a request.")] = 1
    send_token_ids: Annotated[
        bool, _data("Send random prompts as token ids, not as text.", "--send-token-ids")
    ] = False
    custom_output_len: Annotated[int, _data("Tokens to generate; -1: the data's own `output_tokens`.")] = 256
    sharegpt_output_len: Annotated[
        int | None, _data("Tokens to generate; by default as many as the recorded answer has.")
    ] = None
    skip_chat_template: Annotated[
        bool,
        _data("Send custom prompts as they are, not in the model's chat template.", "--skip-chat-template"),
    ] = False


class TrafficOptions(msgspec.Struct, frozen=True, kw_only=True):
    request_rate: Annotated[float, _traffic("Requests a second; inf: as fast as the limits allow.")] = float(
        "inf"
    )
    burstiness: Annotated[
        float, _traffic("1: Poisson arrivals; below: burstier (gamma); above: steadier; inf: even.")
    ] = 1.0
    max_concurrency: Annotated[int | None, _traffic("Most requests in flight.")] = None
    duration: Annotated[
        float | None, _traffic("Send for this many seconds, over and over, and not each prompt once.")
    ] = None
    num_warmups: Annotated[int, _traffic("Requests before the clock starts.")] = 0
    ramp_up_strategy: Annotated[Ramp | None, _traffic("Let the rate rise during the run.")] = None
    ramp_up_start_rps: Annotated[float | None, _traffic("The rate that a ramp begins with.")] = None
    ramp_up_end_rps: Annotated[float | None, _traffic("The rate that a ramp ends with.")] = None
    num_processes: Annotated[int | None, _traffic("Load processes; by default half the cores.")] = None
    no_keepalive: Annotated[bool, _traffic("A new connection for each request.", "--no-keepalive")] = False
    request_timeout: Annotated[float, _traffic("Seconds until a request counts as failed.")] = 600.0


class BodyOptions(msgspec.Struct, frozen=True, kw_only=True):
    extra_body: Annotated[str | None, _body("Fields to add to each request.", metavar="JSON")] = None
    ignore_eos: Annotated[
        bool, _body("Generate to the full length (always so for random prompts).", "--ignore-eos")
    ] = False
    temperature: Annotated[float | None, _body("Sampling; the server's default if left out.")] = None
    top_p: Annotated[float | None, _body("Sampling.")] = None
    top_k: Annotated[int | None, _body("Sampling.")] = None
    min_p: Annotated[float | None, _body("Sampling.")] = None
    frequency_penalty: Annotated[float | None, _body("Sampling.")] = None
    presence_penalty: Annotated[float | None, _body("Sampling.")] = None
    repetition_penalty: Annotated[float | None, _body("Sampling.")] = None


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    percentile_metrics: Annotated[
        str | None, _report("Which of ttft, tpot, itl, e2el, ttfb to print.", metavar="NAME,…")
    ] = None
    metric_percentiles: Annotated[str, _report("Which percentiles.", metavar="N,…")] = "99"
    goodput: Annotated[
        list[str], _report("What a good request keeps to, in ms.", "--goodput", metavar="e2el:200…")
    ] = msgspec.field(default_factory=list)
    max_failed: Annotated[float, _report("Share of failed requests above which a run is not valid.")] = 0.01
    save_result: Annotated[
        bool, _report("Write every sample as JSON, and a page with charts.", "--save-result")
    ] = False
    result_dir: Annotated[str, _report("Where to write.")] = "."
    result_filename: Annotated[str | None, _report("The JSON file's name; the page's follows it.")] = None
    label: Annotated[str | None, _report("The run's name; by default the backend's.")] = None


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    server: Annotated[
        list[str],
        _compare(
            "A server to measure; the first is what others are measured by.", "--server", metavar="NAME=URL…"
        ),
    ] = msgspec.field(default_factory=list)
    start: Annotated[
        list[str], _compare("The command that starts a server.", "--start", metavar="NAME=COMMAND")
    ] = msgspec.field(default_factory=list)
    server_backend: Annotated[
        list[str], _compare("Its dialect, if not --backend.", "--server-backend", metavar="NAME=BACKEND…")
    ] = msgspec.field(default_factory=list)
    server_endpoint: Annotated[
        list[str], _compare("Its route.", "--server-endpoint", metavar="NAME=/ROUTE…")
    ] = msgspec.field(default_factory=list)
    server_model: Annotated[
        list[str], _compare("Its name for the model.", "--server-model", metavar="NAME=MODEL…")
    ] = msgspec.field(default_factory=list)
    rounds: Annotated[int, _compare("How often each server is measured, in turn.")] = 5
    one_at_a_time: Annotated[
        bool, _compare("Start a server for its turn and stop it afterwards.", "--one-at-a-time")
    ] = False
    start_timeout: Annotated[float, _compare("Seconds that a server may take to come up.")] = 300.0


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that runs in this process. Peers read the fields that they have a counterpart for."""

    config: EngineConfig = EngineConfig()
    batch_size: int = DEFAULT_BATCH_SIZE  # of peers that do not form batches themselves

    def unquantized(self) -> EngineOptions:
        return msgspec.structs.replace(self, config=msgspec.structs.replace(self.config, quantization=None))


class QualityOptions(msgspec.Struct, frozen=True, kw_only=True):
    task: Annotated[QualityTask, _quality("What the model does.")] = QualityTask.EMBED
    sts: Annotated[str | None, _quality("CSV or TSV of score, sentence, sentence.")] = None
    sts_columns: Annotated[
        str | None, _quality("Its columns, as names or numbers from 1.", metavar="SCORE,LEFT,RIGHT")
    ] = None
    beir: Annotated[str | None, _quality("Folder with corpus.jsonl, queries.jsonl, qrels.")] = None
    num_queries: Annotated[int | None, _quality("Only the first so many queries.")] = None
    reference: Annotated[
        EmbedderName | None,
        _quality(f"Engine whose vectors to compare with, by cosine. {one_of(EmbedderName)}", metavar="NAME"),
    ] = None
    base_url: Annotated[str | None, _quality("Judge a running server, not an engine in this process.")] = None
    header: Annotated[list[str], _quality("Extra headers.", "--header", metavar="KEY=VALUE…")] = (
        msgspec.field(default_factory=list)
    )
    query_prompt: Annotated[str, _quality("Text to put before each query.")] = ""
    document_prompt: Annotated[str, _quality("Text to put before each document.")] = ""
    candidates: Annotated[str, _quality("What a reranker gets: bm25, or judged documents.")] = "bm25"
    top_k: Annotated[int, _quality("How many candidates of bm25.")] = 100
    min_cosine: Annotated[float | None, _quality("Fail below this, at worst, against --reference.")] = None
    min_spearman: Annotated[float | None, _quality("Fail below this.")] = None
    min_ndcg: Annotated[float | None, _quality("Fail below this nDCG@10.")] = None
    output_json: Annotated[str | None, _quality("Write the figures here.")] = None
