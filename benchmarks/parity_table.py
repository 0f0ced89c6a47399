"""Compare every family and task with its reference library, in fp32 and bf16, and every generating family.

    python benchmarks/parity_table.py [--only PATTERN] [--models DIR] [--save]

transformers writes checkpoints with seeded random weights, and both libraries read them. DIR holds folders of
real weights (minilm, mpnet, bge-small, question-tiny, reranker-mini, smollm2); missing ones are reported and
skipped. `--only` leaves out generation. Exit code 1 if a row misses its bar. `--save` writes docs/parity.md.

Needs: pip install -e '.[bench]'
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks import parity_generation  # noqa: E402
from penstock import __version__  # noqa: E402
from penstock.checkpoint.families import FAMILIES  # noqa: E402
from penstock.checkpoint.find import package_folder  # noqa: E402
from penstock.types import TEXT_MARK, PoolingParams, Request, Task  # noqa: E402
from tests.helpers import ints  # noqa: E402
from tests.parity.encoders import dense_terms, opened  # noqa: E402
from tests.parity.reference import Vectors, cosines  # noqa: E402
from tests.parity.subjects import (  # noqa: E402
    Question,
    Subject,
    encoded,
    logits_of,
    pooled,
    subjects,
    tokens_of,
)
from tests.parity.texts import natural_texts  # noqa: E402

FP32_BAR, BF16_BAR, RATIO_BAR = 0.9999, 0.999, 1.1
MAX_REROUTED = 0.05  # share of tokens for which rounding may choose other experts
MET, AS_WORST, AS_ALL, BUT_REROUTED, MISSED = VERDICTS = (
    "yes",
    "as the reference",
    "as the reference, over all",
    "as the reference, but for tokens of other experts",
    "NO",
)
PACKAGES = ("torch", "transformers", "sentence-transformers", "tokenizers", "numpy")
EMBEDDERS = ("minilm", "mpnet", "bge-small")
CLASSIFIERS = ("question-tiny", "reranker-mini")
MAX_TOKENS = 128  # per row of real text


@dataclass(frozen=True)
class Row:
    """The worst results over the compared layouts."""

    family: str
    task: Task
    reference: str
    layouts: tuple[str, ...]
    fp32_cosine: float
    fp32_error: float  # largest difference of a component
    bf16_cosine: float
    reference_bf16_cosine: float  # reference in bf16 against reference in fp32
    bf16_ratio: float  # root mean square of our difference in bf16 over the reference's own
    verdict: str

    @property
    def passed(self) -> bool:
        return self.verdict != MISSED

    def joined(self, other: Row) -> Row:
        return Row(
            self.family,
            self.task,
            self.reference,
            self.layouts + other.layouts,
            min(self.fp32_cosine, other.fp32_cosine),
            max(self.fp32_error, other.fp32_error),
            min(self.bf16_cosine, other.bf16_cosine),
            min(self.reference_bf16_cosine, other.reference_bf16_cosine),
            max(self.bf16_ratio, other.bf16_ratio),
            max(self.verdict, other.verdict, key=VERDICTS.index),
        )


def measure(subject: Subject) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        question = subject.ask(Path(folder))
        expected = question.answer(question.model)
        fp32, bf16 = (ours(question, subject.task, expected, name) for name in ("float32", "bfloat16"))
        theirs = question.answer(rounded(question.model))
    near, near_bf16, near_theirs = (float(cosines(found, expected).min()) for found in (fp32, bf16, theirs))
    ratio = error_ratio(bf16, theirs, expected)
    verdict = judged(near, near_bf16, near_theirs, ratio)
    family = FAMILIES.get(subject.family)
    if verdict == MISSED and near >= FP32_BAR and family is not None and family.has_experts:
        verdict = judged_by_experts(bf16, theirs, expected)
    return Row(
        subject.family,
        subject.task,
        subject.reference,
        (subject.layout,),
        near,
        float(np.abs(fp32 - expected).max()),
        near_bf16,
        near_theirs,
        ratio,
        verdict,
    )


def error_ratio(ours: Vectors, theirs: Vectors, expected: Vectors) -> float:
    """The root mean square of our differences, divided by that of theirs."""
    return float(np.sqrt(np.square(ours - expected).mean() / np.square(theirs - expected).mean()))


def judged_by_experts(bf16: Vectors, theirs: Vectors, expected: Vectors) -> str:
    """Judge without the tokens that rounding routes to other experts in either library. Their differences are
    large."""
    kept = (cosines(bf16, expected) >= BF16_BAR) & (cosines(theirs, expected) >= BF16_BAR)
    if kept.mean() < 1 - MAX_REROUTED or error_ratio(bf16[kept], theirs[kept], expected[kept]) > RATIO_BAR:
        return MISSED
    return BUT_REROUTED


def judged(fp32: float, bf16: float, reference_bf16: float, ratio: float) -> str:
    """The verdict of a comparison.

    A bf16 result below the bar is compared with the reference's own bf16: by the worst row or, because it is
    chance which rounding hits a vector near zero harder, over all rows.
    """
    if fp32 < FP32_BAR:
        return MISSED
    if bf16 >= BF16_BAR:
        return MET
    if bf16 >= reference_bf16:
        return AS_WORST
    return AS_ALL if ratio <= RATIO_BAR else MISSED


def ours(question: Question, task: Task, expected: Vectors, dtype: str) -> Vectors:
    rows, segments = question.rows, question.segments
    request = Request(
        "table",
        ints([token for row in rows for token in row]),
        ints([len(row) for row in rows]),
        PoolingParams(task, normalize=task is Task.EMBED, num_labels=question.num_labels),
        type_ids=None if segments is None else ints(segments),
        token_mask=None if question.marks is None else ints(question.marks),
    )
    with opened(question.folder, question.overrides, dtype=dtype, **question.options) as engine:
        values = engine.engine.submit(request).result(600).values
    if task is Task.ENTITIES and request.token_mask is not None:
        values = values[request.token_mask == TEXT_MARK]
    found = dense_terms(values, expected.shape[1]) if task is Task.SPARSE else values
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return found


def rounded(model: nn.Module) -> nn.Module:
    """Cast parameters to bf16, as `from_pretrained` does; rotary tables keep their type."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def real_subjects(models: Path | None) -> Iterator[Subject]:
    for name in EMBEDDERS:
        yield _real(models, name, Task.EMBED, "sentence-transformers")
        yield _real(models, name, Task.TOKEN_EMBED, "transformers")
    for name in CLASSIFIERS:
        yield _real(models, name, Task.CLASSIFY, "transformers")
    for task in (Task.EMBED, Task.TOKEN_EMBED):
        yield _real(models, "smollm2", task, "transformers")


