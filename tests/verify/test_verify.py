"""`penstock verify`: the choice of the reference, agreement and disagreement, the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock.types import Task
from penstock.verify.compare import compare
from penstock.verify.samples import DEFAULT_TEXTS, Answers, Check, Sample
from tests.checkpoints import (
    write_bert,
    write_cross_encoder,
    write_json,
    write_late,
    write_splade,
    write_static,
    write_token_classifier,
)
from tests.cli.runs import error_of, invoke

CPU = ("--device", "cpu", "--threads", 1)
EMBED = Check("embed", Task.EMBED)
TEXTS = DEFAULT_TEXTS[:4]


def run(folder: Path, *args: object) -> tuple[int, dict[str, Any], str]:
    """Run the command; returns the exit code, the saved report and the output."""
    file = folder.parent / "report.json"
    texts = folder.parent / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    result = invoke("verify", folder, texts, "-o", file, *CPU, *args)
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(file.read_text()), result.stdout


def splade(folder: Path) -> Path:
    write_splade(folder)
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        module["type"] = module["type"].replace(".models.", ".sparse_encoder.models.")
    write_json(folder / "modules.json", modules)
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    return folder


@pytest.mark.parametrize(
    ("write", "reference", "checks"),
    [
        (write_bert, "sentence-transformers", ["embed"]),
        (splade, "sparse-encoder", ["sparse, query", "sparse, document"]),
        (write_late, "multi-vector-encoder", ["token_embed, query", "token_embed, document", "score"]),
        (write_cross_encoder, "cross-encoder", ["score"]),
        (write_token_classifier, "transformers", ["token_classify"]),
        (lambda folder: write_cross_encoder(folder, labels=3), "transformers", ["classify"]),
        (lambda folder: write_bert(folder, modules=False), "transformers", ["token_embed"]),
    ],
)
def test_a_model_answers_as_the_library_that_its_files_name(
    tmp_path: Path, write: Callable[[Path], Path], reference: str, checks: list[str]
) -> None:
    code, report, printed = run(write(tmp_path / "model"))
    assert (code, report["verdict"], report["reference"]) == (0, "same", reference), printed
    assert [finding["name"] for finding in report["findings"]] == checks
    for finding in report["findings"]:
        assert finding["same_tokens"] in (finding["inputs"], None if finding["name"] == "score" else -1)
    assert "verdict: the same answers as the reference" in printed


def test_another_pooling_than_the_reference_is_a_difference_with_its_figures(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model")
    code, report, printed = run(folder, "--pooler-config", '{"pooling_type": "CLS"}')
    assert (code, report["verdict"]) == (1, "different")
    assert "DIFFERENT from the reference: embed: the worst cosine is" in printed
    finding = report["findings"][0]
    assert finding["worst_cosine"] < 0.999 and finding["same_tokens"] == len(TEXTS)
    assert finding["worst_text"] is not None


def test_other_tokens_than_the_reference_are_named_with_their_position() -> None:
    vectors = [np.ones(3), np.ones(3)]
    found = compare(
        EMBED,
        Sample.of(["a", "b"]),
        Answers(vectors, [[1, 7, 9], [1, 2]]),
        Answers(vectors, [[1, 7, 9], [1, 2, 3]]),
        is_fp32=True,
    )
    assert not found.is_same and found.same_tokens == 1
    assert "input 1 first at position 2: [] of 2 tokens, the reference [3] of 3 tokens" in found.reasons[0]


def test_rankings_are_compared_beyond_ties() -> None:
    generator = np.random.default_rng(0)
    theirs = [generator.normal(size=8) for _ in range(6)]
    other = [generator.normal(size=8) for _ in range(6)]
    sample = Sample.of([str(number) for number in range(6)])
    same = compare(EMBED, sample, Answers(theirs, None), Answers(theirs, None), is_fp32=True)
    assert (same.ordered_alike, same.same_best, same.is_same) == (1.0, 1.0, True)
    differs = compare(EMBED, sample, Answers(other, None), Answers(theirs, None), is_fp32=True)
    assert differs.ordered_alike is not None and differs.ordered_alike < 0.9 and not differs.is_same


def test_answers_that_are_not_finite_or_of_another_shape_are_differences() -> None:
    sample = Sample.of(["a", "b"])
    good, short = [np.ones(3), np.ones(3)], [np.ones(3), np.ones(2)]
    broken = [np.ones(3), np.array([1.0, np.nan, 0.0])]
    for wrong, words in ((short, "shape [2]"), (broken, "not finite")):
        found = compare(EMBED, sample, Answers(wrong, None), Answers(good, None), is_fp32=True)
        assert words in found.reasons[0]


def test_a_file_with_one_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("water\n")
    message = error_of("verify", write_bert(tmp_path / "model"), file, *CPU)
    assert "has 1 texts; a comparison needs at least 2" in message


def test_a_model_that_the_library_cannot_load_is_an_error_with_its_reason(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model")
    write_json(folder / "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})  # its width is missing
    message = error_of("verify", folder, *CPU)
    assert message.startswith("sentence-transformers cannot load model: TypeError: ")


def test_static_embeddings_without_modules_are_compared_with_model2vec(tmp_path: Path) -> None:
    folder = write_static(tmp_path / "model")
    (folder / "modules.json").unlink()
    tensors = {"embeddings": load_file(folder / "model.safetensors")["embedding.weight"]}
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": "model2vec", "normalize": True})
    if find_spec("model2vec") is None:
        assert "model has to be compared with model2vec, which is not installed" in error_of(
            "verify", folder, *CPU
        )
        return
    code, report, printed = run(folder)
    assert (code, report["reference"]) == (0, "model2vec"), printed
