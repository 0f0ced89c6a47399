"""Clients that check every answer against those of the idle server before the faults."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

WORDS = ("water", "river", "pipe", "valve", "pump", "gate", "flow", "turbine", "basin", "weir", "sluice")
TOLERANCE = 1e-3  # absolute, for unit vectors; two texts of the corpus differ by far more
HANG_S = 60.0
REFUSALS = (408, 429, 503)  # typed errors, allowed while processes die or queues are full
Vectors = NDArray[np.float64]


def corpus(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [f"{' '.join(draw.choices(WORDS, k=draw.randint(2, 20)))} {number}" for number in range(count)]


@dataclass
class Tally:
    """What clients saw. A violation is a broken promise, with enough detail to investigate it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)  # of right answers only

    def right(self, kind: str, seconds: float) -> None:
        self.outcomes[f"{kind}: right"] += 1
        self.latencies_s.append(seconds)

    def refused(self, kind: str, why: str) -> None:
        self.outcomes[f"{kind}: {why}"] += 1

    def violated(self, kind: str, what: str) -> None:
        self.outcomes[f"{kind}: VIOLATION"] += 1
        self.violations.append(f"{time.strftime('%H:%M:%S')} {kind}: {what[:600]}")


class WrongAnswer(Exception):
    """An answer with wrong content, an unexpected status or a wrong end."""


class Refused(Exception):
    """A typed error that clients are allowed to get."""


@dataclass
class Reference:
    """The expected answers, from an idle server."""

    texts: list[str]
    vectors: Vectors
    rankings: list[tuple[int, list[int], list[float]]]  # query, documents, scores
    completions: list[tuple[str, str]]  # prompt, greedy continuation


async def learn(client: httpx.AsyncClient, texts: list[str]) -> Reference:
    """Record the answers of an idle server. Exit if two texts have almost equal vectors, since a swap of them
    would go unnoticed."""
    vectors = np.concatenate([await _embed(client, texts[at : at + 32]) for at in range(0, len(texts), 32)])
    nearest = np.sort(np.linalg.norm(vectors[:, None] - vectors[None], axis=2), axis=1)[:, 1]
    if nearest.min() < 10 * TOLERANCE:
        raise SystemExit(f"two texts of the corpus have almost equal vectors ({nearest.min():.2g})")
    draw, rankings = random.Random(1), []
    for _ in range(12):
        query, *documents = draw.sample(range(len(texts)), 7)
        scores = await _rerank(client, texts[query], [texts[each] for each in documents])
        rankings.append((query, documents, scores))
    completions = [(text, await _complete(client, text, stream=False)) for text in texts[:24]]
    return Reference(texts, vectors, rankings, completions)


