"""`penstock migrate`: all rows arrive, the comparison is correct, and a switch is atomic and reversible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import Engine
from penstock.errors import BadValue, NotPossible
from penstock.jobs.stamp import Stamp
from penstock.stores import open_store
from penstock.stores.base import VectorStore
from penstock.stores.migrate import CutOverRefused, Migration, run
from tests.checkpoints import BERT_CONFIG, bert_tensors, write_bert
from tests.cli.runs import error_of, invoke, write_jsonl
from tests.stores.contents import contents
from tests.stores.opensearch_stand_in import StandIn
from tests.stores.tables import fixed_lists

TEXTS = {f"doc {i}": f"{word} number {i} of water" for i, word in enumerate(["people", "oil", "time"] * 4)}
Move = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    second = bert_tensors(BERT_CONFIG, seed=5)
    return {"a": write_bert(folder / "a"), "b": write_bert(folder / "b", tensors=second)}


@pytest.fixture(scope="module")
def engines(models: dict[str, Path]) -> Iterator[dict[str, Engine]]:
    opened = {name: Engine(str(model), device="cpu") for name, model in models.items()}
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture
def fill(engines: dict[str, Engine]) -> Callable[..., None]:
    """Write rows into a collection with the first model, as an application does."""

    def write(url: str, texts: dict[Any, str] = TEXTS, **columns: Any) -> None:
        from penstock.checkpoint.revision import content_revision

        engine = engines["a"]
        rows = pa.table(
            {
                "id": list(texts),
                "text": list(texts.values()),
                **columns,
                "vector": fixed_lists(engine.embed(list(texts.values()))),
            }
        )
        stamp = Stamp(
            model="a",
            revision=content_revision(engine.spec),
            dimension=engine.spec.embed_dim,
            normalize=True,
            max_tokens=64,
        )
        with open_store(url) as store:
            store.open(rows.schema, stamp)
            store.write(rows)
            store.finish()

    return write


@pytest.fixture
def move(models: dict[str, Path]) -> Move:
    def moved(old: str, new: str, **fields: Any) -> Any:
        engine = {"model": str(models["b"]), "device": "cpu"}
        fields.setdefault("old_model", str(models["a"]))
        return run(Migration(old=old, new=new, engine=engine, **fields))

    return moved


def assert_moved(url: str, engine: Engine, texts: dict[Any, str], stand_in: StandIn | None = None) -> None:
    held = contents(url, stand_in)
    assert held.keys() == texts.keys()
    wanted = engine.embed(list(texts.values()))
    for each, vector in zip(texts, wanted, strict=True):
        assert held[each] == pytest.approx(vector, abs=1e-6)


PAIRS = [
    ("lancedb", "qdrant"),
    pytest.param("qdrant", "opensearch", marks=pytest.mark.stores),
    pytest.param("opensearch", "lancedb", marks=pytest.mark.stores),
    pytest.param("pgvector", "pgvector", marks=pytest.mark.stores),
    pytest.param("qdrant", "pgvector", marks=pytest.mark.stores),
    pytest.param("pgvector", "lancedb", marks=pytest.mark.stores),
]


@pytest.mark.parametrize(("old_kind", "new_kind"), PAIRS)
def test_every_row_moves_with_its_columns_from_any_store_to_any_other(
    old_kind: str,
    new_kind: str,
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    engines: dict[str, Engine],
    opensearch: StandIn,
) -> None:
    old, new = new_url(old_kind), new_url(new_kind)
    sizes = pa.array([len(text) if i else None for i, text in enumerate(TEXTS.values())])
    fill(old, size=sizes)
    move(old, new, batch_rows=5)
    assert_moved(new, engines["b"], TEXTS, opensearch)
    with open_store(new) as store:
        store.find()
        rows = {row["id"]: row for part in store.read(100) for row in part.to_pylist()}
    assert [row["size"] for row in (rows[each] for each in TEXTS)] == sizes.to_pylist()
    assert [rows[each]["text"] for each in TEXTS] == list(TEXTS.values())


def test_a_second_run_embeds_only_what_is_new_and_a_killed_one_continues(
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    engines: dict[str, Engine],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = new_url("lancedb"), new_url("lancedb")
    fill(old)
    write, left = VectorStore.write, [1, 2]

    def failing(self: VectorStore, table: pa.Table) -> None:
        if not left:
            raise OSError("the machine is gone")
        left.pop()
        write(self, table)

    with monkeypatch.context() as patched:
        patched.setattr(VectorStore, "write", failing)
        with pytest.raises(OSError, match="gone"):
            move(old, new, batch_rows=4)
    assert len(contents(new)) == 8
    move(old, new, batch_rows=4)
    assert "4 rows embedded in 2 passes over 12" in capsys.readouterr().err
    fill(old, more := {"doc 99": "what is new"})
    move(old, new)
    assert "1 rows embedded" in capsys.readouterr().err
    assert_moved(new, engines["b"], TEXTS | more)


def test_rows_that_arrive_during_a_pass_are_seen_by_the_next(
    new_url: Callable[[str], str], fill: Callable[..., None], move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = new_url("lancedb"), new_url("qdrant")
    fill(old)
    write = VectorStore.write
    arrivals = [{"late 1": "they write"}, {"late 2": "they look"}]

    def busy(self: VectorStore, table: pa.Table) -> None:
        write(self, table)
        if self.kind == "qdrant" and arrivals:
            fill(old, arrivals.pop())

    monkeypatch.setattr(VectorStore, "write", busy)
    move(old, new)
    assert contents(new).keys() == {*TEXTS, "late 1", "late 2"}


def test_a_changed_text_is_seen_with_an_updated_column(
    new_url: Callable[[str], str], fill: Callable[..., None], move: Move, engines: dict[str, Engine]
) -> None:
    old, new = new_url("lancedb"), new_url("qdrant")
    fill(old, version=pa.array([1] * len(TEXTS)))
    move(old, new, updated_column="version")
    changed = TEXTS | {"doc 3": "this was another document"}
    fill(old, changed, version=pa.array([2 if each == "doc 3" else 1 for each in changed]))
    move(old, new)
    assert_moved(new, engines["b"], TEXTS)  # a changed text under an old id is not noticed
    move(old, new, updated_column="version")
    assert_moved(new, engines["b"], changed)
    with pytest.raises(BadValue, match="no column 'when'"):
        move(old, new, updated_column="when")


def test_texts_may_come_from_a_file(
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    engines: dict[str, Engine],
    tmp_path: Path,
) -> None:
    old = new_url("lancedb")
    fill(old)
    store: Any = open_store(old)
    store.find()
    store._table.drop_columns(["text"])
    with pytest.raises(BadValue, match="no column with text; give the texts of its ids with --texts"):
        move(old, new_url("lancedb"))
    rows = [{"id": each, "text": text.upper()} for each, text in TEXTS.items()]
    file = write_jsonl(tmp_path / "texts.jsonl", rows)
    new = new_url("lancedb")
    move(old, new, texts=str(file))
    assert_moved(new, engines["b"], {each: text.upper() for each, text in TEXTS.items()})
    file = write_jsonl(tmp_path / "fewer.jsonl", rows[1:])
    with pytest.raises(BadValue, match=r"the row 'doc 0' has no text in .*fewer.jsonl; skip such rows"):
        move(old, new_url("lancedb"), texts=str(file))
    new = new_url("lancedb")
    move(old, new, texts=str(file), skips_bad_rows=True)
    assert len(contents(new)) == len(TEXTS) - 1


def test_the_two_are_compared_on_queries_and_judgements(
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    engines: dict[str, Engine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = new_url("lancedb"), new_url("qdrant")
    fill(old)
    queries = {"q1": "people of water", "q2": "time number 5"}
    file = write_jsonl(tmp_path / "queries.jsonl", [{"id": k, "text": text} for k, text in queries.items()])
    judgements = tmp_path / "qrels.tsv"
    judgements.write_text("q1\tdoc 3\t1\nq2\tdoc 5\t2\n")
    found = move(old, new, queries=str(file), judgements=judgements, top_k=4)

    def ranking(engine: Engine) -> list[list[str]]:
        scores = engine.embed(list(queries.values())) @ engine.embed(list(TEXTS.values())).T
        return [[list(TEXTS)[row] for row in np.argsort(-each)[:4]] for each in scores]

    first, second = ranking(engines["a"]), ranking(engines["b"])
    shared = [len(set(one) & set(two)) / 4 for one, two in zip(first, second, strict=True)]
    assert found.overlap == pytest.approx(np.mean(shared))
    ranks = [
        one.index(want) + 1 if want in one else None
        for one, want in zip(first, ["doc 3", "doc 5"], strict=True)
    ]
    assert found.old_mrr == pytest.approx(np.mean([1 / rank if rank else 0 for rank in ranks]))
    said = capsys.readouterr().err
    assert "overlap@4" in said and "nDCG@4" in said and "MRR@4" in said


def test_the_same_model_finds_the_same(
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    old, new = new_url("lancedb"), new_url("lancedb")
    fill(old)
    (tmp_path / "queries.txt").write_text("people of water\ntime number\n")
    engine = {"model": str(models["a"]), "device": "cpu"}
    found = run(Migration(old=old, new=new, engine=engine, queries=str(tmp_path / "queries.txt")))
    assert found is not None and found.overlap == 1 and found.same_first == 1


def test_queries_need_the_model_that_made_the_old_vectors(
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    old, new = new_url("lancedb"), new_url("lancedb")
    fill(old)
    queries = tmp_path / "queries.txt"
    queries.write_text("water\n")
    with pytest.raises(BadValue, match=r"is not the one that made the vectors.*--old-model"):
        move(old, new, queries=str(queries), old_model=str(models["b"]))
    with open_store(new) as store:
        assert store.find() is None  # the migration has not begun
    with pytest.raises(BadValue, match="name it with --old-model"):
        move(old, new, queries=str(queries), old_model=None)


def test_an_alias_of_qdrant_is_switched_and_back(
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    engines: dict[str, Engine],
    tmp_path: Path,
) -> None:
    first, second = new_url("qdrant"), new_url("qdrant")
    fill(first)
    alias = first.rpartition("/")[0] + "/docs"
    with pytest.raises(NotPossible, match="is a collection, and only an alias can be switched"):
        move(first, second, cut_over=True)
    store: Any = open_store(first)
    with store:
        models = store._models
        create = models.CreateAlias(collection_name=store.location.collection, alias_name="docs")
        store._client.update_collection_aliases([models.CreateAliasOperation(create_alias=create)])
    queries = tmp_path / "queries.txt"
    queries.write_text("people of water\n")
    with pytest.raises(CutOverRefused, match=r"below --min-overlap 1.0; .* was not switched"):
        move(alias, second, cut_over=True, queries=str(queries), min_overlap=1.0, top_k=5)
    assert_moved(alias, engines["a"], TEXTS)
    move(alias, second, cut_over=True)
    assert_moved(alias, engines["b"], TEXTS)
    assert_moved(first, engines["a"], TEXTS)
    assert invoke("migrate", alias, first, "--switch-only").exit_code == 0
    assert_moved(alias, engines["a"], TEXTS)


def test_an_alias_of_opensearch_is_switched(
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    opensearch: StandIn,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = new_url("opensearch"), new_url("opensearch")
    fill(first)
    alias = first.rpartition("/")[0] + "/live"
    opensearch.aliases["live"] = first.rpartition("/")[2]
    move(alias, second, cut_over=True)
    assert opensearch.aliases["live"] == second.rpartition("/")[2]
    assert f"penstock migrate '{alias}' '{first}' --switch-only" in capsys.readouterr().err


@pytest.mark.stores
def test_tables_of_postgres_swap_names_in_one_transaction_and_back(
    new_url: Callable[[str], str],
    fill: Callable[..., None],
    move: Move,
    engines: dict[str, Engine],
    postgres: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import psycopg

    old, new = new_url("pgvector"), new_url("pgvector")
    fill(old)
    name = old.rpartition("=")[2]
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE ROLE reader")
        connection.execute(f"GRANT SELECT ON {name} TO reader")
        move(old, new, cut_over=True)
        assert_moved(old, engines["b"], TEXTS)
        (may_read,) = connection.execute(
            f"SELECT has_table_privilege('reader', '{name}', 'SELECT')"
        ).fetchone()
        assert may_read
        back = capsys.readouterr().err.rpartition("penstock migrate ")[2].split("'")[3]
        assert invoke("migrate", old, back, "--switch-only").exit_code == 0
        assert_moved(old, engines["a"], TEXTS)
        connection.execute("DROP OWNED BY reader")
        connection.execute("DROP ROLE reader")


def test_wrong_flags_are_refused_before_anything_is_read(
    new_url: Callable[[str], str], fill: Callable[..., None], models: dict[str, Path]
) -> None:
    old, new = new_url("lancedb"), new_url("lancedb")
    model = ("--model", models["b"])
    assert "there is no collection" in error_of("migrate", old, new, *model)
    assert "OLD and NEW are the same collection" in error_of("migrate", old, old, *model)
    assert "--min-overlap needs --queries" in error_of("migrate", old, new, *model, "--min-overlap", 0.5)
    assert "names no vector store" in error_of("migrate", "old.parquet", new, *model)
    fill(old)
    assert "lancedb has no atomic switch" in error_of("migrate", old, new, *model, "--cut-over")
    assert "there is no collection" in error_of("migrate", old, new, "--switch-only")
    assert "has no column 'body'" in error_of("migrate", old, new, *model, "--text-column", "body")
    with open_store(new) as store:
        assert store.find() is None
