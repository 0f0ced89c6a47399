"""Models that a command line or a `--config` file lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.config_file import listed_models
from penstock.cli.serve import model_settings, named_model, settings_of_models
from penstock.config import ServerConfig
from penstock.errors import ConfigError
from penstock.serving.model_settings import describe_loaded, model_config


def read(tmp_path: Path, text: str) -> list[dict[str, Any]]:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return listed_models(str(file), settings_of_models())


def test_a_file_lists_models_by_name_or_with_settings(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
port: 1
models:
  - org/one
  - model: org/two
    served_model_name: two
    aliases: second
    kv-cache-gb: 2
    hf_overrides: {a: 1}
    auto_truncate: false
    sleep_after: 60
    dtype:
""",
    )
    assert found == [
        {"model": "org/one"},
        {
            "model": "org/two",
            "served_model_name": ("two",),
            "aliases": ["second"],
            "kv_cache_gb": 2,
            "hf_overrides": {"a": 1},
            "auto_truncate": False,
            "sleep_after_s": 60,
        },
    ]
    config = model_config(found[1], ServerConfig())
    assert config.engine.model_names == ("two",) and config.aliases == ("second",)
    assert (config.engine.kv_cache_gb, config.auto_truncate, config.sleep_after_s) == (2.0, False, 60.0)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("models: {}", "must be a list"),
        ("models: []", "must be a list"),
        ("models: [3]", "use a model, or a mapping"),
        ("models: [{served_model_name: a}]", "use a model, or a mapping"),
        ("models: [{model: a, port: 3}]", "'port', which is no setting of a model"),
        ("models: [{model: a, dtyp: float32}]", "did you mean dtype?"),
        ("models: [{model: a, quantization: int7}]", "use one of int8, fp8"),
        ("models: [{model: a, threads: 0}]", "use at least 1"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(tmp_path: Path, entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        read(tmp_path, entry)


def test_arguments_come_before_the_file_and_flags_hold_for_all() -> None:
    shared: dict[str, Any] = {"device": "cpu"}
    listed = [{"model": "c", "device": "cuda"}]
    assert model_settings(["a", "n=b"], shared, listed) == [
        {"device": "cpu", "model": "a"},
        {"device": "cpu", "model": "b", "served_model_name": ("n",)},
    ]
    assert model_settings([], shared, listed) == [{"device": "cuda", "model": "c"}]
    assert model_settings([], shared, []) == [shared]
    named = {**shared, "served_model_name": ("x",)}
    assert model_settings(["a"], named, []) == [{**named, "model": "a"}]


@pytest.mark.parametrize(
    ("arguments", "shared", "listed", "words"),
    [
        (["a", "b"], {"served_model_name": ("x",)}, [], "--served-model-name is for one model"),
        (["a", "b"], {"model": "c"}, [], "--model is for one model"),
        (["a"], {"model": "b"}, [], "two models are named"),
        ([], {"model": "b"}, [{"model": "a"}], "leave out --served-model-name and --model"),
    ],
)
def test_names_that_could_mean_several_models_are_refused(
    arguments: list[str], shared: dict[str, Any], listed: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        model_settings(arguments, shared, listed)


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert named_model(str(folder)) == {"model": str(folder)}
    for argument in ("=b", "a="):
        with pytest.raises(ConfigError, match="empty part"):
            named_model(argument)


def test_cutting_and_chunking_contradict_each_other_for_each_model() -> None:
    with pytest.raises(ConfigError, match="give only one"):
        model_config({"auto_truncate": True, "default_chunking": "mean"}, ServerConfig())
    with pytest.raises(ConfigError, match="give only one"):
        model_config({"default_chunking": "mean"}, ServerConfig(auto_truncate=True))
    assert (
        model_config({"auto_truncate": False}, ServerConfig(default_chunking="mean")).auto_truncate is False
    )


def test_an_order_cannot_set_where_the_server_writes() -> None:
    with pytest.raises(ConfigError, match="cannot have profile"):
        describe_loaded("a", {"profile": "/tmp"}, {}, ServerConfig())
