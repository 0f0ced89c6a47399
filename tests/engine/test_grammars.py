"""Requests wait until their grammar is compiled, and no other request waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import build, grammars
from penstock.engine.grammars import Compiled, Grammars
from penstock.engine.loop import EngineCore
from penstock.errors import BadValue, DeadlineExceeded, QueueFull
from penstock.inputs.grammar_sandbox import GrammarTimeout, GrammarTooComplex
from penstock.types import Grammar, Request
from tests.generation.fakes import VOCABULARY, Answers, continued, generation_request, make_core, run
from tests.text_models import text_spec, tokenizer_folder
from tests.waiting import PATIENCE_S, wait_until

ROW = [3, 1, 4]


class Anything:
    """A constraint that allows every token and ends after three."""

    def __init__(self) -> None:
        self.taken = 0

    @property
    def done(self) -> bool:
        return self.taken == 3

    def mask(self) -> Any:
        return np.full(-(-VOCABULARY // 32), 0xFFFFFFFF, dtype=np.uint32)

    def accept(self, token: int) -> None:
        self.taken += 1


class Slow:
    """A compiler that waits until the test releases it, and records what it compiles."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.compiled: list[str] = []
        self.limits: list[float] = []  # time limits of the grammars that time out

    def hold(self, text: str) -> threading.Event:
        return self.gates.setdefault(text, threading.Event())

    def __call__(self, grammar: Grammar, max_s: float) -> Compiled:
        self.compiled.append(grammar.text)
        if grammar.text.startswith("huge"):
            raise GrammarTooComplex
        if grammar.text.startswith("endless"):
            self.limits.append(max_s)
            raise GrammarTimeout
        if grammar.text in self.gates:
            assert self.gates[grammar.text].wait(PATIENCE_S)
        if grammar.text == "bad":
            raise BadValue("the regular expression cannot be used: said the library")
        if grammar.text == "broken":
            raise RuntimeError("out of its depth")
        return Compiled(Anything)


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    for gate in made.gates.values():
        gate.set()


def core_with(slow: Slow, **options: Any) -> EngineCore:
    core = make_core(blocks=60)
    core.clock = time.monotonic
    core.grammars = Grammars(slow, **options)
    return core


def following(name: str, text: str, rows: int = 1, param: str | None = None, **fields: Any) -> Request:
    request = generation_request(name, [ROW] * rows, 10, grammar=Grammar("regex", text, param))
    for field, value in fields.items():
        object.__setattr__(request, field, value)
    return request


