"""`penstock serve`: a server for one model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import flags
from penstock.cli.flags import engine_options
from penstock.errors import ConfigError
from penstock.serving.child import spawned_engine

MOST_API_PROCESSES = 8  # more than a single engine can keep busy


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub id; without it the embedded default model.")
    ] = None,
    model_flag: Annotated[str | None, typer.Option("--model", help="The same, as a flag.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="Key that clients must send.")
    ] = None,
    api_server_count: Annotated[
        str, typer.Option(metavar="N|auto", help="API processes; auto: as the machine's cores allow.")
    ] = "auto",
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use.")] = None,
    revision: flags.Revision = None,
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    quantization: flags.Quantize = None,
    unquantized_layers: Annotated[
        list[int] | None, typer.Option(min=0, help="Number of a layer that quantization leaves alone.")
    ] = None,
    max_model_len: flags.MaxModelLen = None,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Rows of one step.")] = None,
    max_queued_tokens: Annotated[int | None, typer.Option(help="Tokens that may wait; beyond: 429.")] = None,
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Requests under way in one API process; beyond: 429.")
    ] = 4096,
    max_rows: Annotated[int, typer.Option(min=1, help="Texts in one request.")] = 2048,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest body in MiB; beyond: 413.")] = 32.0,
    timeout: Annotated[float | None, typer.Option(help="Default deadline of a request, seconds.")] = None,
    drain: Annotated[float, typer.Option(min=0, help="Seconds to finish requests after SIGTERM.")] = 30.0,
    threads: flags.Threads = None,
    model_impl: flags.Impl = flags.ModelImpl.AUTO,
    load_format: flags.LoadAs = flags.LoadFormat.AUTO,
    hf_overrides: flags.HfOverridesJson = None,
    pooler_config: flags.PoolerConfigJson = None,
    score_template: flags.ScoreTemplate = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|FILE|NAME",
            help="A chat template (Jinja) instead of the model's own; of several, which.",
        ),
    ] = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Spread long rows of causal models over steps; by default where a row may exceed one.",
        ),
    ] = None,
    long_prefill_token_threshold: Annotated[
        int, typer.Option(min=0, help="Most tokens of one row in one step; 0: no such limit.")
    ] = 0,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep keys and values of shared prefixes (causal models, last-token pooling); by default "
            "for rerankers.",
        ),
    ] = None,
    enable_generation: Annotated[
        bool | None,
        typer.Option(
            "--enable-generation/--no-enable-generation",
            help="Continue texts; by default where the checkpoint is a language model, and neither an "
            "embedder nor a reranker.",
        ),
    ] = None,
    share_identical: Annotated[
        bool,
        typer.Option(
            help="Compute rows that are alike and wait together once, and keep the vectors of queries."
        ),
    ] = True,
    document_cache_gb: Annotated[
        float, typer.Option(help="Memory for vectors of documents that may be scored again.")
    ] = 0.0,
    kv_cache_gb: Annotated[
        float | None, typer.Option(min=0.0, help="Memory for keys and values of rows that go on over steps.")
    ] = None,
    step_output_mb: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Token vectors that leave one step, so that answers are sent while the next is computed; "
            "0 for no limit.",
        ),
    ] = 16.0,
    shared_memory_mb: Annotated[
        int,
        typer.Option(
            min=0,
            help="Memory through which large answers reach the API processes, taken as it is needed; "
            "0 to send them.",
        ),
    ] = 512,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Write traces of the engine's steps here, soon and at each SIGUSR2."
        ),
    ] = None,
    profile_steps: Annotated[int, typer.Option(min=1, help="Steps in one trace.")] = 20,
    seed: flags.Seed = 0,
    runner: Annotated[
        str,
        typer.Option(
            help="pooling keeps no memory for generation; generate wants a model that can.",
            metavar="auto|pooling|generate",
        ),
    ] = "auto",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
    enable_expert_parallel: Annotated[
        bool,
        typer.Option(
            "--enable-expert-parallel", help="Accepted for familiarity; one device holds all experts."
        ),
    ] = False,
    disable_log_stats: Annotated[
        bool, typer.Option("--disable-log-stats", help="Accepted for familiarity; no statistics are logged.")
    ] = False,
) -> None:
    """Serve MODEL over HTTP until SIGTERM or ctrl-C."""
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"log level {log_level!r} is unknown; use debug, info, warning or error")
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s")
    if model is not None and model_flag is not None and model != model_flag:
        raise ConfigError(f"two models are named: {model!r} and --model {model_flag!r}", param="model")
    with spawned_engine(device) as begun:  # before all that has to be imported here
        from penstock.checkpoint.spec import describe
        from penstock.config import EngineConfig, ServerConfig, from_mapping
        from penstock.serving.supervisor import Supervisor

        options = engine_options(
            model=model or model_flag,
            revision=revision,
            served_model_name=served_model_name,
            device=device,
            dtype=dtype,
            quantization=quantization,
            unquantized_layers=unquantized_layers,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_queued_tokens=max_queued_tokens,
            threads=threads,
            load_format=load_format,
            model_impl=model_impl,
            hf_overrides=hf_overrides,
            pooler_config=pooler_config,
            template=score_template,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            enable_prefix_caching=enable_prefix_caching,
            enable_generation=generation(enable_generation, runner),
            kv_cache_gb=kv_cache_gb,
            share_identical=share_identical,
            document_cache_gb=document_cache_gb,
            step_output_mb=step_output_mb,
            enforce_eager=enforce_eager,
            profile=profile,
            profile_steps=profile_steps,
            seed=seed,
        )
        engine = from_mapping(EngineConfig, options)
        server = from_mapping(
            ServerConfig,
            {
                "host": host,
                "port": port,
                "api_key": api_key,
                "api_server_count": api_processes(api_server_count, device),
                "max_body_bytes": int(max_body_mb * 1024 * 1024),
                "max_rows": max_rows,
                "max_concurrent_requests": max_concurrent_requests,
                "default_timeout_s": timeout,
                "shared_memory_mb": shared_memory_mb,
                "chat_template": _template_text(chat_template),
                "drain_s": drain,
                "log_level": log_level,
                "access_log": access_log,
            },
        )
        spec = describe(engine)
        if server.chat_template is not None:
            from penstock.inputs.chat import ModelTemplate

            _ = ModelTemplate(spec.path, server.chat_template).template  # what is wrong with it is told now
        supervisor = Supervisor(engine, server, spec, begun)
    raise typer.Exit(supervisor.run())


def generation(asked: bool | None, runner: str) -> bool | None:
    """`--runner pooling` says what `--no-enable-generation` does, in words that users of others know."""
    if runner not in ("auto", "pooling", "generate"):
        raise ConfigError(f"--runner is {runner!r}; use auto, pooling or generate", param="runner")
    if runner == "auto":
        return asked
    wanted = runner == "generate"
    if asked is not None and asked is not wanted:
        raise ConfigError(f"--runner {runner} contradicts --enable-generation", param="runner")
    return wanted


def api_processes(wanted: str, device: str, cores: int | None = None, gpu: bool | None = None) -> int:
    """How many API processes there are to be. `auto` leaves half of the cores to the engine, to the system
    and to clients on the same machine, and nearly all of them to an engine that computes on them."""
    if wanted != "auto":
        if not wanted.isascii() or not wanted.isdigit() or int(wanted) < 1:
            raise ConfigError(
                f"--api-server-count is {wanted!r}; use auto or a number from 1", param="api_server_count"
            )
        return int(wanted)
    cores = cores_here() if cores is None else cores
    gpu = Path("/dev/nvidiactl").exists() if gpu is None else gpu
    if device == "cpu" or (device == "auto" and not gpu):
        return 1
    return max(1, min(MOST_API_PROCESSES, cores // 2))


def cores_here() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _template_text(given: str | None) -> str | None:
    """What a file holds, or the text or name itself."""
    if given is None or "{{" in given or "{%" in given or not Path(given).is_file():
        return given
    return Path(given).read_text(encoding="utf-8")
