"""Which models the supervisor puts to sleep, and on whose behalf."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig, ModelConfig, ServerConfig
from penstock.serving.child import Child
from penstock.serving.control import EngineOrder, OrderDone, RoomMade, RoomWanted
from penstock.serving.engines import ManagedEngine
from penstock.serving.models import ManagedModel, ModelSet
from penstock.serving.placement import Placement
from penstock.serving.sleepers import ENGINE_GONE, Sleepers
from penstock.wire.status import EngineSleep, EngineStatus, StatusWriter


class FakeLink:
    """A link to an engine that records its orders."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid


class Engines:
    """Engines whose status pages the test writes."""

    def __init__(
        self, folder: Path, config: ServerConfig, names: str, sleep_after_s: float | None = None
    ) -> None:
        self.models = ModelSet()
        self.pages: dict[str, StatusWriter] = {}
        for position, name in enumerate(names):
            engine = EngineConfig(device="null", served_model_name=name)
            child = Child("nothing", process=Process(100 + position))  # type: ignore[arg-type]
            settings = ModelConfig(engine=engine, sleep_after_s=sleep_after_s)
            spec = describe(engine)
            model = ManagedModel(position, settings, spec, config, folder, [(child, Placement())])
            (managed,) = model.engines
            managed.started_s, managed.link = 0.0, FakeLink()  # type: ignore[assignment]
            self.models.add(model)
            self.pages[name] = StatusWriter(model.folder / "engine.status")
            self.set(name)
        self.sleepers = Sleepers(self.models, config)

    def model(self, name: str) -> ManagedModel:
        found = self.models.find(name)
        assert found is not None
        return found

    def __getitem__(self, name: str) -> ManagedEngine:
        return self.model(name).engines[0]

    def set(
        self, name: str, used_s: float = 1.0, state: EngineSleep = EngineSleep.AWAKE, num_bytes: int = 100
    ) -> None:
        pid = self[name].pid
        self.pages[name].publish(
            EngineStatus(pid=pid, last_request_s=used_s, state=state, device_bytes=num_bytes)
        )

    def orders(self, name: str) -> list[str]:
        return [each.action for each in self._sent(name) if isinstance(each, EngineOrder)]

    def rooms_made(self, name: str) -> int:
        return sum(isinstance(each, RoomMade) for each in self._sent(name))

    def slept(self, name: str, error: str | None = None) -> None:
        """Report that the engine has carried out its last order."""
        if error is None:
            self.set(name, state=EngineSleep.ASLEEP)
        last = next(each for each in reversed(self._sent(name)) if isinstance(each, EngineOrder))
        link = self[name].link
        assert link is not None
        self.sleepers.order_done(link, OrderDone(last.id, error))

    def want_room(self, name: str, num_bytes: int) -> None:
        link = self[name].link
        assert link is not None
        self.sleepers.room_wanted(link, RoomWanted(1, num_bytes))

    def _sent(self, name: str) -> list[Any]:
        return self[name].link.sent  # type: ignore[union-attr]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def two_engines(folder: Path, config: ServerConfig) -> tuple[ManagedModel, Sleepers, list[StatusWriter]]:
    """A model with two engines on two GPUs."""
    engine = EngineConfig(device="null", served_model_name="twice")
    children = [Child("nothing", process=Process(200 + index)) for index in range(2)]  # type: ignore[arg-type]
    placements = [Placement(devices=(f"cuda:{index}",)) for index in range(2)]
    model = ManagedModel(
        0,
        ModelConfig(engine=engine),
        describe(engine),
        config,
        folder,
        list(zip(children, placements, strict=True)),
    )
    models, pages = ModelSet(), []
    models.add(model)
    for each in model.engines:
        each.link, each.started_s = FakeLink(), 0.0  # type: ignore[assignment]
        pages.append(StatusWriter(Path(each.address.status_file or "")))
        pages[-1].publish(EngineStatus(pid=each.pid, last_request_s=1.0, device_bytes=100))
    return model, Sleepers(models, config), pages


def sent_to(engine: ManagedEngine) -> list[EngineOrder]:
    return [each for each in engine.link.sent if isinstance(each, EngineOrder)]  # type: ignore[union-attr]


def test_an_order_goes_to_all_engines_and_is_done_with_the_last(folder: Path) -> None:
    model, sleepers, _ = two_engines(folder, ServerConfig())
    ends: list[str | None] = []
    sleepers.order(model, "sleep", 1, ends.append)
    for engine, expected in zip(model.engines, ([], [None]), strict=True):
        (order,) = sent_to(engine)
        assert engine.link is not None and order.level == 1
        sleepers.order_done(engine.link, OrderDone(order.id))
        assert ends == expected


def test_an_order_tells_which_engine_could_not_follow_it(folder: Path) -> None:
    model, sleepers, _ = two_engines(folder, ServerConfig())
    model.engines[1].link = None
    ends: list[str | None] = []
    sleepers.order(model, "sleep", None, ends.append)
    (order,) = sent_to(model.engines[0])
    assert model.engines[0].link is not None and ends == []
    sleepers.order_done(model.engines[0].link, OrderDone(order.id))
    assert ends == ["engine 1 of twice does not run"]


