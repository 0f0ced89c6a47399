"""Flags of the bench commands, in groups. Their names are those of `vllm bench serve`.

A group is a frozen struct, so the command line and programs that call `bench` use the same fields.
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
    VLLM_CLASSIFY = "vllm-classify"
    VLLM_SCORE = "vllm-score"
    VLLM_RERANK = "vllm-rerank"
    COHERE_EMBED = "cohere-embed"
    COHERE_RERANK = "cohere-rerank"
    TEI = "tei"
    TEI_PREDICT = "tei-predict"
    INFINITY = "infinity-embeddings"
    INFINITY_RERANK = "infinity-rerank"
    OLLAMA_EMBED = "ollama-embed"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"
    VLLM = "vllm"


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
    _in(panel)
    for panel in ("Target server", "Data", "Traffic", "Request body", "Report", "Comparison", "Quality")
)


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that are the same for all servers of a comparison."""

    backend: Annotated[BackendName, _server(f"API of the server. {one_of(BackendName)}", metavar="NAME")] = (
        BackendName.OPENAI
    )
    model: Annotated[
        str | None,
        _server(
            "Name of the model in requests, or its folder, whose tokenizer then makes the prompts. "
            "Default: the first model that the server lists."
        ),
    ] = None
    served_model_name: Annotated[
        str | None, _server("Name of the model in requests, if it is not --model.")
    ] = None
    tokenizer: Annotated[
        str | None,
        _server(
            "Folder, tokenizer.json or hub id of the tokenizer. Default: that of the folder --model, or else "
            "the server's own."
        ),
    ] = None
    header: Annotated[
        list[str], _server("Extra HTTP header, such as x-user=me.", "--header", metavar="KEY=VALUE…")
    ] = msgspec.field(default_factory=list)


