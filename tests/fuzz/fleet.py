"""The servers to fuzz: one for each kind of model, started as users start them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints import write_cross_encoder, write_json, write_late, write_m3, write_token_classifier
from tests.docs.stand_ins import STAND_INS
from tests.e2e.llama import write_llama
from tests.fuzz.cases import ADAPTER
from tests.lora_models import adapted_embedder

FLAGS = ("--device", "cpu", "--threads", "1")
TEXT = "the long water"


@dataclass(frozen=True, slots=True)
class Target:
    """A server, its share of all cases, and the request that the probe repeats."""

    name: str
    share: float
    route: str
    body: dict[str, Any]
    write: Callable[[Path], Path] | None = None  # None: the default model
    more_flags: tuple[str, ...] = ()  # {folder} stands for the model's folder

    def flags(self, folder: Path) -> tuple[str, ...]:
        model = () if self.write is None else (str(self.write(folder / self.name)),)
        more = (each.format(folder=folder / self.name) for each in self.more_flags)
        return (*model, *FLAGS, *more)


def _write_llama(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return write_llama(folder)


def _write_adapted(folder: Path) -> Path:
    return adapted_embedder(folder, ADAPTER).base


SPECULATION = '{{"method": "ngram", "num_speculative_tokens": 4, "adaptive": false}}'
TARGETS = (
    Target("minilm", 0.25, "/v1/embeddings", {"input": TEXT}),
    Target(
        "llama",
        0.2,
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 2, "temperature": 0},
        _write_llama,
        ("--speculative-config", SPECULATION),
    ),
    Target(
        "adapted",
        0.05,
        "/v1/embeddings",
        {"input": TEXT, "adapter": ADAPTER},
        _write_adapted,
        ("--enable-lora", "--lora-modules", f"{ADAPTER}={{folder}}/adapters/{ADAPTER}"),
    ),
    Target("clip", 0.1, "/v1/embeddings", {"input": TEXT}, STAND_INS["clip"]),
    Target("reranker", 0.1, "/rerank", {"query": TEXT, "documents": ["water", "oil"]}, write_cross_encoder),
    Target("late", 0.1, "/rerank", {"query": TEXT, "documents": ["water", "oil"]}, write_late),
    Target("m3", 0.1, "/v1/sparse", {"input": TEXT}, write_m3),
    Target("entities", 0.1, "/v1/entities", {"input": TEXT}, write_token_classifier),
)


def _classifier(folder: Path) -> Path:
    """Write a model for natural-language inference that also has a chat template."""
    folder = STAND_INS["nli"](folder)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    write_json(folder / "tokenizer_config.json", {"chat_template": template})
    return folder


# One tiny model of each kind, for tests that need every route to succeed somewhere.
KINDS: dict[str, Callable[[Path], Path]] = {
    "embedder": STAND_INS["prompts"],
    "generator": STAND_INS["llama"],
    "cross-encoder": STAND_INS["cross-encoder"],
    "classifier": _classifier,
    "token-classifier": STAND_INS["tagger"],
    "late": STAND_INS["colbert"],
    "sparse": STAND_INS["splade"],
    "multi-task": STAND_INS["m3"],
}
