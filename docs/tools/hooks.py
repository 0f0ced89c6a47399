"""MkDocs hooks: fill in the generated parts of pages, and add the measured results to the site.

Pages link to files of the repository (`../benchmarks/results/…`), so that links work in a checkout too. The
hooks redirect those links to copies inside the site.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from mkdocs.structure.files import File, Files  # noqa: E402

from docs.tools.reference import RENDERERS  # noqa: E402

_LOW = "---\nsearch:\n  boost: 0.1\n---\n\n"
_TEST_COMMENT = re.compile(r"^<!-- (?:not run|stand-in|expect): .+ -->\n", re.MULTILINE)
_MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
_RESULT_LINK = re.compile(r"\]\((?:\.\./)+benchmarks/results/([\w.-]+)\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:README|CHANGELOG|CONTRIBUTING)\.md)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the results and the changelog. The search ranks them below the hand-written pages."""

    def add(target: str, source: Path) -> None:
        files.append(File.generated(config, target, content=_LOW + source.read_text(encoding="utf-8")))

    for source in sorted((ROOT / "benchmarks/results").glob("*.md")):
        add(f"results/{source.name}", source)
    add("changelog.md", ROOT / "CHANGELOG.md")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = str(PurePosixPath(page.file.src_uri).parent)

    def result(match: re.Match[str]) -> str:
        target = f"results/{match[1]}"
        if files.get_file_from_path(target) is None:
            return match[0]  # MkDocs' strict mode reports the broken link
        return f"]({os.path.relpath(target, here)})"

    markdown = _TEST_COMMENT.sub("", markdown)
    markdown = _MARK.sub(lambda match: RENDERERS[match[1]](), markdown)
    markdown = _RESULT_LINK.sub(result, markdown)
    if here == "results":
        markdown = re.sub(r"\]\((?:\.\./)+docs/([\w./-]+)\)", r"](../\1)", markdown)
        markdown = re.sub(r"\[([^\]]+)\]\(([\w-]+\.(?:json|py))\)", r"`\1`", markdown)
    return _OUTSIDE.sub(r"`\1`", markdown)
