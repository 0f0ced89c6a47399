"""`--adapter` and `--lora-modules`: which adapter a command uses, and how it affects the output."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer

from penstock import Engine
from penstock.cli.adapter_flag import AdapterFlag
from penstock.cli.command import repeat_flags
from penstock.cli.flags import EngineFields, lora_modules
from penstock.cli.main import app
from penstock.config import LoraModule
from penstock.errors import BadValue, ConfigError
from penstock.jobs.stamp import Stamp
from tests.cli.runs import error_of, invoke
from tests.lora_models import TEXTS, Adapted, adapted_embedder, adapted_llama


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted_embedder(tmp_path_factory.mktemp("bert"), "a", "b")


def test_modules_are_pairs_or_json() -> None:
    given = ["a=/x", '{"name": "b", "path": "/y", "base_model_name": "m"}', '[{"name": "c", "path": "/z"}]']
    expected = (LoraModule("a", "/x"), LoraModule("b", "/y", "m"), LoraModule("c", "/z"))
    assert lora_modules(given) == expected
    assert lora_modules(["a=x=y"]) == (LoraModule("a", "x=y"),)
    for wrong in ("a", "=x", "a=", "{", '{"name": "a"}', '{"name": "a", "path": "b", "rank": 1}', "[1]"):
        with pytest.raises(ConfigError, match="use NAME=PATH, or JSON"):
            lora_modules([wrong])


def test_one_flag_takes_several_modules() -> None:
    args = ["model", "--lora-modules", "a=x", "b=y", "--port", "1"]
    repeated = ["model", "--lora-modules", "a=x", "--lora-modules", "b=y", "--port", "1"]
    assert repeat_flags(args, {"--lora-modules"}) == repeated


def test_json_adapters_follow_one_flag_where_a_file_names_the_models(tmp_path: Path) -> None:
    """Another value is an adapter if it is JSON, and a model otherwise."""
    (tmp_path / "models.yaml").write_text("models: [{model: x}]")
    given = ['{"name": "a", "path": "/a"}', '{"name": "b", "path": "/b"}']
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    args = ["--config", str(tmp_path / "models.yaml"), "--lora-modules", *given, "model"]
    context = command.make_context("serve", args)
    assert context.params["engineconfig_lora_modules"] == given
    assert context.params["models"] == ["model"]


@pytest.mark.parametrize(
    "before", [["model"], ["--port", "1", "model"], ["--enable-lora", "model", "--port=1"]]
)
def test_adapters_follow_one_flag_once_the_model_is_named(before: list[str]) -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    context = command.make_context("serve", [*before, "--lora-modules", "a=x", "b=y"])
    assert context.params["engineconfig_lora_modules"] == ["a=x", "b=y"]
    assert context.params["models"] == ["model"]
    context = command.make_context("serve", ["--port", "1", "--lora-modules", "a=x", "model"])
    assert context.params["models"] == ["model"]


def test_an_adapter_with_its_folder_is_loaded_with_the_model() -> None:
    engine: EngineFields = {"lora_modules": (LoraModule("b", "/b"),)}
    assert AdapterFlag(adapter="a=/x=y").chosen(engine) == "a"
    assert engine == {"enable_lora": True, "lora_modules": (LoraModule("b", "/b"), LoraModule("a", "/x=y"))}
    assert AdapterFlag(adapter="b").chosen({}) == "b" and AdapterFlag().chosen({}) is None
    with pytest.raises(BadValue, match="use NAME=FOLDER"):
        AdapterFlag(adapter="=x").chosen({})


def test_vectors_of_an_adapter_are_stamped_with_its_content(bert: Adapted, tmp_path: Path) -> None:
    texts, output, folder = tmp_path / "texts.txt", tmp_path / "out.parquet", tmp_path / "adapter"
    texts.write_text("\n".join(TEXTS))
    shutil.copytree(bert.adapters["a"], folder)
    args = ("embed", texts, "-o", output, "--device", "cpu", "--threads", "1", "-m", bert.base)
    assert invoke(*args, "--adapter", f"t={folder}").exit_code == 0
    table = pq.read_table(output)
    stamp = Stamp.of_schema(table.schema)
    assert stamp is not None and stamp.adapter.startswith("t@")
    with Engine(str(bert.merged["a"]), device="cpu", threads=1) as merged:
        found = np.stack(table["embedding"].to_pylist())
        np.testing.assert_allclose(found, merged.embed(TEXTS), atol=1e-4)
    assert invoke(*args, "--adapter", f"t={bert.adapters['b']}", "--overwrite").exit_code == 0
    other = Stamp.of_schema(pq.read_table(output).schema)
    assert other is not None and "adapter is" in stamp.difference(other)
    assert "adapter 'x' is not known" in error_of(*args, "--adapter", "x", "--overwrite")


def test_a_command_generates_with_an_adapter(tmp_path: Path) -> None:
    made = adapted_llama(tmp_path, "a")
    args = (
        "generate",
        "Hello",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
    )
    merged = invoke(*args, "-m", made.merged["a"]).stdout
    adapted = invoke(*args, "-m", made.base, "--adapter", f"a={made.adapters['a']}").stdout
    assert adapted == merged != invoke(*args, "-m", made.base).stdout
