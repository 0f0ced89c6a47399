"""The flags of `EngineConfig` and `ServerConfig`, each declared once for all commands.

A flag's type and default come from the configuration's field. The table adds what users see: the name if it
differs from the field's, the group, the help and the accepted values.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
import json
import math
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

from penstock.cli import media_flags
from penstock.config import (
    ALIAS_SETS,
    DEFAULT_MAX_IMAGES,
    KV_CACHE_DTYPES,
    EngineConfig,
    LoraModule,
    ModelConfig,
    ServerConfig,
)
from penstock.errors import ClientError, ConfigError

MODEL, SERVER_PANEL, SCHEDULING = "Model", "Server", "Scheduling"
MEMORY, GENERATION, OBSERVABILITY = "Memory", "Generation", "Observability"
ADAPTERS = "LoRA adapters"
MAX_TTL_S = 315_360_000  # ten years

EngineFields = dict[str, Any]  # fields of EngineConfig that the user has set
ServerFields = dict[str, Any]  # fields of ServerConfig that the user has set
ModelFields = dict[str, Any]  # fields of ModelConfig that the user has set

# Fields without a flag, and the reason.
INTERNAL = {
    "pipeline_depth": "more steps in flight do not help on any device; tests and benchmarks set it in Python",
}


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}", param=flag) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} takes a JSON object, not {text}", param=flag)
    return value


def score_template(given: str) -> str:
    """The value of --score-template: the content of a file, or the text or name itself."""
    if "{document}" in given:
        return given.replace("\\n", "\n").replace("\\t", "\t")
    file = Path(given)
    return file.read_text(encoding="utf-8").removesuffix("\n") if file.is_file() else given


def chat_template(given: str) -> str:
    """The value of --chat-template: the content of a file, or the text or name itself."""
    if "{{" in given or "{%" in given or not Path(given).is_file():
        return given
    return Path(given).read_text(encoding="utf-8")


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for part in value.split(",") if (name := part.strip()))


def _origins(value: str) -> tuple[str, ...]:
    """The value of --allowed-origins: comma-separated names, or a JSON list."""
    names = _names(value)
    if value.startswith("["):
        try:
            names = msgspec.json.decode(value, type=tuple[str, ...])
        except msgspec.MsgspecError:
            raise ConfigError(
                f'--allowed-origins is {value!r}; use a JSON list such as ["https://app.example"]',
                param="allowed_origins",
            ) from None
    origins = tuple(name.rstrip("/") for name in names)
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise ConfigError(
                f"--allowed-origins has {origin!r}; use origins such as https://app.example, or *",
                param="allowed_origins",
            )
    return origins


def metric_aliases(given: str) -> tuple[str, ...]:
    """The value of --metric-aliases."""
    names = tuple(dict.fromkeys(_names(given)))
    if unknown := [name for name in names if name not in ALIAS_SETS]:
        raise ConfigError(
            f"--metric-aliases has {unknown[0]!r}; use {' and '.join(ALIAS_SETS)}, with a comma between them",
            param="metric_aliases",
        )
    return names


def otlp_endpoint(given: str) -> str:
    """The value of --otlp-endpoint. Refuses an endpoint to which traces cannot be sent."""
    from penstock.api.tracing import check_endpoint

    return check_endpoint(given)


def _root_path(given: str) -> str:
    """The value of --root-path, without a slash at its end."""
    path = given.rstrip("/")
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path, re.ASCII):
        raise ConfigError(f"--root-path is {given!r}; use a path such as /penstock", param="root_path")
    return path


def _keys(flag: str) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Return the converter of a flag of keys: comma-separated keys that can be sent in a header."""

    def convert(given: Sequence[str]) -> tuple[str, ...]:
        from penstock.api.key_file import given_keys

        keys = tuple(key.strip() for each in given for key in each.split(",") if key.strip())
        if not keys:
            raise ConfigError(f"{flag} is empty; give a key of visible ASCII characters", param=flag)
        given_keys(keys, flag)  # its errors do not show keys
        return keys

    return convert


api_keys = _keys("--api-key")


def _absolute(given: str) -> str:
    """The absolute path of a file that is read again later. Links are not resolved, since they may change."""
    return str(Path(given).absolute()) if given else given


def _permissions(given: str) -> int:
    if not re.fullmatch(r"0?o?[0-7]{3}", given):
        raise ConfigError(
            f"--uds-permissions is {given!r}; use three octal digits such as 660", param="uds_permissions"
        )
    return int(given.removeprefix("0").removeprefix("o"), 8)


_CERT_REQS = ("none", "optional", "required")


def _cert_reqs(given: str) -> str:
    """The value of --ssl-cert-reqs: a name, or its number in Python's ssl module."""
    return _CERT_REQS[int(given)] if given.isdigit() else given


def hang_timeout(given: float) -> float:
    """The value of --engine-hang-timeout."""
    if 0 < given < 1:
        raise ConfigError(
            f"--engine-hang-timeout is {given:g}; use at least 1 second, or 0 for never",
            param="engine_hang_timeout_s",
        )
    return given


