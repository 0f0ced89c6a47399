"""Compares an adapter's folder with the served model: modules after the model, prompts and tokens.

A request with an adapter uses those of the served model, so the adapter must have been trained with the same.
Free of torch.
"""

from __future__ import annotations

import filecmp
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from penstock.checkpoint.adapters import CONFIG, read_lora
from penstock.checkpoint.dense import DenseSpec, LayerNormSpec, ModuleSpec
from penstock.checkpoint.families import find_architecture
from penstock.checkpoint.files import MAX_JSON_BYTES, first_names, optional_json, weight_files
from penstock.checkpoint.identity import names_of
from penstock.checkpoint.late import dense_modules
from penstock.checkpoint.layout import read_files, read_layout
from penstock.checkpoint.pooling import PoolingSpec, pooling_of_modules
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import ModelLoadError
from penstock.types import Task

log = logging.getLogger("penstock.adapters")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class _Step(NamedTuple):
    """One operation on the model's hidden states."""

    words: str
    # The folder with its weights: the model's own folder if they are stored with the model; None: no weights.
    folder: Path | None = None


def check_folder(folder: Path, spec: ModelSpec) -> None:
    """Refuse an adapter that was trained with another pooling, with other layers after the model, or with
    tokens that the model's tokenizer lacks."""
    _report_base(folder, spec)
    _check_modules(folder, spec)
    _check_tokens(folder, spec)


def _report_base(folder: Path, spec: ModelSpec) -> None:
    """Warn if the hub ids of the adapter's base model and of the served model name different models.

    Organisations are ignored, because copies of a model are published under the same name.
    """
    base = optional_json(folder / CONFIG).get("base_model_name_or_path")
    served = [name for name in names_of(spec.root_path, "") if "/" in name]
    if not served or not isinstance(base, str) or not _HUB_ID.fullmatch(base) or Path(base).exists():
        return
    if all(_model_name(base) != _model_name(name) for name in served):
        log.warning(
            "the adapter in %s was trained on %s, as its %s says; it is loaded on %s",
            folder,
            base,
            CONFIG,
            served[0],
        )


def _model_name(hub_id: str) -> str:
    return hub_id.lower().rpartition("/")[2]


def _check_modules(folder: Path, spec: ModelSpec) -> None:
    """Refuse an adapter whose modules differ from the model's. Without modules.json, nothing is checked."""
    family = find_architecture(spec.architecture, spec.config).family
    if not (folder / "modules.json").is_file() or family.has_own_pooling or family.is_dual:
        return
    files, root = read_files(read_layout(folder), spec.config, {}), spec.root_path
    if spec.late is not None:
        own, model = _layers(folder, dense_modules(files)), _layers(root, spec.late.dense)
    elif Task.EMBED in spec.tasks and (files.has_module("Pooling") or files.has_module("Dense")):
        pooling = pooling_of_modules(files, is_late=False)
        own, model = _pooling(folder, pooling), _pooling(root, spec.pooling)
        _report_prompts(folder, spec)
    else:
        return
    if (own_words := _words(own)) != (words := _words(model)):
        why = f"with {own_words}, as its modules.json says; {spec.name} has {words}"
    elif changed := next(
        (mine for mine, its in zip(own, model, strict=True) if not _is_same(mine, its)), None
    ):
        why = f"with weights in {changed.folder} that are not those of {spec.name}"
    else:
        return
    raise ModelLoadError(
        f"the adapter was trained {why}. Serve {folder} as a model of its own, or make the model pool alike "
        "with --pooler-config",
        param="lora_path",
    )


def _pooling(root: Path, pooling: PoolingSpec) -> list[_Step]:
    steps = [_Step(f"{' + '.join(pooling.methods)} pooling")]
    if not pooling.include_prompt:
        steps.append(_Step("without the prompt"))
    steps += _layers(root, pooling.modules)
    if pooling.normalize:
        steps.append(_Step("normalised"))
    if pooling.quantizes:
        steps.append(_Step("quantised"))
    return steps


def _layers(root: Path, modules: Sequence[ModuleSpec]) -> list[_Step]:
    steps = []
    for module in modules:
        if isinstance(module, DenseSpec):
            size, rest = f"{module.in_features} → {module.out_features}", [module.activation]
            rest += ["with bias"] * module.bias + ["residual"] * module.residual
            steps.append(_Step(f"Dense ({size}, {', '.join(rest)})", root / module.folder))
        elif isinstance(module, LayerNormSpec):
            steps.append(_Step(f"LayerNorm ({module.size})", root / module.folder))
        else:
            steps.append(_Step("normalised"))
    return steps


def _words(steps: Sequence[_Step]) -> str:
    return ", ".join(step.words for step in steps) or "no layers"


def _is_same(own: _Step, model: _Step) -> bool:
    """Whether two steps with the same description have the same weights."""
    if own.folder is None or model.folder is None:
        return own.folder is model.folder
    files, others = weight_files(own.folder), weight_files(model.folder)
    return len(files) == len(others) and all(
        mine.is_file() and its.is_file() and filecmp.cmp(mine, its, shallow=False)
        for mine, its in zip(files, others, strict=True)
    )


def _report_prompts(folder: Path, spec: ModelSpec) -> None:
    prompts = optional_json(folder / "config_sentence_transformers.json").get("prompts")
    own = prompts.items() if isinstance(prompts, dict) else ()
    if missing := [str(name) for name, text in own if text and spec.prompts.get(str(name)) != text]:
        log.warning(
            "the adapter in %s was trained with prompts that %s does not have: %s. Texts of its requests "
            "have to begin with them",
            folder,
            spec.name,
            ", ".join(missing),
        )


class _Token(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    """The part of tokenizer.json that is read."""

    added_tokens: list[_Token] = []


def _check_tokens(folder: Path, spec: ModelSpec) -> None:
    own, model = folder / "tokenizer.json", spec.path / "tokenizer.json"
    if not own.is_file() or not model.is_file() or filecmp.cmp(own, model, shallow=False):
        return
    known = {token.content for token in _added_tokens(model)}
    added = [token.content for token in _added_tokens(own) if token.content not in known]
    if added:
        vocabulary = Tokenizer.from_file(str(model))
        added = [token for token in added if vocabulary.token_to_id(token) is None]
    if not added:
        return
    lora = read_lora(folder, folder.name)
    tables = [name for name, target in lora.targets.items() if target.is_table]
    tables += [*lora.tokens, *(name for name in lora.saved if "embed" in name)]
    if tables:
        raise ModelLoadError(
            f"the adapter changes {tables[0]} and was trained with tokens that {spec.name} does not have: "
            f"{first_names(added)}. Serve {folder} as a model of its own",
            param="lora_path",
        )
    log.warning("the tokenizer in %s has tokens that %s lacks: %s", folder, spec.name, first_names(added))


def _added_tokens(file: Path) -> list[_Token]:
    try:
        if (size := file.stat().st_size) > MAX_JSON_BYTES:
            raise ModelLoadError(f"{file} has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        return msgspec.json.decode(file.read_bytes(), type=_Tokenizer).added_tokens
    except (msgspec.DecodeError, OSError) as error:
        raise ModelLoadError(f"{file} is not a tokenizer: {error}", param="lora_path") from None
