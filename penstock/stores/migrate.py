"""Migration of a collection to another model: embed again, compare on the user's queries, switch.

The old collection is only read, unless the user requested a switch.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from penstock.errors import BadValue, ModelLoadError, PenstockError
from penstock.jobs.embedder import Embedder, VectorOptions
from penstock.jobs.progress import report_line
from penstock.jobs.stamp import Stamp
from penstock.stores.base import VectorStore
from penstock.stores.quality import Comparison, Judgements, compare, read_judgements, table
from penstock.stores.queries import Queries, QueryPrompt, embed_queries, read_queries, search
from penstock.stores.reembed import Reembedding, inspect
from penstock.stores.texts import TextFile
from penstock.stores.urls import open_store

# Settings of the new model's engine that also apply to the old model's.
_SHARED_FIELDS = ("device", "threads", "dtype", "download_dir", "hf_token", "trust_remote_code")


class CutOverRefused(PenstockError):
    """The new collection falls short of the user's requirements."""

    code = "cut_over_refused"


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a migration. `penstock migrate` has a flag for each field."""

    old: str
    new: str
    engine: dict[str, Any]  # fields of `EngineConfig` of the new model
    vectors: VectorOptions = VectorOptions()
    skips_bad_rows: bool = False
    text_column: str | None = None
    texts: str | None = None
    updated_column: str | None = None
    queries: str | None = None
    query_column: str | None = None
    judgements: Path | None = None
    top_k: int = 10
    query_prompt: QueryPrompt = QueryPrompt()
    old_model: str | None = None
    old_query_prompt: QueryPrompt = QueryPrompt()
    cut_over: bool = False
    switch_only: bool = False
    min_overlap: float | None = None
    min_ndcg_ratio: float | None = None
    batch_rows: int = 2048


def run(migration: Migration) -> Comparison | None:
    """Migrate a collection. Returns a comparison of the two collections, if there are queries."""
    _check(migration)
    with ExitStack() as stack:
        old = stack.enter_context(open_store(migration.old))
        new = stack.enter_context(open_store(migration.new))
        if (
            old.location.address == new.location.address
            and old.location.collection == new.location.collection
        ):
            raise BadValue("OLD and NEW are the same collection", param="NEW")
        if migration.switch_only:
            _switch_only(old, new)
            return None
        return _move(migration, old, new, stack)


def _check(migration: Migration) -> None:
    """Refuse flags that contradict each other."""
    if migration.switch_only:
        return
    if migration.queries is None:
        needs = {
            "--judgements": migration.judgements,
            "--min-overlap": migration.min_overlap,
            "--min-ndcg-ratio": migration.min_ndcg_ratio,
        }
        if given := [flag for flag, value in needs.items() if value is not None]:
            raise BadValue(f"{given[0]} needs --queries", param=given[0])
    if migration.min_ndcg_ratio is not None and migration.judgements is None:
        raise BadValue("--min-ndcg-ratio needs --judgements", param="--min-ndcg-ratio")


def _move(migration: Migration, old: VectorStore, new: VectorStore, stack: ExitStack) -> Comparison | None:
    rows = inspect(
        old, migration.batch_rows, migration.text_column, has_texts_file=migration.texts is not None
    )
    if migration.cut_over:
        old.check_cut_over(new)
    embedder = Embedder(migration.engine, migration.vectors, skips_bad_rows=migration.skips_bad_rows)
    texts = None
    if migration.texts is not None:
        texts = TextFile(migration.texts, migration.text_column)
        stack.callback(texts.close)
    work = Reembedding(
        rows,
        embedder,
        texts=texts,
        updated_column=migration.updated_column,
        batch_rows=migration.batch_rows,
    )
    new.check_open(work.schema, work.vectors.stamp)
    judged = _Judged(migration, old, new, work)
    new.open(work.schema, work.vectors.stamp)
    with embedder:
        work.run(old, new)
        new.finish()
        _report(work, old, new)
        comparison = judged.compare()
        if migration.cut_over:
            judged.demand(comparison)
            work.run_pass(old, new)  # rows that were written during the comparison
            _switch(old, new, work)
    return comparison


class _Judged:
    """Compares the collections. Queries are embedded before the long work, to report errors early."""

    def __init__(self, migration: Migration, old: VectorStore, new: VectorStore, work: Reembedding) -> None:
        self._migration, self._old, self._new = migration, old, new
        self._queries: Queries | None = None
        self._judgements: Judgements | None = None
        if migration.queries is None:
            return
        self._queries = read_queries(migration.queries, migration.query_column)
        if migration.judgements is not None:
            self._judgements = read_judgements(migration.judgements)
        self._old_vectors = self._of_old_model(self._queries, work.vectors.stamp)
        self._new_vectors = embed_queries(
            self._queries, migration.engine, work.vectors.stamp, migration.query_prompt, "--model"
        )

    def _of_old_model(self, queries: Queries, new_stamp: Stamp) -> pa.Table:
        stamp = self._old.mark.stamp if self._old.mark else None
        if stamp is None and self._migration.old_model is None:
            raise BadValue(
                f"{self._old} does not say which model made its vectors; name it with --old-model",
                param="--old-model",
            )
        given = self._migration.engine
        fields = {name: given[name] for name in _SHARED_FIELDS if name in given}
        if stamp is not None:
            fields |= {name: value for name, value in stamp.overrides.items() if name != "device"}
        if self._migration.old_model is not None:
            fields["model"] = self._migration.old_model
        elif stamp is not None and stamp.revision and stamp.revision == new_stamp.revision:
            fields |= {"model": given["model"]} if "model" in given else {}  # the same files
        elif stamp is not None:
            fields["model"] = stamp.model
        try:
            return embed_queries(queries, fields, stamp, self._migration.old_query_prompt, "--old-model")
        except ModelLoadError as error:
            raise BadValue(
                f"the model of {self._old} cannot be opened: {error.message}; name it with --old-model",
                param="--old-model",
            ) from None

    def compare(self) -> Comparison | None:
        if self._queries is None:
            return None
        k = self._migration.top_k
        before = search(self._old, self._old_vectors, k)
        after = search(self._new, self._new_vectors, k)
        comparison = compare(self._queries.ids, before, after, k, self._judgements)
        report_line(table(comparison))
        return comparison

    def demand(self, comparison: Comparison | None) -> None:
        """Raise if the comparison falls short of the user's minimums."""
        if comparison is None:
            return
        demands = [
            (f"overlap@{comparison.k}", comparison.overlap, self._migration.min_overlap, "--min-overlap"),
            ("the ratio of nDCG", comparison.ndcg_ratio, self._migration.min_ndcg_ratio, "--min-ndcg-ratio"),
        ]
        for name, value, minimum, flag in demands:
            if minimum is not None and value < minimum:
                raise CutOverRefused(
                    f"{name} is {value:.3f}, below {flag} {minimum}; {self._old} was not switched", param=flag
                )


