"""Multi-vector retrievers of pages (ColQwen): their projection of token vectors, and how they read queries.

colpali-engine names the projection `custom_text_proj`, transformers and others `embedding_proj_layer`. Its
width stands in the files of weights, and in most configurations. Free of torch.
"""

from __future__ import annotations

from penstock.checkpoint.files import CheckpointFiles, optional_integer, optional_json, weight_files
from penstock.checkpoint.tensors import stored_tensors
from penstock.checkpoint.tokenizer_settings import special_tokens
from penstock.errors import ModelLoadError

PROJECTIONS = ("custom_text_proj", "embedding_proj_layer")
_DIM_KEYS = ("embedding_dim", "embed_dim", "dim")  # of config.json
_NUM_AUGMENTATIONS = 10
_PAD_TOKEN = "<|endoftext|>"


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


def page_prompts(files: CheckpointFiles) -> dict[str, str]:
    """The prompt of queries. transformers' own classes have one, colpali-engine's have none."""
    if not _is_native(files):
        return {}
    return {"query": str(_processor(files).get("query_prefix") or "Query: ")}


def page_query_end(files: CheckpointFiles) -> str:
    """What follows a query: padding tokens, in which the model gathers more of its meaning."""
    known = special_tokens(optional_json(files.folder / "tokenizer_config.json"))
    end = (known.get("pad_token") or _PAD_TOKEN) if _is_native(files) else _PAD_TOKEN
    return end * _NUM_AUGMENTATIONS + ("\n" if _is_native(files) else "")


def _is_native(files: CheckpointFiles) -> bool:
    """Whether transformers' own class saved it."""
    return files.config.get("vlm_model_type") is not None


def _processor(files: CheckpointFiles) -> dict[str, object]:
    return optional_json(files.folder / "processor_config.json")