def _real(models: Path | None, name: str, task: Task, reference: str) -> Subject:
    folder = models / name if models is not None else None
    if name == "minilm" and (folder is None or not folder.is_dir()):
        folder = package_folder()
    missing = ""
    if folder is None:
        missing = "its package is not installed" if name == "minilm" else "--models was not given"
    elif not (folder / "config.json").is_file():
        missing = f"{folder} is not there"
    ask = partial(_ask_real, folder or Path(), name, task)
    return Subject(f"{name} (real weights)", name, task, reference, ask, missing)


def _ask_real(folder: Path, name: str, task: Task, _: Path) -> Question:
    texts = [text for text in natural_texts(160) if text.strip()][-100:]
    if name in EMBEDDERS and task is Task.EMBED:
        reference = SentenceTransformer(str(folder), device="cpu")
        reference.max_seq_length = MAX_TOKENS
        rows = [reference.tokenizer(t, truncation=True, max_length=MAX_TOKENS)["input_ids"] for t in texts]
        return Question(folder, reference, rows, partial(encoded, texts))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    cut = {"truncation": True, "max_length": MAX_TOKENS}
    if name in CLASSIFIERS:
        pairs = [tokenizer(a, b, **cut) for a, b in zip(texts, texts[1:] + texts[:1], strict=True)]
        rows, segments = ([pair[key] for pair in pairs] for key in ("input_ids", "token_type_ids"))
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        answer = partial(logits_of, rows=rows, segments=segments)
        flat = [segment for row in segments for segment in row]
        return Question(folder, model.eval(), rows, answer, segments=flat)
    rows = [tokenizer(text, **cut)["input_ids"] for text in texts]
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    answer = (
        partial(tokens_of, rows=rows) if task is Task.TOKEN_EMBED else partial(pooled, rows=rows, last=True)
    )
    return Question(folder, model, rows, answer)


def gathered(rows: list[Row]) -> list[Row]:
    """One row for each family, task and reference: the worst of its layouts."""
    out: dict[tuple[str, Task, str], Row] = {}
    for row in rows:
        key = (row.family, row.task, row.reference)
        out[key] = out[key].joined(row) if key in out else row
    places = {name: number for number, name in enumerate(FAMILIES)}
    tasks = list(Task)
    return sorted(
        out.values(), key=lambda row: (places.get(row.family, 99), row.family, tasks.index(row.task))
    )