class ServerOptions(ClientOptions, frozen=True, kw_only=True):
    base_url: Annotated[
        str | None, _server("URL of the server, such as http://127.0.0.1:8000, instead of --host and --port.")
    ] = None
    host: Annotated[str, _server("Host of the server.")] = "127.0.0.1"
    port: Annotated[int, _server("Port of the server.")] = 8000
    endpoint: Annotated[
        str | None, _server("Route to send to, such as /v1/embeddings. Default: the usual one of --backend.")
    ] = None
    ready_check_timeout_sec: Annotated[float, _server("Seconds to wait for the server to come up.")] = 0.0


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to send or embed."""

    dataset_name: Annotated[DatasetName, _data("Kind of data set.")] = DatasetName.RANDOM
    dataset_path: Annotated[str | None, _data("File of the data set, for custom, sharegpt and parquet.")] = (
        None
    )
    dataset_column: Annotated[str | None, _data("Column of a parquet file that holds the texts.")] = None
    num_prompts: Annotated[int, _data("Number of prompts. A shorter data set is repeated.")] = 1000
    seed: Annotated[int, _data("Seed of lengths, texts, order and arrival times.")] = 0
    random_input_len: Annotated[int, _data("Tokens in a prompt, special tokens included.")] = 1024
    random_range_ratio: Annotated[
        str, _data('Vary lengths by ± this share: a number below 1, or {"input": 0.5, "output": 0.1}.')
    ] = "0.0"
    random_prefix_len: Annotated[
        int, _data("Tokens of a prefix that all prompts share, in addition to their own length.")
    ] = 0
    disable_shuffle: Annotated[bool, _data("Send prompts in the order of the file.", "--disable-shuffle")] = (
        False
    )


class DataOptions(TextOptions, frozen=True, kw_only=True):
    """How texts become requests."""

    random_output_len: Annotated[int, _data("Tokens to generate for a random prompt.")] = 128
    random_batch_size: Annotated[int, _data("Prompts, or documents to rank, in a request.")] = 1
    send_token_ids: Annotated[
        bool, _data("Send random prompts as token ids instead of text.", "--send-token-ids")
    ] = False
    custom_output_len: Annotated[
        int, _data("Tokens to generate for a custom prompt; -1 takes `output_tokens` of each row.")
    ] = 256
    sharegpt_output_len: Annotated[
        int | None,
        _data("Tokens to generate for a sharegpt prompt. Default: the length of the recorded answer."),
    ] = None
    skip_chat_template: Annotated[
        bool,
        _data("Send custom prompts as they are, without the model's chat template.", "--skip-chat-template"),
    ] = False


class TrafficOptions(msgspec.Struct, frozen=True, kw_only=True):
    request_rate: Annotated[
        float, _traffic("Requests a second; inf sends as fast as --max-concurrency allows.")
    ] = float("inf")
    burstiness: Annotated[
        float,
        _traffic(
            "Burstiness of arrivals: 1 is Poisson, below 1 is burstier (gamma), above 1 is steadier, inf is "
            "evenly spaced."
        ),
    ] = 1.0
    max_concurrency: Annotated[int | None, _traffic("Maximum number of requests in flight.")] = None
    duration: Annotated[
        float | None,
        _traffic("Seconds to send for, repeating the prompts, instead of sending each prompt once."),
    ] = None
    num_warmups: Annotated[int, _traffic("Requests before the clock starts.")] = 0
    ramp_up_strategy: Annotated[Ramp | None, _traffic("How the rate rises during the run.")] = None
    ramp_up_start_rps: Annotated[float | None, _traffic("Requests a second at the start of a ramp.")] = None
    ramp_up_end_rps: Annotated[float | None, _traffic("Requests a second at the end of a ramp.")] = None
    num_processes: Annotated[
        int | None, _traffic("Number of load processes. Default: half of the cores.")
    ] = None
    no_keepalive: Annotated[bool, _traffic("Open a new connection for each request.", "--no-keepalive")] = (
        False
    )
    request_timeout: Annotated[float, _traffic("Seconds after which a request counts as failed.")] = 600.0


class BodyOptions(msgspec.Struct, frozen=True, kw_only=True):
    extra_body: Annotated[
        str | None, _body("Fields to add to each request, such as '{\"dimensions\": 256}'.", metavar="JSON")
    ] = None
    ignore_eos: Annotated[
        bool, _body("Generate to the full length; always on for random prompts.", "--ignore-eos")
    ] = False
    temperature: Annotated[float | None, _body("Sampling temperature. Default: the server's.")] = None
    top_p: Annotated[float | None, _body("Sampling parameter top_p.")] = None
    top_k: Annotated[int | None, _body("Sampling parameter top_k.")] = None
    min_p: Annotated[float | None, _body("Sampling parameter min_p.")] = None
    frequency_penalty: Annotated[float | None, _body("Frequency penalty.")] = None
    presence_penalty: Annotated[float | None, _body("Presence penalty.")] = None
    repetition_penalty: Annotated[float | None, _body("Repetition penalty.")] = None


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    percentile_metrics: Annotated[
        str | None,
        _report(
            "Latencies to print: ttft, tpot, itl, e2el, ttfb. Default: ttft,tpot,itl for generation, e2el "
            "otherwise.",
            metavar="NAME,…",
        ),
    ] = None
    metric_percentiles: Annotated[str, _report("Percentiles to print, such as 50,95,99.", metavar="N,…")] = (
        "99"
    )
    goodput: Annotated[
        list[str],
        _report(
            "Limit in milliseconds that a good request stays within, such as e2el:200.",
            "--goodput",
            metavar="e2el:200…",
        ),
    ] = msgspec.field(default_factory=list)
    max_failed: Annotated[float, _report("Share of failed requests above which a run is not valid.")] = 0.01
    save_result: Annotated[
        bool, _report("Write every sample as JSON, and an HTML page with charts.", "--save-result")
    ] = False
    result_dir: Annotated[str, _report("Folder to write results into.")] = "."
    result_filename: Annotated[
        str | None, _report("Name of the JSON file; the page has the same name with .html.")
    ] = None
    label: Annotated[str | None, _report("Name of the run. Default: the backend's.")] = None


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    server: Annotated[
        list[str],
        _compare("Server to measure; the first is the baseline.", "--server", metavar="NAME=URL…"),
    ] = msgspec.field(default_factory=list)
    start: Annotated[
        list[str], _compare("Command that starts a server.", "--start", metavar="NAME=COMMAND")
    ] = msgspec.field(default_factory=list)
    server_backend: Annotated[
        list[str],
        _compare("API of a server, if it is not --backend.", "--server-backend", metavar="NAME=BACKEND…"),
    ] = msgspec.field(default_factory=list)
    server_endpoint: Annotated[
        list[str],
        _compare(
            "Route of a server, if it is not the usual one.", "--server-endpoint", metavar="NAME=/ROUTE…"
        ),
    ] = msgspec.field(default_factory=list)
    server_model: Annotated[
        list[str], _compare("Name of the model at a server.", "--server-model", metavar="NAME=MODEL…")
    ] = msgspec.field(default_factory=list)
    rounds: Annotated[int, _compare("Number of times that each server is measured, in turn.")] = 5
    one_at_a_time: Annotated[
        bool, _compare("Start each server for its turn and stop it afterwards.", "--one-at-a-time")
    ] = False
    start_timeout: Annotated[float, _compare("Seconds that a server may take to start.")] = 300.0


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that runs in this process. Peers use the fields for which they have a counterpart."""

    config: EngineConfig = EngineConfig()
    batch_size: int = DEFAULT_BATCH_SIZE  # for peers that do not form batches themselves

    def unquantized(self) -> EngineOptions:
        return msgspec.structs.replace(self, config=msgspec.structs.replace(self.config, quantization=None))


