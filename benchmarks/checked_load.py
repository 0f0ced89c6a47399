"""A load on one or several models of one server, with every answer checked.

The expected answers are recorded on the idle server. Under load, each request has its own id, which its
answer must carry, and its own connection, on which nothing may follow the answer. A different `cache_salt`
per request prevents deduplication of equal texts.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from http_load import Running, start
from numpy.typing import NDArray
from soak import processes
from texts import natural_texts

from penstock import __version__
from penstock.checkpoint.find import find

ENGINE = "penstock.serving.engine_process"
MAX_CHARS = 300  # per text: about 70 tokens
PATIENCE_S = 120.0  # to wait for one answer
REFUSALS = (429, 503)
_STATUS_PAGE = re.compile(r"(?:/(\d+))?/engine\.status$", re.MULTILINE)

Answer = NDArray[np.float64] | str  # vectors or scores in the order of the request; generated text


@dataclass(frozen=True)
class Question:
    path: str
    fields: dict[str, Any]


def embed_questions(model: str, count: int, rows: int = 1) -> list[Question]:
    texts = [text[:MAX_CHARS] for text in natural_texts(count * rows)]
    parts = (texts[at : at + rows] for at in range(0, count * rows, rows))
    return [
        Question("/v1/embeddings", {"model": model, "input": part, "encoding_format": "base64"})
        for part in parts
    ]


def rerank_questions(model: str, count: int, documents: int = 4) -> list[Question]:
    texts = [text[:MAX_CHARS] for text in natural_texts(count * documents)]
    parts = (texts[at : at + documents] for at in range(0, count * documents, documents))
    return [
        Question("/rerank", {"model": model, "query": " ".join(part[0].split()[:6]), "documents": part})
        for part in parts
    ]


def generate_questions(model: str, count: int, max_tokens: int = 16) -> list[Question]:
    texts = natural_texts(count)
    fields = {"model": model, "max_tokens": max_tokens, "temperature": 0}
    return [Question("/v1/completions", fields | {"prompt": " ".join(text.split()[:12])}) for text in texts]


TASKS: dict[str, Callable[[str, int], list[Question]]] = {
    "embed": embed_questions,
    "rerank": rerank_questions,
    "generate": generate_questions,
}


def read_answer(path: str, body: bytes) -> Answer:
    content = json.loads(body)
    if path == "/v1/completions":
        return str(content["choices"][0]["text"])
    if path == "/rerank":
        rows = sorted(content["results"], key=lambda row: row["index"])
        return np.array([row["relevance_score"] for row in rows], dtype=np.float64)
    rows = sorted(content["data"], key=lambda row: row["index"])
    vectors = [np.frombuffer(base64.b64decode(row["embedding"]), dtype=np.float32) for row in rows]
    return np.array(vectors, dtype=np.float64)


def difference(found: Answer, expected: Answer, tolerance: float) -> str:
    """Describe how an answer differs from the expected one; empty if it does not."""
    if isinstance(found, str) or isinstance(expected, str):
        return "" if found == expected else f"{found!r} instead of {expected!r}"
    if found.shape != expected.shape:
        return f"shape {found.shape} instead of {expected.shape}"
    error = float(np.abs(found - expected).max())
    return "" if error <= tolerance else f"values differ by {error:.3g}"  # true for NaN too


@dataclass(frozen=True)
class Reply:
    status: int
    head: dict[str, str]
    body: bytes


async def exchange(
    port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Reply:
    """Send one request on its own connection. Raises `ValueError` unless exactly one complete answer comes,
    and `TimeoutError` if none comes."""
    lines = {"Host": "localhost", "Content-Length": str(len(body)), "Connection": "close", **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            received = await reader.read(-1)
        finally:
            writer.close()
    first, _, content = received.partition(b"\r\n\r\n")
    status, *rest = first.decode("latin-1").split("\r\n")
    answered = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    if not content and not rest:
        raise ValueError("the connection was closed without an answer")
    if len(content) != int(answered["content-length"]):
        raise ValueError(f"{len(content)} bytes came, {answered['content-length']} were announced")
    return Reply(int(status.split(" ", 2)[1]), answered, content)


@dataclass(frozen=True)
class Sample:
    """The outcome of one request. Times are from `time.monotonic`."""

    sent_s: float
    answered_s: float
    status: int  # 0: no answer
    complaint: str = ""
    retry_after: str = ""

    @property
    def seconds(self) -> float:
        return self.answered_s - self.sent_s

    @property
    def is_right(self) -> bool:
        return self.status == 200 and not self.complaint


@dataclass
class CheckedModel:
    """Questions for one model, their expected answers, and the outcome of every request."""

    name: str
    port: int
    questions: list[Question]
    tolerance: float = 1e-5
    expected: list[Answer] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    also_right: set[tuple[int, str]] = field(default_factory=set)  # question, generated text

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._learns_texts = False

    async def learn(self) -> None:
        """Record the expected answers, one request at a time. They must differ, so that swapped answers are
        noticed."""
        for question in self.questions:
            reply = await exchange(self.port, "POST", question.path, json.dumps(question.fields).encode())
            if reply.status != 200:
                raise SystemExit(f"{self.name} answered {reply.status}: {reply.body.decode()[:300]}")
            self.expected.append(read_answer(question.path, reply.body))
        pairs = itertools.pairwise(self.expected)
        if all(not difference(left, right, self.tolerance) for left, right in pairs):
            raise SystemExit(f"{self.name} gives the same answer to every question")

    async def learn_texts(self, clients: int, seconds: float) -> None:
        """Also accept the texts that the model generates for several clients while no other model has load.
        On a GPU, rounding depends on the number of rows in a step, so near-ties may resolve differently."""
        self._learns_texts = True
        await for_seconds(self, clients, seconds)
        self._learns_texts = False

    async def ask(self) -> Sample:
        """Send the next request, check its answer, and record the sample."""
        number = next(self._numbers)
        at = number % len(self.questions)
        sent_s = time.monotonic()
        try:
            reply = await self._post(self.questions[at], number)
            complaint = self._complaint(reply, number, at)
            sample = Sample(
                sent_s, time.monotonic(), reply.status, complaint, reply.head.get("retry-after", "")
            )
        except (OSError, ValueError, TimeoutError) as error:
            sample = Sample(sent_s, time.monotonic(), 0, f"no answer: {type(error).__name__}: {error}")
        self.samples.append(sample)
        return sample

    def _id(self, number: int) -> str:
        return f"{self.name}-{number}"

    async def _post(self, question: Question, number: int) -> Reply:
        own = {"request_id": self._id(number), "cache_salt": str(number)}
        return await exchange(self.port, "POST", question.path, json.dumps(question.fields | own).encode())

    def _complaint(self, reply: Reply, number: int, at: int) -> str:
        if (name := reply.head.get("x-request-id")) != self._id(number):
            return f"the answer to {self._id(number)} is that to {name}"
        if reply.status == 200:
            found = read_answer(self.questions[at].path, reply.body)
            if isinstance(found, str) and self._learns_texts:
                self.also_right.add((at, found))
            if isinstance(found, str) and (at, found) in self.also_right:
                return ""
            return difference(found, self.expected[at], self.tolerance)
        if reply.status in REFUSALS:
            return "" if b'"error"' in reply.body else f"status {reply.status} without an error"
        return f"status {reply.status}: {reply.body.decode(errors='replace')[:300]}"

    def taken(self) -> list[Sample]:
        """The samples since the last call."""
        found, self.samples = self.samples, []
        return found

    def between(self, began_s: float, ended_s: float) -> list[Sample]:
        """The samples of requests sent between two times."""
        return [sample for sample in self.samples if began_s <= sample.sent_s < ended_s]


async def closed_loop(model: CheckedModel, clients: int, until: Callable[[], bool]) -> None:
    """Run clients that send their next request after each answer, until the condition holds."""

    async def client() -> None:
        while not until():
            sample = await model.ask()
            if not sample.is_right:
                await asyncio.sleep(0.05)  # no busy loop while the model cannot answer

    await asyncio.gather(*(client() for _ in range(clients)))


async def for_seconds(model: CheckedModel, clients: int, seconds: float) -> list[Sample]:
    """Run a closed loop for this time; returns its samples."""
    until_s = time.monotonic() + seconds
    await closed_loop(model, clients, lambda: time.monotonic() >= until_s)
    return model.taken()


def model_entry(name: str, folder: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A model's entry in a --config file. If it is a classifier with two labels, the second one means
    "relevant"."""
    path = find(folder)
    labels = (
        json.loads(file.read_text()).get("id2label") if (file := path / "config.json").is_file() else None
    )
    scores = {"pooler_config": {"score_labels": [1, 0]}} if labels and len(labels) == 2 else {}
    return {"model": str(path), "served_model_name": name, **settings, **scores}


