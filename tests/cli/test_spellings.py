from __future__ import annotations

import json

import pytest

from penstock.cli.spellings import with_dashes, with_json_keys
from penstock.errors import ConfigError

KNOWN = ("--max-model-len", "--pooler-config", "--odd_flag")
JSON = ("--pooler-config", "--hf-overrides")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--max_model_len", "--max-model-len"),
        ("--max_model_len=5", "--max-model-len=5"),
        ("--max_model_len=a_b", "--max-model-len=a_b"),
        ("--pooler_config.use_activation", "--pooler-config.use_activation"),
        ("--odd_flag", "--odd_flag"),
        ("--no_such", "--no_such"),
        ("a_model", "a_model"),
        ("-m", "-m"),
    ],
)
def test_underscores_of_a_flag_become_dashes(given: str, expected: str) -> None:
    assert with_dashes([given], KNOWN) == [expected]


def joined(*args: str) -> dict[str, object]:
    """The JSON object of --pooler-config."""
    out = with_json_keys(list(args), JSON)
    assert out[-2] == "--pooler-config"
    return json.loads(out[-1])  # type: ignore[no-any-return]


def test_keys_after_a_dot_become_an_object() -> None:
    assert joined("model", "--pooler-config.task", "embed") == {"task": "embed"}
    assert joined("--pooler-config.use_activation=false", "--port", "1") == {"use_activation": False}
    whole = joined("--pooler-config", '{"task": "embed"}', "--pooler-config.max_embed_len", "10")
    assert whole == {"task": "embed", "max_embed_len": 10}
    assert joined("--pooler-config.a.b", "x", "--pooler-config.a.c", "1") == {"a": {"b": "x", "c": 1}}


def test_other_arguments_stay_as_they_are() -> None:
    args = ["a.b", "--port", "1", "--pooler-config", "{", "--other.key", "1"]
    assert with_json_keys(args, JSON) == args
    assert with_json_keys(["--pooler-config.a", "1", "x"], JSON)[0] == "x"


@pytest.mark.parametrize(
    "args",
    [
        ["--pooler-config.task"],
        ["--pooler-config", "[]", "--pooler-config.task", "embed"],
        ["--pooler-config.a", "1", "--pooler-config.a.b", "1"],
    ],
)
def test_what_cannot_be_an_object_is_refused(args: list[str]) -> None:
    with pytest.raises(ConfigError):
        with_json_keys(args, JSON)
