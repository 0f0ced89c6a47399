"""Small models that generate text, without weights: tokenizers, model folders and a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from penstock.checkpoint.spec import ModelSpec
from penstock.errors import PenstockError
from penstock.handle import EngineStats, StreamListener, Unsubscribe
from penstock.inputs.tokenizer import Tokenizer as OurTokenizer
from penstock.types import Comparison, GeneratedTokens, Ints, PooledOutput, Request, Task, Timings
from tests.checkpoints import WORDS
from tests.helpers import ints, make_spec

# Real tokenizers, if they are available.
SHARED = Path(__file__).resolve().parents[2] / "shared/scenarios/tokenizers"
TEXTS = [
    " ".join(WORDS),
    "Hello, world! The capital of France is Paris.",
    "Äpfel, naïve façade, ждать, 日本語のテキスト, 的是不, 🙂👩‍👩‍👧 end.",
    'A {"name": "value", "number": 12.5} stop yes no maybe',
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMIT = 128


def _byte_bpe() -> Tokenizer:
    """A byte-level BPE tokenizer like GPT-2's. Some tokens end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("tool call", special=False)])
    return tokenizer


def _sentence_bpe() -> Tokenizer:
    """A tokenizer like Mistral's: pieces with a mark for spaces, and bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    draft = Tokenizer(models.BPE(unk_token="<unk>"))
    draft.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    plain = [text for text in TEXTS if text.isascii()]
    draft.train_from_iterator(plain * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    trained = json.loads(draft.to_str())["model"]
    known = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *known]))}
    merges = [
        tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in trained["merges"]
    ]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)  # type: ignore[arg-type]
    )
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte bpe": _byte_bpe,
    "sentence bpe": _sentence_bpe,
    "unigram": _unigram,
}
KINDS = [
    *MAKERS,
    *(f"shared {path.name}" for path in sorted(SHARED.glob("*")) if path.name != "bert-uncased"),
]


@cache
def _trained(kind: str) -> str:
    return MAKERS[kind]().to_str()


def tokenizer_folder(kind: str, folder: Path) -> Path:
    """Write a tokenizer of this kind to `folder`; returns its folder. A shared one stays where it is."""
    if kind.startswith("shared "):
        return SHARED / kind.removeprefix("shared ")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained(kind))
    return folder


def write_text_model(
    folder: Path, kind: str = "byte bpe", template: str | None = TEMPLATE, **generation: Any
) -> Path:
    """Write a generative model without weights."""
    tokenizer_folder(kind, folder)
    eos = "<|im_end|>" if kind == "byte bpe" else "</s>"
    settings: dict[str, Any] = {"eos_token": {"content": eos}, "bos_token": "<s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def text_spec(folder: Path, **changes: Any) -> ModelSpec:
    vocabulary = OurTokenizer(folder).max_token_id + 1
    values = {
        "folder": str(folder),
        "name": "writer",
        "max_model_len": LIMIT,
        "max_positions": LIMIT,
        "vocab_size": vocabulary + 5,  # padded, like real embedding tables
        "tasks": (Task.GENERATE, Task.EMBED),
        "is_causal": True,
    }
    return make_spec(**(values | changes))


# (prompt, index among equal prompts) → the generated tokens.
Script = Callable[[list[int], int], Sequence[int]]


class ScriptedEngine:
    """A fake engine that continues prompts from a script, `burst` tokens at a time. It obeys end tokens,
    token limits and requested log probabilities."""

    ready = True
    unavailable_reason = ""

    def __init__(self, script: Script, burst: int = 1) -> None:
        self.script = script
        self.burst = burst
        self.requests: list[Request] = []
        self.open = 0  # number of running requests
        self.cancelled: list[str] = []
        self.steps = 0
        self.omits_end_token = False  # report the end token only as the stop reason
        self.fail_after: int | None = None  # steps until requests fail
        self.pause: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the event loop of paused requests

    def start(self) -> None:
        return None

    def close(self) -> None:
        return None

    def resume(self) -> None:
        """Resume paused requests, from any thread."""
        assert self.pause is not None and self._loop is not None
        self._loop.call_soon_threadsafe(self.pause.set)

    async def run(self, request: Request) -> PooledOutput:
        raise NotImplementedError

    async def compare(self, comparison: Comparison) -> PooledOutput:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats(self.open)

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        task = asyncio.create_task(self._deliver(request, listener))
        return lambda: None if listener.finished else cast(None, task.cancel())

    async def _deliver(self, request: Request, listener: StreamListener) -> None:
        async with aclosing(cast(Any, self.generate(request))) as stream:
            try:
                async for parts in stream:
                    for part in parts:
                        if part.finish_reason is None and part.ranks is None and part.prompt_ranks is None:
                            for number in part.token_ids.tolist():
                                listener.on_token(part.row, number)
                        else:
                            listener.on_tokens([part])
            except PenstockError as error:
                listener.on_error(error)

    async def generate(self, request: Request) -> AsyncIterator[list[GeneratedTokens]]:
        self.requests.append(request)
        self.open += 1
        finished = False
        try:
            rows = [_Row(self, request, row) for row in range(request.num_rows)]
            while parts := [part for row in rows if (part := row.step()) is not None]:
                await asyncio.sleep(0)
                self.steps += 1
                if self.fail_after is not None and self.steps > self.fail_after:
                    from penstock.errors import RowFailed

                    raise RowFailed("the step could not compute this row")
                yield parts
                if self.pause is not None:
                    self._loop = asyncio.get_running_loop()
                    await self.pause.wait()
            finished = True
        finally:
            self.open -= 1
            if not finished:
                self.cancelled.append(request.id)


def fake_logprob(token: int, place: int) -> float:
    """A fake log probability for a token at this place among the most likely."""
    return -0.125 * (token % 7) - place


class _Row:
    def __init__(self, engine: ScriptedEngine, request: Request, row: int) -> None:
        assert request.sampling is not None
        first = int(request.starts[row])
        self.request, self.row, self.params = request, row, request.sampling
        self.prompt = request.token_ids[first : first + int(request.lengths[row])].tolist()
        copy = sum(1 for other in range(row) if self._prompt_of(other) == self.prompt)
        self.tokens = [*engine.script(self.prompt, copy)]
        self.engine = engine
        self.burst = engine.burst
        self.at = 0
        self.done = False

    def _prompt_of(self, row: int) -> list[int]:
        first = int(self.request.starts[row])
        return self.request.token_ids[first : first + int(self.request.lengths[row])].tolist()

    def step(self) -> GeneratedTokens | None:
        if self.done:
            return None
        params, new = self.params, []
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(params.eos_token_ids))
        finish, stop = None, None
        begin = self.at
        while len(new) < self.burst and finish is None:
            token = self.tokens[self.at] if self.at < len(self.tokens) else (params.eos_token_ids or (0,))[0]
            self.at += 1
            new.append(token)
            if token in ends and self.at > params.min_tokens:
                finish, stop = "stop", token
            elif self.at >= params.max_tokens:
                finish = "length"
        self.done = finish is not None
        if stop is not None and self.engine.omits_end_token:
            new.pop()
        first = begin == 0 and params.prompt_logprobs is not None
        return GeneratedTokens(
            self.request.id,
            self.row,
            ints(new),
            finish,
            stop,
            **_scored("", new, params.logprobs),
            **(_scored("prompt_", self.prompt[1:], params.prompt_logprobs) if first else {}),
            timings=Timings(0.25, 0.5) if self.done else None,
        )


def _scored(prefix: str, tokens: list[int], top: int | None) -> dict[str, Any]:
    if top is None:
        return {}
    ids = [[token, *(max(0, token - place) for place in range(top))] for token in tokens]
    values = [
        [fake_logprob(row[0], 0), *(fake_logprob(i, place) for place, i in enumerate(row[1:]))] for row in ids
    ]
    shape = (len(tokens), 1 + top)
    name = "prompt_ranks" if prefix else "ranks"
    return {
        f"{prefix}logprob_ids": np.array(ids, dtype=np.int32).reshape(shape),
        f"{prefix}logprobs": np.array(values, dtype=np.float32).reshape(shape),
        name: ints([1] * len(tokens)),
    }


def continue_with(tokenizer: OurTokenizer, *texts: str) -> Script:
    """A script that continues equal prompts with these texts in turn."""
    rows: list[Ints] = tokenizer.encode(texts, add_special_tokens=False)
    return lambda prompt, copy: rows[copy % len(rows)].tolist()