@contextmanager
def start_models(
    models: Sequence[dict[str, Any]], flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start a server with several models. Each is a mapping as in `models` of a --config file."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "server.yaml"
        file.write_text(json.dumps({"models": list(models)}))  # JSON is YAML
        own = ["--config", str(file), "--api-server-count", "1", *flags]
        with start(own, environment=environment) as server:
            yield server


def engine_pids(server_pid: int) -> dict[int, int]:
    """Index of a model in the server's configuration → process id of its engine."""
    engines = (pid for pid, module in processes(server_pid) if module == ENGINE)
    return {number: pid for pid in engines if (number := model_number(pid)) is not None}


def model_number(engine_pid: int) -> int | None:
    """The index of the model that an engine process serves; None before it has received its configuration."""
    with suppress(OSError):
        if page := _STATUS_PAGE.search(Path(f"/proc/{engine_pid}/maps").read_text()):
            return int(page[1] or 0)
    return None


def percentile_ms(samples: Iterable[Sample], share: float) -> float:
    ordered = sorted(sample.seconds for sample in samples)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def latency(samples: Sequence[Sample]) -> str:
    """p50 / p99 / max latency of correct answers, in ms."""
    right = [sample for sample in samples if sample.is_right]
    if not right:
        return "–"
    return " / ".join(f"{percentile_ms(right, share):,.0f}" for share in (0.5, 0.99, 1.0))


def rate(samples: Iterable[Sample], seconds: float) -> float:
    return sum(sample.is_right for sample in samples) / seconds


def statuses(samples: Iterable[Sample]) -> str:
    counts = Counter(sample.status for sample in samples)
    return ", ".join(f"{count:,} × {status or 'none'}" for status, count in sorted(counts.items())) or "none"


def complaints_of(name: str, samples: Iterable[Sample], most: int = 5) -> list[str]:
    """What was wrong with the answers: the first `most` complaints, and the number of the others."""
    found = [f"{name}: {sample.complaint}" for sample in samples if sample.complaint]
    return found[:most] + ([f"{name}: {len(found) - most} more"] if len(found) > most else [])


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def heading(title: str, command: str) -> Iterator[str]:
    """The first lines of a report: the command and the machine."""
    yield f"## {title}"
    yield (
        f"`{command}` · {date.today()} · {os.cpu_count()} cores, {platform.machine()}, load average "
        f"{os.getloadavg()[0]:.1f} at the start · Penstock {__version__}"
    )


def command_line() -> str:
    """The command line of this script, with folder names instead of full paths."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return " ".join(("python", f"benchmarks/{Path(sys.argv[0]).name}", *words))


def finish(parts: list[str], complaints: list[str], save: Path | None) -> int:
    """Print a report and its verdict, append it to a file, and return the exit code."""
    verdict = "\n".join(f"FAILED: {line}" for line in complaints) or "Passed: every check holds."
    text = "\n\n".join([*parts, verdict]) + "\n"
    print(text)
    if save is not None:
        with save.open("a") as file:
            file.write(f"\n{text}")
    return 1 if complaints else 0
