"""Code metrics and the path of a request through the code, as a Markdown table.

    python benchmarks/code_shape.py [TREE ...] [--embed MODEL] [--rerank MODEL] [--chat MODEL]

TREE is a checkout; by default this one. Two trees give two columns, before and after. With model folders,
each tree serves them on the null device. The script then counts the distinct functions and files of the
package that one warm request enters, in the API process and in the engine process. The tree needs no changes:
a profile hook is installed through `sitecustomize`.
"""

from __future__ import annotations

import argparse
import ast
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

LONG_FUNCTION = 80  # lines
MANY_PARAMETERS = 8

HOOK = """
import json, mmap, os, sys, threading
folder = os.environ.get("TRACE_FOLDER")
if folder:
    shared = mmap.mmap(os.open(folder + "/flag", os.O_RDWR), 1)
    seen = {}
    root = os.environ["TRACE_ROOT"]

    def hook(frame, event, argument):
        if event == "call" and shared[0] == 1:
            code = frame.f_code
            if code.co_filename.startswith(root) and not code.co_name.startswith("<"):
                seen[code.co_filename[len(root):], code.co_qualname] = None

    def dump():
        import time
        done = 0
        while True:
            time.sleep(0.02)
            if shared[0] == 2 and not done:
                with open(f"{folder}/{os.getpid()}.json", "w") as file:
                    json.dump([sys.argv[0], list(seen)], file)
                seen.clear()
                done = 1
            elif shared[0] != 2:
                done = 0

    threading.Thread(target=dump, daemon=True).start()
    threading.setprofile(hook)
    sys.setprofile(hook)
"""

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": ("/v1/embeddings", {"input": "a short text"}),
    "rerank": ("/v1/rerank", {"query": "a query", "documents": ["one document", "another document"]}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0},
    ),
}


def functions(tree: Path) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in sorted((tree / "penstock").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file.relative_to(tree), node


def classes(tree: Path) -> list[tuple[int, str]]:
    found = []
    for file in (tree / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.append((_lines(node), node.name))
    return sorted(found, reverse=True)


def _lines(node: ast.AST) -> int:
    return int(node.end_lineno or 0) - int(node.lineno) + 1  # type: ignore[attr-defined]


def shape(tree: Path) -> dict[str, str]:
    files = [(len(file.read_text().splitlines()), file) for file in (tree / "penstock").rglob("*.py")]
    files.sort(reverse=True)
    long = [node.name for _, node in functions(tree) if _lines(node) > LONG_FUNCTION]
    wide = [
        node.name
        for file, node in functions(tree)
        if "kernels" not in file.parts
        and len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs) > MANY_PARAMETERS
    ]
    asserts = sum(
        isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)
        for file in (tree / "penstock").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    )
    code = "import sys, penstock.api.process; print(sum(m.startswith('penstock') for m in sys.modules))"
    env = os.environ | {"PYTHONPATH": str(tree)}
    modules = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tree, capture_output=True, text=True, check=True
    )
    return {
        "files / lines": f"{len(files)} / {sum(count for count, _ in files):,}",
        "largest files": ", ".join(f"{file.relative_to(tree / 'penstock')} {n}" for n, file in files[:3]),
        "largest classes": ", ".join(f"{name} {count}" for count, name in classes(tree)[:3]),
        f"functions over {LONG_FUNCTION} lines": str(len(long)),
        f"functions with more than {MANY_PARAMETERS} parameters, kernels aside": str(len(wide)),
        "`assert … is not None`": str(asserts),
        "modules of the package that an API process imports": modules.stdout.strip(),
    }


@contextmanager
def serving(tree: Path, kind: str, model: str, folder: Path) -> Iterator[str]:
    (folder / "sitecustomize.py").write_text(HOOK)
    env = os.environ | {
        "PYTHONPATH": f"{folder}:{tree}",
        "TRACE_FOLDER": str(folder),
        "TRACE_ROOT": f"{tree}/penstock/",
    }
    port = 18700 + os.getpid() % 1000
    flags = ["--device", "null", "--port", str(port), "--api-server-count", "1", "--max-model-len", "512"]
    if kind == "chat":  # the scenarios' folders have no chat template
        flags += ["--chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}"]
    command = [sys.executable, "-m", "penstock", "serve", model, *flags, "--log-level", "error"]
    server = subprocess.Popen(command, env=env, cwd=tree)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                with urlopen(f"{url}/ready", timeout=5) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def post(url: str, path: str, body: dict[str, Any]) -> None:
    request = Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        answer.read()


def path_of(tree: Path, kind: str, model: str) -> str:
    """The functions and files that one warm request enters."""
    route, body = BODIES[kind]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flag").write_bytes(b"\0")
        with (folder / "flag").open("r+b") as file, serving(tree, kind, model, folder) as url:
            flag = mmap.mmap(file.fileno(), 1)
            for _ in range(3):
                post(url, route, body)
            flag[0] = 1
            post(url, route, body)
            flag[0] = 2
            time.sleep(0.5)
            found = [json.loads(dump.read_text()) for dump in folder.glob("*.json")]
    parts = {("engine" if "engine" in argv or ("process.py" in argv and "api" not in argv) else "API"): seen
             for argv, seen in found if seen}  # fmt: skip
    everything = [tuple(each) for seen in parts.values() for each in seen]
    files = {file for file, _ in everything}
    detail = ", ".join(f"{who} {len(seen)}" for who, seen in sorted(parts.items()))
    return f"{len(everything)} functions in {len(files)} files ({detail})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]])
    for kind in BODIES:
        parser.add_argument(f"--{kind}", metavar="MODEL", help=f"model folder for the {kind} request")
    arguments = parser.parse_args()
    trees = [tree.resolve() for tree in arguments.trees]
    columns = [shape(tree) for tree in trees]
    for tree, column in zip(trees, columns, strict=True):
        for kind in BODIES:
            if (model := getattr(arguments, kind)) is not None:
                column[f"one {kind} request enters"] = path_of(tree, kind, str(Path(model).resolve()))
    print("| |" + "".join(f" {tree.name} |" for tree in trees))
    print("|---|" + "---|" * len(trees))
    for name in columns[0]:
        print(f"| {name} |" + "".join(f" {column.get(name, '–')} |" for column in columns))


if __name__ == "__main__":
    main()
