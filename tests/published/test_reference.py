"""What transformers and sentence-transformers read from the files of published models, Penstock reads too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers")

from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.checkpoint.dense import DenseSpec
from penstock.checkpoint.describe import read_spec
from penstock.checkpoint.spec import ModelSpec
from tests.published.catalog import Published
from tests.published.models import SERVED, write

METHODS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}


def names_its_own_code(model: Published) -> bool:
    """Whether the library's class of the same name is not what its authors run."""
    config = model.config or {}
    return "auto_map" in config or config.get("architectures", [""])[0].startswith(("JinaFor", "LlamaBidir"))


KNOWN = [
    model
    for model in SERVED
    if model.config is not None
    and model.config["model_type"] in CONFIG_MAPPING
    and not names_its_own_code(model)
]
MODULES = [model for model in SERVED if any(name.endswith("Pooling/config.json") for name in model.files)]


@pytest.mark.parametrize("model", KNOWN, ids=lambda model: model.id)
def test_transformers_reads_the_same_sizes_and_labels(model: Published, tmp_path: Path) -> None:
    folder = write(model, tmp_path)
    spec, outer = read_spec(folder, model.id), AutoConfig.from_pretrained(folder)
    is_nested = spec.config.get("text_model_type") or spec.config.get("vision_config")
    config = outer.get_text_config() if is_nested else outer
    assert (spec.hidden_size, spec.num_layers) == (config.hidden_size, config.num_hidden_layers)
    assert (spec.sizes.heads, spec.vocab_size) == (config.num_attention_heads, config.vocab_size)
    if (positions := getattr(config, "max_position_embeddings", None)) is not None and "n_positions" not in (
        model.config or {}
    ):
        assert spec.max_positions in (positions, positions - 2)  # RoBERTa's positions begin after padding
    if spec.tasks[0].value in ("classify", "token_classify"):
        assert list(spec.labels) == [config.id2label[number] for number in range(config.num_labels)]


@pytest.mark.parametrize("model", MODULES, ids=lambda model: model.id)
def test_sentence_transformers_reads_the_same_modules(model: Published, tmp_path: Path) -> None:
    folder = write(model, tmp_path)
    spec = read_spec(folder, model.id)
    for name in model.files:
        path, _, file = name.rpartition("/")
        if file != "config.json":
            continue
        if path.endswith("SpladePooling"):
            check_splade(SpladePooling.load(str(folder), subfolder=path), spec)
        elif path.endswith("Pooling"):
            check_pooling(Pooling.load(str(folder), subfolder=path), spec)
        elif path.endswith("Dense") and spec.late is None:
            check_dense(Dense.load_config(str(folder), subfolder=path), path, spec)
    limit = model.files.get("sentence_bert_config.json", {}).get("max_seq_length")
    assert limit is None or spec.max_model_len == min(limit, spec.max_positions)


def check_pooling(read: Any, spec: ModelSpec) -> None:
    modes = read.pooling_mode if isinstance(read.pooling_mode, tuple) else (read.pooling_mode,)
    assert spec.pooling.methods == tuple(METHODS[mode] for mode in modes)
    by_name = spec.name.startswith("hkunlp/instructor")  # sentence-transformers changes it for these
    assert spec.pooling.include_prompt == (read.include_prompt and not by_name)


def check_splade(read: Any, spec: ModelSpec) -> None:
    assert spec.sparse is not None
    assert spec.sparse.reduce == read.pooling_strategy
    assert spec.sparse.logs == {"relu": 1, "log1p_relu": 2}[read.activation_function]


def check_dense(config: dict[str, Any], path: str, spec: ModelSpec) -> None:
    (dense,) = [each for each in spec.pooling.modules if isinstance(each, DenseSpec) and each.folder == path]
    assert (dense.in_features, dense.out_features) == (config["in_features"], config["out_features"])
    assert dense.bias == config["bias"]
    assert config["activation_function"].lower().endswith(f".{dense.activation}")
