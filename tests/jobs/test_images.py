"""Folders of images and PDF files: one row per image or page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from penstock import Engine
from penstock.errors import BadValue
from penstock.jobs import images as module
from penstock.jobs.formats import InputFormat
from penstock.jobs.images import ImageRef, render_page
from penstock.jobs.inputs import find_files, open_inputs
from penstock.jobs.rows import Columns
from tests.cli.runs import error_of, invoke, read_jsonl
from tests.inputs.images.pictures import noise
from tests.parity.dual import CLIP

PICTURES = [noise(40, 30, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    CLIP.write(folder)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, picture in enumerate(PICTURES):
        picture.save(folder / f"{number}.png")
    return folder


def write_pdf(file: Path, pages: int = 2) -> Path:
    first, *more = [noise(100, 150, seed=seed + 10) for seed in range(pages)]
    first.save(file, "PDF", save_all=True, append_images=more, resolution=72)
    return file


def test_images_and_pages_have_vectors_with_their_names(tmp_path: Path, photos: Path, model: Path) -> None:
    pytest.importorskip("pypdfium2")
    pdf, output = write_pdf(tmp_path / "pages.pdf"), tmp_path / "out.parquet"
    args = ("--model", model, "--device", "cpu", "--dtype", "float32", "--keep", "path", "--keep", "page")
    result = invoke("embed", photos, pdf, "-o", output, *args, "--pdf-dpi", 72)
    assert result.exit_code == 0, result.output
    table = pq.read_table(output).to_pylist()
    assert [Path(row["path"]).name for row in table] == ["0.png", "1.png", "2.png", "pages.pdf", "pages.pdf"]
    assert [row["page"] for row in table] == [None, None, None, 1, 2]
    pages = [render_page(ImageRef(str(pdf), page, 72), 10**7) for page in (1, 2)]
    assert pages[0].size == (100, 150)
    with Engine(str(model), device="cpu", dtype="float32") as engine:
        expected = engine.embed(images=[*PICTURES, *pages])
    np.testing.assert_allclose(np.array([row["embedding"] for row in table]), expected, atol=2e-5)


def test_images_that_cannot_be_read_are_skipped_and_listed(tmp_path: Path, photos: Path, model: Path) -> None:
    (photos / "1.png").write_bytes(b"no image")
    output = tmp_path / "out.jsonl"
    args = ("embed", photos, "-o", output, "--model", model, "--device", "cpu")
    assert "row 1, " in error_of(*args) and "unknown type" in error_of(*args)
    result = invoke(*args, "--on-error", "skip")
    assert result.exit_code == 0, result.output
    assert [row["id"] for row in read_jsonl(output)] == [0, 2]
    (listed,) = read_jsonl(tmp_path / "out.jsonl.errors.jsonl")
    assert (listed["row"], listed["column"]) == (1, "path")


def test_rows_are_cut_at_the_same_places_wherever_reading_starts(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CHUNK_IMAGES", 2)
    files, columns = find_files([str(photos)], None), Columns("path", None, ("path",))
    assert {file.form for file in files} == {InputFormat.IMAGE}

    def spans(start: int, stop: int | None = None) -> list[tuple[int, int]]:
        with open_inputs(files, None) as source:
            return [
                (each.first, each.end) for each in source.chunks(columns, start=start, stop=stop, size=2048)
            ]

    assert spans(0) == [(0, 2), (2, 3)]
    assert spans(1) == [(0, 2), (2, 3)]
    assert spans(2) == [(2, 3)]
    assert spans(0, 1) == [(0, 1)]


def test_texts_and_images_in_one_input_are_refused(tmp_path: Path, photos: Path) -> None:
    (photos / "words.txt").write_text("words\n")
    assert "mixes images and texts" in error_of("embed", photos, "-o", tmp_path / "out.jsonl")


def test_a_link_keeps_its_name_and_files_of_other_types_are_named(
    tmp_path: Path, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files in the hub's cache are links to files whose names are hashes."""
    blob = tmp_path / "0f3a"
    (photos / "0.png").rename(blob)
    (photos / "0.png").symlink_to(blob)
    (photos / "3.heic").write_bytes(b"")
    with caplog.at_level("WARNING", "penstock.jobs"):
        files = find_files([str(photos)], None)
    assert [file.location for file in files] == [str(photos / f"{number}.png") for number in range(3)]
    assert "no known extension are left out: 3.heic" in caplog.text


def test_a_model_of_texts_refuses_images(tmp_path: Path, photos: Path) -> None:
    message = error_of("embed", photos, "-o", tmp_path / "out.jsonl", "--device", "null")
    assert "reads no images" in message


def test_broken_pdf_files_and_huge_pages_are_refused(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("pypdfium2")
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 nothing")
    args = ("-o", tmp_path / "out.jsonl", "--model", model, "--device", "cpu")
    assert "is not a PDF file that can be read" in error_of("embed", tmp_path / "a.pdf", *args)
    large = write_pdf(tmp_path / "b.pdf")
    with pytest.raises(BadValue, match="Lower --pdf-dpi"):
        render_page(ImageRef(str(large), 1, 1200), 1_000_000)