HEAD = (
    "architecture",
    "task",
    "layouts",
    "reference",
    "fp32 worst cosine",
    "fp32 max abs error",
    "bf16 worst cosine",
    "reference's own bf16",
    "bf16 error / reference's",
    "within the bar",
)


def cells(row: Row) -> tuple[str, ...]:
    prefix = FAMILIES[row.family].class_prefix + "*" if row.family in FAMILIES else ""
    return (
        f"{row.family} ({prefix})" if prefix else row.family,
        row.task.value,
        str(len(row.layouts)),
        row.reference,
        f"{row.fp32_cosine:.7f}",
        f"{row.fp32_error:.1e}",
        f"{row.bf16_cosine:.5f}",
        f"{row.reference_bf16_cosine:.5f}",
        f"{row.bf16_ratio:.2f}",
        row.verdict,
    )


PROSE = """\
# Parity with the reference libraries

{date} · CPU · Python {python}, penstock {penstock}, {versions}. Made by:

    {command}

Each table row compares Penstock with the library that wrote the checkpoint. The library runs every
text alone and in fp32. Weights are random and seeded unless the row says "real weights"; texts have 1
to 200 tokens. Where a family has several layouts (names of tensors, forms of config.json, options), the
row shows the worst of them. Cosines are those of vectors (embed), of each token's hidden state
(token_embed), of logits before the activation (classify, token_classify), and of the weights of the
whole vocabulary (sparse: SPLADE's formula on the masked-language head).

The bar is a cosine of at least {fp32} in fp32 and {bf16} in bf16. The bf16 columns compare Penstock in
bf16 with the *fp32* reference, so they include the rounding of the weights. Two more columns put that in
proportion: the reference in bf16 against itself in fp32 on the same texts, and the root mean square of
Penstock's difference divided by the reference's own. Rounding can take a comparison below the bar (logits
that nearly cancel, states of a deep decoder). It must then be as near as the reference's own bf16: for
the worst text ("{as_worst}"), or else over all texts, with a ratio of at most {ratio} ("{as_all}").
Measured by the worst text alone, the latter miss. In a model with experts, rounding sends a few tokens to
other experts, in the reference's own bf16 too; "{rerouted}" leaves out these
tokens, at most {share:.0%}, and holds the others to that ratio.
"""


def markdown(rows: list[Row], skipped: list[str], command: str) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    table = gathered(rows)
    lines = [
        PROSE.format(
            date=datetime.now(UTC).date().isoformat(),
            python=platform.python_version(),
            penstock=__version__,
            versions=versions,
            command=command,
            fp32=FP32_BAR,
            bf16=BF16_BAR,
            ratio=RATIO_BAR,
            as_worst=AS_WORST,
            as_all=AS_ALL,
            rerouted=BUT_REROUTED,
            share=MAX_REROUTED,
        ),
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
        *(f"| {' | '.join(cells(row))} |" for row in table),
        "",
        f"{len(rows)} comparisons in {len(table)} rows: "
        + "; ".join(f"{sum(row.verdict == each for row in rows)} {each}" for each in VERDICTS)
        + ".",
    ]
    lines += ["", *(f"- skipped: {line}" for line in skipped)] if skipped else []
    return "\n".join(lines) + "\n"


def run(chosen: list[Subject]) -> tuple[list[Row], list[str]]:
    rows, skipped = [], []
    for subject in chosen:
        if subject.missing:
            skipped.append(f"{subject.layout} {subject.task.value}: {subject.missing}")
            print(f"skipped {skipped[-1]}", flush=True)
            continue
        rows.append(row := measure(subject))
        print(f"{subject.layout}: {' | '.join(cells(row))}", flush=True)
    return rows, skipped


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression to search for in 'family layout task'")
    parser.add_argument("--models", type=Path, help="folder of real weights")
    parser.add_argument("--save", action="store_true", help="write docs/parity.md")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    every = [*subjects(), *real_subjects(options.models)]
    chosen = [s for s in every if re.search(options.only, f"{s.family} {s.layout} {s.task.value}")]
    rows, skipped = run(chosen)
    command = "python benchmarks/parity_table.py" + (f" --only '{options.only}'" if options.only else "")
    text = markdown(rows, skipped, command + (" --models DIR" if options.models else "") + " --save")
    texts = [] if options.only else list(parity_generation.generation(options.models))
    if texts:
        text += "\n" + parity_generation.section(texts)
    print("\n" + text)
    if options.save:
        (ROOT / "docs" / "parity.md").write_text(text)
    return 0 if rows and all(row.passed for row in [*rows, *texts]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
