"""LoRA adapters on Ray Serve, without a cluster: the ingress and its replicas have the same adapters."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("ray")

from penstock import Engine
from penstock.api.state import ServedModel
from penstock.cli.settings import app_settings
from penstock.errors import BadValue, ConfigError, ModelLoadError, NotServed, PenstockError
from penstock.scale.serving.config import AppConfig
from penstock.scale.serving.engine_replica import EngineReplica
from penstock.scale.serving.ingress import FixedModels, served_model
from penstock.scale.serving.transport import pack_work, unpack_results
from penstock.types import Failure, PooledOutput, PoolingParams, Request
from tests.lora_models import TEXTS, Adapted, adapted_embedder

WORDS = TEXTS[0]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted_embedder(tmp_path_factory.mktemp("bert"), "a", "b")


def configured(bert: Adapted, *names: str, **more: Any) -> AppConfig:
    modules = [f"{name}={bert.adapters[name]}" for name in names]
    settings = {"device": "cpu", "threads": 1, "enable-lora": True, "lora-modules": modules, **more}
    return app_settings({"models": [str(bert.base)], **settings})


def replica_of(config: AppConfig) -> EngineReplica:
    return EngineReplica(msgspec.json.encode(config.replica_launch(config.models[0])))


class Handle:
    app_name = deployment_name = "adapters"

    def options(self, **options: Any) -> Handle:
        return self


def ingress_of(config: AppConfig) -> ServedModel:
    return served_model(config.models[0], Handle(), config.server, 1.0)  # type: ignore[arg-type]


def wanted(model: ServedModel) -> str:
    found: str = model.engine._fingerprint  # type: ignore[attr-defined]
    return found


def embed(replica: EngineReplica, model: ServedModel, adapter: str | None) -> Any:
    """The vector of a text, requested with the ingress's token ids and adapter id."""
    ids = np.array(model.text.tokenizer.encode([WORDS])[0], dtype=np.int32)
    work = Request("r", ids, np.array([len(ids)], dtype=np.int32), PoolingParams())
    if adapter is not None:
        work.adapters = np.array([model.find_adapter(adapter).id], dtype=np.int32)
    frames = pack_work(work, "r")
    (found,) = unpack_results(asyncio.run(replica.run(frames, "r", len(ids), wanted(model))))
    assert not isinstance(found, Failure), found.error
    assert isinstance(found, PooledOutput)
    return found.values[0]


def test_a_replica_has_the_adapters_that_its_ingress_names(bert: Adapted) -> None:
    config = configured(bert, "a", "b")
    replica, model = replica_of(config), ingress_of(config)
    for name, folder in {None: bert.base, **bert.merged}.items():
        with Engine(str(folder), device="cpu", threads=1) as engine:
            np.testing.assert_allclose(embed(replica, model, name), engine.embed([WORDS])[0], atol=1e-4)


def test_replicas_with_other_adapters_are_other_models(bert: Adapted, tmp_path: Path) -> None:
    both = wanted(ingress_of(configured(bert, "a", "b")))
    assert both == wanted(ingress_of(configured(bert, "a", "b")))
    others = [wanted(ingress_of(configured(bert, *names))) for names in (("b", "a"), ("a",), ())]
    shutil.copytree(bert.adapters["a"], tmp_path / "a")
    moved = Adapted(bert.base, bert.adapters | {"a": tmp_path / "a"}, {})
    assert wanted(ingress_of(configured(moved, "a", "b"))) == both  # only contents matter
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(bert.adapters["b"], tmp_path / "a")
    others.append(wanted(ingress_of(configured(moved, "a", "b"))))
    assert len({both, *others}) == 5


def test_a_request_of_an_ingress_with_other_adapters_is_refused(bert: Adapted) -> None:
    replica, other = replica_of(configured(bert, "a", "b")), ingress_of(configured(bert, "b", "a"))
    work = Request("r", np.arange(3, 6, dtype=np.int32), np.array([3], dtype=np.int32), PoolingParams())
    (found,) = unpack_results(asyncio.run(replica.run(pack_work(work, "r"), "r", 3, wanted(other))))
    assert isinstance(found, Failure) and "another model of this name" in found.error.message


def test_a_replica_that_cannot_load_an_adapter_does_not_start(bert: Adapted, tmp_path: Path) -> None:
    other = adapted_embedder(tmp_path / "other", "a")
    folder = other.adapters["a"]
    config = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(config.replace('"r": 4', '"r": 5'))
    with pytest.raises(ModelLoadError, match="its rank is 5"):
        replica_of(configured(Adapted(bert.base, other.adapters, {}), "a"))


def test_names_are_checked_before_anything_is_loaded(bert: Adapted) -> None:
    clash = Adapted(bert.base, {"base": bert.adapters["a"]}, {})
    with pytest.raises(ConfigError, match="a model has this name"):
        ingress_of(configured(clash, "base"))
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        replica_of(configured(bert, "a", **{"enable-lora": False}))


def test_a_request_for_an_adapter_that_is_not_configured_is_refused_by_name(bert: Adapted) -> None:
    with pytest.raises(PenstockError, match="adapter 'c' is not loaded; model base has: a, b"):
        ingress_of(configured(bert, "a", "b")).find_adapter("c")


@pytest.mark.parametrize("action", ["load_adapter", "unload_adapter"])
def test_orders_for_adapters_are_refused_with_a_reason(action: Any) -> None:
    with pytest.raises(NotServed, match="deploy it with other lora_modules"):
        asyncio.run(FixedModels().order(action, "m", settings={"name": "a"}))


def test_adapters_of_several_models_are_kept_for_the_check_of_their_bases(bert: Adapted) -> None:
    config = app_settings(
        {
            "models": ["some/model", "other/model"],
            "enable-lora": True,
            "lora-modules": [{"name": "a", "path": str(bert.adapters["a"]), "base_model_name": "some/model"}],
        }
    )
    assert [each.name for each in config.lora_modules] == ["a"]
    with pytest.raises((ConfigError, BadValue), match="lora-root"):
        app_settings({"models": ["some/model"], "lora-root": "/adapters"})