def until(core: EngineCore, answers: Answers, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        answers.take(list(core.step()))
        time.sleep(0.001)


def check_nothing_is_left(core: EngineCore) -> None:
    assert not core.busy and core.generation is not None and core.grammars is not None
    core.generation.check_integrity()
    core.generation.pool.check_integrity()
    assert core.next_deadline_s() is None


def test_other_requests_generate_while_a_grammar_compiles(slow: Slow) -> None:
    core, answers, gate, woken = core_with(slow), Answers(), slow.hold("slow"), threading.Event()
    core.wake = woken.set
    core.add(following("bound", "slow", rows=2))
    core.add(generation_request("free", [[1, 2], [5]], 20))
    until(core, answers, lambda: len(answers.finished) == 2)
    assert answers.tokens == {("free", 0): continued([1, 2], 20), ("free", 1): continued([5], 20)}
    assert core.busy and core.generates("bound") and core.generation is not None and not core.generation.busy
    with pytest.raises(BadValue, match="already in use"):
        core.add(following("bound", "slow"))
    woken.clear()
    gate.set()
    assert woken.wait(PATIENCE_S), "the engine was not woken when the grammar was ready"
    run(core, answers)
    for row in (0, 1):
        assert answers.tokens["bound", row] == continued(ROW, 3) and answers.finished["bound", row] == "stop"
    check_nothing_is_left(core)


def test_a_second_grammar_compiles_beside_the_first(slow: Slow) -> None:
    core, answers = core_with(slow), Answers()
    slow.hold("slow")
    core.add(following("a", "slow"))
    core.add(following("b", "quick"))
    until(core, answers, lambda: ("b", 0) in answers.finished)
    assert ("a", 0) not in answers.tokens and core.generates("a")
    core.cancel("a")
    check_nothing_is_left(core)


def test_equal_grammars_compile_once_and_the_oldest_is_evicted(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)
    core, answers, gate = core_with(slow), Answers(), slow.hold("one")
    for name in "abc":
        core.add(following(name, "one"))
    gate.set()
    run(core, answers)
    for name, text in (("d", "one"), ("e", "two"), ("f", "one"), ("g", "three"), ("h", "one"), ("i", "two")):
        core.add(following(name, text))
        run(core, answers)
    assert slow.compiled == ["one", "two", "three", "two"]
    assert not answers.failed and len(answers.finished) == 9
    check_nothing_is_left(core)


@pytest.mark.parametrize(("text", "said"), [("bad", "said the library"), ("broken", "out of its depth")])
def test_a_grammar_that_does_not_compile_is_refused_every_time(slow: Slow, text: str, said: str) -> None:
    core, answers = core_with(slow), Answers()
    for name in ("a", "b"):
        core.add(following(name, text))
        core.add(generation_request(f"{name}-free", [[7]], 5))
        run(core, answers)
        error = answers.failed[name].error
        assert isinstance(error, BadValue) and said in error.message
        assert answers.tokens[f"{name}-free", 0] == continued([7], 5)
    assert slow.compiled == [text, text]
    check_nothing_is_left(core)


def test_a_request_cancelled_while_its_grammar_compiles_leaves_nothing(slow: Slow) -> None:
    core, answers, gate = core_with(slow), Answers(), slow.hold("slow")
    core.add(following("a", "slow"))
    core.step()
    core.cancel("a")
    check_nothing_is_left(core)
    gate.set()
    for _ in range(20):
        assert core.step() == []
        time.sleep(0.001)
    core.add(following("a", "slow"))  # the id is free again, and the compiled grammar is cached
    run(core, answers)
    assert slow.compiled == ["slow"] and answers.tokens["a", 0] == continued(ROW, 3)
    check_nothing_is_left(core)


def test_a_deadline_passes_while_a_grammar_compiles(slow: Slow) -> None:
    core, answers = core_with(slow), Answers()
    slow.hold("slow")
    now = time.monotonic()
    core.add(following("a", "slow", arrival_s=now, deadline_s=now + 0.05))
    core.add(following("b", "slow"))
    assert core.next_deadline_s() == now + 0.05
    until(core, answers, lambda: "a" in answers.failed)
    assert isinstance(answers.failed["a"].error, DeadlineExceeded)
    assert core.generates("b") and not core.generates("a")
    core.cancel("b")
    check_nothing_is_left(core)


def test_a_grammar_that_takes_too_long_to_compile_is_refused(slow: Slow) -> None:
    core, answers = core_with(slow, max_compile_s=0.05), Answers()
    slow.hold("slow")
    core.add(following("a", "slow"))
    until(core, answers, lambda: "a" in answers.failed)
    error = answers.failed["a"].error
    assert isinstance(error, BadValue) and "more than 0.05 s" in error.message
    check_nothing_is_left(core)


def test_waiting_for_a_compiler_does_not_count_as_compiling(slow: Slow) -> None:
    core, now_s = make_core(blocks=60), [0.0]
    core.grammars = Grammars(slow, clock=lambda: now_s[0], max_compile_s=30.0)
    core.clock = lambda: now_s[0]
    large = [f"{i}" * 5000 for i in range(2)]
    gates = [slow.hold(text) for text in large]
    for name, text in zip("ab", large, strict=True):
        core.add(following(name, text))
    wait_until(lambda: slow.compiled == large[:1])
    now_s[0] = 25.0
    gates[0].set()
    wait_until(lambda: slow.compiled == large)
    now_s[0] = 50.0  # the second one has waited for 25 s and compiled for 25 s
    answers = Answers()
    answers.take(list(core.step()))
    assert not answers.failed and core.next_deadline_s() == 55.0
    now_s[0] = 55.0
    until(core, answers, lambda: "b" in answers.failed)
    assert "more than 30 s to compile" in answers.failed["b"].error.message


def test_a_small_grammar_does_not_wait_for_large_ones(slow: Slow) -> None:
    core, answers = core_with(slow), Answers()
    for i in range(60):
        text = f"{i:02}" * 5000
        slow.hold(text)
        core.add(following(f"large-{i}", text))
    core.add(following("small", "a+"))
    until(core, answers, lambda: ("small", 0) in answers.finished)
    assert len(core.grammars or ()) == 60


def test_a_small_grammar_that_is_slow_moves_behind_the_large_ones(slow: Slow) -> None:
    core, answers, gate = core_with(slow), Answers(), slow.hold("large" * 1000)
    core.add(following("large", "large" * 1000))
    wait_until(lambda: slow.compiled == ["large" * 1000])
    core.add(following("slow", "endless"))
    core.add(following("small", "a+"))
    until(core, answers, lambda: ("small", 0) in answers.finished)
    gate.set()
    run(core, answers)
    assert slow.limits == [grammars.MAX_SMALL_S, grammars.MAX_COMPILE_S]
    assert "more than 30 s" in answers.failed["slow"].error.message and ("large", 0) in answers.finished
    check_nothing_is_left(core)


def test_a_grammar_that_is_too_complex_is_not_tried_again_for_a_while(slow: Slow) -> None:
    core, answers, now_s = make_core(blocks=60), Answers(), [0.0]
    core.grammars = Grammars(slow, clock=lambda: now_s[0])
    core.clock = lambda: now_s[0]
    core.add(following("a", "huge", param="guided_regex"))
    run(core, answers)
    error = answers.failed["a"].error
    assert isinstance(error, BadValue) and error.param == "guided_regex" and "too complex" in error.message
    with pytest.raises(BadValue, match="too complex") as caught:
        core.add(following("b", "huge", param="structured_outputs"))
    assert caught.value.param == "structured_outputs" and slow.compiled == ["huge"]
    now_s[0] = grammars.REFUSED_S + 1
    core.add(following("c", "huge"))
    run(core, answers)
    assert slow.compiled == ["huge", "huge"]
    check_nothing_is_left(core)


def test_grammars_that_nobody_waits_for_any_more_are_not_compiled(slow: Slow) -> None:
    core, answers, gate = core_with(slow), Answers(), slow.hold("0" * 5000)
    core.add(following("first", "0" * 5000))
    wait_until(lambda: len(slow.compiled) == 1)
    for i in range(1, 9):
        core.add(following(f"gone-{i}", str(i) * 5000))
        core.cancel(f"gone-{i}")
    core.add(following("last", "9" * 5000))
    gate.set()
    run(core, answers)
    assert slow.compiled == ["0" * 5000, "9" * 5000] and len(answers.finished) == 2
    check_nothing_is_left(core)


def test_large_compiled_grammars_leave_the_cache_first_come_first(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED_BYTES", 100)
    core, answers = make_core(blocks=60), Answers()
    core.grammars = Grammars(lambda grammar, max_s: Compiled(slow(grammar, max_s).factory, num_bytes=60))
    for name, text in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "three"), ("e", "one")):
        core.add(following(name, text))
        run(core, answers)
    assert slow.compiled == ["one", "two", "three", "one"]


