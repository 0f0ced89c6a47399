from __future__ import annotations

import json

import pytest

from penstock.cli.json_flags import with_json_keys
from penstock.errors import ConfigError

JSON = ("--pooler-config", "--hf-overrides")


def joined(*args: str) -> dict[str, object]:
    """Parse flags and return the JSON object of `--pooler-config`."""
    out = with_json_keys(list(args), JSON)
    assert out[-2] == "--pooler-config"
    return json.loads(out[-1])  # type: ignore[no-any-return]


def test_keys_after_a_dot_become_an_object() -> None:
    assert joined("model", "--pooler-config.task", "embed") == {"task": "embed"}
    assert joined("--pooler_config.use_activation", "true") == {"use_activation": True}
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
