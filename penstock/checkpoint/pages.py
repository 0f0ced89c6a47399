"""Multi-vector retrievers of pages (ColPali, ColQwen …): how they project token vectors and read queries.

colpali-engine names the projection `custom_text_proj`, transformers and others `embedding_proj_layer`. Its
width stands in the files of weights, and in most configurations. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.checkpoint.files import CheckpointFiles, optional_integer, optional_json, weight_files
from penstock.checkpoint.tensors import stored_tensors
from penstock.checkpoint.tokenizer_settings import special_tokens
from penstock.errors import ModelLoadError

PROJECTIONS = ("custom_text_proj", "embedding_proj_layer")
_DIM_KEYS = ("embedding_dim", "embed_dim", "dim")  # of config.json
_NUM_AUGMENTATIONS = 10


class _QueryForm(NamedTuple):
    """How one library reads queries: a prompt, and a token that is repeated behind the query, where the model
    gathers more of its meaning."""

    token: str
    is_padding: bool = False  # the tokenizer's padding token, if it names one, takes the place of `token`
    prompt: str = ""
    end: str = ""  # follows the repeated tokens


class _Forms(NamedTuple):
    native: _QueryForm  # of transformers' own class
    engine: _QueryForm  # of colpali-engine


_FORMS = {  # by the beginning of the family's name
    "ColModernVBert": _Forms(_QueryForm("<end_of_utterance>"), _QueryForm("<end_of_utterance>")),
    "ColPali": _Forms(
        _QueryForm("<pad>", is_padding=True, prompt="Question: ", end="\n"),
        _QueryForm("<pad>", is_padding=True),
    ),
    "ColQwen": _Forms(
        _QueryForm("<|endoftext|>", is_padding=True, prompt="Query: ", end="\n"),
        _QueryForm("<|endoftext|>"),
    ),
}


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


def page_prompts(files: CheckpointFiles, family: str) -> dict[str, str]:
    """The prompt of queries. transformers' own classes take it from their processor's file; colpali-engine's
    have none."""
    if not is_native(files.config):
        return {}
    given = optional_json(files.folder / "processor_config.json").get("query_prefix")
    prompt = str(given or _query_form(files, family).prompt)
    return {"query": prompt} if prompt else {}


def page_query_end(files: CheckpointFiles, family: str) -> str:
    """What follows a query."""
    form = _query_form(files, family)
    known = special_tokens(optional_json(files.folder / "tokenizer_config.json"))
    token = (known.get("pad_token") if form.is_padding else None) or form.token
    return token * _NUM_AUGMENTATIONS + form.end


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether transformers' own class saved it, which nests the model in vlm_config."""
    return config.get("vlm_model_type") is not None or "vlm_config" in config


def _query_form(files: CheckpointFiles, family: str) -> _QueryForm:
    forms = next(forms for name, forms in _FORMS.items() if family.startswith(name))
    return forms.native if is_native(files.config) else forms.engine
