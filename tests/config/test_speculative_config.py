"""`--speculative-config`: accepted values, their meaning, and refusals of all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import Engine
from penstock.cli.flags import ENGINE, ENGINE_FLAGS
from penstock.config import EngineConfig, Machine, ModelFacts, resolve
from penstock.errors import ConfigError
from penstock.speculative_config import read_speculative_config
from tests.checkpoints import write_bert

GENERATES = ModelFacts(max_model_len=128, generates=True)
CPU = Machine(cpus=2, cuda=False)


def resolved(given: dict[str, Any], facts: ModelFacts = GENERATES) -> Any:
    return resolve(EngineConfig(model="m", speculative_config=given), facts, CPU).speculation


def test_vllms_keys_are_accepted() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 3}
    config = resolved(given)
    assert (config.num_speculative_tokens, config.max_ngram, config.min_ngram) == (5, 6, 3)
    assert config.adaptive


def test_speculation_is_off_by_default() -> None:
    assert resolved({}) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram"}, (2, 4)),
        ({"num_speculative_tokens": 3}, (2, 4)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 6}, (6, 6)),
        ({"prompt_lookup_max": 8}, (2, 8)),
    ],
    ids=str,
)
def test_missing_lookup_sizes_follow_from_the_given_one(
    given: dict[str, Any], expected: tuple[int, int]
) -> None:
    config = read_speculative_config(given)
    assert config is not None and (config.min_ngram, config.max_ngram) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "ngram", "lookup": 3},
            "key 'lookup', which is unknown with method ngram; use method, num_speculative_tokens",
        ),
        ({"method": "eagle"}, "method is 'eagle'; use ngram or draft_model"),
        ({"method": ["ngram"]}, "use ngram or draft_model"),
        ({"method": "draft_model"}, "draft_model needs the key model"),
        ({"model": "m", "prompt_lookup_max": 3}, "'prompt_lookup_max', which is unknown with method draft"),
        ({"method": "ngram", "model": "m"}, "'model', which is unknown with method ngram"),
        ({"model": "m", "draft_tensor_parallel_size": 2}, "one device, so use 1"),
        ({"model": "m", "max_model_len": 0}, "max_model_len is 0"),
        ({"model": "m", "quantization": "int3"}, "quantization"),
        ({"model": 3}, "model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; use 1 to 31"),
        ({"num_speculative_tokens": 32}, "use 1 to 31"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min is 3, above"),
    ],
    ids=str,
)
def test_unknown_keys_and_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        resolved(given)
    assert raised.value.param == "speculative_config"


def test_a_model_that_does_not_generate_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model that generates text"):
        resolved({"method": "ngram"}, ModelFacts(max_model_len=128))
    folder = write_bert(tmp_path / "bert")
    with pytest.raises(ConfigError, match="needs a model that generates text"):
        Engine(str(folder), device="cpu", speculative_config={"method": "ngram"})


def test_the_flag_takes_a_json_object() -> None:
    flag = next(flag for flag in ENGINE_FLAGS if flag.field == "speculative_config")
    assert flag.name == "--speculative-config"
    assert ENGINE.to_field(flag, '{"method": "ngram"}') == {"method": "ngram"}
    with pytest.raises(ConfigError, match="not valid JSON"):
        ENGINE.to_field(flag, "ngram")
