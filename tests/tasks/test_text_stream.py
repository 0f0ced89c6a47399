"""Text streams of generation jobs: stop strings end rows and free them, whatever the size of the pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.errors import DeadlineExceeded, EngineError, RowFailed
from penstock.inputs.generation import GenerationFields, GenerationInputs, GenerationJob, JobOptions
from penstock.inputs.tokenizer import Tokenizer
from penstock.tasks.text_stream import TextDelta, stream_text
from tests.text_models import ScriptedEngine, continue_with, text_spec, write_text_model
from tests.waiting import PATIENCE_S

LONG = "the water was long and the people see many words"


@pytest.fixture(scope="module", params=["byte bpe", "sentence bpe"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GenerationInputs:
    folder = write_text_model(tmp_path_factory.mktemp("model"), request.param)
    return GenerationInputs(text_spec(folder), Tokenizer(folder))


def job(text: GenerationInputs, prompt: Any = "find", **given: Any) -> GenerationJob:
    when = {name: given.pop(name) for name in ("arrival_s", "deadline_s") if name in given}
    body = msgspec.convert({"max_tokens": 80, **given}, GenerationFields)
    return text.job("r", text.rows(prompt, body), body, JobOptions(**when))


async def collect(engine: ScriptedEngine, text: GenerationInputs, wanted: GenerationJob) -> list[TextDelta]:
    """Join the pieces of each row."""
    rows: dict[int, TextDelta] = {}
    async for pieces in stream_text(engine, text.tokenizer, wanted):
        for piece in pieces:
            row = rows.setdefault(piece.row, TextDelta(piece.row, "", []))
            assert row.finish_reason is None, "a row went on after its end"
            row.text += piece.text
            row.token_ids += piece.token_ids
            row.finish_reason, row.stop_reason = piece.finish_reason, piece.stop_reason
    return [rows[row] for row in sorted(rows)]


def run(engine: ScriptedEngine, text: GenerationInputs, wanted: GenerationJob) -> list[TextDelta]:
    got = asyncio.run(collect(engine, text, wanted))
    assert engine.open == 0
    return got


@pytest.mark.parametrize("omits_end_token", [False, True])
@pytest.mark.parametrize("burst", [1, 3, 100])
def test_text_comes_whole_and_ends_at_the_end_token(
    text: GenerationInputs, burst: int, omits_end_token: bool
) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, LONG), burst)
    engine.omits_end_token = omits_end_token
    (row,) = run(engine, text, job(text))
    assert row.text.strip() == LONG and (row.finish_reason, row.stop_reason) == ("stop", None)
    assert row.token_ids[-1] in text.eos_token_ids and not engine.cancelled


@pytest.mark.parametrize("burst", [1, 3, 100])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_its_row_and_frees_it(text: GenerationInputs, burst: int, include: bool) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, LONG, "no such thing"), burst)
    wanted = job(text, n=1, stop=["and the", "zzz"], include_stop_str_in_output=include)
    (row,) = run(engine, text, wanted)
    assert row.text.lstrip() == "the water was long " + ("and the" if include else "")
    assert (row.finish_reason, row.stop_reason) == ("stop", "and the")
    whole = text.tokenizer.encode([LONG], add_special_tokens=False)[0]
    assert len(row.token_ids) < len(whole)
    assert engine.cancelled == ([] if burst == 100 else ["r"])


def test_other_rows_go_on_after_a_stop_string(text: GenerationInputs) -> None:
    engine = ScriptedEngine(lambda prompt, copy: continue_with(text.tokenizer, LONG)(prompt, 0))
    wanted = job(text, ["find", "see"], stop=["words"], n=2)
    rows = run(engine, text, wanted)
    assert [row.row for row in rows] == [0, 1, 2, 3]
    assert all(row.stop_reason == "words" and row.text.strip() == LONG.removesuffix(" words") for row in rows)


def test_stop_strings_wait_for_min_tokens(text: GenerationInputs) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, "the the the the the the"))
    (row,) = run(engine, text, job(text, stop="the", min_tokens=3))
    assert 1 <= row.text.count("the") <= 3 and len(row.token_ids) >= 3


def test_a_named_stop_token_is_the_reason(text: GenerationInputs) -> None:
    ids = text.tokenizer.encode([LONG], add_special_tokens=False)[0].tolist()
    token = next(i for at, i in enumerate(ids) if at > 4 and i not in ids[:at])
    engine = ScriptedEngine(lambda prompt, copy: ids)
    (row,) = run(engine, text, job(text, stop_token_ids=[token]))
    assert (row.finish_reason, row.stop_reason) == ("stop", token) and row.token_ids == ids[
        : ids.index(token) + 1
    ]
    assert row.text.strip() == text.tokenizer.decode(row.token_ids[:-1]).strip()
    engine.omits_end_token = True
    (shown,) = run(engine, text, job(text, stop_token_ids=[token], include_stop_str_in_output=True))
    assert shown.text.strip() == text.tokenizer.decode(row.token_ids).strip()


def test_what_was_held_for_a_stop_is_given_at_the_end(text: GenerationInputs) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, "one two"))
    (row,) = run(engine, text, job(text, stop="two three"))
    assert row.text.strip() == "one two" and row.stop_reason is None


def test_length_is_a_finish(text: GenerationInputs) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, LONG))
    (row,) = run(engine, text, job(text, max_tokens=3))
    assert (row.finish_reason, len(row.token_ids)) == ("length", 3)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_leaving_early_cancels_every_request(text: GenerationInputs) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, LONG))

    async def leave() -> None:
        async with aclosing(stream_text(engine, text.tokenizer, job(text, n=3, seed=1))) as stream:  # type: ignore[type-var]
            await anext(stream)
            assert engine.open == 3
        await until(lambda: engine.open == 0)

    asyncio.run(leave())
    assert len(engine.cancelled) == 3


def test_a_failure_is_told_and_the_others_are_cancelled(text: GenerationInputs) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, LONG))
    engine.fail_after = 4
    with pytest.raises(RowFailed):
        run(engine, text, job(text, n=2, seed=1))
    assert engine.open == 0


def test_missing_scores_of_a_prompt_are_an_error(text: GenerationInputs) -> None:
    class Silent(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            async for parts in super().generate(request):
                yield [replace(part, prompt_logprob_ids=None) for part in parts]

    engine = Silent(continue_with(text.tokenizer, LONG))
    with pytest.raises(EngineError, match="no prompt log probabilities"):
        run(engine, text, job(text, "the water was", prompt_logprobs=1))
    assert engine.open == 0 and engine.cancelled


def test_the_deadline_ends_the_wait(text: GenerationInputs) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, LONG))

    async def late() -> None:
        engine.pause = asyncio.Event()
        now = time.monotonic()
        await collect(engine, text, job(text, arrival_s=now, deadline_s=now + 0.05))

    with pytest.raises(DeadlineExceeded):
        asyncio.run(late())
    assert engine.open == 0 and engine.cancelled


def test_a_slow_reader_gets_fewer_pieces(text: GenerationInputs) -> None:
    engine = ScriptedEngine(continue_with(text.tokenizer, LONG))

    async def slow() -> int:
        count = 0
        async for _ in stream_text(engine, text.tokenizer, job(text)):
            count += 1
            await until(lambda: engine.open == 0)
        return count

    assert asyncio.run(slow()) <= 4 < engine.steps
