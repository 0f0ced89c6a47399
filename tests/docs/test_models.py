"""The page of model families covers every family and agrees with its sources."""

from __future__ import annotations

import tomllib

from docs.tools.models import EXAMPLES, PAGE, page
from penstock.checkpoint.families import FAMILIES


def test_every_family_has_an_example() -> None:
    examples = tomllib.loads(EXAMPLES.read_text())
    assert set(examples) == set(FAMILIES), "add a published model to docs/tools/models.toml"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python docs/tools/models.py"
