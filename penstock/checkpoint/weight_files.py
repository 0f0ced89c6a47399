"""The files that hold a model's weights."""

from __future__ import annotations

from pathlib import Path

from penstock.checkpoint import files
from penstock.checkpoint.dense import UnitSpec
from penstock.checkpoint.spec import ModelSpec


def model_weight_files(spec: ModelSpec) -> list[Path]:
    """The weight files of the model itself and of the modules after its pooling."""
    modules = [module.folder for module in spec.pooling.modules if not isinstance(module, UnitSpec)]
    folders = [spec.path, *(spec.root_path / folder for folder in modules if folder)]
    return [file for folder in folders for file in files.weight_files(folder) if file.is_file()]
