"""About a hundred requests that schemathesis derives from the document; `make schema-test` has thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.local_app import WholeClient, local_state
from tests.api.scripted_app import listening
from tests.fuzz.exchange import Outcome
from tests.fuzz.fleet import KINDS

pytest.importorskip("schemathesis", reason="needs schemathesis: pip install '.[fuzz]'")

NUM_CASES = 160


@pytest.mark.parametrize("kind", ["embedder", "generator"])
def test_answers_fit_the_document(kind: str, tmp_path: Path) -> None:
    from tests.fuzz.schema_cases import run_schema_cases

    outcomes: list[tuple[str, Outcome]] = []

    def report(mode: str, route: str, outcome: Outcome, repeat: str) -> None:
        outcomes.append((route, outcome))

    folder = KINDS[kind](tmp_path / kind)
    with local_state(folder, client=WholeClient, kv_cache_gb=0.05) as (state, _), listening(state) as url:
        run_schema_cases(url, NUM_CASES, 17, None, report)
    faults = {(route, each.fault, each.detail) for route, each in outcomes if each.fault is not None}
    assert not faults
    assert sum(each.status == 200 for _, each in outcomes) >= 20