def test_a_model_is_idle_when_all_its_engines_are(folder: Path) -> None:
    model, sleepers, pages = two_engines(folder, ServerConfig(sleep_after_s=10))
    pages[1].publish(EngineStatus(pid=model.engines[1].pid, last_request_s=9.0))
    sleepers.apply(15.0)
    assert not sent_to(model.engines[0]) and not sent_to(model.engines[1])
    sleepers.apply(19.0)
    assert len(sent_to(model.engines[0])) == len(sent_to(model.engines[1])) == 1


def test_for_memory_only_the_engines_of_the_device_sleep_and_never_those_of_the_same_model(
    folder: Path,
) -> None:
    model, sleepers, _ = two_engines(folder, ServerConfig())
    (folder / "others").mkdir()
    others = Engines(folder / "others", ServerConfig(), "b")
    others["b"].device = "cuda:1"
    sleepers._models._models[9] = others.model("b")
    link = others["b"].link
    assert link is not None
    sleepers.room_wanted(link, RoomWanted(1, 50))
    assert not sent_to(model.engines[0]) and len(sent_to(model.engines[1])) == 1
    own = model.engines[0].link
    assert own is not None
    sleepers.room_wanted(own, RoomWanted(2, 50))
    assert [type(each) for each in own.sent] == [RoomMade]  # type: ignore[attr-defined]


def test_an_idle_model_sleeps_once_and_a_used_one_does_not(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(sleep_after_s=10), "ab")
    engines.set("a", used_s=5)
    engines.set("b", used_s=9)
    for now_s in (14.0, 15.0, 16.0):
        engines.sleepers.apply(now_s)
    assert engines.orders("a") == ["sleep"] and engines.orders("b") == []
    engines.slept("a")
    engines.sleepers.apply(17.0)
    assert engines.orders("a") == ["sleep"], "it sleeps already"


def test_a_model_may_have_an_idle_time_of_its_own(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(sleep_after_s=10), "a", sleep_after_s=0)
    engines.sleepers.apply(1000.0)
    assert engines.orders("a") == []


def test_the_least_recently_used_models_sleep_beyond_the_limit(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(max_awake_models=1), "abc")
    for name, used_s in zip("abc", (3.0, 1.0, 2.0), strict=True):
        engines.set(name, used_s)
    engines.sleepers.apply(5.0)
    assert [engines.orders(name) for name in "abc"] == [[], ["sleep"], ["sleep"]]


def test_as_many_models_sleep_as_the_memory_takes_the_least_used_first(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(), "abcd")
    for name, used_s in zip("abcd", (4.0, 1.0, 2.0, 3.0), strict=True):
        engines.set(name, used_s)
    engines.want_room("a", 150)
    assert [engines.orders(name) for name in "abcd"] == [[], ["sleep"], ["sleep"], []]
    engines.slept("b")
    assert engines.rooms_made("a") == 0
    engines.slept("c")
    assert engines.rooms_made("a") == 1 and engines.orders("d") == []


def test_another_model_sleeps_where_one_cannot(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(), "abc")
    engines.set("a", used_s=3.0)
    engines.set("c", used_s=2.0)
    engines.want_room("a", 100)
    engines.slept("b", error="no host memory")
    assert engines.orders("c") == ["sleep"] and engines.rooms_made("a") == 0
    engines.slept("c")
    assert engines.rooms_made("a") == 1


def test_a_model_that_cannot_fall_asleep_for_another_reason_frees_nothing(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(sleep_after_s=1), "abc")
    engines.set("a", used_s=100.0)
    engines.set("c", used_s=99.5)
    engines.sleepers.apply(100.0)
    assert engines.orders("b") == ["sleep"] and engines.orders("c") == []
    engines.want_room("a", 100)
    engines.slept("b", error="no host memory")
    assert engines.orders("c") == ["sleep"] and engines.rooms_made("a") == 0


def test_an_engine_is_answered_at_once_where_nothing_can_sleep(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(), "ab")
    engines.set("b", state=EngineSleep.WAKING)
    engines.want_room("a", 100)
    assert engines.rooms_made("a") == 1 and engines.orders("b") == []


def test_the_memory_of_an_engine_that_dies_is_free(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(), "ab")
    engines.want_room("a", 100)
    errors: list[str | None] = []
    engines.sleepers.order(engines.model("b"), "wake", None, errors.append)
    engines.sleepers.engine_exited(engines["b"])
    assert engines.rooms_made("a") == 1 and errors == [ENGINE_GONE]


def test_models_of_another_device_do_not_sleep_for_it(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(), "ab")
    engines["b"].device = "cuda:1"
    engines.want_room("a", 100)
    assert engines.orders("b") == [] and engines.rooms_made("a") == 1


def test_a_model_that_falls_asleep_already_is_waited_for(folder: Path) -> None:
    engines = Engines(folder, ServerConfig(sleep_after_s=10), "ab")
    ends: list[str | None] = []
    engines.sleepers.order(engines.model("b"), "sleep", 1, ends.append)
    engines.want_room("a", 100)
    assert engines.orders("b") == ["sleep"] and engines.rooms_made("a") == 0
    engines.slept("b")
    assert engines.rooms_made("a") == 1 and ends == [None]