def redis_url(given: str) -> str:
    """The value of --result-cache-redis. Errors do not show it, because it may contain a password."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(given)
        is_complete = bool(parts.path if parts.scheme == "unix" else parts.hostname) and parts.port != 0
    except ValueError:
        is_complete = False
    if not is_complete or parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            "--result-cache-redis takes redis://HOST:PORT/DB, rediss:// for TLS, or unix:///PATH",
            param="result_cache_redis",
        )
    if importlib.util.find_spec("redis") is None:
        raise ConfigError(
            "--result-cache-redis needs the redis package; run `pip install '.[redis]'` in the clone",
            param="result_cache_redis",
        )
    return given


def cache_ttl(given: float) -> float:
    """The value of --result-cache-ttl."""
    if not given <= MAX_TTL_S:  # also true for NaN
        raise ConfigError(
            f"--result-cache-ttl is {given:g}; use up to {MAX_TTL_S} seconds, or 0 for no limit",
            param="result_cache_ttl_s",
        )
    return given


def data_parallel_size(given: str | int) -> str | int:
    """The value of --data-parallel-size."""
    text = str(given)
    if text != "auto" and not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise ConfigError(
            f"--data-parallel-size is {text!r}; use auto or a number from 1", param="data_parallel_size"
        )
    return text if text == "auto" else int(text)


def lora_modules(given: Sequence[Any]) -> tuple[LoraModule, ...]:
    """The values of --lora-modules: NAME=PATH, JSON objects with name and path, or a JSON list of these."""
    modules: list[LoraModule] = []
    for each in given:
        try:
            if isinstance(each, str) and each.lstrip().startswith(("{", "[")):
                each = json.loads(each)
            if isinstance(each, list):
                modules += lora_modules(each)
            elif isinstance(each, str) and all(parts := each.partition("=")):
                modules.append(LoraModule(parts[0], parts[2]))
            else:
                modules.append(msgspec.convert(each, LoraModule))
        except (ValueError, msgspec.ValidationError):
            raise ConfigError(
                f"--lora-modules has {each!r}; use NAME=PATH, or JSON such as "
                '{"name": "tenant-a", "path": "/adapters/a"}',
                param="lora_modules",
            ) from None
    return tuple(modules)


def _mebibytes(value: float) -> int:
    return int(value * 1024 * 1024)


_UNSET: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of a configuration."""

    field: str
    panel: str
    help: str
    names: tuple[str, ...] = ()  # the first identifies the flag; empty: derived from the field
    metavar: str | None = None
    choices: tuple[str, ...] = ()  # if the field's type does not list them
    min: float | None = None
    default: Any = _UNSET  # if the flag's unit or meaning differs from the field's
    default_text: str | None = None  # describes a default that is decided later, for the help
    envvar: str | None = None
    convert: Callable[[Any], Any] | None = None  # from the flag's value to the field's
    why_unused_offline: str = ""

    @property
    def name(self) -> str:
        return self.all_names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        return self.names or ("--" + self.field.replace("_", "-"),)

    def names_beside(self, taken: frozenset[str]) -> tuple[str, ...]:
        """This flag's name, and its other names that no other option of the command uses."""
        return tuple(name for name in self.all_names if name == self.name or name not in taken)


