"""GritLM's instruction is left out of the mean. Its end is found on the CPU for the whole batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, processors

from penstock.inputs.instruction import InstructionEnd
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import cumulative

MARK = "<|embed|>\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A character tokenizer with Mistral's conventions: ▁ for spaces and at the start, preceded by BOS."""
    letters = [chr(i) for i in range(32, 127)] + ["\n", "▁", "▁<"]
    vocabulary = {token: i + 3 for i, token in enumerate(letters)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    rust = RustTokenizer(models.BPE(vocabulary, [("▁", "<")], unk_token="<unk>"))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Fuse()
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("tokenizer")
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(Path(folder))


def reference(tokenizer: Tokenizer, instruction: str) -> int:
    """The number of tokens of the instruction alone, special tokens included."""
    return len(tokenizer.encode([instruction])[0])


def test_the_instruction_ends_after_its_mark_anywhere_in_the_row(tokenizer: Tokenizer) -> None:
    instructions = [f"<|user|>\nFind a paper\n{MARK}", MARK, f"<|user|>\nx\n{MARK}"]
    rows = tokenizer.encode([i + "some text" for i in instructions])
    rows.append(tokenizer.encode(["no mark at all"])[0])
    rows.append(tokenizer.encode([f"a\n{MARK}b\n{MARK}c"])[0])
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    skip = InstructionEnd(tokenizer, MARK)(np.concatenate(rows), lengths)
    expected = [reference(tokenizer, i) for i in instructions] + [1, reference(tokenizer, f"a\n{MARK}")]
    assert skip.tolist() == expected


def test_a_row_that_ends_with_the_mark_keeps_one_token(tokenizer: Tokenizer) -> None:
    (row,) = tokenizer.encode([MARK])
    assert InstructionEnd(tokenizer, MARK)(row, np.array([len(row)], dtype=np.int32)).tolist() == [
        len(row) - 1
    ]


def test_a_mark_never_spans_two_rows(tokenizer: Tokenizer) -> None:
    (row,) = tokenizer.encode([MARK + "x"])
    lengths = np.array([4, len(row) - 4], dtype=np.int32)
    assert cumulative(lengths)[-1] == len(row)
    assert InstructionEnd(tokenizer, MARK)(row, lengths).tolist() == [1, 1]


def test_a_row_gets_the_same_result_alone_and_in_a_batch(tokenizer: Tokenizer) -> None:
    find = InstructionEnd(tokenizer, MARK)
    random = np.random.default_rng(0)
    texts = [
        ("<|user|>\n" + "i" * random.integers(0, 9) + "\n" if random.random() < 0.6 else "")
        + (MARK if random.random() < 0.8 else "")
        + "t" * random.integers(1, 9)
        for _ in range(200)
    ]
    rows = tokenizer.encode(texts)
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    alone = [int(find(row, lengths[i : i + 1])[0]) for i, row in enumerate(rows)]
    assert find(np.concatenate(rows), lengths).tolist() == alone
