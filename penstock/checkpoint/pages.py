"""Visual document retrievers (ColPali, ColQwen …): their projection to token vectors, and their query format.

colpali-engine names the projection `custom_text_proj`, transformers and others `embedding_proj_layer`. Its
width is read from the weight files; most configurations have it too. Free of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.checkpoint.files import CheckpointFiles, optional_integer, optional_json, weight_files
from penstock.checkpoint.identity import Identity
from penstock.checkpoint.tensors import stored_tensors
from penstock.checkpoint.tokenizer_settings import special_tokens
from penstock.errors import ModelLoadError

log = logging.getLogger("penstock.load")

PROJECTIONS = ("custom_text_proj", "embedding_proj_layer")
_DIM_KEYS = ("embedding_dim", "embed_dim", "dim")  # keys of config.json


class _QueryForm(NamedTuple):
    """The query format of one library: a prompt before the query, and a token repeated after it.

    The repeated tokens give the model room for further vectors of the query (query augmentation).
    """

    token: str
    is_padding: bool = False  # use the tokenizer's padding token instead of `token`, if it has one
    prompt: str = ""
    num_tokens: int = 10
    end: str = ""  # text after the repeated tokens


class _Forms(NamedTuple):
    native: _QueryForm  # checkpoints of transformers' own classes
    engine: _QueryForm  # checkpoints of colpali-engine
    had_prompt: bool = False  # older versions of colpali-engine put a prompt before queries


_ENGINE_QWEN = _QueryForm("<|endoftext|>")
_FORMS = {  # by family name or a prefix of it
    "BiQwen3": _Forms(_ENGINE_QWEN, _ENGINE_QWEN),
    "BiQwen": _Forms(_ENGINE_QWEN, _ENGINE_QWEN, had_prompt=True),
    "ColModernVBert": _Forms(_QueryForm("<end_of_utterance>"), _QueryForm("<end_of_utterance>")),
    "ColPali": _Forms(
        _QueryForm("<pad>", is_padding=True, prompt="Question: ", end="\n"),
        _QueryForm("<pad>", is_padding=True),
        had_prompt=True,
    ),
    "ColQwen3": _Forms(_ENGINE_QWEN, _ENGINE_QWEN),
    "ColQwen": _Forms(
        _QueryForm("<|endoftext|>", is_padding=True, prompt="Query: ", end="\n"),
        _ENGINE_QWEN,
        had_prompt=True,
    ),
}


class _Published(NamedTuple):
    """The query format of published colpali-engine checkpoints."""

    names: str  # pattern of the published names, in lower case
    prompt: str
    token: str = ""  # "": that of the library's form
    num_tokens: int = 10
    end: str = ""
    has_one_begin: bool = False  # a page has one begin token, as in transformers' own class
    is_native_too: bool = False  # also holds for its copy in transformers' own class


# What colpali-engine wrote around queries when it trained them (illuin-tech/colpali, nomic-ai/colpali): until
# 0.3.3 "Question: " for ColPali, until 0.3.12 "Query: ", and nothing since. ColPali to v1.2 was trained at
# e834866, with other tokens behind a query. sentence-transformers checked ColPali's at the commits that their
# repositories name, and reads the copies in transformers' class the same way (test_pretrained.py, 8af5a2c).
_PUBLISHED = (
    _Published(
        r"vidore/colpali$|colpali-hard-v1|colpali-v1\.[0-2]",
        "Question: ",
        token="<unused0>",
        num_tokens=5,
        end="\n",
        has_one_begin=True,
        is_native_too=True,
    ),
    _Published(r"colpali-v1\.3", "Query: ", end="\n", has_one_begin=True, is_native_too=True),
    _Published(r"colpali2-3b", "Query: ", end="\n"),
    _Published(r"colqwen2(\.5)?-v\d|colnomic-embed-multimodal", "Query: "),
    _Published(r"(?<!col)nomic-embed-multimodal", "Query: ", num_tokens=1),
)


def page_dim(files: CheckpointFiles, default: int) -> int:
    """The width of a token vector."""
    given = optional_integer(files.config, *_DIM_KEYS)
    for file in weight_files(files.folder):
        if file.suffix != ".safetensors" or not file.is_file():
            continue
        for name, tensor in stored_tensors(file).items():
            if name.removesuffix(".weight").endswith(PROJECTIONS) and name.endswith(".weight"):
                if given not in (None, tensor.shape[0]):
                    raise ModelLoadError(
                        f"{files.config_file} has vectors of {given} numbers, but {name} in {file.name} "
                        f"makes vectors of {tensor.shape[0]}",
                        param="model",
                    )
                return tensor.shape[0]
    return given or default


def is_page_retriever(family: str) -> bool:
    """Whether this family has a query format of visual document retrievers."""
    return family.startswith(tuple(_FORMS))


def page_prompts(files: CheckpointFiles, family: str, identity: Identity) -> dict[str, str]:
    """The query prompt: from the processor's file, otherwise the one that the model was trained with."""
    given = _given_prefix(files)
    prompt = _query_form(files, family, identity).prompt if given is None else given
    if given is None and _may_lack_prompt(files, family, identity):
        log.warning(
            'nothing says whether %s was trained with "Query: " before queries: until 0.3.12 colpali-engine '
            "wrote it, and not later. Queries have no prompt here; write the right one as query_prefix into "
            "processor_config.json, empty if there is none",
            identity.names[0],
        )
    return {"query": prompt} if prompt else {}


def page_query_end(files: CheckpointFiles, family: str, identity: Identity) -> str:
    """The text after a query: the repeated tokens, and an end."""
    form = _query_form(files, family, identity)
    known = special_tokens(optional_json(files.folder / "tokenizer_config.json"))
    token = (known.get("pad_token") if form.is_padding else None) or form.token
    return token * form.num_tokens + form.end


def page_has_one_begin(config: Mapping[str, Any], identity: Identity) -> bool:
    """Whether a page of ColPali has one begin token. Later versions of colpali-engine write two."""
    known = _published(identity)
    return is_native(config) or (known is not None and known.has_one_begin)


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether transformers' own class saved the checkpoint. That class nests the model in vlm_config."""
    return config.get("vlm_model_type") is not None or "vlm_config" in config


def _given_prefix(files: CheckpointFiles) -> str | None:
    """The prompt in the processor's file. transformers' own classes treat an empty one as missing."""
    given = optional_json(files.folder / "processor_config.json").get("query_prefix")
    return None if given is None or (given == "" and is_native(files.config)) else str(given)


def _query_form(files: CheckpointFiles, family: str, identity: Identity) -> _QueryForm:
    forms, native = _forms(family), is_native(files.config)
    form = forms.native if native else forms.engine
    known = _published(identity) if forms.had_prompt else None
    if known is None or (native and not known.is_native_too):
        return form
    form = form._replace(prompt=known.prompt, num_tokens=known.num_tokens, end=known.end)
    return form._replace(token=known.token, is_padding=False) if known.token else form


def _may_lack_prompt(files: CheckpointFiles, family: str, identity: Identity) -> bool:
    return _forms(family).had_prompt and not is_native(files.config) and _published(identity) is None


def _published(identity: Identity) -> _Published | None:
    """Find a published checkpoint by its name.

    The origin is ignored, because a model that was trained from a published one is a different model.
    """
    named = (each for each in _PUBLISHED if identity.is_named(each.names, with_origin=False))
    return next(named, None)


def _forms(family: str) -> _Forms:
    return next(forms for name, forms in _FORMS.items() if family.startswith(name))