_JSON = "JSON"
ENGINE_FLAGS: tuple[Flag, ...] = (
    Flag(
        field="model",
        names=("--model", "-m", "--model-id"),
        panel=MODEL,
        help="Folder of the model, or its hub id, such as BAAI/bge-base-en-v1.5.",
        default_text="the bundled all-MiniLM-L6-v2",
    ),
    Flag(
        field="revision",
        panel=MODEL,
        help="Branch, tag or commit of a hub model.",
        default_text="main",
    ),
    Flag(
        field="base_model",
        panel=MODEL,
        metavar="FOLDER",
        help="Folder or hub id of the base model, if --model is a repository with only a LoRA adapter, such "
        "as vidore/colqwen2.5-v0.2. The adapter is merged into it.",
        default_text="the one that the adapter names",
    ),
    Flag(
        field="download_dir",
        names=("--download-dir", "--huggingface-hub-cache"),
        panel=MODEL,
        metavar="FOLDER",
        help="Folder for files of hub models, in the layout of the hub's own cache.",
        default_text="the standard cache, such as ~/.cache/huggingface/hub",
    ),
    Flag(
        field="served_model_name",
        panel=MODEL,
        metavar="NAME [NAME...]",
        convert=tuple,
        help="Name of the model in requests and responses. Requests may also use the further names.",
        default_text="the hub id or the folder's name",
    ),
    Flag(
        field="device",
        panel=MODEL,
        metavar="auto|cpu|cuda|cuda:N|null",
        help="Device to run on. auto takes a GPU where there is one. null computes nothing; it is for tests.",
    ),
    Flag(
        field="tensor_parallel_size",
        names=("--tensor-parallel-size", "-tp"),
        panel=MODEL,
        min=1,
        help="Number of GPUs that compute the model together, for a model that one GPU cannot hold.",
    ),
    Flag(
        field="dtype",
        panel=MODEL,
        metavar="auto|float32|bfloat16|float16",
        help="Number format of weights and activations. auto means float32 on a CPU, and on a GPU bfloat16, "
        "or float16 where the GPU lacks bfloat16.",
    ),
    Flag(
        field="quantization",
        panel=MODEL,
        help="Quantize linear layers: int8 on a CPU, fp8 on a GPU of compute capability 8.9 or above.",
        default_text="none",
    ),
    Flag(
        field="unquantized_layers",
        panel=MODEL,
        metavar="N",
        min=0,
        help="Layer that --quantization leaves alone, counted from 0. Repeat the flag for more layers.",
    ),
    Flag(
        field="max_model_len",
        panel=MODEL,
        min=1,
        help="Maximum number of tokens in a row.",
        default_text="the model's limit",
    ),
    Flag(
        field="load_format",
        panel=MODEL,
        help="auto and safetensors read the checkpoint's weights. dummy runs on random weights.",
    ),
    Flag(
        field="model_impl",
        panel=MODEL,
        help="auto and penstock run Penstock's own implementation. transformers runs the Hugging Face "
        "module, for architectures that Penstock does not implement.",
    ),
    Flag(
        field="hf_overrides",
        panel=MODEL,
        metavar=_JSON,
        help="Keys that override the model's config.json, such as '{\"num_hidden_layers\": 6}'.",
    ),
    Flag(
        field="pooler_config",
        names=("--pooler-config", "--override-pooler-config"),
        panel=MODEL,
        metavar=_JSON,
        help='Override the model\'s pooling, such as \'{"pooling_type": "cls", "normalize": true}\'.',
    ),
    Flag(
        field="default_prompt_name",
        panel=MODEL,
        metavar="NAME",
        help="Prompt of the model's own table for requests that name none.",
        default_text="the model's own default",
    ),
    Flag(
        field="default_prompt",
        panel=MODEL,
        metavar="TEXT",
        help="Text before each input of requests that name no prompt, such as 'query: '.",
        default_text="none",
    ),
    Flag(
        field="score_template",
        panel=MODEL,
        metavar="TEXT|FILE|NAME",
        convert=score_template,
        help="Prompt template of a reranker, with {query} and {document}; \\n is a new line. Or a file with "
        "it, or a known name, such as qwen3-reranker. `none` lets the tokenizer join the two texts.",
        default_text="the model's own",
    ),
    Flag(
        field="threads",
        panel=MODEL,
        min=1,
        help="CPU threads of the engine.",
        default_text="all cores that this process may use",
    ),
    Flag(
        field="seed",
        names=("--weights-seed", "--seed"),
        panel=MODEL,
        help="Seed of the random weights of --load-format dummy.",
    ),
    Flag(
        field="max_num_batched_tokens",
        names=("--max-num-batched-tokens", "--max-batch-tokens"),
        panel=SCHEDULING,
        min=1,
        help="Maximum number of tokens in one step.",
        default_text="1024 on a CPU, chosen by the model's size on a GPU",
    ),
    Flag(
        field="max_num_seqs",
        names=("--max-num-seqs", "--max-batch-requests"),
        panel=SCHEDULING,
        min=1,
        help="Maximum number of rows in one step.",
        default_text="256 on a CPU, 1024 on a GPU",
    ),
    Flag(
        field="max_queued_tokens",
        panel=SCHEDULING,
        min=1,
        help="Maximum number of queued tokens. The server answers 429 to requests beyond it.",
        default_text="1 million on a CPU, 50 million on a GPU",
        why_unused_offline="the engine takes as many texts as this command reads",
    ),
    Flag(
        field="max_queue_seconds",
        panel=SCHEDULING,
        min=0,
        help="Maximum number of seconds that a request waits to start. The server answers 429 to requests "
        "that would wait longer; 0 sets no limit.",
        why_unused_offline="a call in this process waits for as long as it takes",
    ),
    Flag(
        field="background_step_ms",
        panel=SCHEDULING,
        min=0.01,
        help="Maximum time of a step of batch lines while other requests arrive, in milliseconds; or a "
        "fifth of their mean step, if that is longer.",
        why_unused_offline="only lines of batches run in the background",
    ),
    Flag(
        field="enable_chunked_prefill",
        panel=SCHEDULING,
        help="Split long rows of causal models into chunks that run in successive steps.",
        default_text="on where a row can exceed one step",
    ),
    Flag(
        field="long_prefill_token_threshold",
        panel=SCHEDULING,
        min=0,
        help="Maximum number of tokens of one row in one step; 0 sets no limit.",
    ),
    Flag(
        field="max_num_partial_prefills",
        panel=SCHEDULING,
        min=0,
        help="Maximum number of partial prefills (chunks of longer prompts) in one step; 0 sets no limit.",
    ),
    Flag(
        field="target_itl_ms",
        panel=SCHEDULING,
        min=0,
        default_text="14 on a GPU with CUDA graphs, otherwise 0",
        help="Target for the milliseconds between two tokens of a sequence while other prompts are "
        "prefilled. Decode steps take as many prompt tokens as fit into that time. 0 prefills prompts in "
        "separate steps of up to --max-num-batched-tokens.",
    ),
    Flag(
        field="share_identical",
        panel=SCHEDULING,
        help="Deduplicate: compute identical rows in flight once, and cache the vectors of queries.",
    ),
    Flag(
        field="enforce_eager",
        panel=SCHEDULING,
        help="Run without CUDA graphs.",
    ),
    Flag(
        field="graph_capture_seconds",
        panel=SCHEDULING,
        min=0,
        help="Seconds to capture CUDA graphs of likely steps before the engine is ready. Further graphs are "
        "captured while the engine is idle.",
    ),
    Flag(
        field="graph_history",
        panel=SCHEDULING,
        help="Save the shapes of a model's steps in the cache folder, so that the next start captures their "
        "CUDA graphs first.",
    ),
    Flag(
        field="enable_lora",
        panel=ADAPTERS,
        help="Let requests choose LoRA adapters, which are loaded with --lora-modules or at run time.",
    ),
    Flag(
        field="lora_modules",
        panel=ADAPTERS,
        metavar="NAME=PATH [NAME=PATH...]",
        convert=lora_modules,
        help="Adapters to load with the model: folders that PEFT has saved, each with the name that requests "
        "use.",
    ),
    Flag(
        field="max_loras",
        panel=ADAPTERS,
        min=1,
        help="Maximum number of adapters in one step, and on the device.",
    ),
    Flag(
        field="max_lora_rank",
        panel=ADAPTERS,
        min=1,
        help="Maximum rank of an adapter. It decides how much device memory each of --max-loras takes.",
    ),
    Flag(
        field="max_cpu_loras",
        panel=ADAPTERS,
        min=1,
        help="Adapters that are kept in host memory; others are read from their folders again.",
        default_text="four times --max-loras",
    ),
    Flag(
        field="kv_cache_gb",
        panel=MEMORY,
        min=1e-9,
        help="KV cache in GiB.",
        default_text="1 on a CPU; on a GPU 8, or all free memory for generation",
    ),
    Flag(
        field="kv_cache_dtype",
        panel=MEMORY,
        choices=KV_CACHE_DTYPES,
        help="Number format of the KV cache. `fp8` holds about twice as many tokens; results differ "
        "slightly.",
    ),
    Flag(
        field="enable_prefix_caching",
        panel=MEMORY,
        help="Keep the KV cache blocks of shared prefixes, for causal models with last-token pooling.",
        default_text="on for rerankers and for generation",
    ),
    Flag(
        field="document_cache_gb",
        panel=MEMORY,
        min=0,
        help="Cache in GiB for the vectors of documents that may be scored again.",
    ),
    Flag(
        field="step_output_mb",
        panel=MEMORY,
        min=0,
        help="Maximum MiB of token vectors that one step returns, so that responses are sent while the next "
        "step runs; 0 sets no limit.",
    ),
    Flag(
        field="enable_generation",
        panel=GENERATION,
        help="Generate text.",
        default_text="on for language models that are neither embedders nor rerankers",
    ),
    Flag(
        field="speculative_config",
        panel=GENERATION,
        metavar=_JSON,
        help="Speculative decoding: propose several tokens and verify them in one step. Prompt lookup "
        'proposes from the text so far: \'{"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_max": 4, "prompt_lookup_min": 2}\'. A draft model is a smaller model with the same '
        'tokenizer: \'{"model": "Qwen/Qwen3-0.6B"}\'. Output does not change. Speculation turns itself off '
        'while it is slower; "adaptive": false keeps it on.',
    ),
    Flag(
        field="null_step_ms",
        panel=OBSERVABILITY,
        metavar="MS",
        min=0,
        help="Milliseconds that a step of --device null takes, for benchmarks without a model.",
    ),
    Flag(
        field="profile",
        panel=OBSERVABILITY,
        metavar="DIR",
        help="Write traces of the engine's steps into this folder, soon after the start and at each SIGUSR2.",
    ),
    Flag(
        field="profile_steps",
        panel=OBSERVABILITY,
        min=1,
        help="Number of steps in one trace.",
    ),
)
SERVER_FLAGS: tuple[Flag, ...] = (
    Flag(
        field="host",
        names=("--host", "--hostname"),
        panel=SERVER_PANEL,
        help="Address to listen on; 0.0.0.0 listens on all interfaces.",
    ),
    Flag(
        field="port",
        names=("--port", "-p"),
        envvar="PORT",
        panel=SERVER_PANEL,
        help="Port to listen on; 0 picks a free one.",
    ),
    Flag(
        field="uds",
        panel=SERVER_PANEL,
        metavar="PATH",
        convert=_absolute,
        help="Unix socket to listen on, in place of --host and --port.",
        default_text="none",
    ),
    Flag(
        field="uds_permissions",
        panel=SERVER_PANEL,
        metavar="MODE",
        default="600",
        convert=_permissions,
        help="Permissions of the socket of --uds, as octal digits. 660 lets the group connect.",
    ),
    Flag(
        field="admin_port",
        names=("--admin-port", "--prometheus-port"),
        panel=SERVER_PANEL,
        metavar="PORT",
        min=0,
        help="Port for /metrics, /version, /load, /server_info and admin routes, which --port does not serve "
        "then. /live, /ready, /health and /ping are on both. 0 picks a free one.",
        default_text="all routes are on --port",
    ),
    Flag(
        field="admin_host",
        panel=SERVER_PANEL,
        help="Address of --admin-port.",
        default_text="that of --host",
    ),
    Flag(
        field="api_keys",
        names=("--api-key",),
        panel=SERVER_PANEL,
        envvar="PENSTOCK_API_KEY",
        metavar="KEY,...",
        convert=api_keys,
        help="Accepted API keys. Clients send one as Authorization: Bearer KEY. Prefer the environment "
        "variable or --api-key-file: other users of the machine can read command lines.",
        default_text="clients need no key",
    ),
    Flag(
        field="api_key_file",
        panel=SERVER_PANEL,
        metavar="FILE",
        convert=_absolute,
        help="File of keys, one in each line, or a YAML list of entries with names and limits. It is read "
        "again when it changes. A client must send one of them, or one of --api-key.",
        default_text="none",
    ),
    Flag(
        field="admin_keys",
        names=("--admin-key",),
        panel=SERVER_PANEL,
        envvar="PENSTOCK_ADMIN_KEY",
        metavar="KEY,...",
        convert=_keys("--admin-key"),
        help="Keys that admin routes require. They are valid for all other routes too.",
        default_text="admin routes refuse every request",
    ),
    Flag(
        field="admin_key_file",
        panel=SERVER_PANEL,
        metavar="FILE",
        convert=_absolute,
        help="File of admin keys, as --api-key-file.",
        default_text="none",
    ),
    Flag(
        field="ssl_certfile",
        panel=SERVER_PANEL,
        metavar="FILE",
        convert=_absolute,
        help="Certificate, with its chain, in PEM format. The server then speaks TLS 1.2 and 1.3 only. It is "
        "read again when it changes.",
        default_text="plain HTTP",
    ),
    Flag(
        field="ssl_keyfile",
        panel=SERVER_PANEL,
        metavar="FILE",
        convert=_absolute,
        help="Private key of the certificate, in PEM format.",
        default_text="in the file of --ssl-certfile",
    ),
    Flag(
        field="ssl_keyfile_password",
        panel=SERVER_PANEL,
        envvar="PENSTOCK_SSL_KEYFILE_PASSWORD",
        metavar="TEXT",
        help="Password of the private key. Prefer the environment variable or --ssl-keyfile-password-file.",
        default_text="none",
    ),
    Flag(
        field="ssl_keyfile_password_file",
        panel=SERVER_PANEL,
        metavar="FILE",
        convert=_absolute,
        help="File whose first line is the password of the private key.",
        default_text="none",
    ),
    Flag(
        field="ssl_ca_certs",
        panel=SERVER_PANEL,
        metavar="FILE",
        convert=_absolute,
        help="Certificates of the authorities that sign certificates of clients, in PEM format.",
        default_text="none",
    ),
    Flag(
        field="ssl_cert_reqs",
        panel=SERVER_PANEL,
        metavar="none|optional|required",
        choices=(*_CERT_REQS, "0", "1", "2"),
        convert=_cert_reqs,
        help="Whether clients show a certificate: none does not ask for one, required refuses clients "
        "without, optional checks those that are shown.",
    ),
    Flag(
        field="ssl_ciphers",
        panel=SERVER_PANEL,
        metavar="NAMES",
        help="Ciphers of TLS 1.2, as OpenSSL lists them.",
        default_text="those of Python's ssl module",
    ),
    Flag(
        field="api_server_count",
        panel=SERVER_PANEL,
        metavar="N|auto",
        default="auto",
        help="Number of API processes. auto starts one if the engine runs on the CPU, and otherwise one for "
        "every two cores, up to 8.",
    ),
    Flag(
        field="max_concurrent_requests",
        panel=SERVER_PANEL,
        min=1,
        help="Maximum number of requests in progress in one API process. It answers 429 beyond it.",
    ),
    Flag(
        field="max_rows",
        names=("--max-rows", "--max-client-batch-size"),
        panel=SERVER_PANEL,
        min=1,
        help="Maximum number of texts in one request.",
    ),
    Flag(
        field="max_body_bytes",
        names=("--max-body-mb",),
        panel=SERVER_PANEL,
        min=0.001,
        default=32.0,
        convert=_mebibytes,
        help="Maximum size of a request's body in MiB. The server answers 413 beyond it.",
    ),
    Flag(
        field="max_buffered_bytes",
        names=("--max-buffered-mb",),
        panel=SERVER_PANEL,
        min=1,
        default=1024.0,
        convert=_mebibytes,
        help="Maximum MiB of request bodies and large answers that one API process holds. It answers 503 "
        "beyond it; bodies of up to 64 KiB are always read.",
    ),
    Flag(
        field="max_connections",
        panel=SERVER_PANEL,
        min=1,
        help="Maximum number of connections to one API process. It answers 503 and closes beyond it.",
    ),
    Flag(
        field="max_connections_per_address",
        panel=SERVER_PANEL,
        min=0,
        help="Maximum number of connections from one address (one /64 of IPv6) to one API process; 0 sets no "
        "limit. Loopback is not limited.",
    ),
    Flag(
        field="max_header_bytes",
        panel=SERVER_PANEL,
        min=256,
        help="Maximum size of a request's URL and headers in bytes. The server answers 431 beyond it.",
    ),
    Flag(
        field="max_headers",
        panel=SERVER_PANEL,
        min=1,
        help="Maximum number of headers of a request. The server answers 431 beyond it.",
    ),
    Flag(
        field="max_url_bytes",
        panel=SERVER_PANEL,
        min=64,
        help="Maximum length of a request's URL in bytes. The server answers 414 beyond it.",
    ),
    Flag(
        field="header_timeout_s",
        names=("--header-timeout",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0.1,
        help="Time for a client to send a request's headers. The server answers 408 and closes beyond it.",
    ),
    Flag(
        field="body_timeout_s",
        names=("--body-timeout",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0.1,
        help="Time for a client to send a request's body, plus the time of its bytes at --min-body-rate. "
        "The server answers 408 and closes beyond it.",
    ),
    Flag(
        field="min_body_rate",
        panel=SERVER_PANEL,
        metavar="BYTES",
        min=1,
        help="Slowest rate, in bytes per second, at which a body may arrive after --body-timeout.",
    ),
    Flag(
        field="write_timeout_s",
        names=("--write-timeout",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0.1,
        help="Time after which a client that does not read its answer is disconnected.",
    ),
    Flag(
        field="idle_timeout_s",
        names=("--idle-timeout",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0.1,
        help="Time after which a connection without a request is closed.",
    ),
    Flag(
        field="allowed_hosts",
        panel=SERVER_PANEL,
        metavar="NAME,...",
        default="",
        convert=_names,
        help="Names that requests may have in their Host header, besides addresses and names without a dot; "
        "* accepts every name. Others get 421.",
        default_text="on a loopback --host, none; on others, every name",
    ),
    Flag(
        field="allowed_origins",
        names=("--allowed-origins", "--cors-allow-origin"),
        panel=SERVER_PANEL,
        metavar="ORIGIN,...",
        default="",
        convert=_origins,
        help="Origins, such as https://app.example, whose pages may call this server from a browser; * "
        "allows all.",
        default_text="none",
    ),
    Flag(
        field="root_path",
        panel=SERVER_PANEL,
        metavar="PATH",
        convert=_root_path,
        help="Path prefix of every route, such as /penstock, for a proxy that does not strip it. Routes are "
        "served without it too.",
        default_text="none",
    ),
    Flag(
        field="any_model_name",
        panel=SERVER_PANEL,
        help="Answer requests for any model name, for clients that send one that they cannot change.",
    ),
    Flag(
        field="strict_fields",
        panel=SERVER_PANEL,
        help="Refuse requests with unknown fields. Otherwise they are ignored, and the header "
        "x-ignored-fields names them.",
    ),
    Flag(
        field="auto_truncate",
        panel=SERVER_PANEL,
        help="Truncate texts beyond the model's limit in requests that do not choose; --no-auto-truncate "
        "refuses them. The header x-truncated-rows counts them.",
        default_text="TEI's routes cut them, other routes refuse them",
    ),
    Flag(
        field="default_chunking",
        panel=SERVER_PANEL,
        help="How embedding requests that do not choose treat long texts: none refuses them; mean embeds "
        "them in chunks and averages the vectors.",
    ),
    Flag(
        field="default_timeout_s",
        names=("--timeout",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0.001,
        help="Deadline of requests that set none.",
        default_text="no deadline",
    ),
    Flag(
        field="lora_root",
        panel=ADAPTERS,
        metavar="FOLDER",
        convert=_absolute,
        help="Load adapters at run time from folders below this one only.",
        default_text="any folder; the route needs an admin key",
    ),
    Flag(
        field="drain_s",
        names=("--drain",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0,
        help="Time to finish requests after SIGTERM. A second signal ends the server at once.",
    ),
    Flag(
        field="engine_affinity",
        panel=SCHEDULING,
        help="With several engines of a model, send a query or prefix to the engine that has it cached, "
        "unless its queue is much longer.",
    ),
    Flag(
        field="sleep_after_s",
        names=("--sleep-after",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0,
        help="Put a model to sleep after this time without a request: it releases its memory, and the next "
        "request wakes it. 0 turns this off.",
    ),
    Flag(
        field="max_awake_models",
        panel=SERVER_PANEL,
        min=0,
        help="Maximum number of awake models; the least recently used ones go to sleep. 0 sets no limit.",
    ),
    Flag(
        field="wake_timeout_s",
        names=("--wake-timeout",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0,
        help="Time that a request waits for a sleeping model to wake before it gets 503. 0 does not wait: "
        "the request gets 503 at once and wakes the model.",
    ),
    Flag(
        field="standby_engine",
        panel=SERVER_PANEL,
        help="Keep a process that has imported PyTorch, so that an engine that dies is replaced sooner. It "
        "takes about 250 MB of memory, and none of the GPU's.",
        default_text="on beside an engine on a GPU",
    ),
    Flag(
        field="engine_hang_timeout_s",
        names=("--engine-hang-timeout",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0,
        convert=hang_timeout,
        help="Replace an engine after this time without a heartbeat, or 12 times as long while it launches "
        "a step, which may compile kernels. Requests get 503 after a quarter of it. 0 never replaces an "
        "engine.",
    ),
    Flag(
        field="engine_step_timeout_s",
        names=("--engine-step-timeout",),
        panel=SERVER_PANEL,
        metavar="SECONDS",
        min=0,
        help="Replace an engine if one step takes longer than this, such as on a hung device; 0 sets no "
        "limit.",
    ),
    Flag(
        field="shared_memory_mb",
        panel=MEMORY,
        min=0,
        help="Shared memory in MiB through which large results reach the API processes, allocated on demand; "
        "0 sends them through a socket.",
    ),
    Flag(
        field="batch_folder",
        panel=SERVER_PANEL,
        metavar="DIR",
        convert=_absolute,
        help="Folder of uploaded files and batches. It turns on /v1/files and /v1/batches.",
        default_text="none",
    ),
    Flag(
        field="max_batch_file_mb",
        panel=SERVER_PANEL,
        min=1,
        help="Maximum size in MiB of a file that is uploaded for a batch.",
    ),
    Flag(
        field="max_batch_lines",
        panel=SERVER_PANEL,
        min=1,
        help="Maximum number of lines of one batch.",
    ),
    Flag(
        field="batch_quota_gb",
        panel=SERVER_PANEL,
        min=0,
        help="GiB that all files of --batch-folder may take. Uploads and batches beyond it are refused; "
        "0 sets no limit.",
    ),
    Flag(
        field="batch_retention_days",
        panel=SERVER_PANEL,
        min=0,
        help="Days until files, and batches that have ended, are deleted; 0 keeps them.",
    ),
    Flag(
        field="max_image_mb",
        panel=SERVER_PANEL,
        min=0.001,
        help="Maximum size in megabytes of one image's file.",
    ),
    Flag(
        field="max_image_pixels",
        panel=SERVER_PANEL,
        min=1,
        convert=media_flags.image_pixels,
        help="Maximum pixels of one image, checked before it is decoded.",
    ),
    Flag(
        field="limit_mm_per_prompt",
        panel=SERVER_PANEL,
        metavar="KIND=N",
        default="",
        convert=media_flags.mm_limits,
        help="Images that one input may have, as image=N or a JSON object.",
        default_text=f"image={DEFAULT_MAX_IMAGES}",
    ),
    Flag(
        field="allowed_media_domains",
        panel=SERVER_PANEL,
        metavar="HOST [HOST...]",
        default="",
        convert=media_flags.media_domains,
        help="Hosts from which images are fetched when a request names a URL: a name, a name with a port, "
        "*.name for all below it, or * for all. Private addresses need the name of the host itself.",
        default_text="none: URLs are refused",
    ),
    Flag(
        field="allowed_local_media_path",
        panel=SERVER_PANEL,
        metavar="DIR",
        convert=media_flags.media_folder,
        help="Folder below which requests may name images by file:// URLs.",
        default_text="none: files are refused",
    ),
    Flag(
        field="result_cache_mb",
        panel=MEMORY,
        min=0,
        help="Result cache of each API process in MiB: repeated rows are answered without the engine; 0 "
        "turns it off.",
    ),
    Flag(
        field="result_cache_redis",
        panel=MEMORY,
        metavar="URL",
        convert=redis_url,
        help="Redis that keeps results too, as redis://HOST:PORT/DB; rediss:// uses TLS. All processes and "
        "servers of the same model share them. Prefer PENSTOCK_REDIS_PASSWORD to a password in the URL.",
        default_text="none",
    ),
    Flag(
        field="result_cache_ttl_s",
        names=("--result-cache-ttl",),
        panel=MEMORY,
        metavar="SECONDS",
        min=0,
        convert=cache_ttl,
        help="Time that a cached result is kept; 0 keeps it until it is evicted.",
    ),
    Flag(
        field="chat_template",
        panel=GENERATION,
        metavar="TEXT|FILE|NAME",
        convert=chat_template,
        help="Chat template (Jinja), a file that holds one, or the name of one of the model's templates.",
        default_text="the model's own",
    ),
    Flag(
        field="trust_request_chat_template",
        panel=GENERATION,
        help="Accept requests that bring their own chat_template. It runs in a sandbox with limits.",
    ),
    Flag(
        field="enable_tokenizer_info_endpoint",
        panel=SERVER_PANEL,
        help="Serve /tokenizer_info: the tokenizer's configuration, with its chat template.",
    ),
    Flag(
        field="log_level",
        panel=OBSERVABILITY,
        choices=("debug", "info", "warning", "error"),
        help="Least severe messages to log.",
    ),
    Flag(
        field="log_format",
        panel=OBSERVABILITY,
        help="Lines of text, or JSON objects. auto writes text on a terminal and JSON elsewhere.",
    ),
    Flag(
        field="access_log",
        panel=OBSERVABILITY,
        help="Log every request: route, status, time, model, rows and tokens. Texts are not logged.",
    ),
    Flag(
        field="log_inputs",
        panel=OBSERVABILITY,
        help="Log the beginning of every body as well, which may be private. Turns on --access-log.",
    ),
    Flag(
        field="metric_aliases",
        panel=OBSERVABILITY,
        metavar="tei,vllm",
        default="",
        convert=metric_aliases,
        help="Also show metrics under the names of these servers, for their dashboards.",
        default_text="none",
    ),
    Flag(
        field="otlp_endpoint",
        names=("--otlp-endpoint", "--otlp-traces-endpoint"),
        panel=OBSERVABILITY,
        metavar="URL",
        convert=otlp_endpoint,
        help="Send OpenTelemetry traces to this collector, such as http://127.0.0.1:4317 (gRPC) or "
        "http://127.0.0.1:4318 (HTTP). Needs the extra `otel`.",
        default_text="OTEL_EXPORTER_OTLP_ENDPOINT, or no traces",
    ),
    Flag(
        field="otlp_service_name",
        panel=OBSERVABILITY,
        metavar="NAME",
        help="Name of this server in traces.",
        default_text="OTEL_SERVICE_NAME, or penstock",
    ),
)


# Flags of a model on a server. The server flags that a model may override are in the tables above.
MODEL_FLAGS: tuple[Flag, ...] = (
    Flag(
        field="data_parallel_size",
        names=("--data-parallel-size", "-dp"),
        panel=MODEL,
        metavar="N|auto",
        default="1",
        convert=data_parallel_size,
        help="Number of engines of the model, behind the same API processes. auto starts one for each GPU, "
        "or on a CPU one for each NUMA node.",
    ),
    Flag(
        field="engines_per_gpu",
        names=("--engines-per-gpu",),
        panel=MODEL,
        metavar="N",
        default="1",
        convert=int,
        help="Number of engines that share each GPU, each with a copy of the model. Two or three help a "
        "small model with many short requests, if one process cannot schedule them fast enough.",
    ),
)


_FLAG_OF_FIELD = {flag.field: flag.name for flag in (*SERVER_FLAGS, *MODEL_FLAGS, *ENGINE_FLAGS)}


def message_with_flag(error: ClientError) -> str:
    """The error's message. If it begins with a configuration field, the flag's name replaces the field's."""
    field = error.param or ""
    if isinstance(error, ConfigError) and re.match(rf"{re.escape(field)}[ :]", error.message):
        return _FLAG_OF_FIELD.get(field, field) + error.message[len(field) :]
    return error.message


class ConfigFlags:
    """A group of flags that set fields of one configuration.

    A command receives the fields that the user has set, as plain values for `from_mapping`.
    """

    def __init__(
        self,
        config: type[msgspec.Struct],
        flags: Sequence[Flag],
        *,
        takes_model_argument: bool = False,
        is_offline: bool = True,
    ) -> None:
        self.config = config
        self.flags = tuple(flags)
        self._hints = get_type_hints(config)
        self._defaults = {field.name: field for field in msgspec.structs.fields(config)}
        self._takes_model_argument = takes_model_argument
        self._is_offline = is_offline

    def parameters(self, taken: frozenset[str]) -> list[inspect.Parameter]:
        made = [self._parameter(flag, flag.names_beside(taken)) for flag in self.flags]
        return [_MODEL_ARGUMENT, *made] if self._takes_model_argument else made

    def build(self, values: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for flag in self.flags:
            value = values[self._parameter_name(flag)]
            if value == self.default(flag):
                continue
            if flag.why_unused_offline and self._is_offline:
                print(f"warning: {flag.name} changes nothing: {flag.why_unused_offline}", file=sys.stderr)
            fields[flag.field] = self.to_field(flag, value)
        if self._takes_model_argument:
            self._add_model_argument(fields, values[_MODEL_ARGUMENT.name])
        return fields

    def from_file(self, flag: Flag, value: Any) -> tuple[str, Any]:
        """Convert a flag's value in a YAML file to (field, field's value)."""
        kind, choices = _kind(self._hints[flag.field]), self._choices(flag)
        if choices is not None and value not in (accepted := [choice.value for choice in choices]):
            raise ConfigError(
                f"{flag.name[2:]} is {value!r}; use one of {', '.join(accepted)}", param=flag.field
            )
        if flag.min is not None and isinstance(value, int | float) and value < flag.min:
            raise ConfigError(f"{flag.name[2:]} is {value}; use at least {flag.min:g}", param=flag.field)
        if get_origin(kind) is list and not isinstance(value, list):
            value = [value]
        if kind == _JSON and isinstance(value, dict):
            return flag.field, value
        return flag.field, self.to_field(flag, value)

    def default(self, flag: Flag) -> Any:
        """The flag's value if the user does not set it."""
        if flag.default is not _UNSET:
            return flag.default
        kind = _kind(self._hints[flag.field])
        if kind in (list[int], list[str], _JSON):
            return None if kind == _JSON else []
        default = self._defaults[flag.field].default
        choices = self._choices(flag)
        return choices(default) if choices is not None and default is not None else default

    def to_field(self, flag: Flag, value: Any) -> Any:
        """Convert a flag's value to the field's value."""
        if isinstance(value, enum.Enum):
            value = value.value
        if isinstance(value, float) and not math.isfinite(value):  # other processes get settings as JSON
            raise ConfigError(f"{flag.name} is {value}; use a finite number", param=flag.field)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{flag.name} is {value}; it must fit into 64 bits", param=flag.field)
        if flag.convert is None and _kind(self._hints[flag.field]) == _JSON:
            return json_object(flag.name, value)
        return value if flag.convert is None else flag.convert(value)

    def _parameter(self, flag: Flag, names: tuple[str, ...]) -> inspect.Parameter:
        key = (self.config, flag.field, names)
        if key not in _parameters:
            _parameters[key] = self._make_parameter(flag, list(names))
        return _parameters[key]

    def _make_parameter(self, flag: Flag, names: list[str]) -> inspect.Parameter:
        kind = self._flag_type(flag)
        if kind is bool or kind == bool | None:
            # A switch that is off by default has no --no- form.
            names = [f"{names[0]}/--no-{names[0][2:]}"] if self.default(flag) is not False else names
        option = typer.Option(
            *names,
            help=flag.help,
            rich_help_panel=flag.panel,
            metavar=flag.metavar or self._metavar(flag, kind),
            min=flag.min,
            envvar=flag.envvar,
            show_default=flag.default_text or not _is_nothing(self.default(flag)),
        )
        return inspect.Parameter(
            self._parameter_name(flag),
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default(flag),
            annotation=Annotated[kind, option],
        )

    def _parameter_name(self, flag: Flag) -> str:
        """The parameter's name. The prefix separates it from a command's own parameters."""
        return f"{self.config.__name__.lower()}_{flag.field}"

    def _flag_type(self, flag: Flag) -> Any:
        if (choices := self._choices(flag)) is not None:
            return choices | None if self.default(flag) is None else choices
        if flag.default is None:
            return str | None
        if flag.default is not _UNSET:
            return type(flag.default)
        kind = _kind(self._hints[flag.field])
        return str | None if kind == _JSON else kind

    def _choices(self, flag: Flag) -> Any:
        values = flag.choices or _literals(self._hints[flag.field])
        return _enum(flag.field, values) if values else None

    def _metavar(self, flag: Flag, kind: Any) -> str | None:
        if (choices := self._choices(flag)) is not None:
            return "|".join(choice.value for choice in choices)
        plain = next((one for one in get_args(kind) if one is not types.NoneType), kind)
        return {int: "N", float: "NUMBER", str: "TEXT"}.get(plain)

    @staticmethod
    def _add_model_argument(fields: dict[str, Any], given: str | None) -> None:
        flag = fields.get("model")
        if given is not None and flag is not None and given != flag:
            raise ConfigError(f"two models are named: {given!r} and --model {flag!r}", param="model")
        if given is not None:
            fields["model"] = given


_MODEL_ARGUMENT = inspect.Parameter(
    "model_argument",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
    ],
)
_parameters: dict[tuple[type, str, tuple[str, ...]], inspect.Parameter] = {}  # shared by all commands
_enums: dict[tuple[str, ...], Any] = {}


def _enum(name: str, values: tuple[str, ...]) -> Any:
    """One enumeration per set of values, so that parsed values compare equal to defaults."""
    if values not in _enums:
        _enums[values] = enum.Enum(name, [(value.upper(), value) for value in values], type=str)
    return _enums[values]


def _is_nothing(default: Any) -> bool:
    return default is None or default is False or default == []


def _literals(hint: Any) -> tuple[str, ...]:
    """The values of a `Literal` or of a union that contains one."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next((found for part in get_args(hint) if (found := _literals(part))), ())


def _kind(hint: Any) -> Any:
    """What the command line parses for a field of this type: a plain type, a list of plain types, or JSON."""
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return list[str] if issubclass(inner, msgspec.Struct) else list[inner]  # type: ignore[valid-type]
    if get_origin(hint) is dict or (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
        return _JSON
    if get_origin(hint) in (Union, types.UnionType):
        if (
            several := next((part for part in get_args(hint) if get_origin(part) is tuple), None)
        ) is not None:
            return _kind(several)
        inner, *others = (part for part in get_args(hint) if part is not types.NoneType)
        return str if others else _kind(inner) | None  # a flag that takes a number or a word has a converter
    return hint


ENGINE = ConfigFlags(EngineConfig, ENGINE_FLAGS)
ENGINE_AND_ARGUMENT = ConfigFlags(EngineConfig, ENGINE_FLAGS, takes_model_argument=True)
SERVED_ENGINE = ConfigFlags(EngineConfig, ENGINE_FLAGS, is_offline=False)
SERVER = ConfigFlags(ServerConfig, SERVER_FLAGS)
SERVED_MODEL = ConfigFlags(ModelConfig, MODEL_FLAGS, is_offline=False)
