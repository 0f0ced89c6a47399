"""The parity table covers every family in the registry, and a row that misses its bar fails the command."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

from benchmarks import parity_table
from benchmarks.parity_table import AS_ALL, AS_WORST, MET, MISSED, judged
from penstock.checkpoint.families import FAMILIES
from penstock.types import Task
from tests.parity.subjects import KINDS, subjects

ENCODERS = {name for name, family in FAMILIES.items() if not (family.is_decoder or family.reads_images)}


def test_every_family_of_the_registry_is_in_the_table() -> None:
    found = {(subject.family, subject.task) for subject in subjects()}
    # Families with a vision tower are compared with transformers in test_dual.py and test_qwen_vl.py.
    embedders = {name for name, family in FAMILIES.items() if not (family.is_listwise or family.reads_images)}
    assert {family for family, _ in found} == embedders | {"static"}
    labelled = {name for name in embedders if FAMILIES[name].heads & {Task.ENTITIES, Task.ZERO_SHOT}}
    assert {(name, task) for name in labelled for task in FAMILIES[name].heads} <= found
    embedders -= labelled
    assert {(family, task) for family in embedders for task in (Task.EMBED, Task.TOKEN_EMBED)} <= found
    assert {
        (family, task) for family in ENCODERS - labelled for task in KINDS if task in FAMILIES[family].heads
    } <= found


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ((0.99995, 0.9995, 0.9999, 2.0), MET),
        ((0.9998, 1.0, 0.9, 0.1), MISSED),
        ((1.0, 0.998, 0.997, 2.0), AS_WORST),
        ((1.0, 0.998, 0.9985, 1.05), AS_ALL),
        ((1.0, 0.998, 0.9985, 1.2), MISSED),
    ],
)
def test_below_the_bar_the_rounding_of_the_reference_decides(
    figures: tuple[float, float, float, float], verdict: str
) -> None:
    assert judged(*figures) == verdict


def test_the_command_prints_its_comparisons_and_fails_on_a_miss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "^bert bert (token_embed|sparse)$"]
    assert parity_table.main(only) == 0
    printed = capsys.readouterr().out
    assert printed.count("| bert (Bert*) |") == 2 and "2 comparisons in 2 rows: 2 yes" in printed
    honest = parity_table.ours

    def wrong(*args: object) -> object:
        return np.roll(honest(*args), 1, axis=-1)  # type: ignore[arg-type]

    monkeypatch.setattr(parity_table, "ours", wrong)
    assert parity_table.main(only) == 1
    assert "| NO |" in capsys.readouterr().out


def test_absent_weights_are_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity_table.main(["--only", "^mpnet .real"]) == 1, "nothing was compared"
    assert "skipped: mpnet embed: --models was not given" in capsys.readouterr().out
