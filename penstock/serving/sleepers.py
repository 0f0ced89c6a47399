"""Which models sleep, and when: on an operator's order, after idle time, or to make room for another.

An engine wakes by itself when a request arrives. Before it takes memory that its device does not have, it
asks the supervisor, which puts the least recently used models to sleep.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.config import ServerConfig
from penstock.serving.control import EngineOrder, Link, OrderDone, RoomMade, RoomWanted
from penstock.serving.models import ManagedModel, ModelSet
from penstock.wire.status import EngineSleep

log = logging.getLogger("penstock")
Done = Callable[[str | None], None]  # called with the reason if an order fails
ENGINE_GONE = "the engine process stopped meanwhile"


@dataclass(slots=True)
class _Sent:
    """An order that an engine follows."""

    model: ManagedModel
    action: str
    done: Done


@dataclass(slots=True)
class _Room:
    """An engine that waits for memory."""

    model: ManagedModel
    link: Link
    id: int
    missing_bytes: int
    falling_asleep: list[ManagedModel] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)  # numbers of models that were told to sleep


class Sleepers:
    """Sends orders to engines, and follows the rules of the server's settings."""

    def __init__(self, models: ModelSet, config: ServerConfig) -> None:
        self._models = models
        self._config = config
        self._ids = itertools.count()
        self._sent: dict[int, _Sent] = {}
        self._rooms: list[_Room] = []

    def order(self, model: ManagedModel, action: str, level: int | None, done: Done) -> None:
        """Have an engine sleep or wake."""
        if model.link is None or not model.serves:
            done(f"the engine of {model.name} does not run")
            return
        number = next(self._ids)
        self._sent[number] = _Sent(model, action, done)
        model.link.send(EngineOrder(number, "sleep" if action == "sleep" else "wake", level))

    def order_done(self, link: Link, message: OrderDone) -> None:
        sent = self._sent.get(message.id)
        if sent is not None and sent.model.link is link:
            del self._sent[message.id]
            sent.done(message.error)

    def engine_exited(self, model: ManagedModel) -> None:
        """Fail the orders of an engine that is gone. It needs no room, and its memory is free."""
        for number, sent in list(self._sent.items()):
            if sent.model is model:
                del self._sent[number]
                sent.done(ENGINE_GONE)
        self._rooms = [room for room in self._rooms if room.model is not model]
        for room in list(self._rooms):
            self._slept(room, model)

    def closed(self, link: Link) -> None:
        self._rooms = [room for room in self._rooms if room.link is not link]

    def room_wanted(self, link: Link, message: RoomWanted) -> None:
        model = next((each for each in self._models if each.link is link), None)
        if model is None:
            link.send(RoomMade(message.id))
            return
        room = _Room(model, link, message.id, message.num_bytes)
        self._rooms.append(room)
        self._join(room)
        self._advance(room)

    def apply(self, now_s: float) -> None:
        """Put models to sleep that are idle, or more than may be awake."""
        for model in self._awake():
            limit_s = self._sleep_after_s(model)
            if limit_s and self._is_idle(model) and now_s - self._last_used_s(model) >= limit_s:
                self._send_to_sleep(model, f"it was idle for {limit_s:g} s")
        if limit := self._config.max_awake_models:
            awake = self._awake()
            for model in awake[: max(0, len(awake) - limit)]:
                self._send_to_sleep(model, f"--max-awake-models is {limit}")

    def _sleep_after_s(self, model: ManagedModel) -> float:
        own = model.config.sleep_after_s
        return self._config.sleep_after_s if own is None else own

    def _awake(self) -> list[ManagedModel]:
        """The models that are awake and not told to sleep, the least recently used first."""
        told = {sent.model.number for sent in self._sent.values() if sent.action == "sleep"}
        awake = [
            each
            for each in self._models
            if each.serves and each.sleep_state is EngineSleep.AWAKE and each.number not in told
        ]
        return sorted(awake, key=self._last_used_s)

    @staticmethod
    def _last_used_s(model: ManagedModel) -> float:
        return max(model.status.read().last_request_s, model.started_s)

    @staticmethod
    def _is_idle(model: ManagedModel) -> bool:
        status = model.status.read()
        return not (status.queued_tokens or status.queued_prompt_tokens or status.step_began_s)

    def _send_to_sleep(self, model: ManagedModel, why: str, done: Done | None = None) -> None:
        began_s = time.monotonic()

        def slept(error: str | None) -> None:
            if error is None:
                log.info("%s sleeps after %.1f s: %s", model.name, time.monotonic() - began_s, why)
            else:
                log.warning("%s cannot sleep: %s", model.name, error)
            if done is not None:
                done(error)

        self.order(model, "sleep", None, slept)

    def _join(self, room: _Room) -> None:
        """Wait for the models that fall asleep for another reason."""
        for sent in self._sent.values():
            victim, told = sent.model, sent.done
            if sent.action != "sleep" or not _shares_memory(victim, room):
                continue
            room.asked.add(victim.number)
            room.falling_asleep.append(victim)

            def slept(error: str | None, victim: ManagedModel = victim, told: Done = told) -> None:
                told(error)
                self._slept(room, victim, has_freed=error in (None, ENGINE_GONE))

            sent.done = slept

    def _advance(self, room: _Room) -> None:
        """Put further models to sleep until there is enough room, or none is left."""
        victims = (each for each in self._awake() if _shares_memory(each, room))
        while self._expected_bytes(room) < room.missing_bytes and (victim := next(victims, None)) is not None:
            room.asked.add(victim.number)
            room.falling_asleep.append(victim)

            def slept(error: str | None, victim: ManagedModel = victim) -> None:
                self._slept(room, victim, has_freed=error in (None, ENGINE_GONE))

            self._send_to_sleep(victim, f"{room.model.name} needs its memory", slept)
        if not room.falling_asleep and room in self._rooms:
            self._rooms.remove(room)
            room.link.send(RoomMade(room.id))

    @staticmethod
    def _expected_bytes(room: _Room) -> int:
        return sum(each.status.read().device_bytes for each in room.falling_asleep)

    def _slept(self, room: _Room, victim: ManagedModel, *, has_freed: bool = True) -> None:
        """A model that was told to sleep does so, or cannot, or is gone."""
        if victim in room.falling_asleep:
            room.missing_bytes -= victim.status.read().device_bytes if has_freed else 0
            room.falling_asleep.remove(victim)
            self._advance(room)


def _shares_memory(model: ManagedModel, room: _Room) -> bool:
    """Whether the sleep of a model, which was not asked for yet, can help."""
    return model is not room.model and model.device == room.model.device and model.number not in room.asked
