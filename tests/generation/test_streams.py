"""Token streams over the wire and in this process: tokens are in order, and blocks are freed when a reader
leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from penstock import AsyncEngine, SamplingParams
from penstock.engine.loop import EngineCore
from penstock.errors import BadValue
from penstock.types import DecodedTokens, GeneratedTokens, SequenceIds, Timings
from penstock.wire.client import EngineClient
from penstock.wire.messages import Outcomes, Ready, decode_from_engine, pack_outcomes, unpack_outcomes
from penstock.wire.server import EngineServer
from tests.generation.fakes import continued, generation_request, make_core
from tests.generation.families import check_nothing_is_held, prompts, write
from tests.generation.streams import read_stream
from tests.waiting import PATIENCE_S


def test_generated_tokens_are_received_as_sent() -> None:
    parts = [
        GeneratedTokens("a", 3, np.array([5, 6], dtype=np.int32)),
        GeneratedTokens(
            "b",
            0,
            np.array([7], dtype=np.int32),
            "length",
            None,
            np.array([[7, 1, 2]], dtype=np.int32),
            np.array([[-0.5, -1.0, -2.25]], dtype=np.float32),
            np.array([1], dtype=np.int32),
            Timings(0.5, 0.25),
        ),
        GeneratedTokens("c", 1, np.zeros(0, dtype=np.int32), "stop", 2),
    ]
    header, *frames = pack_outcomes(parts)
    message = decode_from_engine(header)
    assert isinstance(message, Outcomes)
    for got, sent in zip(unpack_outcomes(message.items, frames), parts, strict=True):
        assert isinstance(got, GeneratedTokens)
        assert (got.id, got.row, got.finish_reason, got.stop_token) == (
            sent.id,
            sent.row,
            sent.finish_reason,
            sent.stop_token,
        )
        assert got.timings == sent.timings
        for name in ("token_ids", "logprob_ids", "logprobs", "ranks"):
            mine, theirs = getattr(got, name), getattr(sent, name)
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                np.testing.assert_array_equal(mine, theirs)
                assert mine.dtype == theirs.dtype


def test_decoded_sequences_are_named_only_when_they_change() -> None:
    def sent(rows: SequenceIds, last_rows: SequenceIds) -> tuple[int, DecodedTokens]:
        ids = np.arange(len(rows), dtype=np.int32) + 7
        header, *frames = pack_outcomes([DecodedTokens(rows, ids)], last_rows)
        message = decode_from_engine(header)
        assert isinstance(message, Outcomes)
        (got,) = unpack_outcomes(message.items, frames, last_rows)
        assert isinstance(got, DecodedTokens) and got.rows == rows
        np.testing.assert_array_equal(got.token_ids, ids)
        return len(header), got

    rows: SequenceIds = (("a", 0), ("a", 1), ("é", 0))
    named, _ = sent(rows, ())
    again, got = sent(rows, rows)
    assert again < named and got.rows is rows
    assert sent(rows[1:], rows)[0] > again


def test_steps_of_the_same_sequences_name_them_by_the_same_object() -> None:
    core = make_core(blocks=60, depth=1)
    core.add(generation_request("a", [[1, 2], [3]], 20))
    core.add(generation_request("b", [[4]], 6))
    seen: list[SequenceIds] = []
    while core.busy:
        for outcome in core.step():
            if isinstance(outcome, DecodedTokens) and outcome.rows not in seen:
                seen.append(outcome.rows)
            elif isinstance(outcome, DecodedTokens):
                assert any(outcome.rows is one for one in seen)
    three, two = {("a", 0), ("a", 1), ("b", 0)}, {("a", 0), ("a", 1)}
    assert [set(rows) for rows in seen] == [three, two]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, EngineCore]]:
    """A generating engine behind a socket, on a thread."""
    address = f"ipc://{tmp_path}/engine"
    server, core = EngineServer(address), make_core(blocks=60)
    core.wake = server.wake
    thread = threading.Thread(target=server.serve, args=(core, Ready(1, {}), lambda core: time.sleep(0.002)))
    thread.start()
    yield address, core
    server.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not server._last_rows, "an idle server keeps no sequence names"


async def connected(address: str) -> EngineClient:
    client = EngineClient(address)
    client.start()
    async with asyncio.timeout(PATIENCE_S):
        while not client.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return client


async def until_idle(core: EngineCore) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while core.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_client_gets_every_token_and_one_that_leaves_frees_its_blocks(
    served: tuple[str, EngineCore],
) -> None:
    address, core = served

    async def scene() -> None:
        client = await connected(address)
        tokens: dict[int, list[int]] = {0: [], 1: []}
        async for part in read_stream(client, generation_request("a", [[1, 2], [3]], 20)):
            tokens[part.row] += part.token_ids.tolist()
        assert tokens == {0: continued([1, 2], 20), 1: continued([3], 20)}

        left = read_stream(client, generation_request("b", [[4], [5]], 60))
        assert (await anext(left)).finish_reason is None
        await left.aclose()
        await until_idle(core)

        has_tokens = asyncio.Event()

        async def read_until_cancelled() -> None:
            async with aclosing(read_stream(client, generation_request("c", [[6]], 60))) as stream:
                await anext(stream)
                has_tokens.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(read_until_cancelled())
        async with asyncio.timeout(PATIENCE_S):
            await has_tokens.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(core)

        with pytest.raises(BadValue, match="max_tokens is 0"):
            await anext(read_stream(client, generation_request("d", [[6]], 0)))
        assert client.stats().num_requests == 0
        client.close()

    asyncio.run(scene())
    assert core.generation is not None
    core.generation.check_integrity()
    core.generation.pool.check_integrity()


def test_two_clients_get_their_own_tokens_while_others_come_and_go(served: tuple[str, EngineCore]) -> None:
    address, core = served

    async def scene() -> None:
        clients = [await connected(address), await connected(address)]

        async def read(client: EngineClient, name: str, prompts: list[list[int]], count: int) -> None:
            tokens: list[list[int]] = [[] for _ in prompts]
            async for part in read_stream(client, generation_request(name, prompts, count)):
                tokens[part.row] += part.token_ids.tolist()
            assert tokens == [continued(prompt, count) for prompt in prompts]

        async def leave(client: EngineClient, name: str) -> None:
            stream = read_stream(client, generation_request(name, [[9, 9]], 50))
            await anext(stream)
            await stream.aclose()

        async with asyncio.timeout(PATIENCE_S):
            work = [read(clients[i % 2], f"r{i}", [[i], [i, 5]], 8 + 5 * i) for i in range(6)]
            await asyncio.gather(*work, *(leave(clients[i % 2], f"l{i}") for i in range(4)))
        await until_idle(core)
        for client in clients:
            client.close()

    asyncio.run(scene())
    assert core.generation is not None
    core.generation.check_integrity()
    core.generation.pool.check_integrity()


def test_tokens_of_a_reused_request_id_reach_the_new_request(served: tuple[str, EngineCore]) -> None:
    async def scene() -> None:
        client = await connected(served[0])
        for prompt in ([1, 2], [3]):
            got: list[int] = []
            async with asyncio.timeout(PATIENCE_S):
                async for part in read_stream(client, generation_request("same", [prompt], 12)):
                    got += part.token_ids.tolist()
            assert got == continued(prompt, 12)
        client.close()

    asyncio.run(scene())


def test_an_async_engine_streams_and_a_reader_that_leaves_frees_its_blocks(tmp_path: Path) -> None:
    folder = write("qwen3", tmp_path / "qwen3")
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)

    async def scene() -> None:
        async with AsyncEngine(str(folder), device="cpu", pipeline_depth=2) as engine:

            async def read(prompt: list[int]) -> list[int]:
                return [
                    token_id
                    async for delta in engine.generate_stream(prompt, greedy)
                    for token_id in delta.token_ids
                ]

            completions = await engine.generate(prompts(), greedy)
            streamed = await asyncio.gather(*map(read, prompts()))
            assert streamed == [completion.token_ids for completion in completions]
            await until_idle(engine.local.engine.core)
            check_nothing_is_held(engine)

            leaving = engine.generate_stream(prompts()[5], SamplingParams(max_tokens=150, ignore_eos=True))
            assert len((await anext(leaving)).token_ids) >= 1
            await leaving.aclose()
            await until_idle(engine.local.engine.core)
            check_nothing_is_held(engine)

    asyncio.run(scene())
