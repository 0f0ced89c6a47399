"""Adapters with a base model on the hub: fetched, found offline, and identified by content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.checkpoint.describe import describe
from penstock.checkpoint.revision import content_revision, loaded_revision
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError
from tests.checkpoint.hub import Files, serve
from tests.lora_models import adapted_embedder

DESCRIBE = """
import sys
from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError
try:
    spec = describe(EngineConfig(model="org/adapter", download_dir=sys.argv[1]))
    links = {path.name: str(path.resolve()) for path in spec.root_path.iterdir() if path.is_symlink()}
    print(spec.name, spec.merges_adapter, spec.root_path.name, spec.config["_name_or_path"])
    print(links["model.safetensors"].count("models--org--base"), spec.config.get("note"))
except ModelLoadError as error:
    print("ModelLoadError:", " ".join(str(error).split()))
"""


def described(home: Path, **environment: str) -> list[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    kept |= {"HF_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "NO_PROXY": "*"} | environment
    command = [sys.executable, "-c", DESCRIBE, str(home / "models")]
    ran = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def files_of(folder: Path) -> Files:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_adapter_and_base_are_fetched_and_then_found_offline(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path / "made", "one")
    adapter = json.loads((made.adapters["one"] / "adapter_config.json").read_text())
    adapter |= {"base_model_name_or_path": "org/base", "revision": "v2"}
    config = json.loads((made.base / "config.json").read_text())
    newer = files_of(made.base) | {"config.json": json.dumps(config | {"note": "second"}).encode()}
    own = files_of(made.adapters["one"]) | {"adapter_config.json": json.dumps(adapter).encode()}
    repos = {"org/adapter": {"main": own}, "org/base": {"main": files_of(made.base), "v2": newer}}
    wanted = ["org/adapter True models--org--adapter org/base", "1 second"]
    with serve(repos) as hub:
        assert described(tmp_path / "home", HF_ENDPOINT=hub.address) == wanted
    assert described(tmp_path / "home", HF_HUB_OFFLINE="1") == wanted
    (missing,) = described(tmp_path / "other", HF_HUB_OFFLINE="1")
    assert "org/adapter is not in the local cache and HF_HUB_OFFLINE is set" in missing


def test_offline_a_base_that_is_not_cached_is_named_with_what_to_do(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path / "made", "one")
    adapter = json.loads((made.adapters["one"] / "adapter_config.json").read_text())
    own = files_of(made.adapters["one"]) | {
        "adapter_config.json": json.dumps(adapter | {"base_model_name_or_path": "org/base"}).encode()
    }
    with serve({"org/adapter": {"main": own}}) as hub:
        described(tmp_path / "home", HF_ENDPOINT=hub.address)
    (message,) = described(tmp_path / "home", HF_HUB_OFFLINE="1")
    assert (
        "holds an adapter for 'org/base', which cannot be loaded: org/base is not in the local cache"
        in message
    )
    assert "--base-model" in message


def test_other_weights_of_the_adapter_are_another_model(tmp_path: Path) -> None:
    """The result cache must distinguish the two revisions."""
    made = adapted_embedder(tmp_path, "one", "two")
    model = str(made.adapters["one"])
    first = describe(EngineConfig(model=model))
    content, loaded = content_revision(first), loaded_revision(first, {})
    file = made.adapters["one"] / "adapter_model.safetensors"
    kept = file.read_bytes()
    file.write_bytes((made.adapters["two"] / file.name).read_bytes())
    other = describe(EngineConfig(model=model))
    assert content_revision(other) != content and loaded_revision(other, {}) != loaded
    file.write_bytes(kept)
    assert content_revision(describe(EngineConfig(model=model))) == content


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = adapted_embedder(tmp_path, "one")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="set XDG_CACHE_HOME to a folder that can be written"):
        describe(EngineConfig(model=str(made.adapters["one"])))
