from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.api.model_server import serving_models
from tests.docs.blocks import ROOT
from tests.docs.stand_ins import STAND_INS
from tests.e2e.server import serving

Folder = Callable[[str], Path]
Url = Callable[[str | None], str]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Gives the folder of a stand-in model. Each is written once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = STAND_INS[kind](tmp_path_factory.mktemp("models") / kind)
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def url_of(folder_of: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Url]:
    """Gives the address of a server. Each is started once. The default model runs in its own processes, a
    stand-in in this process, where it starts without importing torch again."""
    urls: dict[str | None, str] = {}
    with ExitStack() as stack:

        def url(kind: str | None) -> str:
            if kind not in urls:
                batches = str(tmp_path_factory.mktemp("batches"))
                if kind is None:
                    server = stack.enter_context(serving("--device", "cpu", "--batch-folder", batches))
                    urls[kind] = server.url
                else:
                    models = {kind: folder_of(kind)}
                    urls[kind] = stack.enter_context(serving_models(models, batch_folder=batches))
            return urls[kind]

        yield url


@pytest.fixture(scope="session")
def shell_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `penstock` runs this checkout."""
    programs = tmp_path_factory.mktemp("bin")
    command = programs / "penstock"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path}
