"""Loads repositories that hold only an adapter: finds the base model, and makes one model folder of both.

The folder is in Penstock's cache and has links to the files of both. config.json and weights come from the
base model. Tokenizer, processors, modules and prompts come from the adapter's repository, if it has them. The
adapter is merged into the weights as they are read. Free of torch.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.adapters import CONFIG, WEIGHTS, LoraSpec, read_lora
from penstock.checkpoint.convert import cache_folder
from penstock.checkpoint.files import read_json, shown, weight_files
from penstock.checkpoint.find import find
from penstock.checkpoint.identity import BASE_NAMES, names_of
from penstock.checkpoint.pages import PROJECTIONS
from penstock.checkpoint.quantization import stored_format, with_quantization
from penstock.checkpoint.tensors import stored_tensors
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError

log = logging.getLogger("penstock.load")
_READ = (".json", ".txt", ".model", ".jinja")  # suffixes of the files that are read from the adapter's folder
_CARD = "README.md"
# Files that define a vocabulary, and files that belong to it.
_VOCABULARIES: tuple[str, ...] = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "spm.model")
_VOCABULARIES += ("sentencepiece.bpe.model", "tokenizer.model")
_TOKENIZER = frozenset(
    {*_VOCABULARIES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
)
# Chat models to which colpali-engine adds a projection → the architecture with the projection.
_RETRIEVERS = {
    "Qwen2VLForConditionalGeneration": "ColQwen2",
    "Qwen2_5_VLForConditionalGeneration": "ColQwen2_5",
    "Qwen3VLForConditionalGeneration": "ColQwen3",
}


def holds_adapter_alone(folder: Path) -> bool:
    """Whether a folder has a PEFT adapter and no model weights. A folder with both counts as a model."""
    if not (folder / CONFIG).is_file():
        return False
    if not weight_files(folder):
        return True
    log.warning(
        "%s has weights of a model and an adapter beside them; the weights are used, the adapter is not",
        folder,
    )
    return False


def with_base_model(folder: Path, config: EngineConfig) -> Path:
    """The folder of an adapter together with its base model."""
    if config.model_impl == "transformers":
        raise _refused(
            f"{folder} holds an adapter, which --model-impl transformers does not merge; leave it out"
        )
    base, name = _base_folder(folder, config)
    adapter = read_lora(folder, folder.name)
    written: dict[str, bytes] = {}
    if (base / "config.json").is_file():
        values = _config(base, name, adapter)
        written["config.json"] = msgspec.json.format(msgspec.json.encode(values), indent=2)
    return _assembled(_files(folder, base), written, _label(folder))


def check_merged(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse an adapter for transposed weights. `config` is the model's."""
    values = read_json(folder / CONFIG)
    if values.get("fan_in_fan_out") or config.get("model_type") == "gpt2":
        raise _refused(
            f"the adapter in {folder} changes transposed weights (fan_in_fan_out), which are not merged; "
            "load it with --enable-lora --lora-modules NAME=FOLDER on its base"
        )


def _base_folder(folder: Path, config: EngineConfig) -> tuple[Path, str]:
    """The base model's folder and name, from --base-model or from the adapter's configuration."""
    values = read_json(folder / CONFIG)
    name, revision = config.base_model, None
    if name is None:
        name, revision = values.get("base_model_name_or_path"), values.get("revision")
        if not isinstance(name, str) or not name:
            raise _refused(
                f"{folder} holds an adapter, and {CONFIG} does not name its base model; give its folder or "
                "hub id with --base-model"
            )
        if revision is not None and not isinstance(revision, str):
            raise _refused(f"{folder / CONFIG} has revision = {shown(revision)}; it has to be a string")
    try:
        base = find(name, revision, config.download_dir)
    except ModelLoadError as error:
        raise _refused(
            f"{folder} holds an adapter for {shown(name)}, which cannot be loaded: {error}. Give the base "
            "model's folder or hub id with --base-model"
        ) from None
    if holds_adapter_alone(base):
        raise _refused(f"{folder} holds an adapter for {shown(name)}, which is an adapter too")
    return base.absolute(), name


def _config(base: Path, name: str, adapter: LoraSpec) -> dict[str, Any]:
    """The merged model's config.json: the base model's, with the adapter's changes."""
    values = read_json(base / "config.json")
    if stored_format(with_quantization(base, values)) is not None:
        raise _refused(
            f"{base} is quantised, and an adapter is merged into plain weights only; give a base model that "
            "is not quantised with --base-model"
        )
    changes: dict[str, Any] = {BASE_NAMES: list(names_of(base, name))}
    if not values.get("_name_or_path"):
        changes["_name_or_path"] = name
    module = next((each for each in adapter.modules if each.rpartition(".")[2] in PROJECTIONS), None)
    if module is None or _has_tensor(base, module.rpartition(".")[2]):
        return values | changes
    saved = adapter.saved.get(f"{module}.weight")
    if saved is None:
        raise _refused(
            f"the adapter in {adapter.folder} changes {module}, whose weights neither it nor its base model "
            f"in {base} has; give a base model that has them with --base-model"
        )
    (known, *_) = values.get("architectures") or [""]
    if known not in _RETRIEVERS:
        raise _refused(
            f"the adapter in {adapter.folder} has a projection {module}, which is not known for {known}; "
            f"known for: {', '.join(_RETRIEVERS)}"
        )
    return values | changes | {"architectures": [_RETRIEVERS[known]], "dim": saved[0]}


def _has_tensor(folder: Path, module: str) -> bool:
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors" and file.is_file()]
    wanted = f".{module}.weight"
    return any(f".{name}".endswith(wanted) for file in files for name in stored_tensors(file))


def _files(folder: Path, base: Path) -> dict[str, Path]:
    """The files and folders of the merged model, by name."""
    own = {
        path.name: path
        for path in folder.iterdir()
        if not path.name.startswith(".")
        and (path.is_dir() or path.suffix in _READ or path.name in (_CARD, WEIGHTS))
    }
    own.pop("config.json", None)  # the base model's config.json describes the weights
    found = {path.name: path for path in base.iterdir() if not path.name.startswith(".")}
    found.pop(_CARD, None)  # the card describes the base model, not the adapter
    if any(name in own for name in _VOCABULARIES):
        found = {name: path for name, path in found.items() if name not in _TOKENIZER}
    return found | own


def _label(folder: Path) -> str:
    """The name of the assembled folder: the adapter's, because some models are recognised by their name."""
    hub = (part for part in reversed(folder.absolute().parts) if part.startswith("models--"))
    return next(hub, folder.absolute().name)


def _assembled(files: Mapping[str, Path], written: Mapping[str, bytes], label: str) -> Path:
    """Create a folder with links to `files` and with the `written` files, or reuse it from the cache."""
    links = {name: str(path.absolute()) for name, path in files.items() if name not in written}
    content = repr(sorted(links.items())) + repr(sorted(written.items()))
    top = cache_folder() / "merged" / hashlib.sha256(content.encode()).hexdigest()[:24]
    if (top / label).is_dir():
        return top / label
    try:
        top.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=top.parent))
        (draft / label).mkdir()
        for name, target in links.items():
            (draft / label / name).symlink_to(target)
        for name, text in written.items():
            (draft / label / name).write_bytes(text)
        try:
            draft.rename(top)
        except OSError:  # another process has made it
            shutil.rmtree(draft)
            if not (top / label).is_dir():
                raise
    except OSError as error:
        raise _refused(
            f"a folder with links to the files of the adapter and its base model cannot be made in "
            f"{top.parent}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return top / label


def _refused(message: str) -> ModelLoadError:
    return ModelLoadError(message, param="model")