def test_a_deadline_at_zero_is_a_deadline(slow: Slow) -> None:
    core = core_with(slow)
    core.clock = lambda: -1.0
    slow.hold("slow")
    core.add(following("a", "slow", deadline_s=0.0))
    assert core.next_deadline_s() == 0.0
    core.cancel("a")


def test_a_request_is_refused_when_too_many_wait_for_grammars(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 2)
    core = core_with(slow)
    slow.hold("slow")
    core.add(following("a", "slow"))
    core.add(following("b", "slow"))
    with pytest.raises(QueueFull, match="2 requests wait"):
        core.add(following("c", "slow"))
    core.cancel("a")
    core.cancel("b")
    check_nothing_is_left(core)


def test_an_invalid_request_is_refused_before_its_grammar_compiles(slow: Slow) -> None:
    core = core_with(slow)
    request = generation_request("a", [ROW], 1000, grammar=Grammar("regex", "x"))
    with pytest.raises(BadValue, match="max_tokens"):
        core.add(request)
    assert slow.compiled == []
    check_nothing_is_left(core)


def test_a_grammar_that_crashes_the_library_fails_alone(tmp_path: Path) -> None:
    """The API refuses such a grammar, but an API process of another version may send it."""
    pytest.importorskip("llguidance")
    folder = tokenizer_folder("byte bpe", tmp_path)
    core, answers = core_with(Slow()), Answers()
    core.grammars = build._grammars(text_spec(folder, eos_token_ids=(0,)))
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(2900))
    crash = Grammar("lark", f'start: r0\n{rules}r2900: "a"', "guided_grammar")
    core.add(generation_request("crash", [ROW], 10, grammar=crash))
    core.add(generation_request("free", [[7]], 5))
    until(core, answers, lambda: "crash" in answers.failed and ("free", 0) in answers.finished)
    error = answers.failed["crash"].error
    assert isinstance(error, BadValue) and error.param == "guided_grammar" and "too complex" in error.message
    core.close()


def test_closing_the_engine_ends_the_compiler_threads(slow: Slow) -> None:
    core, answers = core_with(slow), Answers()
    core.add(following("a", "x"))
    run(core, answers)
    assert core.grammars is not None
    threads = core.grammars._threads
    assert threads and all(thread.is_alive() and thread.daemon for thread in threads)
    core.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
