"""Finds the parts of a model folder: its modules, and the folder with its config.json, tokenizer and weights.

A plain checkpoint has everything at its root. In the sentence-transformers layout each module may have a
folder of its own, and a Router holds two lists of modules, for queries and for documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from penstock.checkpoint.files import (
    ROUTER_MODULES,
    SPARSE_STATIC_MODULE,
    STATIC_MODULE,
    TRANSFORMER_MODULES,
    CheckpointFiles,
    Module,
    mapping,
    named_module,
    optional_json,
    read_json,
    read_modules,
    shown,
)
from penstock.errors import ModelLoadError

ROUTES = ("query", "document")


class QueryRoute(msgspec.Struct, frozen=True):
    """A Router's route for queries: a weight for each token, without a model."""

    folder: str  # the SparseStaticEmbedding module's, with its tokenizer and weights
    is_default: bool  # texts without an input type are queries


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """Where a model's files are and which modules they describe."""

    root: Path  # holds modules.json
    folder: Path  # holds the config.json, tokenizer and weights of the module that reads texts
    modules: tuple[Module, ...]  # a Router is replaced by the modules of its document route
    query_route: QueryRoute | None = None  # if a Router has a different route for queries


def read_layout(root: Path) -> FolderLayout:
    modules = read_modules(root / "modules.json")
    query_route = None
    if modules and modules[0].kind in ROUTER_MODULES:
        modules, query_route = _routed(root, modules)
    if any(module.kind in ROUTER_MODULES for module in modules):
        raise ModelLoadError(
            f"{root / 'modules.json'} has a Router that is not its first module, which is not supported",
            param="model",
        )
    if not modules and (root / "idf.json").is_file():
        raise ModelLoadError(
            f"{root} has idf.json but no modules.json, so its files do not say how to compute sparse "
            "weights; take a revision of the model with modules.json and router_config.json",
            param="model",
        )
    return FolderLayout(root, _model_folder(root, modules), modules, query_route)


def read_files(layout: FolderLayout, config: dict[str, Any], overrides: dict[str, Any]) -> CheckpointFiles:
    return CheckpointFiles(
        root=layout.root,
        folder=layout.folder,
        config=config,
        overrides=overrides,
        modules=layout.modules,
        transformer=_transformer_options(layout.root, layout.modules),
        sentence_transformers=optional_json(layout.root / "config_sentence_transformers.json"),
    )


def _transformer_options(folder: Path, modules: tuple[Module, ...]) -> dict[str, Any]:
    paths = [module.path for module in modules if module.kind in TRANSFORMER_MODULES] or [""]
    for path in paths:
        for kind in ("bert", "roberta", "xlm-roberta", "distilbert", "camembert"):
            file = folder / path / f"sentence_{kind}_config.json"
            if file.is_file():
                return read_json(file)
    return {}


def _model_folder(root: Path, modules: tuple[Module, ...]) -> Path:
    """The folder of the module that reads texts; the root if that module has no files of its own."""
    for module in modules[:1]:
        if module.kind in (*TRANSFORMER_MODULES, STATIC_MODULE):
            folder = root / module.path
            needed = "tokenizer.json" if module.kind == STATIC_MODULE else "config.json"
            if (folder / needed).is_file():
                return folder
    return root


def _routed(root: Path, modules: tuple[Module, ...]) -> tuple[tuple[Module, ...], QueryRoute | None]:
    """The modules of the document route, and the query route if it differs."""
    router, *others = modules
    file = root / router.path / "router_config.json"
    config = read_json(file) if file.is_file() else read_json(root / router.path / "config.json")
    kinds, structure = mapping(config, "types", file=file), mapping(config, "structure", file=file)
    if set(structure) != set(ROUTES):
        raise ModelLoadError(
            f"{file} has routes {', '.join(map(shown, structure))}; supported: {' and '.join(ROUTES)}",
            param="model",
        )
    parameters = mapping(config, "parameters", file=file)
    if parameters.get("route_mappings"):
        raise ModelLoadError(
            f"{file} has route_mappings, which are not supported; supported: routes named query and document",
            param="model",
        )
    routes = {
        name: tuple(
            named_module(
                file,
                str(kinds.get(each, "")),
                str(PurePosixPath(router.path, each)) if each else router.path,
                (SPARSE_STATIC_MODULE,),
            )
            for each in structure[name]
        )
        for name in ROUTES
    }
    query, document = routes["query"], routes["document"]
    if query == document:
        return (*document, *others), None
    if [module.kind for module in query] != [SPARSE_STATIC_MODULE] or others:
        found = " + ".join(module.kind for module in (*query, *others))
        raise ModelLoadError(
            f"{file} sends queries through {found}, which is not supported; supported: "
            f"{SPARSE_STATIC_MODULE} alone, or the same modules for queries and documents",
            param="model",
        )
    if [module.kind for module in document if module.kind in (SPARSE_STATIC_MODULE, STATIC_MODULE)]:
        raise ModelLoadError(
            f"{file} sends documents through {' + '.join(module.kind for module in document)}, which is not "
            "supported; supported: Transformer + SpladePooling",
            param="model",
        )
    default = parameters.get("default_route")
    if default is None and parameters.get("allow_empty_key", True):
        default = next(iter(structure))
    return document, QueryRoute(query[0].path, is_default=default == "query")


def max_query_tokens(folder: Path) -> int | None:
    """Maximum tokens of a query: model_max_length of the query route's tokenizer; None: no limit."""
    length = optional_json(folder / "tokenizer_config.json").get("model_max_length")
    return length if isinstance(length, int) and 0 < length < 1_000_000 else None
