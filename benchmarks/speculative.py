"""Compare speculative decoding with plain decoding, in alternating rounds of one engine.

    python benchmarks/speculative.py FOLDER [--sequences 1 4 16] [--rounds 3] [--output 128] [--save FILE]
    python benchmarks/speculative.py FOLDER --load-format dummy --acceptance 0.8 [--prompt 1024]
    python benchmarks/speculative.py FOLDER --draft FOLDER [--load-format dummy --acceptance 0.8]

The first form asks a real model to quote passages of its prompt, and proposes tokens by prompt lookup. The
second form is for random weights: proposals come from a first run of the same prompts, and each proposed
token is wrong with probability 1 - `--acceptance`. With `--draft`, a draft model proposes. With
`--acceptance` as well, the draft model runs all its steps, but its tokens are replaced by those of the first
run. The accepted tokens are then never its own, so it computes all of them again, and gains a little less
than a real draft model would. Greedy outputs of all rounds are compared token by token.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from penstock import Engine, SamplingParams
from penstock.scheduler.generation import GenerationScheduler
from penstock.scheduler.prompt_lookup import PromptLookup, Proposals
from penstock.scheduler.slots import SlotTable
from penstock.scheduler.speculation import Proposer, Speculation
from penstock.types import Ints

PLACES = ("the north wharf", "the east mill", "the old observatory", "the river station", "the upper terrace")
THINGS = ("a brass pressure gauge", "a ledger of tides", "two cast-iron valves", "a spare turbine blade")
PEOPLE = ("Marit Olsen", "Jonas Eide", "Priya Raman", "Tomás Rivas", "Ana Lindqvist", "Kwame Mensah")


def passage(draw: np.random.Generator, number: int) -> str:
    """A record that no model has memorised."""
    place, thing, person = draw.choice(PLACES), draw.choice(THINGS), draw.choice(PEOPLE)
    day, level, code = draw.integers(1, 29), draw.integers(10, 99), draw.integers(1000, 9999)
    return (
        f"Record {number}. On {day} March, {person} inspected {place} and found {thing} behind panel {code}. "
        f"The water stood at {level} centimetres, the inlet was cleared by hand, and the crew was told to "
        f"return with a new seal before the end of the week."
    )


def question(seed: int, num_passages: int) -> str:
    """A prompt of retrieved passages, with a question whose answer quotes two of them."""
    draw = np.random.default_rng(seed)
    passages = [passage(draw, number) for number in range(1, num_passages + 1)]
    wanted = int(draw.integers(1, num_passages + 1))
    context = "\n\n".join(passages)
    return (
        f"<|im_start|>user\n{context}\n\nRepeat record {wanted} word for word, then record "
        f"{wanted % num_passages + 1}.<|im_end|>\n<|im_start|>assistant\nRecord {wanted}."
    )


class KnownContinuations:
    """Proposes tokens of known outputs, each correct with a given probability. A draft model may run first,
    so that its time is measured."""

    def __init__(
        self,
        slots: SlotTable,
        num_tokens: int,
        rows: list[list[int]],
        acceptance: float,
        draft: Proposer | None = None,
    ) -> None:
        self.num_tokens, self.is_free = num_tokens, draft is None
        self._draft = draft
        self._slots, self._acceptance = slots, acceptance
        self._rows = {tuple(row[:PREFIX]): np.array(row, dtype=np.int32) for row in rows}
        self._row_of: dict[int, Ints] = {}
        self._draw = np.random.default_rng(1)

    def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
        proposed = np.zeros((len(slots), self.num_tokens), dtype=np.int32)
        counts = np.zeros(len(slots), dtype=np.int32)
        for index, slot in enumerate(slots.tolist()):
            known = int(self._slots.num_known[slot])
            if slot not in self._row_of:
                self._row_of[slot] = self._rows[tuple(self._slots.token_ids[slot, :PREFIX].tolist())]
            following = self._row_of[slot][known : known + self.num_tokens]
            proposed[index, : len(following)], counts[index] = following, len(following)
        wrong = self._draw.random(proposed.shape) >= self._acceptance
        proposed = np.where(wrong, 1, proposed).astype(np.int32)
        if self._draft is None:
            return Proposals(proposed, counts)
        drafted = self._draft.propose(slots, max_counts)
        return drafted._replace(token_ids=proposed, counts=np.minimum(counts, drafted.counts))

    def forget(self, slots: Ints) -> None:
        if self._draft is not None:
            self._draft.forget(slots)
        for slot in slots.tolist():
            self._row_of.pop(slot, None)


PREFIX = 16  # tokens that identify a prompt


@dataclass
class Rounds:
    """The rounds of one decoding method with one number of sequences."""

    tokens_per_s: list[float] = field(default_factory=list)
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0


def generated(engine: Engine, rows: list[list[int]], output: int) -> tuple[list[list[int]], float]:
    """The outputs, and tokens per second."""
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    began_s = time.perf_counter()
    made = [answer.token_ids for answer in engine.generate(rows, params)]
    return made, sum(map(len, made)) / (time.perf_counter() - began_s)


def scheduler_of(engine: Engine) -> GenerationScheduler:
    generation = engine.local.engine.core.generation
    assert generation is not None
    return generation


def speculation(
    engine: Engine, options: argparse.Namespace, known: list[list[int]], way: str, draft: Proposer | None
) -> Speculation:
    """A new instance without learned state."""

    def make(slots: SlotTable) -> Proposer:
        if options.acceptance is not None:
            return KnownContinuations(slots, options.tokens, known, options.acceptance, draft)
        if draft is not None:
            return draft
        return PromptLookup(slots, options.tokens, options.lookup_min, options.lookup_max)

    generation = scheduler_of(engine)
    generation.enable_speculation(make, is_adaptive=way == "adaptive")
    assert generation.speculation is not None
    return generation.speculation


def measure(
    engine: Engine, rows: list[list[int]], options: argparse.Namespace, draft: Proposer | None
) -> tuple[dict[str, Rounds], int]:
    """The rounds of each decoding method, and the number of outputs that differ from the first run."""
    generation, ways = scheduler_of(engine), {way: Rounds() for way in ("plain", *options.ways)}
    generation.speculation = None
    expected, _ = generated(engine, rows, options.output)  # also warms up, and fills the prefix cache
    known = [row + made for row, made in zip(rows, expected, strict=True)]
    kept = {way: speculation(engine, options, known, way, draft) for way in options.ways}
    all_slots = np.arange(max(16, *options.sequences))
    num_different = 0
    for number in range(options.rounds + 1):  # the first round captures graphs and is not counted
        for way, found in ways.items():
            generation.speculation = kept.get(way)
            if draft is not None:
                draft.forget(all_slots)  # it has not seen the sequences of plain rounds
            counts = None if way == "plain" else kept[way].counts
            before = (0, 0, 0)
            if counts is not None:
                before = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
            made, rate = generated(engine, rows, options.output)
            num_different += sum(a != b for a, b in zip(made, expected, strict=True))
            if not number:
                continue
            found.tokens_per_s.append(rate)
            if counts is not None:
                found.drafts += counts.num_drafts - before[0]
                found.draft_tokens += counts.num_draft_tokens - before[1]
                found.accepted += counts.num_accepted_tokens - before[2]
    return ways, num_different


def prompt_rows(engine: Engine, count: int, options: argparse.Namespace) -> list[list[int]]:
    if options.load_format == "dummy":
        draw = np.random.default_rng(5)
        return draw.integers(5, 300, (count, options.prompt)).tolist()  # type: ignore[no-any-return]
    texts = [question(seed, options.passages) for seed in range(count)]
    return engine.tokenize(texts, add_special_tokens=False)


def table_line(count: int, way: str, found: Rounds, plain: Rounds) -> str:
    rate, base = median(found.tokens_per_s), median(plain.tokens_per_s)
    rounds = ", ".join(f"{each:.0f}" for each in found.tokens_per_s)
    if not found.drafts:
        return f"| {count} | {way} | {rate:.0f} | {rounds} | {rate / base:.2f} | – | – |"
    share = found.accepted / found.draft_tokens
    per_step = 1 + found.accepted / found.drafts
    return f"| {count} | {way} | {rate:.0f} | {rounds} | {rate / base:.2f} | {share:.2f} | {per_step:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=512, help="tokens per prompt, with dummy weights")
    parser.add_argument("--tokens", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--lookup-min", type=int, default=2)
    parser.add_argument("--lookup-max", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=["adaptive", "always"], choices=["adaptive", "always"])
    parser.add_argument("--draft", type=Path, help="folder of a draft model that proposes tokens")
    parser.add_argument(
        "--acceptance", type=float, help="propose known outputs, correct with this probability"
    )
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.load_format == "dummy" and options.acceptance is None:
        parser.error("dummy weights need --acceptance")
    settings: dict[str, Any] = {"load_format": options.load_format, "max_model_len": options.max_model_len}
    settings |= {"max_num_seqs": max(16, *options.sequences), "enable_generation": True}
    settings["speculative_config"] = {"num_speculative_tokens": options.tokens}
    if options.draft is not None:
        settings["speculative_config"]["model"] = str(options.draft)
    lines = [
        "| sequences | decoding | tok/s, median | rounds | times plain | accepted | tokens a step |",
        "|---|---|---|---|---|---|---|",
    ]
    with Engine(str(options.folder), **settings) as engine:
        started = scheduler_of(engine).speculation
        draft = None if options.draft is None or started is None else started.proposer
        for count in options.sequences:
            ways, num_different = measure(engine, prompt_rows(engine, count, options), options, draft)
            lines += [table_line(count, way, found, ways["plain"]) for way, found in ways.items()]
            print(f"{count} sequences: {num_different} outputs differ from plain decoding", flush=True)
            print("\n".join(lines[-len(ways) :]), flush=True)
    print("\n".join(lines))
    if options.save is not None:
        options.save.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
