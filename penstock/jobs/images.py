"""Images and pages of PDF files as rows of an input.

Rows only refer to images. They are decoded when they are embedded, so only a few are in memory at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat
from penstock.jobs.remote import is_remote
from penstock.jobs.rows import BadRow, Chunk, Columns, Source

if TYPE_CHECKING:
    from PIL.Image import Image

PATH, PAGE = "path", "page"  # the columns of an input of images
DEFAULT_PDF_DPI = 150
_POINTS_PER_INCH = 72
MAX_CHUNK_IMAGES = 32  # all prepared images of a chunk are in memory at once


class InputFile(Protocol):
    @property
    def location(self) -> str: ...

    @property
    def form(self) -> InputFormat: ...


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image of an input. Picklable."""

    path: str
    page: int | None = None  # page of a PDF file, from 1
    dpi: int = DEFAULT_PDF_DPI

    def __len__(self) -> int:
        return 1  # so that `Chunk.split` never splits a chunk of images by size

    def load(self, max_pixels: int) -> Path | Image:
        """Return the image in a form that an image loader accepts."""
        return Path(self.path) if self.page is None else render_page(self, max_pixels)


class ImageSource(Source):
    """Images and PDF files, in order. Each image and each page is a row."""

    def __init__(self, files: Sequence[InputFile], dpi: int) -> None:
        super().__init__(_name(files), (PATH, PAGE), (PATH,))
        self._files, self._dpi = files, dpi

    def chunks(self, columns: Columns, *, start: int, stop: int | None, size: int) -> Iterator[Chunk]:
        size = min(size, MAX_CHUNK_IMAGES)
        first, rows = 0, list[ImageRef | BadRow]()
        for row in self._rows(columns):
            if stop is not None and first + len(rows) >= stop:
                break
            rows.append(row)
            if len(rows) == size:
                if first + size > start:
                    yield self._chunk(first, rows, columns)
                first, rows = first + size, []
        if rows and first + len(rows) > start:
            yield self._chunk(first, rows, columns)

    def empty_chunk(self, columns: Columns) -> Chunk:
        return Chunk(0, 0, [], {name: [] for name in columns.carried}, 1.0)

    def close(self) -> None:
        pass

    def _rows(self, columns: Columns) -> Iterator[ImageRef | BadRow]:
        """Yield the rows of all files. A PDF file that cannot be opened is a bad row."""
        for file in self._files:
            if file.form is not InputFormat.PDF:
                yield ImageRef(file.location)
                continue
            try:
                num_pages = count_pages(file.location)
            except BadValue as error:
                if not self.skips_bad_rows:
                    raise
                yield BadRow(-1, None, error.message, columns.text)
                continue
            yield from (ImageRef(file.location, page, self._dpi) for page in range(1, num_pages + 1))

    def _chunk(self, first: int, rows: list[ImageRef | BadRow], columns: Columns) -> Chunk:
        images = [row for row in rows if isinstance(row, ImageRef)]
        bad = tuple(
            BadRow(first + at, None, row.reason, row.column)
            for at, row in enumerate(rows)
            if isinstance(row, BadRow)
        )
        values: dict[str, list[Any]] = {
            PATH: [each.path for each in images],
            PAGE: [each.page for each in images],
        }
        carried = {name: values[name] for name in columns.carried}
        return Chunk(first, len(rows), images, carried, None, bad)  # type: ignore[arg-type]


def is_image_file(file: InputFile) -> bool:
    return file.form in (InputFormat.IMAGE, InputFormat.PDF)


def open_images(files: Sequence[InputFile], dpi: int) -> ImageSource:
    """Open an input of images and PDF files. It must not contain other files."""
    other = next((file for file in files if not is_image_file(file)), None)
    if other is not None:
        raise BadValue(
            f"the input mixes images and texts, such as {other.location}; give one kind", param="input"
        )
    if remote := next((file.location for file in files if is_remote(file.location)), None):
        raise BadValue(f"{remote} is an image on another machine; give a local folder", param="input")
    return ImageSource(files, dpi)


def _name(files: Sequence[InputFile]) -> str:
    return files[0].location + (f" and {len(files) - 1} more" if len(files) > 1 else "")


_pdfium = threading.Lock()  # pdfium is not thread-safe


def count_pages(path: str) -> int:
    with _pdfium:
        document = _open_pdf(path)
        try:
            return len(document)
        finally:
            document.close()


def render_page(ref: ImageRef, max_pixels: int) -> Image:
    """Render a page as an RGB image on a white background."""
    assert ref.page is not None
    scale = ref.dpi / _POINTS_PER_INCH
    with _pdfium:
        document = _open_pdf(ref.path)
        try:
            page = document[ref.page - 1]
            width, height = page.get_size()
            if width * height * scale * scale > max_pixels:
                raise BadValue(
                    f"page {ref.page} of {ref.path} has {width * scale:,.0f} × {height * scale:,.0f} pixels "
                    f"at {ref.dpi} dpi; at most {max_pixels:,} are possible. Lower --pdf-dpi"
                )
            image: Image = page.render(scale=scale).to_pil().convert("RGB")
            return image
        except BadValue:
            raise
        except Exception as error:  # pdfium raises its own error types
            raise BadValue(f"page {ref.page} of {ref.path} cannot be rendered: {error}") from None
        finally:
            document.close()


def _open_pdf(path: str) -> Any:
    try:
        import pypdfium2
    except ImportError:
        raise BadValue(
            "PDF files need the package pypdfium2: pip install 'penstock[pdf]'", param="input"
        ) from None
    try:
        return pypdfium2.PdfDocument(path)
    except (pypdfium2.PdfiumError, OSError) as error:
        raise BadValue(f"{path} is not a PDF file that can be read: {error}", param="input") from None