def _report(work: Reembedding, old: VectorStore, new: VectorStore) -> None:
    totals = work.totals
    said = [f"{totals.embedded:,} rows embedded in {totals.passes} passes over {totals.read:,}"]
    if totals.bad:
        said.append(f"{totals.bad:,} rows were skipped")
    if not totals.is_caught_up:
        said.append("rows arrive faster than they are embedded: run the command again")
    found = new.find()
    extra = (found.num_rows if found else 0) - (totals.read - totals.bad)
    if extra > 0:
        said.append(f"{extra:,} rows of the new collection are not in the old one, or were deleted there")
    report_line("; ".join(said) + f" → {new}")


def _switch(old: VectorStore, new: VectorStore, work: Reembedding) -> None:
    """Switch, then copy rows that were written to the old collection before the switch."""
    with old.cut_over(new) as replaced, open_store(old.location) as current:
        current.open(work.schema, work.vectors.stamp)
        work.run_pass(replaced, current)
        _report_switch(old, new, replaced)


def _switch_only(old: VectorStore, new: VectorStore) -> None:
    if new.find() is None:
        raise BadValue(f"there is no collection {new}", param="NEW")
    old.check_cut_over(new)
    with old.cut_over(new) as replaced:
        _report_switch(old, new, replaced)


def _report_switch(old: VectorStore, new: VectorStore, replaced: VectorStore) -> None:
    report_line(
        f"{old} points to {new.location.collection}. The old rows are in {replaced}; to roll back:\n"
        f"  penstock migrate '{old}' '{replaced}' --switch-only"
    )
