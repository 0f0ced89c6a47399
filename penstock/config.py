"""Configuration: frozen settings, and the pure functions that resolve every "auto".

`resolve` runs before anything is built, and nothing changes a configuration afterwards. Errors name unknown
keys.
"""

from __future__ import annotations

import os
from typing import Any, Literal, TypeVar

import msgspec

from penstock.errors import ConfigError
from penstock.speculative_config import SpeculativeConfig, read_speculative_config

MAX_TENSOR_PARALLEL_SIZE = 64  # ranks of one engine, all on one machine
DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # fp8 and fp8_e4m3 mean the same
T = TypeVar("T")


class PoolerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--pooler-config`: settings that override the model's files."""

    pooling_type: str | None = None
    normalize: bool | None = None
    step_tag_id: int | None = None  # the token that ends a step; for pooling_type STEP
    score_labels: tuple[int, ...] | None = None  # a score is the first of these outputs minus the second
    task: str | None = None  # default task of /pooling requests
    use_activation: bool | None = None  # whether vectors are normalised and scores activated by default
    seq_pooling_type: str | None = None  # another name of pooling_type
    enable_chunked_processing: bool = False  # on a server: the same as --default-chunking mean
    max_embed_len: int | None = None  # no effect: chunked texts may have any length

    def __post_init__(self) -> None:
        """Apply the fields that are vLLM's names for other fields."""
        if self.seq_pooling_type is not None:
            if self.pooling_type is not None:
                raise ValueError("pooling_type and seq_pooling_type are the same; give only one")
            msgspec.structs.force_setattr(self, "pooling_type", self.seq_pooling_type)
        if self.use_activation is not None:
            if self.normalize not in (None, self.use_activation):
                raise ValueError("normalize and use_activation contradict each other")
            msgspec.structs.force_setattr(self, "normalize", self.use_activation)
        if self.max_embed_len is not None and not self.enable_chunked_processing:
            raise ValueError("max_embed_len needs enable_chunked_processing; else set max_model_len")


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter that is loaded with the model: `--lora-modules`."""

    name: str  # the model name that requests use
    path: str  # folder of the adapter
    base_model_name: str | None = None  # the model that it adapts, on a server with several


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of one engine. `resolve` replaces "auto" and None."""

    model: str | None = None  # folder, hub id, or None for the embedded default
    revision: str | None = None
    # Base model if `model` is a repository with only an adapter; None: the one that the adapter names.
    base_model: str | None = None
    download_dir: str | None = None  # cache folder for hub models; None: the standard cache
    served_model_name: str | tuple[str, ...] | None = None  # the model's name, then aliases
    device: str = "auto"  # auto | cpu | cuda | cuda:N | null
    tensor_parallel_size: int = 1  # devices of one engine, each with a slice of every layer
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    quantization: Literal["int8", "fp8"] | None = None  # int8 for CPUs, fp8 for CUDA
    unquantized_layers: tuple[int, ...] = ()  # numbers of layers that quantisation skips
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_queued_tokens: int | None = None
    max_queue_seconds: float = 5.0  # maximum wait until a request starts; 0: no limit
    background_step_ms: float = 2.0  # target time of a background step while interactive requests arrive
    pipeline_depth: int | None = None  # steps in flight
    threads: int | None = None  # CPU threads of the engine
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    model_impl: Literal["auto", "penstock", "transformers"] = "auto"  # auto: penstock
    hf_overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    pooler_config: PoolerConfig = msgspec.field(default_factory=PoolerConfig)
    default_prompt_name: str | None = None  # prompt of requests that name none; None: the model's default
    default_prompt: str | None = None  # the same as text instead of a name
    score_template: str | None = None  # text with {query} and {document}, or the name of a built-in template
    enable_chunked_prefill: bool | None = None  # None: if a row may exceed a step and the model supports it
    long_prefill_token_threshold: int = 0  # maximum tokens of one row in a step; 0: no limit
    max_num_partial_prefills: int = 0  # partial prefills in one step; 0: no limit
    # Target inter-token latency while other prompts are prefilled; 0: none. None: DEFAULT_TARGET_ITL_MS if
    # steps run as CUDA graphs, otherwise none.
    target_itl_ms: float | None = None
    enable_prefix_caching: bool | None = None  # None: if the model's rows usually share prefixes
    enable_generation: bool | None = None  # None: if the checkpoint is a generative model
    speculative_config: dict[str, Any] = msgspec.field(default_factory=dict)  # empty: no speculation
    # Size of the KV cache. None: 1 on a CPU; on CUDA 8, or most of the free memory if the model generates.
    kv_cache_gb: float | None = None
    kv_cache_dtype: str = "auto"  # auto: the model's dtype; fp8: 8 bits, with a scale per token and head
    share_identical: bool = True  # compute identical rows in flight, and repeated queries, once
    document_cache_gb: float = 0.0  # cache for vectors of documents that may be scored again
    step_output_mb: float = 16.0  # maximum size of the token vectors that one step returns; 0: no limit
    enforce_eager: bool = False
    graph_capture_seconds: float = 2.0  # time to capture CUDA graphs before the engine is ready
    graph_history: bool = True  # save the shapes of steps for the next start
    enable_lora: bool = False  # requests may choose LoRA adapters, which can be loaded at any time
    lora_modules: tuple[LoraModule, ...] = ()  # adapters to load with the model
    max_loras: int = 8  # adapters in one step
    max_lora_rank: int = 64
    max_cpu_loras: int | None = None  # adapters in host memory; None: four times `max_loras`
    null_step_ms: float = 0.0  # duration of a step of the null device
    profile: str | None = None  # folder for profiler traces of steps
    profile_steps: int = 20  # steps in one trace
    seed: int = 0

    @property
    def model_names(self) -> tuple[str, ...]:
        """Served names of the model, without duplicates; empty: the model's own name."""
        names = self.served_model_name
        return (names,) if isinstance(names, str) else tuple(dict.fromkeys(names or ()))


MAX_COUNT = 2**31 - 1  # maximum of all counts in a step, because plans hold 32-bit integers
MAX_GIB = 1 << 20  # maximum size of a cache; a larger value is a mistake in the unit
MAX_THREADS = 1024  # threads of an engine; the rest of the machine needs some too
MAX_DATA_PARALLEL_SIZE = 256  # engines of one model on one machine
MAX_ENGINES_PER_GPU = 8
DEFAULT_MAX_IMAGES = 32  # images of one input
DEFAULT_TARGET_ITL_MS = 14.0  # about three times the decode step of an 8B model on an H200
ALIAS_SETS = ("tei", "vllm")  # servers whose metric names /metrics can show as well


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model of a server. A field that is None takes the server's setting."""

    engine: EngineConfig
    aliases: tuple[str, ...] = ()  # names in addition to `engine.served_model_name`
    auto_truncate: bool | None = None
    default_chunking: Literal["none", "mean"] | None = None
    chat_template: str | None = None
    sleep_after_s: float | None = None  # idle time after which the engine goes to sleep; 0: never
    data_parallel_size: int | str = 1  # engines; auto: one per GPU, or per NUMA node on a CPU
    engines_per_gpu: int = 1  # engines that share a GPU, each with a copy of the model

    def __post_init__(self) -> None:
        if not 1 <= self.engines_per_gpu <= MAX_ENGINES_PER_GPU:
            raise ValueError(
                f"engines_per_gpu is {self.engines_per_gpu}; use a number from 1 to {MAX_ENGINES_PER_GPU}"
            )
        if self.engines_per_gpu > 1 and self.engine.tensor_parallel_size > 1:
            raise ValueError(
                f"engines_per_gpu is {self.engines_per_gpu}, and tensor_parallel_size is "
                f"{self.engine.tensor_parallel_size}; a model that needs several GPUs has one engine on them"
            )
        size = self.data_parallel_size
        if size != "auto" and not (isinstance(size, int) and 1 <= size <= MAX_DATA_PARALLEL_SIZE):
            raise ValueError(
                f"data_parallel_size is {size!r}; use auto or a number from 1 to {MAX_DATA_PARALLEL_SIZE}"
            )
        if self.sleep_after_s is not None and not self.sleep_after_s >= 0:
            raise ValueError(f"sleep_after_s is {self.sleep_after_s}; use 0 or more seconds")
        if self.sleep_after_s and self.engine.tensor_parallel_size > 1:
            raise ValueError(
                f"sleep_after_s is {self.sleep_after_s:g}, but a model with tensor_parallel_size = "
                f"{self.engine.tensor_parallel_size} cannot sleep; use 0"
            )


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    api_server_count: int = 1
    api_keys: tuple[str, ...] = ()  # keys, or their digests as sha256:HEX; a client sends one of them
    api_key_file: str | None = None  # file of more keys; read again when it changes
    admin_keys: tuple[str, ...] = ()  # keys for the admin routes
    admin_key_file: str | None = None
    uds: str | None = None  # path of a Unix socket, instead of host and port
    uds_permissions: int = 0o600
    admin_port: int | None = None  # port for operation and admin routes, which then leave `port`
    admin_host: str | None = None  # None: `host`
    ssl_certfile: str | None = None  # certificate; turns on TLS
    ssl_keyfile: str | None = None  # private key; None: in `ssl_certfile`
    ssl_keyfile_password: str | None = None
    ssl_keyfile_password_file: str | None = None
    ssl_ca_certs: str | None = None  # authorities that sign client certificates
    ssl_cert_reqs: Literal["none", "optional", "required"] = "none"  # client certificates
    ssl_ciphers: str | None = None  # ciphers for TLS 1.2
    max_body_bytes: int = 32 * 1024 * 1024
    max_rows: int = 2048  # inputs of one request
    max_concurrent_requests: int = 4096  # per API process; beyond it: status 429
    max_connections: int = 8192  # per API process; beyond it: status 503
    max_connections_per_address: int = 4096  # per API process, except loopback; 0: no limit
    max_header_bytes: int = 64 * 1024  # request line and headers; beyond it: status 431
    max_headers: int = 100
    max_url_bytes: int = 8192  # beyond it: status 414
    max_buffered_bytes: int = 1024 * 1024 * 1024  # bodies and large answers held by one API process
    header_timeout_s: float = 20.0  # time to send a request's headers
    body_timeout_s: float = 30.0  # time to send a body, in addition to its bytes at `min_body_rate`
    min_body_rate: int = 8192  # bytes per second
    write_timeout_s: float = 60.0  # time after which a client that reads nothing is disconnected
    idle_timeout_s: float = 75.0  # for connections without a request
    allowed_hosts: tuple[str, ...] = ()  # accepted values of `Host`; "*": any
    strict_fields: bool = False  # refuse bodies with unknown fields
    any_model_name: bool = False  # accept any model name in requests
    auto_truncate: bool | None = None  # truncate long texts by default; None: the dialect's default
    default_chunking: Literal["none", "mean"] = "none"  # chunking of embedding requests that set none
    allowed_origins: tuple[str, ...] = ()  # origins whose pages may call this server; "*": all
    root_path: str = ""  # path in front of every route, if a proxy does not strip it
    default_timeout_s: float | None = None
    shared_memory_mb: int = 512  # for large responses from the engine to API processes; 0: use the socket
    batch_folder: str | None = None  # uploaded files and batches; None: /v1/files and /v1/batches are off
    max_batch_file_mb: int = 512  # size of one uploaded file
    max_batch_lines: int = 50_000  # lines of one batch
    batch_quota_gb: float = 50.0  # total size of all files; 0: no limit
    batch_retention_days: float = 30.0  # time until files and finished batches are deleted; 0: never
    result_cache_mb: int = 0  # result cache of each API process; 0: none
    result_cache_redis: str | None = None  # URL of a Redis that also caches results
    result_cache_ttl_s: float = 86_400.0  # lifetime of a cached result; 0: until it is evicted
    max_image_mb: float = 20.0  # size of one image's file
    max_image_pixels: int = 50_000_000  # pixels of one image
    limit_mm_per_prompt: dict[str, int] = msgspec.field(default_factory=dict)  # {"image": images per input}
    allowed_media_domains: tuple[str, ...] = ()  # hosts from which images are fetched; "*": all public ones
    allowed_local_media_path: str | None = None  # folder whose files requests may name; None: no files
    chat_template: str | None = None  # Jinja, or the name of one of the model's templates; None: its default
    trust_request_chat_template: bool = False  # accept chat templates in requests
    enable_tokenizer_info_endpoint: bool = False  # serve the tokenizer's configuration at /tokenizer_info
    lora_root: str | None = None  # folder below which adapters must be to be loaded at run time; None: any
    drain_s: float = 30.0
    wake_timeout_s: float = 30.0  # how long a request waits for a sleeping model to wake; 0: not at all
    standby_engine: bool | None = None  # None: only if the engine is on a GPU
    engine_affinity: bool = True  # route equal queries and prefixes to the engine that has them cached
    sleep_after_s: float = 0.0  # idle time after which a model goes to sleep; 0: never
    max_awake_models: int = 0  # beyond it, the least recently used model goes to sleep; 0: no limit
    engine_hang_timeout_s: float = 10.0  # an engine without a heartbeat for this long is replaced; 0: never
    engine_step_timeout_s: float = 600.0  # time limit of one step; 0: none
    log_level: str = "info"
    log_format: Literal["auto", "text", "json"] = "auto"  # auto: text on a terminal, JSON elsewhere
    access_log: bool = False
    log_inputs: bool = False  # log the beginning of each body in the access log
    metric_aliases: tuple[str, ...] = ()  # servers whose metric names are also shown: tei, vllm
    otlp_endpoint: str | None = None  # URL of the trace collector; None: from the OTEL_* variables
    otlp_service_name: str | None = None  # None: OTEL_SERVICE_NAME, or penstock

    @property
    def max_images(self) -> int:
        """Maximum number of images in one input."""
        return self.limit_mm_per_prompt.get("image", DEFAULT_MAX_IMAGES)

    @property
    def logs_requests(self) -> bool:
        return self.access_log or self.log_inputs

    @property
    def needs_key(self) -> bool:
        """Whether a client must send a key."""
        return bool(self.api_keys) or self.api_key_file is not None


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's settings, with every "auto" resolved."""

    device: str
    dtype: str
    quantization: str | None
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_queued_tokens: int
    pipeline_depth: int
    threads: int
    load_format: str
    seed: int
    tensor_parallel_size: int = 1
    devices: tuple[str, ...] = ()  # devices of the tensor-parallel ranks; empty: consecutive from `device`
    max_queue_seconds: float = 0.0  # maximum wait until a request starts; 0: no limit
    background_step_ms: float = 2.0  # target time of a background step while interactive requests arrive
    shares_steps: bool = True  # small requests get a share of each step while large ones run
    unquantized_layers: tuple[int, ...] = ()
    model_impl: str = "penstock"
    chunked: bool = False
    chunk_tokens: int = 0  # maximum tokens of one row in a step of chunked prefill
    prefix_caching: bool = False
    max_partial_prefills: int = 0  # partial prefills in one step; 0: no limit
    target_itl_s: float = 0.0  # target inter-token latency while other prompts are prefilled; 0: none
    generates: bool = False
    generate_prefixes: bool = False  # generating sequences share cached prefixes
    speculation: SpeculativeConfig | None = None  # None: no speculation
    draft: Resolved | None = None  # settings of the draft model; None: no draft model
    kv_cache_bytes: int = 0  # 0: a share of the device's free memory
    kv_cache_is_fp8: bool = False
    kv_share: float = 0.8  # share of the memory that the weights leave free; the rest is for activations
    share_identical: bool = True
    document_cache_bytes: int = 0
    step_output_bytes: int = 0  # 0: no limit
    graphs: bool = False  # replay small steps as CUDA graphs
    graph_capture_seconds: float = 2.0  # time to capture CUDA graphs before the engine is ready
    graph_history: bool = True
    max_loras: int = 0  # adapters in one step; 0: LoRA is off
    max_lora_rank: int = 0
    max_cpu_loras: int = 0  # adapters in host memory
    null_step_s: float = 0.0  # duration of a step of the null device
    profile: str = ""  # folder; empty: no profile
    profile_steps: int = 20


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a model that `resolve` uses."""

    max_model_len: int  # the length that the model was trained for
    max_positions: int | None = None  # the length that its weights allow; None: `max_model_len`
    hidden_size: int | None = None
    num_layers: int | None = None
    why_not_chunked: str | None = None  # why chunked prefill is impossible; None: it is possible
    shares_prefixes: bool = False  # rows usually begin with the same tokens
    generates: bool = False
    is_static: bool = False  # a table of token vectors, without layers
    draft: ModelFacts | None = None  # facts about its draft model


class Machine(msgspec.Struct, frozen=True):
    """The facts about this machine that `resolve` uses."""

    cpus: int
    cuda: bool
    bf16: bool = False  # the GPU multiplies bfloat16 natively
    fp8: bool = False  # the GPU multiplies float8 natively
    num_gpus: int = 0


def available_cpus() -> int:
    """Number of cores that this process may use; in a container, fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def check_settings(config: EngineConfig, model: ModelFacts) -> None:
    """Raise `ConfigError` for settings that `resolve` would refuse on any machine.

    It does not look at this machine, so it can run before an engine process has examined its devices.
    """
    cpus = available_cpus()
    cpu = Machine(cpus=cpus, cuda=False)
    gpus = Machine(cpus=cpus, cuda=True, bf16=True, fp8=True, num_gpus=MAX_TENSOR_PARALLEL_SIZE)
    possible = [gpus] if config.device.startswith("cuda") else [cpu]
    if config.device == "auto":
        possible = [cpu, gpus]
    refusals: list[ConfigError] = []
    for machine in possible:
        try:
            resolve(config, model, machine)
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == len(possible):
        raise refusals[0]


def unused_settings(config: EngineConfig, model: ModelFacts) -> tuple[str, ...]:
    """Names of fields that are set but have no effect on this model.

    These are not errors, because the models of one server may share settings.
    """
    if model.generates:
        return ()
    return tuple(name for name in ("target_itl_ms", "max_num_partial_prefills") if getattr(config, name))


def resolve(config: EngineConfig, model: ModelFacts, machine: Machine) -> Resolved:
    """Resolve every "auto"; raise `ConfigError` for settings that contradict each other."""
    generate_prefixes = model.generates and config.enable_prefix_caching is not False
    if config.enable_prefix_caching is None:
        can_chunk = model.why_not_chunked is None and config.enable_chunked_prefill is not False
        config = msgspec.structs.replace(config, enable_prefix_caching=model.shares_prefixes and can_chunk)
    _check_impl(config)
    _check_lora(config, model)
    device = _device(config.device, machine)
    on_cpu = not device.startswith("cuda")
    _check_quantization(config, device, machine)
    if model.is_static and config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization} does not apply to static embeddings; leave it out",
            param="quantization",
        )
    dtype = _dtype(config, on_cpu, machine)
    max_model_len = _max_model_len(config, model)
    best = CPU_STEP_TOKENS
    if model.is_static:
        best = STATIC_STEP_TOKENS
    elif not on_cpu:
        best = cuda_step_tokens(model.hidden_size, model.num_layers, config.quantization)
    max_num_batched_tokens = _given(config.max_num_batched_tokens, best)
    _positive("max_num_batched_tokens", max_num_batched_tokens)
    size = _tensor_parallel_size(config.tensor_parallel_size, device, machine)
    chunked = _chunked(config, max_model_len, max_num_batched_tokens, model.why_not_chunked)
    graphs = _graphs(config, on_cpu, dtype) and not model.is_static and size == 1
    resolved = Resolved(
        device=device,
        tensor_parallel_size=size,
        dtype=dtype,
        quantization=config.quantization,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=_given(config.max_num_seqs, _num_seqs(on_cpu, model)),
        max_queued_tokens=_given(config.max_queued_tokens, 1_000_000 if on_cpu else 50_000_000),
        max_queue_seconds=_queue_seconds(config.max_queue_seconds),
        background_step_ms=_background_step(config.background_step_ms),
        pipeline_depth=_given(config.pipeline_depth, 1 if on_cpu else 2),
        threads=_given(config.threads, max(1, machine.cpus // (size if on_cpu else 1))),
        load_format="safetensors" if config.load_format == "auto" else config.load_format,
        seed=config.seed,
        unquantized_layers=config.unquantized_layers,
        model_impl="penstock" if config.model_impl == "auto" else config.model_impl,
        chunked=chunked,
        chunk_tokens=config.long_prefill_token_threshold or max_num_batched_tokens,
        prefix_caching=bool(config.enable_prefix_caching),
        max_partial_prefills=_partial_prefills(config.max_num_partial_prefills),
        target_itl_s=_target_itl(config.target_itl_ms, graphs) / 1000,
        generates=model.generates,
        generate_prefixes=generate_prefixes,
        speculation=_speculation(config, model),
        kv_cache_bytes=_kv_cache(config.kv_cache_gb, on_cpu, model.generates),
        kv_cache_is_fp8=_is_fp8_cache(config.kv_cache_dtype, has_cache=model.generates or chunked),
        # With a static model, comparing rows costs more than computing them.
        share_identical=config.share_identical and not model.is_static,
        document_cache_bytes=_document_cache(config.document_cache_gb),
        step_output_bytes=_step_output(config.step_output_mb),
        graphs=graphs,
        graph_capture_seconds=_graph_capture(config.graph_capture_seconds),
        graph_history=config.graph_history,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
        max_cpu_loras=_given(config.max_cpu_loras, 4 * config.max_loras) if config.enable_lora else 0,
        null_step_s=_null_step(config.null_step_ms, device),
        profile=config.profile or "",
        profile_steps=config.profile_steps,
    )
    for name in ("profile_steps", "max_num_seqs", "pipeline_depth"):
        _positive(name, getattr(resolved, name))
    _positive("threads", resolved.threads, max(MAX_THREADS, machine.cpus))
    _positive("max_queued_tokens", resolved.max_queued_tokens, 2**63 - 1)
    if model.draft is None or resolved.speculation is None or resolved.speculation.model is None:
        return resolved
    draft = _draft(config, resolved, resolved.speculation, model.draft, machine)
    return msgspec.structs.replace(resolved, draft=draft)


def _draft(
    config: EngineConfig,
    target: Resolved,
    speculation: SpeculativeConfig,
    model: ModelFacts,
    machine: Machine,
) -> Resolved:
    """The settings of a draft model: the target model's, except for those set in `speculation`."""
    if target.device == "null":
        raise ConfigError(
            "speculative_config: device null computes nothing, so it runs no draft model; use prompt lookup",
            param="speculative_config",
        )
    positions = model.max_positions or model.max_model_len
    if (given := speculation.max_model_len) is not None and given > positions:
        raise ConfigError(
            f"speculative_config: max_model_len is {given}, but the draft model has {positions} positions",
            param="speculative_config",
        )
    own = EngineConfig(
        model=speculation.model,
        device=target.device,
        dtype=target.dtype,
        quantization=speculation.quantization,
        max_model_len=min(target.max_model_len, given or positions),
        max_num_batched_tokens=target.max_num_batched_tokens,
        max_num_seqs=target.max_num_seqs,
        # All draft steps of a proposal are in flight at once, after one step that prefills known tokens.
        pipeline_depth=speculation.num_speculative_tokens + 1,
        threads=target.threads,
        load_format=config.load_format,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        kv_cache_dtype=config.kv_cache_dtype,
        enforce_eager=config.enforce_eager,
        graph_capture_seconds=config.graph_capture_seconds,
        graph_history=False,
        seed=config.seed,
    )
    try:
        return resolve(own, msgspec.structs.replace(model, generates=True), machine)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error.message}", param="speculative_config") from None


CPU_STEP_TOKENS = 1024  # a step's activations fit in the CPU cache; measured by benchmarks/cpu_profile.py
STATIC_STEP_TOKENS = 1 << 17  # a token is one table lookup, so a step needs many of them
CUDA_STEP_TOKENS = 16_384  # for models of unknown size
_KNEE = 1 << 24  # tokens × hidden size at which a step saturates the GPU; fitted to measurements
_MAX_STEP_FLOPS = 6e13  # a tenth of a second on a large GPU
_EIGHT_BIT = ("fp8",)  # quantisations that run at twice the rate, so both limits double


def cuda_step_tokens(hidden: int | None, layers: int | None, quantization: str | None = None) -> int:
    """The best number of tokens in a step: fewer leave the GPU idle, more only add latency.

    Narrow models need many tokens to fill the GPU, wide ones few. Deep and wide models are limited to a tenth
    of a second per step. This was measured on an H200 with up to 16,384 tokens. Matrix products 384 to 1,024
    wide get faster up to 16,384 tokens; products 4,096 wide are fastest at 4,096 tokens. Other sizes are
    extrapolated.
    """
    if not hidden or not layers:
        return CUDA_STEP_TOKENS
    flops_per_token = 24 * layers * hidden * hidden  # projections and a feed-forward four times as wide
    tokens = min(_KNEE / hidden, _MAX_STEP_FLOPS / flops_per_token)
    tokens *= 2 if quantization in _EIGHT_BIT else 1
    return min(32_768, max(1024, 1 << (int(tokens).bit_length() - 1)))


def _num_seqs(on_cpu: bool, model: ModelFacts) -> int:
    if model.is_static:
        return 1 << 14
    return 256 if on_cpu else 1024


def _max_model_len(config: EngineConfig, model: ModelFacts) -> int:
    max_model_len = _given(config.max_model_len, model.max_model_len)
    _positive("max_model_len", max_model_len)
    positions = model.max_positions or model.max_model_len
    if max_model_len > positions:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model has positions for {positions} tokens",
            param="max_model_len",
        )
    return max_model_len


def _device(wanted: str, machine: Machine) -> str:
    if wanted == "auto":
        return "cuda" if machine.cuda else "cpu"
    if wanted in ("cpu", "null"):
        return wanted
    if wanted == "cuda" or wanted.startswith("cuda:"):
        if not machine.cuda:
            raise ConfigError(
                f"device is {wanted!r}, but this machine has no CUDA device; use cpu or auto", param="device"
            )
        return wanted
    raise ConfigError(f"device {wanted!r} is unknown; use auto, cpu, cuda or cuda:N", param="device")


def _tensor_parallel_size(size: int, device: str, machine: Machine) -> int:
    if not 1 <= size <= MAX_TENSOR_PARALLEL_SIZE:
        raise ConfigError(
            f"tensor_parallel_size is {size}; use a number from 1 to {MAX_TENSOR_PARALLEL_SIZE}",
            param="tensor_parallel_size",
        )
    first = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
    if size > 1 and device.startswith("cuda") and first + size > machine.num_gpus:
        raise ConfigError(
            f"tensor_parallel_size is {size}, which needs the GPUs cuda:{first} to cuda:{first + size - 1}, "
            f"but this machine has {machine.num_gpus}; use at most {max(1, machine.num_gpus - first)}",
            param="tensor_parallel_size",
        )
    return size


def _check_quantization(config: EngineConfig, device: str, machine: Machine) -> None:
    wanted, on_cuda = config.quantization, device.startswith("cuda")
    if wanted == "int8" and on_cuda:
        raise ConfigError("quantization int8 is for CPUs; on CUDA use fp8", param="quantization")
    if wanted == "fp8" and device == "cpu":
        raise ConfigError("quantization fp8 is for CUDA; on a CPU use int8", param="quantization")
    if wanted == "fp8" and on_cuda and not machine.fp8:
        raise ConfigError(
            "quantization fp8 needs a GPU of compute capability 8.9 or above; this one's is lower",
            param="quantization",
        )
    if config.unquantized_layers and wanted is None:
        raise ConfigError(
            "unquantized_layers needs a quantization; set quantization to int8 or fp8",
            param="unquantized_layers",
        )
    if min(config.unquantized_layers, default=0) < 0:
        raise ConfigError(
            f"unquantized_layers has {min(config.unquantized_layers)}; layers are counted from 0",
            param="unquantized_layers",
        )


def _dtype(config: EngineConfig, on_cpu: bool, machine: Machine) -> str:
    dtype = {"half": "float16", "float": "float32"}.get(config.dtype, config.dtype)
    if dtype == "auto":
        return "float32" if on_cpu else ("bfloat16" if machine.bf16 else "float16")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {config.dtype!r} is unknown; use auto, {', '.join(DTYPES)}", param="dtype")
    if config.quantization == "fp8" and dtype != "bfloat16":
        raise ConfigError("quantization fp8 computes in bfloat16; leave dtype at auto", param="dtype")
    if config.quantization == "int8" and dtype != "float32":
        raise ConfigError(
            "quantization int8 keeps activations in float32; leave dtype at auto", param="dtype"
        )
    if on_cpu and dtype == "float16":
        raise ConfigError("float16 is slow and imprecise on a CPU; use float32 or bfloat16", param="dtype")
    return dtype


def _check_impl(config: EngineConfig) -> None:
    if config.model_impl != "transformers":
        return
    for name, plain in (("quantization", None), ("load_format", "auto")):
        if getattr(config, name) != plain:
            raise ConfigError(f"{name} needs a native model, not --model-impl transformers", param=name)


MAX_LORAS, MAX_LORA_RANK, MAX_CPU_LORAS = 512, 1024, 65_536


def _check_lora(config: EngineConfig, model: ModelFacts) -> None:
    """Refuse LoRA settings that contradict each other or the model."""
    if not config.enable_lora:
        if config.lora_modules:
            raise ConfigError("lora_modules needs enable_lora; set --enable-lora", param="lora_modules")
        return
    for name, high in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_LORA_RANK)):
        if not 1 <= (value := getattr(config, name)) <= high:
            raise ConfigError(f"{name} is {value}; use a number from 1 to {high}", param=name)
    if config.max_cpu_loras is not None and not config.max_loras <= config.max_cpu_loras <= MAX_CPU_LORAS:
        raise ConfigError(
            f"max_cpu_loras is {config.max_cpu_loras}; use a number from max_loras, which is "
            f"{config.max_loras}, to {MAX_CPU_LORAS}",
            param="max_cpu_loras",
        )
    why_not = None
    if model.is_static:
        why_not = "static embeddings have no layers that an adapter could change"
    elif config.model_impl == "transformers":
        why_not = "adapters need a native model, not --model-impl transformers"
    if why_not is not None:
        raise ConfigError(f"enable_lora cannot be used: {why_not}", param="enable_lora")


def _speculation(config: EngineConfig, model: ModelFacts) -> SpeculativeConfig | None:
    settings = read_speculative_config(config.speculative_config)
    if settings is not None and not model.generates:
        raise ConfigError(
            "speculative_config needs a model that generates text; this one does not. Leave it out",
            param="speculative_config",
        )
    if settings is not None and settings.model is not None and config.tensor_parallel_size > 1:
        raise ConfigError(
            "speculative_config: a draft model needs a model on one device, but tensor_parallel_size is "
            f"{config.tensor_parallel_size}; use 1, or prompt lookup",
            param="speculative_config",
        )
    return settings


def _chunked(config: EngineConfig, limit: int, budget: int, why_not: str | None) -> bool:
    """Whether to use chunked prefill. Enabling it for a model that cannot do it is an error."""
    if config.long_prefill_token_threshold < 0:
        raise ConfigError(
            f"long_prefill_token_threshold is {config.long_prefill_token_threshold}; use 0 for no limit",
            param="long_prefill_token_threshold",
        )
    _at_most("long_prefill_token_threshold", config.long_prefill_token_threshold)
    for name in ("enable_chunked_prefill", "enable_prefix_caching"):
        if getattr(config, name) and why_not is not None:
            raise ConfigError(f"{name} cannot be used: {why_not}", param=name)
    if config.enable_chunked_prefill is False:
        if config.enable_prefix_caching:
            raise ConfigError(
                "enable_prefix_caching needs enable_chunked_prefill", param="enable_prefix_caching"
            )
        return False
    wanted = config.enable_chunked_prefill or config.enable_prefix_caching or limit > budget
    return bool(wanted) and why_not is None


def _graphs(config: EngineConfig, on_cpu: bool, dtype: str) -> bool:
    """Whether to use CUDA graphs. Attention in fp32 and in transformers loops over lengths on the host, which
    a graph cannot capture."""
    return not (on_cpu or config.enforce_eager or dtype == "float32" or config.model_impl == "transformers")


def _is_fp8_cache(dtype: str, *, has_cache: bool) -> bool:
    if dtype not in KV_CACHE_DTYPES:
        known = ", ".join(KV_CACHE_DTYPES)
        raise ConfigError(f"kv_cache_dtype is {dtype!r}, but must be one of {known}", param="kv_cache_dtype")
    is_fp8 = dtype != "auto"
    if is_fp8 and not has_cache:
        raise ConfigError(
            f"kv_cache_dtype is {dtype!r}, but the model keeps no KV cache: it neither generates nor chunks "
            "long inputs",
            param="kv_cache_dtype",
        )
    return is_fp8


def _graph_capture(seconds: float) -> float:
    if not 0 <= seconds <= 600:
        raise ConfigError(
            f"graph_capture_seconds is {seconds}; use seconds up to 600, or 0 to capture while serving only",
            param="graph_capture_seconds",
        )
    return seconds


def _kv_cache(size_gb: float | None, on_cpu: bool, generates: bool) -> int:
    if size_gb is None:
        return 0 if generates and not on_cpu else (1 if on_cpu else 8) << 30
    if not 0 < size_gb <= MAX_GIB:
        raise ConfigError(
            f"kv_cache_gb is {size_gb:g}; use a size above 0, up to {MAX_GIB}, or leave it out",
            param="kv_cache_gb",
        )
    return int(size_gb * 2**30)


def _queue_seconds(seconds: float) -> float:
    if not 0 <= seconds <= 86_400:
        raise ConfigError(
            f"max_queue_seconds is {seconds}; use seconds up to 86400, or 0 for no limit",
            param="max_queue_seconds",
        )
    return seconds


def _background_step(milliseconds: float) -> float:
    if not 0 < milliseconds <= 10_000:
        raise ConfigError(
            f"background_step_ms is {milliseconds}; use milliseconds above 0, up to 10000",
            param="background_step_ms",
        )
    return milliseconds


def _partial_prefills(count: int) -> int:
    if count < 0:
        raise ConfigError(
            f"max_num_partial_prefills is {count}; use 0 for no limit", param="max_num_partial_prefills"
        )
    _at_most("max_num_partial_prefills", count)
    return count


def _target_itl(milliseconds: float | None, graphs: bool) -> float:
    if milliseconds is None:  # eager steps with prompts and decodes take much longer than decodes alone
        return DEFAULT_TARGET_ITL_MS if graphs else 0.0
    if not 0 <= milliseconds <= 60_000:
        raise ConfigError(
            f"target_itl_ms is {milliseconds}; use milliseconds up to 60000, or 0 for no target",
            param="target_itl_ms",
        )
    return milliseconds


def _document_cache(size_gb: float) -> int:
    if not 0 <= size_gb <= MAX_GIB:
        raise ConfigError(
            f"document_cache_gb is {size_gb:g}; use up to {MAX_GIB}, or 0 for no cache",
            param="document_cache_gb",
        )
    return int(size_gb * 2**30)


def _step_output(size_mb: float) -> int:
    if not 0 <= size_mb <= MAX_GIB * 1024:
        raise ConfigError(
            f"step_output_mb is {size_mb:g}; use up to {MAX_GIB * 1024}, or 0 for no limit",
            param="step_output_mb",
        )
    return int(size_mb * 2**20)


def _null_step(step_ms: float, device: str) -> float:
    if not 0 <= step_ms <= 60_000:
        raise ConfigError(f"null_step_ms is {step_ms}; use milliseconds up to 60000", param="null_step_ms")
    if step_ms and device != "null":
        raise ConfigError(f"null_step_ms is for device null, not {device}", param="null_step_ms")
    return step_ms / 1000


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _positive(name: str, value: int, high: int = MAX_COUNT) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1", param=name)
    _at_most(name, value, high)


def _at_most(name: str, value: int, high: int = MAX_COUNT) -> None:
    if value > high:
        raise ConfigError(f"{name} is {value}; use at most {high}", param=name)


def from_mapping(kind: type[T], values: dict[str, Any]) -> T:
    """Build a configuration from plain values. Errors name unknown keys and wrong types."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