class Load:
    """Clients that send requests of every kind, one after another, until `stopping` is set."""

    def __init__(self, url: str, reference: Reference, tally: Tally) -> None:
        self._url, self._reference, self._tally = url, reference, tally
        self.stopping = False

    async def client(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds: list[Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]] = [
            self.embed, self.embed, self.embed, self.embed_ids, self.rerank, self.maxsim, self.complete,
            self.stream, self.choice, self.round_trip,
        ]  # fmt: skip
        async with httpx.AsyncClient(base_url=self._url, timeout=HANG_S) as http:
            while not self.stopping:
                kind = draw.choice(kinds)
                began = time.monotonic()
                try:
                    await kind(http, draw)
                except Refused as error:
                    self._tally.refused(kind.__name__, str(error))
                    await asyncio.sleep(0.05)
                except httpx.TimeoutException:
                    self._tally.violated(kind.__name__, f"no answer within {HANG_S:g} s")
                except (httpx.TransportError, OSError) as error:  # the API process was killed
                    self._tally.refused(kind.__name__, f"connection lost ({type(error).__name__})")
                    await asyncio.sleep(0.02)
                except WrongAnswer as error:
                    self._tally.violated(kind.__name__, f"wrong answer: {error}")
                except Exception as error:
                    self._tally.violated(kind.__name__, f"{type(error).__name__}: {error}")
                else:
                    self._tally.right(kind.__name__, time.monotonic() - began)

    async def embed(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        numbers = draw.sample(range(len(self._reference.texts)), draw.choice((1, 1, 1, 2, 8, 32)))
        texts = [self._reference.texts[number] for number in numbers]
        _compare(
            await _embed(http, texts, draw.choice(("float", "base64"))), self._reference.vectors[numbers]
        )

    async def embed_ids(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        number = draw.randrange(len(self._reference.texts))
        ids = (await _post(http, "/tokenize", input=self._reference.texts[number]))["tokens"]
        ids = ids[0] if isinstance(ids[0], list) else ids
        _compare(await _embed(http, ids), self._reference.vectors[[number]])

    async def rerank(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        query, documents, expected = draw.choice(self._reference.rankings)
        texts = self._reference.texts
        _compare(
            np.array(await _rerank(http, texts[query], [texts[d] for d in documents])), np.array(expected)
        )

    async def maxsim(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        numbers = np.random.default_rng(draw.randrange(1 << 30))
        query = numbers.normal(size=(4, 8)).round(3)
        documents = [numbers.normal(size=(draw.randint(1, 9), 8)).round(3) for _ in range(3)]
        body = {"queries": [query.tolist()], "documents": [each.tolist() for each in documents]}
        answer = await _post(http, "/v1/maxsim", **body)
        expected = [(query @ each.T).max(axis=1).sum() for each in documents]
        _compare(np.array([item["score"] for item in answer["data"]]), np.array(expected))

    async def complete(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        prompt, expected = draw.choice(self._reference.completions)
        _equal(await _complete(http, prompt, stream=False), expected)

    async def stream(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        prompt, expected = draw.choice(self._reference.completions)
        _equal(await _complete(http, prompt, stream=True), expected)

    async def choice(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        choices = draw.sample(WORDS, 3)
        body = {"prompt": "pick", "max_tokens": 30, "guided_choice": choices, "temperature": 0}
        text = (await _post(http, "/v1/completions", **body))["choices"][0]["text"]
        if text not in choices:
            raise WrongAnswer(f"{text!r} is none of {choices}")

    async def round_trip(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        text = draw.choice(self._reference.texts)
        ids = (await _post(http, "/tokenize", input=text))["tokens"]
        ids = ids[0] if isinstance(ids[0], list) else ids
        answer = await _post(http, "/detokenize", tokens=ids)
        _equal(answer.get("text", answer.get("prompt")), text)


async def _post(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await http.post(path, json=body)
    _check_status(response.status_code, response.text)
    answer: dict[str, Any] = response.json()
    return answer


def _check_status(status: int, text: str) -> None:
    if status in REFUSALS:
        code = json.loads(text)["error"]["reason"]  # typed, in the dialect's shape
        raise Refused(f"{status} {code}")
    if status != 200:
        raise WrongAnswer(f"status {status}: {text[:300]}")


async def _embed(http: httpx.AsyncClient, texts: Any, encoding: str = "float") -> Vectors:
    answer = await _post(http, "/v1/embeddings", input=texts, encoding_format=encoding)
    rows = [item["embedding"] for item in sorted(answer["data"], key=lambda item: item["index"])]
    if encoding == "base64":
        rows = [np.frombuffer(base64.b64decode(row), dtype=np.float32) for row in rows]
    return np.array(rows, dtype=np.float64)


async def _rerank(http: httpx.AsyncClient, query: str, documents: list[str]) -> list[float]:
    answer = await _post(http, "/rerank", query=query, documents=documents)
    by_index = {item["index"]: item["relevance_score"] for item in answer["results"]}
    return [by_index[index] for index in range(len(documents))]


async def _complete(http: httpx.AsyncClient, prompt: str, *, stream: bool) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": stream}
    if not stream:
        text: str = (await _post(http, "/v1/completions", **body))["choices"][0]["text"]
        return text
    parts: list[str] = []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            _check_status(response.status_code, (await response.aread()).decode())
        done = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    code = event["error"]["reason"]
                    if code not in ("engine_unavailable", "queue_full", "deadline_exceeded"):
                        raise WrongAnswer(f"the stream ended with {event}")
                    raise Refused(f"stream ended with {code}")
                parts += [choice["text"] for choice in event["choices"]]
        if not done:
            raise WrongAnswer("the stream ended without [DONE]")
    return "".join(parts)


def _compare(found: Vectors, expected: Vectors) -> None:
    if found.shape != expected.shape:
        raise WrongAnswer(f"shape {found.shape}, not {expected.shape}")
    if not np.isfinite(found).all() or np.abs(found - expected).max() > TOLERANCE:
        raise WrongAnswer(f"values differ by up to {np.abs(found - expected).max():.3g}")


def _equal(found: object, expected: object) -> None:
    if found != expected:
        raise WrongAnswer(f"{found!r} instead of {expected!r}")
