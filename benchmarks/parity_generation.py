"""Compare greedy texts of every generating family with transformers; part of benchmarks/parity_table.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock import Engine, SamplingParams
from tests.generation.families import FAMILIES, prompts, reference, write
from tests.parity.texts import natural_texts

TOKENS = 70  # generated per prompt
BAR = 1e-3  # maximum difference of log probabilities
HEAD = (
    "model",
    "rows",
    "greedy tokens",
    "of them the likeliest for transformers",
    "max logprob difference",
    "within the bar",
)
PROSE = f"""\
## Generation

For each row, Penstock continues 8 prompts greedily, all in one batch, by {TOKENS} tokens each, past the end
token, in fp32. transformers then reads each whole text and says for every token whether it is the
likeliest one after the tokens before it, and how likely it is. If every token is the likeliest, the text is
the one that its own `generate` would give. The bar: every token is the likeliest, and log probabilities
differ by at most {BAR:g}.
"""


@dataclass(frozen=True)
class Row:
    model: str
    rows: int
    tokens: int
    agreeing: int
    difference: float  # largest difference of a log probability

    @property
    def passed(self) -> bool:
        return self.agreeing == self.tokens and self.difference <= BAR


def measured(name: str, folder: Path, model: Any, rows: list[list[int]]) -> Row:
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    with Engine(str(folder), device="cpu", dtype="float32") as engine:
        made = engine.generate(rows, greedy)
    agreeing, difference = 0, 0.0
    for row, found in zip(rows, made, strict=True):
        new = torch.tensor(found.token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([row + found.token_ids])).logits[0, len(row) - 1 : -1].float()
        agreeing += int((logits.argmax(dim=-1) == new).sum())
        likely = logits.log_softmax(dim=-1).gather(1, new[:, None])
        assert found.logprobs is not None
        difference = max(difference, float((likely - torch.from_numpy(found.logprobs.values)).abs().max()))
    return Row(name, len(rows), sum(len(found.token_ids) for found in made), agreeing, difference)


def generation(models: Path | None) -> Iterator[Row]:
    """Compare seeded checkpoints of all families, and real weights if they are present."""
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            written = write(name, Path(folder))
            yield measured(name, written, reference(name, written), prompts())
    folder = None if models is None else models / "smollm2"
    if folder is not None and (folder / "config.json").is_file():
        yield measured("smollm2 (real weights)", folder, _real(folder), _real_prompts(folder))


@cache
def _real(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _real_prompts(folder: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [text for text in natural_texts(160) if text.strip()][-8:]
    return [tokenizer(text, truncation=True, max_length=128)["input_ids"] for text in texts]


def section(rows: list[Row]) -> str:
    lines = [PROSE, f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for row in rows:
        cells = (row.model, str(row.rows), str(row.tokens), str(row.agreeing), f"{row.difference:.1e}")
        lines.append(f"| {' | '.join(cells)} | {'yes' if row.passed else 'NO'} |")
    return "\n".join(lines) + "\n"
