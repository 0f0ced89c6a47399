"""`--speculative-config`: the settings of speculative decoding."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 31  # per sequence and step; a sequence with n proposals has n + 1 rows
MAX_LOOKUP = 32  # tokens in an n-gram
_PARAM = "speculative_config"
_SHARED_KEYS = ("method", "num_speculative_tokens", "adaptive")
_KEYS = {  # accepted keys of each method
    "ngram": (*_SHARED_KEYS, "prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": (
        *_SHARED_KEYS,
        "model",
        "revision",
        "quantization",
        "max_model_len",
        "draft_tensor_parallel_size",
    ),
}


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of prompt lookup or of a draft model.

    Prompt lookup proposes the tokens that followed an earlier occurrence of the sequence's last n-gram. A
    draft model is a smaller model with the same vocabulary."""

    method: str = "ngram"
    num_speculative_tokens: int = 4  # proposed tokens per sequence and step
    adaptive: bool = True  # speculate only while it is faster; False: always
    prompt_lookup_max: int | None = None  # tokens of the longest n-gram; None: 4, or the minimum if larger
    prompt_lookup_min: int | None = None  # tokens of the shortest n-gram; None: 2, or the maximum if smaller
    model: str | None = None  # folder or hub id of the draft model
    revision: str | None = None
    quantization: Literal["int8", "fp8"] | None = None
    max_model_len: int | None = None  # no drafts beyond this length; None: the draft model's limit
    draft_tensor_parallel_size: int = 1

    @property
    def max_ngram(self) -> int:
        return self.prompt_lookup_max or max(4, self.prompt_lookup_min or 0)

    @property
    def min_ngram(self) -> int:
        return self.prompt_lookup_min or min(2, self.max_ngram)


def read_speculative_config(given: dict[str, Any]) -> SpeculativeConfig | None:
    """The settings; None if speculation is off. Raises `ConfigError` for unknown keys and values."""
    if not given:
        return None
    method = given.get("method", "draft_model" if "model" in given else "ngram")
    if (accepted := _KEYS.get(method) if isinstance(method, str) else None) is None:
        raise ConfigError(f"{_PARAM}: method is {method!r}; use {' or '.join(_KEYS)}", param=_PARAM)
    if unknown := [key for key in given if key not in accepted]:
        raise ConfigError(
            f"{_PARAM} has the key {unknown[0]!r}, which is unknown with method {method}; use "
            f"{', '.join(accepted)}",
            param=_PARAM,
        )
    try:
        config = msgspec.convert({**given, "method": method}, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_PARAM}: {error}", param=_PARAM) from None
    _check_range("num_speculative_tokens", config.num_speculative_tokens, MAX_SPECULATIVE_TOKENS)
    if method == "draft_model":
        _check_draft(config)
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        if (value := getattr(config, name)) is not None:
            _check_range(name, value, MAX_LOOKUP)
    if config.min_ngram > config.max_ngram:
        raise ConfigError(
            f"{_PARAM}: prompt_lookup_min is {config.min_ngram}, above prompt_lookup_max {config.max_ngram}",
            param=_PARAM,
        )
    return config


def _check_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{_PARAM}: {name} is {value}; use 1 to {most}", param=_PARAM)


def _check_draft(config: SpeculativeConfig) -> None:
    if not config.model:
        raise ConfigError(
            f'{_PARAM}: method draft_model needs the key model, such as {{"model": "Qwen/Qwen3-0.6B"}}',
            param=_PARAM,
        )
    if config.draft_tensor_parallel_size != 1:
        raise ConfigError(
            f"{_PARAM}: draft_tensor_parallel_size is {config.draft_tensor_parallel_size}; a draft model "
            "runs on one device, so use 1",
            param=_PARAM,
        )
    if config.max_model_len is not None and config.max_model_len < 1:
        raise ConfigError(f"{_PARAM}: max_model_len is {config.max_model_len}; use at least 1", param=_PARAM)