class QualityOptions(msgspec.Struct, frozen=True, kw_only=True):
    task: Annotated[QualityTask, _quality("Task to evaluate.")] = QualityTask.EMBED
    sts: Annotated[str | None, _quality("CSV or TSV file of score, sentence, sentence.")] = None
    sts_columns: Annotated[
        str | None, _quality("Columns of --sts, as names or numbers from 1.", metavar="SCORE,LEFT,RIGHT")
    ] = None
    beir: Annotated[str | None, _quality("BEIR folder with corpus.jsonl, queries.jsonl and qrels.")] = None
    num_queries: Annotated[int | None, _quality("Number of queries to use. Default: all.")] = None
    reference: Annotated[
        EmbedderName | None,
        _quality(f"Engine whose vectors to compare with, by cosine. {one_of(EmbedderName)}", metavar="NAME"),
    ] = None
    base_url: Annotated[
        str | None, _quality("URL of a running server to evaluate, instead of an engine in this process.")
    ] = None
    header: Annotated[
        list[str], _quality("Extra HTTP header, such as x-user=me.", "--header", metavar="KEY=VALUE…")
    ] = msgspec.field(default_factory=list)
    query_prompt: Annotated[str, _quality("Text to put before each query.")] = ""
    document_prompt: Annotated[str, _quality("Text to put before each document.")] = ""
    candidates: Annotated[
        str,
        _quality(
            "Documents that a reranker gets: bm25 (the best by BM25) or judged (those with a judgement)."
        ),
    ] = "bm25"
    top_k: Annotated[int, _quality("Number of candidates from BM25.")] = 100
    min_cosine: Annotated[float | None, _quality("Fail if any cosine to --reference is below this.")] = None
    min_spearman: Annotated[float | None, _quality("Fail if the Spearman correlation is below this.")] = None
    min_ndcg: Annotated[float | None, _quality("Fail if nDCG@10 is below this.")] = None
    output_json: Annotated[str | None, _quality("File to write the figures into, as JSON.")] = None
