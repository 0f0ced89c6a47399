"""Flags of vLLM's and TEI's servers that have no configuration field of their own.

They let scripts that start one of these servers keep working. A flag sets the corresponding setting, has no
effect and logs a warning, or is refused if its effect is not supported. They are hidden in the help of the
commands; docs/guides/from-tei.md has a table that is generated from this one.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typer

from penstock.errors import ConfigError

VLLM, TEI = "vLLM", "TEI"
Target = Literal["engine", "server"]
Settings = dict[tuple[Target, str], Any]  # (configuration, field) → value


@dataclass(slots=True)
class Given:
    """The effects of the foreign flags of a command line."""

    settings: Settings = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    tasks: dict[str, str] = field(default_factory=dict)  # flag and value → task that the model must have
    hub_token: str | None = None

    def merged(self, target: Target, fields: dict[str, Any]) -> dict[str, Any]:
        """Merge the fields that foreign flags set into the fields of a configuration."""
        out = dict(fields)
        for (own, name), value in self.settings.items():
            if own != target:
                continue
            if name in out and out[name] != value:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"two flags contradict each other about {flag}: {out[name]!r} and {value!r}", param=name
                )
            out[name] = value
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """One flag of another server.

    Without `sets`, values in `accepts` (None: all values) have no effect, and other values are refused.
    `value` is the metavar; a flag without one is a switch.
    """

    names: tuple[str, ...]
    server: str
    why: str  # what it sets, why it has no effect, or why other values are refused
    value: str | None = None
    accepts: tuple[str, ...] | None = None
    sets: Callable[[Given, str], None] | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parameter(self) -> str:
        return "foreign_" + self.name.lstrip("-").replace("-", "_")

    def apply(self, given: Given, value: str) -> None:
        if self.sets is not None:
            self.sets(given, value)
            return
        if self.accepts is not None and value.lower() not in self.accepts:
            raise ConfigError(f"{self._shown(value)} is not supported: {self.why}", param=self.name)
        given.warnings.append(f"{self.name} changes nothing: {self.why}")

    def _shown(self, value: str) -> str:
        return self.name if self.value is None else f"{self.name} {value}"


def no_effect(*names: str, server: str, why: str, value: str | None = None) -> ForeignFlag:
    return ForeignFlag(names=names, server=server, why=why, value=value)


def only(*names: str, accepts: tuple[str, ...], server: str, why: str, value: str = "VALUE") -> ForeignFlag:
    return ForeignFlag(names=names, server=server, why=why, value=value, accepts=accepts)


def refused(*names: str, server: str, why: str, value: str | None = None) -> ForeignFlag:
    return ForeignFlag(names=names, server=server, why=why, value=value, accepts=())


def _setting(target: Target, name: str, convert: Callable[[str], Any]) -> Callable[[Given, str], None]:
    def put(given: Given, value: str) -> None:
        given.settings[target, name] = convert(value)

    return put


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _bytes(flag: str) -> Callable[[str], int]:
    """Return a converter of byte counts such as 2000000, 2m or 2M. As in vLLM, lower-case units are powers of
    1000."""

    def convert(value: str) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", value)
        if found is None:
            raise ConfigError(f"{flag} is {value!r}; use a number of bytes, such as 2000000 or 2M")
        return int(float(found[1]) * _UNITS[found[2]])

    return convert


_POOLINGS = {"cls": "cls", "mean": "mean", "splade": "splade", "last-token": "last"}


def _pooling(given: Given, value: str) -> None:
    if value not in _POOLINGS:
        raise ConfigError(f"--pooling is {value!r}; use {', '.join(_POOLINGS)}", param="pooler_config")
    given.settings["engine", "pooler_config"] = {"pooling_type": _POOLINGS[value]}


_TASKS = {
    "embed": "embed",
    "embedding": "embed",
    "classify": "classify",
    "score": "score",
    "reward": "reward",
    "token_embed": "token_embed",
    "token_classify": "token_classify",
}


def _task(given: Given, value: str) -> None:
    if value == "auto":
        return
    if value == "generate":
        given.settings["engine", "enable_generation"] = True
        return
    _need(given, "--task", value, ("auto", "generate", *_TASKS))
    given.settings["engine", "enable_generation"] = False


def _convert(given: Given, value: str) -> None:
    if value not in ("auto", "none"):
        _need(given, "--convert", value, ("auto", "none", "embed", "classify", "reward"))


def _need(given: Given, flag: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(f"{flag} is {value!r}; use {', '.join(accepted)}", param=flag)
    given.tasks[f"{flag} {value}"] = _TASKS[value]


def _hub_token(given: Given, value: str) -> None:
    given.hub_token = value


def _switch(target: Target, name: str, value: Any) -> Callable[[Given, str], None]:
    return _setting(target, name, lambda _: value)


_ONE_MACHINE = (
    "a server runs on one machine, with --data-parallel-size and --tensor-parallel-size; for several "
    "machines use --ray"
)
_STEPS = "steps are planned by Penstock's own scheduler"
_KERNELS = "Penstock chooses its kernels and CUDA graphs itself"
_LOADING = "weights are read by Penstock's own loader"
_ADAPTERS = "adapters are kept in the number format of the model"
_NO_CODE = "no code of a checkpoint is run"
_CACHE = "the cache has its own size; see --kv-cache-gb"

FOREIGN_FLAGS: tuple[ForeignFlag, ...] = (
    # --- flags that set something ---
    ForeignFlag(
        names=("--payload-limit",),
        server=TEI,
        value="BYTES",
        why="the same as --max-body-mb, in bytes",
        sets=_setting("server", "max_body_bytes", _bytes("--payload-limit")),
    ),
    ForeignFlag(
        names=("--pooling",),
        server=TEI,
        value="cls|mean|splade|last-token",
        why="the same as pooling_type in --pooler-config",
        sets=_pooling,
    ),
    ForeignFlag(
        names=("--hf-token", "--hf-api-token"),
        server=f"{TEI}, {VLLM}",
        value="TOKEN",
        why="the same as the environment variable HF_TOKEN, which other users cannot see",
        sets=_hub_token,
    ),
    ForeignFlag(
        names=("--task",),
        server=VLLM,
        value="TASK",
        why="a model serves all its tasks; it must have this one, which turns generation on or off",
        sets=_task,
    ),
    ForeignFlag(
        names=("--convert",),
        server=VLLM,
        value="auto|none|embed|classify|reward",
        why="a model serves all its tasks; the model must have this one",
        sets=_convert,
    ),
    ForeignFlag(
        names=("--kv-cache-memory-bytes",),
        server=VLLM,
        value="BYTES",
        why="the same as --kv-cache-gb, in bytes",
        sets=_setting(
            "engine", "kv_cache_gb", lambda value: _bytes("--kv-cache-memory-bytes")(value) / 2**30
        ),
    ),
    ForeignFlag(
        names=("--enable-log-requests",),
        server=VLLM,
        why="the same as --access-log; texts are logged with --log-inputs only",
        sets=_switch("server", "access_log", True),
    ),
    ForeignFlag(
        names=("--json-output",),
        server=TEI,
        why="the same as --log-format json",
        sets=_switch("server", "log_format", "json"),
    ),
    # --- flags without effect ---
    no_effect("--uds-path", server=TEI, value="PATH", why="the engine's socket has a folder of its own"),
    no_effect("--tokenization-workers", server=TEI, value="N", why="threads follow from the cores"),
    no_effect("--disable-spans", server=TEI, why="spans are not logged; --otlp-endpoint sends them"),
    no_effect("--collect-detailed-traces", server=VLLM, value="NAMES", why="traces have every phase"),
    no_effect("--enable-ssl-refresh", server=VLLM, why="certificates are always read again when they change"),
    no_effect("--trust-remote-code", server=VLLM, why=_NO_CODE),
    no_effect("--code-revision", server=VLLM, value="REVISION", why=_NO_CODE),
    no_effect("--gpu-memory-utilization", server=VLLM, value="SHARE", why=_CACHE),
    no_effect("--swap-space", server=VLLM, value="GIB", why="nothing is swapped to the host"),
    no_effect("--num-gpu-blocks-override", server=VLLM, value="N", why=_CACHE),
    no_effect("--block-size", server=VLLM, value="N", why=_CACHE),
    no_effect("--prefix-caching-hash-algo", server=VLLM, value="NAME", why=_CACHE),
    no_effect("--calculate-kv-scales", server=VLLM, why=_CACHE),
    no_effect("--enable-expert-parallel", server=VLLM, why="one device holds all experts of a model"),
    no_effect("--distributed-executor-backend", server=VLLM, value="NAME", why=_ONE_MACHINE),
    no_effect("--disable-custom-all-reduce", server=VLLM, why=_ONE_MACHINE),
    no_effect("--max-parallel-loading-workers", server=VLLM, value="N", why=_LOADING),
    no_effect("--fully-sharded-loras", server=VLLM, why="adapters are divided as their layers are"),
    no_effect("--specialize-active-lora", server=VLLM, why=_KERNELS),
    no_effect("--safetensors-load-strategy", server=VLLM, value="NAME", why=_LOADING),
    no_effect("--model-loader-extra-config", server=VLLM, value="JSON", why=_LOADING),
    no_effect("--use-tqdm-on-load", server=VLLM, why=_LOADING),
    no_effect("--ignore-patterns", server=VLLM, value="PATTERN", why=_LOADING),
    no_effect("--async-scheduling", server=VLLM, why=_STEPS),
    no_effect("--scheduling-policy", server=VLLM, value="fcfs|priority", why="requests have a `priority`"),
    no_effect("--num-scheduler-steps", server=VLLM, value="N", why=_STEPS),
    no_effect("--max-long-partial-prefills", server=VLLM, value="N", why=_STEPS),
    no_effect("--stream-interval", server=VLLM, value="N", why="every token is sent when it is there"),
    no_effect("--preemption-mode", server=VLLM, value="NAME", why=_STEPS),
    no_effect("--attention-backend", server=VLLM, value="NAME", why=_KERNELS),
    no_effect("--compilation-config", "-O", server=VLLM, value="CONFIG", why=_KERNELS),
    no_effect("--optimization-level", server=VLLM, value="N", why=_KERNELS),
    no_effect("--cudagraph-capture-sizes", server=VLLM, value="N", why=_KERNELS),
    no_effect("--max-cudagraph-capture-size", server=VLLM, value="N", why=_KERNELS),
    no_effect("--max-seq-len-to-capture", server=VLLM, value="N", why=_KERNELS),
    no_effect("--disable-cascade-attn", server=VLLM, why=_KERNELS),
    no_effect("--enable-flash-late-interaction", server=VLLM, why=_KERNELS),
    no_effect("--no-enable-flash-late-interaction", server=VLLM, why=_KERNELS),
    no_effect("--disable-hybrid-kv-cache-manager", server=VLLM, why=_CACHE),
    no_effect("--uvicorn-log-level", server=VLLM, value="LEVEL", why="--log-level is for all messages"),
    no_effect("--disable-uvicorn-access-log", server=VLLM, why="requests are logged with --access-log only"),
    no_effect("--disable-log-requests", server=VLLM, why="requests are logged with --access-log only"),
    no_effect("--max-log-len", server=VLLM, value="N", why="--log-inputs has a limit of its own"),
    no_effect("--log-config-file", server=VLLM, value="FILE", why="logs go to stderr"),
    no_effect(
        "--disable-log-stats", server=VLLM, why="no statistics are logged; they are served at /metrics"
    ),
    no_effect("--disable-frontend-multiprocessing", server=VLLM, why="see --api-server-count"),
    no_effect("--enable-server-load-tracking", server=VLLM, why="/load always counts requests"),
    no_effect("--enable-request-id-headers", server=VLLM, why="x-request-id is always honoured"),
    # --- flags with only some supported values ---
    only("--pipeline-parallel-size", "-pp", accepts=("1",), server=VLLM, why=_ONE_MACHINE, value="N"),
    only("--nnodes", accepts=("1",), server=VLLM, why=_ONE_MACHINE, value="N"),
    only("--node-rank", accepts=("0",), server=VLLM, why=_ONE_MACHINE, value="N"),
    only(
        "--cpu-offload-gb",
        accepts=("0", "0.0"),
        server=VLLM,
        why="all weights stay on the device",
        value="GIB",
    ),
    only("--lora-dtype", accepts=("auto",), server=VLLM, why=_ADAPTERS),
    only("--tokenizer-mode", accepts=("auto", "hf"), server=VLLM, why="tokenizer.json is read"),
    only("--config-format", accepts=("auto", "hf"), server=VLLM, why="config.json is read"),
    only(
        "--generation-config",
        accepts=("auto",),
        server=VLLM,
        why="defaults are read from the model's generation_config.json",
    ),
    only("--response-role", accepts=("assistant",), server=VLLM, why="answers have the role assistant"),
    only(
        "--chat-template-content-format",
        accepts=("auto",),
        server=VLLM,
        why="the template decides how content is written",
    ),
    only("--allowed-methods", accepts=('["*"]', "*"), server=VLLM, why="pages may use every method"),
    only("--allowed-headers", accepts=('["*"]', "*"), server=VLLM, why="pages may send every header"),
    # --- flags that are refused ---
    refused("--dense-path", server=TEI, value="PATH", why="modules.json names the Dense modules of a model"),
    refused(
        "--tokenizer", server=VLLM, value="NAME", why="the tokenizer is the model's; put it into its folder"
    ),
    refused("--tokenizer-revision", server=VLLM, value="REVISION", why="the tokenizer is the model's"),
    refused("--skip-tokenizer-init", server=VLLM, why="every model has its tokenizer"),
    refused("--hf-config-path", server=VLLM, value="PATH", why="use --hf-overrides for keys of config.json"),
    refused("--disable-sliding-window", server=VLLM, why="a model's attention is as its config.json says"),
    refused(
        "--override-generation-config",
        server=VLLM,
        value="JSON",
        why="set the values in requests, or change the model's generation_config.json",
    ),
    refused("--logits-processors", server=VLLM, value="NAME", why="no code of yours is loaded"),
    refused("--middleware", server=VLLM, value="NAME", why="no code of yours is loaded"),
    refused("--return-tokens-as-token-ids", server=VLLM, why="set it in requests"),
    refused("--allow-credentials", server=VLLM, why="clients send the API key as a header, not as a cookie"),
    refused("--disable-fastapi-docs", server=VLLM, why="/docs and /openapi.json are always there"),
    refused("--enable-force-include-usage", server=VLLM, why="set stream_options in requests"),
    refused("--headless", server=VLLM, why=_ONE_MACHINE),
    refused("--grpc", server=VLLM, why="the server speaks HTTP only"),
)


class ForeignFlags:
    """The group of these flags. A command receives their effects."""

    def parameters(self, taken: frozenset[str]) -> list[inspect.Parameter]:
        return [self._parameter(flag) for flag in FOREIGN_FLAGS]

    def build(self, values: dict[str, Any]) -> Given:
        given = Given()
        for flag in FOREIGN_FLAGS:
            value = values[flag.parameter]
            if value is not None and value is not False:
                flag.apply(given, "" if value is True else str(value))
        return given

    @staticmethod
    def _parameter(flag: ForeignFlag) -> inspect.Parameter:
        is_switch = flag.value is None
        option = typer.Option(*flag.names, help=flag.why, metavar=flag.value, hidden=True)
        kind: Any = bool if is_switch else str | None
        return inspect.Parameter(
            flag.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if is_switch else None,
            annotation=Annotated[kind, option],
        )


FOREIGN = ForeignFlags()


def effect(flag: ForeignFlag) -> str:
    """What a flag does in Penstock, for the table in the docs."""
    if flag.sets is not None:
        return flag.why[0].upper() + flag.why[1:]
    if flag.accepts is None:
        return f"Changes nothing: {flag.why}"
    if not flag.accepts:
        return f"Refused: {flag.why}"
    return f"Only {' or '.join(json.dumps(each).strip(chr(34)) for each in flag.accepts)}: {flag.why}"
