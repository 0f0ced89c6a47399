"""How the supervisor loads and unloads LoRA adapters on all engines and API processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from penstock.checkpoint.describe import describe
from penstock.config import (
    EngineConfig,
    LoraModule,
    Machine,
    ModelConfig,
    ModelFacts,
    ServerConfig,
    resolve,
)
from penstock.errors import ConfigError, ModelLoadError
from penstock.serving.adapters import check_base_names, check_lora_modules
from penstock.serving.control import (
    AdapterDone,
    AdapterLost,
    AdapterOrder,
    AdapterReleased,
    ApiAttached,
    ApiServes,
    EngineAttached,
    ModelTable,
    Order,
    OrderAnswer,
    TableApplied,
)
from penstock.serving.launch import EngineLaunch
from penstock.serving.model_settings import model_config
from penstock.serving.models import ManagedModel
from penstock.serving.supervisor import Supervisor
from penstock.wire.status import EngineStatus, StatusWriter
from tests.waiting import wait_until


class Recorder:
    """The other end of a control link, which records the messages it receives."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def last(self, kind: type) -> Any:
        return next((each for each in reversed(self.sent) if isinstance(each, kind)), None)


class Stage:
    """A supervisor with one model, two engines and one API process, whose messages the tests send."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        (self.model,) = supervisor.models
        self.api, self.engines = Recorder(), [Recorder(), Recorder()]
        supervisor.apis[0].child.process = Mock(pid=7)
        self.say(self.api, ApiAttached(7), ApiServes())
        for number in range(2):
            self.start_engine(number)

    def start_engine(self, number: int, pid: int = 0) -> None:
        engine, pid = self.model.engines[number], pid or 100 + number
        engine.child.process = Mock(pid=pid)
        self.engines[number] = Recorder()
        self.say(self.engines[number], EngineAttached(self.model.number, pid, "null", number))
        StatusWriter(Path(engine.address.status_file or "")).publish(EngineStatus(pid=pid))

    def say(self, link: Recorder, *messages: Any) -> None:
        for message in messages:
            self.supervisor._handle(link, message)  # type: ignore[arg-type]

    def order(self, action: Any, **settings: Any) -> None:
        self.say(self.api, Order(1, action, self.model.name, settings=settings))

    def advance(self) -> None:
        self.supervisor.adapters.advance()

    def loading(self) -> list[AdapterOrder]:
        """Wait until both engines have received an order to load an adapter."""

        def told() -> bool:
            self.advance()
            return all(engine.last(AdapterOrder) is not None for engine in self.engines)

        wait_until(told)
        return [engine.last(AdapterOrder) for engine in self.engines]

    def load(self, name: str, folder: Path, **more: Any) -> None:
        """Load an adapter on all engines."""
        for engine in self.engines:
            engine.sent.clear()
        self.order("load_adapter", name=name, path=str(folder), **more)
        for engine, told in zip(self.engines, self.loading(), strict=True):
            self.say(engine, AdapterDone(told.id))
        self.advance()
        self.apply()
        assert self.api.last(OrderAnswer).error is None

    def apply(self) -> None:
        self.say(self.api, TableApplied(self.supervisor.models.version))
        self.advance()

    @property
    def listed(self) -> dict[str, int]:
        table = self.api.last(ModelTable)
        return {each.name: each.id for each in table.models[0].adapters}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path / "adapter"


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    engine = EngineConfig(device="null", served_model_name="model", enable_lora=True)
    config = ModelConfig(engine=engine, data_parallel_size=2)
    supervisor = Supervisor([(config, describe(engine))], ServerConfig(port=0, drain_s=0.0))
    yield Stage(supervisor)
    for child in (supervisor.apis[0].child, *(each.child for each in supervisor.models.get(0).engines)):  # type: ignore[union-attr]
        child.process = None
    supervisor._listeners.close()
    supervisor._control.close()
    supervisor._runtime.remove()


def test_a_load_is_answered_when_every_engine_and_every_api_process_has_it(
    stage: Stage, folder: Path
) -> None:
    stage.order("load_adapter", name="a", path=str(folder))
    first, second = stage.loading()
    assert first.adapter == second.adapter and first.adapter.folder == str(folder)
    stage.say(stage.engines[0], AdapterDone(first.id))
    stage.advance()
    assert "a" not in stage.listed, "the second engine does not have it"
    stage.say(stage.engines[1], AdapterDone(second.id))
    stage.advance()
    assert "a" in stage.listed and stage.api.last(OrderAnswer) is None
    stage.apply()
    assert stage.api.last(OrderAnswer).state == "loaded"


def test_a_load_that_fails_on_one_engine_is_undone_on_the_other(stage: Stage, folder: Path) -> None:
    stage.order("load_adapter", name="a", path=str(folder))
    first, second = stage.loading()
    stage.say(stage.engines[0], AdapterDone(first.id))
    stage.say(stage.engines[1], AdapterDone(second.id, "no room", "ModelLoadError", "lora_path"))
    answer = stage.api.last(OrderAnswer)
    assert (answer.error, answer.kind, answer.param) == ("no room", "ModelLoadError", "lora_path")
    assert stage.engines[0].last(AdapterOrder).action == "unload"
    stage.advance()
    assert stage.listed == {}
    stage.load("a", folder)


def test_an_engine_that_dies_while_it_loads_fails_the_order(stage: Stage, folder: Path) -> None:
    stage.order("load_adapter", name="a", path=str(folder))
    first, _ = stage.loading()
    stage.say(stage.engines[0], AdapterDone(first.id))
    stage.supervisor.adapters.engine_exited(stage.model, stage.model.engines[1])
    assert "stopped while it loaded" in stage.api.last(OrderAnswer).error
    assert stage.engines[0].last(AdapterOrder).action == "unload"
    assert stage.listed == {}


def test_an_engine_that_starts_meanwhile_is_told_when_it_serves(stage: Stage, folder: Path) -> None:
    stage.model.engines[1].child.process = Mock(pid=500)  # a new process that does not serve yet
    stage.order("load_adapter", name="a", path=str(folder))

    def told() -> bool:
        stage.advance()
        return stage.engines[0].last(AdapterOrder) is not None

    wait_until(told)
    stage.say(stage.engines[0], AdapterDone(stage.engines[0].last(AdapterOrder).id))
    stage.advance()
    assert stage.listed == {} and stage.engines[1].last(AdapterOrder) is None
    stage.start_engine(1, 500)
    stage.advance()
    stage.say(stage.engines[1], AdapterDone(stage.engines[1].last(AdapterOrder).id))
    stage.advance()
    assert "a" in stage.listed


def test_the_next_process_of_an_engine_starts_with_the_adapters_of_the_table(
    stage: Stage, folder: Path
) -> None:
    for engine in stage.model.engines:
        engine.launch = None
        engine.configure(
            stage.model.config,
            stage.model.spec,
            stage.supervisor.config,
            metrics_folder=Path(),
            parent=stage.supervisor._parent,
            control=Path(),
            model=0,
            kv_share=None,
        )
    stage.load("a", folder)
    for engine in stage.model.engines:
        launch = msgspec.json.decode(engine.child.config or b"", type=EngineLaunch)
        assert [each.name for each in launch.adapters] == ["a"]


def test_an_adapter_leaves_the_engines_after_its_last_request(stage: Stage, folder: Path) -> None:
    stage.load("a", folder)
    adapter = stage.listed["a"]
    stage.order("unload_adapter", name="a")
    assert stage.listed == {}
    stage.apply()
    assert stage.api.last(OrderAnswer).state == "unloaded"
    assert stage.engines[0].last(AdapterOrder).action == "load", "a request may still use it"
    stage.say(stage.api, AdapterReleased(stage.model.number, adapter))
    stage.advance()
    for engine in stage.engines:
        assert engine.last(AdapterOrder).action == "unload"
        assert engine.last(AdapterOrder).adapter.id == adapter


def test_a_reload_in_place_has_another_id_and_retires_the_old(stage: Stage, folder: Path) -> None:
    stage.load("a", folder)
    old = stage.listed["a"]
    stage.order("load_adapter", name="a", path=str(folder))
    assert "already been loaded" in stage.api.last(OrderAnswer).error
    assert stage.api.last(OrderAnswer).param == "lora_name"
    stage.load("a", folder, replaces=True)
    assert stage.listed["a"] > old
    stage.say(stage.api, AdapterReleased(stage.model.number, old))
    stage.advance()
    assert stage.engines[0].last(AdapterOrder).adapter.id == old


def test_an_api_process_that_dies_uses_no_adapter_any_more(stage: Stage, folder: Path) -> None:
    stage.load("a", folder)
    stage.order("unload_adapter", name="a")
    stage.supervisor._handle_closed(stage.api)  # type: ignore[arg-type]
    stage.advance()
    assert stage.engines[0].last(AdapterOrder).action == "unload"


def test_an_adapter_that_a_restarted_engine_cannot_load_leaves_the_table(stage: Stage, folder: Path) -> None:
    stage.load("a", folder)
    stage.model.has_been_ready = True
    stage.say(stage.engines[0], AdapterLost(stage.model.number, stage.listed["a"], "its files changed"))
    assert stage.listed == {}


def test_an_adapter_of_the_command_line_that_cannot_be_loaded_ends_the_start(
    stage: Stage, folder: Path
) -> None:
    stage.load("a", folder)
    model: ManagedModel = stage.model
    model.has_been_ready = False
    with pytest.raises(ModelLoadError, match="adapter 'a': bad"):
        stage.say(stage.engines[0], AdapterLost(model.number, stage.listed["a"], "bad"))


def test_two_orders_for_one_name_do_not_run_at_once(stage: Stage, folder: Path) -> None:
    stage.order("load_adapter", name="a", path=str(folder))
    stage.order("load_adapter", name="a", path=str(folder))
    assert "is not finished" in stage.api.last(OrderAnswer).error


def test_a_model_cannot_take_the_name_of_an_adapter(stage: Stage, folder: Path) -> None:
    stage.load("a", folder)
    engine = EngineConfig(device="null", served_model_name="a")
    with pytest.raises(ConfigError, match="an adapter of model has the name 'a'"):
        stage.supervisor.add_model(ModelConfig(engine=engine), describe(engine))


def test_modules_of_the_command_line_are_checked_before_the_model_is_loaded(folder: Path) -> None:
    def config(*modules: LoraModule, **more: Any) -> EngineConfig:
        return EngineConfig(
            device="null", served_model_name="m", lora_modules=modules, enable_lora=True, **more
        )

    fine = config(LoraModule("a", str(folder)))
    spec = describe(fine)
    check_lora_modules(fine, spec)
    for module, words in (
        (LoraModule("m", str(folder)), "a model has this name"),
        (LoraModule("query", str(folder)), "names a prompt"),
        (LoraModule("a:b", str(folder)), "a colon"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_lora_modules(config(module), spec)
    with pytest.raises(ConfigError, match="two adapters are called 'a'"):
        check_lora_modules(config(LoraModule("a", str(folder)), LoraModule("a", str(folder))), spec)
    other = LoraModule("a", "/nothing", base_model_name="other")
    check_lora_modules(config(other), spec)  # names another model
    models = [(ModelConfig(engine=fine), spec)]
    with pytest.raises(ConfigError, match="is for 'other', which this server does not have"):
        check_base_names([other], models)
    with pytest.raises(ConfigError, match="several models"):
        check_base_names([LoraModule("a", str(folder))], models * 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_lora": False, "lora_modules": (LoraModule("a", "x"),)}, "lora_modules needs enable_lora"),
        ({"max_loras": 0}, "max_loras is 0; use a number from 1"),
        ({"max_lora_rank": 100_000}, "max_lora_rank is 100000"),
        ({"max_cpu_loras": 2}, "max_cpu_loras is 2; use a number from max_loras, which is 8"),
        ({"model_impl": "transformers"}, "need a native model"),
    ],
)
def test_settings_of_adapters_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    config = EngineConfig(device="cpu", **{"enable_lora": True, **settings})
    with pytest.raises(ConfigError, match=words):
        resolve(config, ModelFacts(max_model_len=512, hidden_size=64, num_layers=2), Machine(2, False))


def test_names_that_nobody_has_are_not_answered_without_the_adapter_that_they_mean() -> None:
    settings = {"enable_lora": True, "device": "null"}
    with pytest.raises(ConfigError, match="--any-model-name contradict each other"):
        model_config(settings, ServerConfig(any_model_name=True))
    settled = resolve(EngineConfig(**settings), ModelFacts(max_model_len=8), Machine(2, False))  # type: ignore[arg-type]
    assert (settled.max_loras, settled.max_cpu_loras, settled.max_lora_rank) == (8, 32, 64)
