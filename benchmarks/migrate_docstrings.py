"""Run `penstock migrate` with real models on real text: docstrings of Python's standard library.

    python -m benchmarks.migrate_docstrings OLD_MODEL NEW_MODEL

Embeds the first paragraphs of 1,000 docstrings with the old model and migrates them to the new one. The
queries are the names of 200 of the functions; the relevant document of each is its docstring.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from penstock.jobs.job import Job, run
from penstock.stores.migrate import Migration
from penstock.stores.migrate import run as migrate
from penstock.stores.sink import store_sink

DOCUMENTS, QUERIES = 1000, 200
UNWANTED = ("test", "idlelib", "lib2to3", "turtle", "antigravity", "this", "tkinter", "__", "distutils")


def docstrings() -> Iterator[tuple[str, str]]:
    """Name and first paragraph of each documented function of the standard library."""
    seen: set[str] = set()
    for module in sorted(pkgutil.iter_modules(), key=lambda each: each.name):
        name = module.name
        if name not in sys.stdlib_module_names or name.startswith(("_", *UNWANTED)):
            continue
        try:
            loaded = importlib.import_module(name)
        except Exception:
            continue
        for key, value in sorted(vars(loaded).items()):
            text = (inspect.getdoc(value) or "").split("\n\n")[0] if inspect.isroutine(value) else ""
            if len(text) > 40 and text not in seen and not key.startswith("_"):
                seen.add(text)
                yield f"{name}.{key}", " ".join(text.split())


def main() -> None:
    old_model, new_model = sys.argv[1:]
    warnings.simplefilter("ignore")
    found = list(docstrings())
    random.Random(0).shuffle(found)
    documents = found[:DOCUMENTS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"id": each, "text": text} for each, text in documents]
        queries = [
            {"id": each, "text": each.replace(".", " ").replace("_", " ")} for each, _ in documents[:QUERIES]
        ]
        for file, lines in (("docs.jsonl", rows), ("queries.jsonl", queries)):
            (folder / file).write_text("\n".join(map(json.dumps, lines)))
        (folder / "qrels.tsv").write_text("".join(f"{each}\t{each}\t1\n" for each, _ in documents[:QUERIES]))
        job = Job(
            inputs=(str(folder / "docs.jsonl"),),
            output=str(folder / "progress.parts"),
            engine={"model": old_model, "device": "cpu"},
            id_column="id",
            keep=("text",),
        )
        run(job, store_sink(f"lancedb:{folder}/db/old", adopt=False))
        migration = Migration(
            old=f"lancedb:{folder}/db/old",
            new=f"lancedb:{folder}/db/new",
            engine={"model": new_model, "device": "cpu"},
            queries=str(folder / "queries.jsonl"),
            judgements=folder / "qrels.tsv",
            old_model=old_model,
        )
        migrate(migration)


if __name__ == "__main__":
    main()
