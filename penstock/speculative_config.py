"""`--speculative-config`: how tokens are proposed that a step verifies together."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 31  # for a sequence and a step; its rows are one more
MAX_LOOKUP = 32  # tokens of an n-gram
_PARAM = "speculative_config"
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prompt lookup: the tokens that followed the last n-gram of a sequence when it came before."""

    method: str = "ngram"
    num_speculative_tokens: int = 4  # proposed for a sequence and a step
    prompt_lookup_max: int | None = None  # tokens of the longest n-gram; None: 4, or the shortest one's
    prompt_lookup_min: int | None = None  # tokens of the shortest n-gram; None: 2, or the longest one's
    adaptive: bool = True  # off where it loses; else every proposal runs

    @property
    def max_ngram(self) -> int:
        return self.prompt_lookup_max or max(4, self.prompt_lookup_min or 0)

    @property
    def min_ngram(self) -> int:
        return self.prompt_lookup_min or min(2, self.max_ngram)


def read_speculative_config(given: dict[str, Any]) -> SpeculativeConfig | None:
    """The settings, or None if there are none; `ConfigError` for what is not understood."""
    if not given:
        return None
    if "model" in given or given.get("method") == "draft_model":
        raise ConfigError(
            f"{_PARAM}: draft models are not supported; use prompt lookup, such as {_EXAMPLE}", param=_PARAM
        )
    accepted = SpeculativeConfig.__struct_fields__
    if unknown := [key for key in given if key not in accepted]:
        raise ConfigError(
            f"{_PARAM} has the unknown key {unknown[0]!r}; use {', '.join(accepted)}", param=_PARAM
        )
    if (method := given.get("method", "ngram")) != "ngram":
        raise ConfigError(f"{_PARAM}: method is {method!r}; use ngram", param=_PARAM)
    try:
        config = msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_PARAM}: {error}", param=_PARAM) from None
    _check_range("num_speculative_tokens", config.num_speculative_tokens, MAX_SPECULATIVE_TOKENS)
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
