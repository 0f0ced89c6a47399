"""Adapters give PEFT's results, in batches where each row has its own adapter or none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock.config import PoolerConfig
from penstock.errors import ModelLoadError
from penstock.types import Task
from tests.parity import decoders
from tests.parity.encoders import (
    BACKBONES,
    CASES,
    Case,
    dense_terms,
    make_rows,
    reference_hidden,
    reference_logits,
    reference_terms,
)
from tests.parity.lora import ask, opened_with, reference, write_adapter

ROWS = [[max(token, 3) for token in row] for row in make_rows((5, 1, 17, 33, 5, 64, 9))]
CHOSEN = (0, -1, 1, 0, 2, -1, 1)
TOLERANCE = 1e-4

ENCODERS: dict[str, Case] = {
    "bert": Case("Bert"),
    "roberta": Case("Roberta"),
    "xlm-roberta": Case("XLMRoberta"),
    "distilbert": Case("DistilBert", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}),
    "mpnet": Case("MPNet", {"pad_token_id": 1}),
    "electra": CASES["electra"],
    "albert": CASES["albert"],
    "modernbert": CASES["modernbert"],
    "nomic": CASES["nomic-port-names"],
    "nomic-original": CASES["nomic"],
    "gte": CASES["gte-port-names"],
    "gte-original": CASES["gte"],
    "jina-v3": CASES["jina"],
    "deberta-v3": CASES["deberta-v3"],
    "deberta-v2": CASES["deberta-v2"],
    "t5": BACKBONES["t5-gated"],
    "eurobert": Case("EuroBert", {"num_key_value_heads": 2, "head_dim": 16}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_with_different_adapters_give_what_peft_gives(name: str, tmp_path: Path) -> None:
    case = ENCODERS[name]
    base = case.write(tmp_path / "base")
    options: list[dict[str, Any]] = [{"r": 4}, {"r": 9, "use_rslora": True}, {"r": 2, "use_dora": True}]
    folders = [tmp_path / str(number) for number in range(3)]
    adapted = [
        write_adapter(base, folder, number, **each)
        for number, (folder, each) in enumerate(zip(folders, options, strict=True))
    ]
    expected = reference(base, adapted, ROWS, CHOSEN, reference_hidden)
    with opened_with(tmp_path / "base", folders) as engine:
        found = ask(engine, ROWS, CHOSEN, Task.TOKEN_EMBED)
        assert np.abs(found - expected).max() <= TOLERANCE
    changed = reference(base, adapted, ROWS, [-1] * len(ROWS), reference_hidden)
    assert np.abs(changed - expected).max() > 0.01  # the adapters have an effect


DECODERS = (
    "qwen3",
    "qwen2",
    "llama",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "granite",
    "olmo3",
)
DECODERS += ("embeddinggemma2", "lfm2")


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_different_adapters_give_what_peft_gives(name: str, tmp_path: Path) -> None:
    family = (decoders.FAMILIES | decoders.MORE_FAMILIES)[name]
    base = decoders.open_backbone(family, family.write(tmp_path / "base"))
    folders = [tmp_path / str(number) for number in range(2)]
    more: dict[str, Any] = {"fan_in_fan_out": True} if name == "gpt2" else {}
    if name == "embeddinggemma2":  # all layers share one of its projections, which cannot be adapted
        more = {"exclude_modules": ["per_layer_model_projection"]}
    adapted = [
        write_adapter(base, folders[0], 0, r=4, **more),
        write_adapter(base, folders[1], 1, r=9, use_dora=True, **more),
    ]
    chosen = (0, -1, 1, 0, 1, -1, 1)
    expected = reference(base, adapted, ROWS, chosen, reference_hidden)
    with opened_with(tmp_path / "base", folders, enable_generation=False) as engine:
        found = ask(engine, ROWS, chosen, Task.TOKEN_EMBED)
        assert np.abs(found - expected).max() <= TOLERANCE * max(1, np.abs(expected).max())


HEADS = {
    "Bert": {"modules_to_save": ["classifier"], "target_modules": ["query", "value", "pooler.dense"]},
    "Roberta": {"modules_to_save": ["classifier"], "target_modules": ["query", "dense"]},
    "DistilBert": {"modules_to_save": ["pre_classifier", "classifier"], "target_modules": ["q_lin"]},
    "ModernBert": {"modules_to_save": ["classifier", "head"], "target_modules": ["Wqkv", "Wo"]},
    "DebertaV2": {"modules_to_save": ["classifier"], "target_modules": ["query_proj", "pooler.dense"]},
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_in_modules_to_save_are_those_of_their_adapter(name: str, tmp_path: Path) -> None:
    case = CASES["deberta-v3"] if name == "DebertaV2" else ENCODERS[name.lower()]
    base = case.write(tmp_path / "base", "ForSequenceClassification")
    folders = [tmp_path / "0", tmp_path / "1"]
    settings = dict(HEADS[name])
    if name == "ModernBert":  # its head contains a norm, which cannot be replaced
        settings["modules_to_save"] = ["classifier"]
    adapted = [write_adapter(base, folders[0], 0, task_type="SEQ_CLS", **settings)]
    adapted.append(write_adapter(base, folders[1], 1, target_modules=settings["target_modules"]))
    expected = reference(base, adapted, ROWS, CHOSEN_OF_TWO, reference_logits)
    with opened_with(tmp_path / "base", folders) as engine:
        found = ask(engine, ROWS, CHOSEN_OF_TWO, Task.CLASSIFY)
    assert np.abs(found - expected).max() <= TOLERANCE


CHOSEN_OF_TWO = (0, -1, 1, 0, 1, -1, 0)


def test_a_head_of_which_the_file_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base", "ForSequenceClassification")
    write_adapter(base, tmp_path / "0", target_modules=["query"], modules_to_save=["classifier", "pooler"])
    tensors = load_file(file := tmp_path / "0/adapter_model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "pooler" not in name}, file)
    with (
        pytest.raises(
            ModelLoadError, match=r"no tensors of bert\.pooler\.dense, which modules_to_save names"
        ),
        opened_with(tmp_path / "base", [tmp_path / "0"]),
    ):
        pass


def test_token_classifiers_of_adapters_read_every_token(tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base", "ForTokenClassification")
    adapted = [
        write_adapter(base, tmp_path / "0", 0, modules_to_save=["classifier"], target_modules=["query"])
    ]
    chosen = (0, -1, 0, -1, 0, -1, 0)
    expected = reference(base, adapted, ROWS, chosen, reference_logits)
    with opened_with(tmp_path / "base", [tmp_path / "0"]) as engine:
        assert np.abs(ask(engine, ROWS, chosen, Task.TOKEN_CLASSIFY) - expected).max() <= TOLERANCE


def test_sparse_weights_go_through_adapters_in_the_head(tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base", "ForMaskedLM")
    targets = {"target_modules": ["query", "transform.dense", "output.dense"]}
    adapted = [write_adapter(base, tmp_path / str(i), i, r=3 + i, **targets) for i in range(2)]
    expected = reference(base, adapted, ROWS, CHOSEN_OF_TWO, reference_terms)
    with opened_with(
        tmp_path / "base", [tmp_path / "0", tmp_path / "1"], pooler_config=PoolerConfig(pooling_type="splade")
    ) as engine:
        found = ask(engine, ROWS, CHOSEN_OF_TWO, Task.SPARSE)
    assert np.abs(dense_terms(found, expected.shape[1]) - expected).max() <= TOLERANCE


OPTIONS: dict[str, dict[str, Any]] = {
    "patterns": {
        "rank_pattern": {"attention.self.query": 7, r"layer\.1\..*value": 2},
        "alpha_pattern": {"attention.self.query": 3},
        "target_modules": ["query", "value"],
    },
    "expression": {"target_modules": r".*layer\.[02]\..*(query|output\.dense)"},
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["key", "pooler.dense"]},
    "layers": {
        "target_modules": ["query", "dense"],
        "layers_to_transform": [1, 2],
        "layers_pattern": "layer",
    },
    "words": {"target_modules": ["word_embeddings", "query"], "exclude_modules": ["pooler.dense"]},
    "segments": {"target_modules": ["token_type_embeddings", "query"]},
    "trained words": {"target_modules": ["query"], "modules_to_save": ["word_embeddings"]},
    "some words": {
        "target_modules": ["query"],
        "trainable_token_indices": {"word_embeddings": [3, 7, 20, 64]},
    },
    "some words of the table of inputs": {"target_modules": ["query"], "trainable_token_indices": [20, 3]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_adapters_mean_what_they_mean_to_peft(name: str, tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base")
    adapted = [
        write_adapter(base, tmp_path / "0", 0, **OPTIONS[name]),
        write_adapter(base, tmp_path / "1", 1, target_modules=["key"]),
    ]
    expected = reference(base, adapted, ROWS, CHOSEN_OF_TWO, reference_hidden)
    with opened_with(tmp_path / "base", [tmp_path / "0", tmp_path / "1"]) as engine:
        assert np.abs(ask(engine, ROWS, CHOSEN_OF_TWO, Task.TOKEN_EMBED) - expected).max() <= TOLERANCE


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"bias": "all"}, "bias"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "rank": ({"r": 32}, "rank 32; at most 16"),
    "norms": ({"modules_to_save": ["LayerNorm"]}, "LayerNorm"),
    "positions": ({"modules_to_save": ["position_embeddings"]}, "position_embeddings"),
    "query alone": ({"target_modules": ["key"], "modules_to_save": ["query"]}, "fuses"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    base = ENCODERS["bert"].write(tmp_path / "base")
    write_adapter(base, tmp_path / "0", 0, **options)
    with pytest.raises(ModelLoadError, match=message), opened_with(tmp_path / "base", [tmp_path / "0"]):
        pass


def test_an_adapter_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    """An embedder does not use BERT's pooler, so its answers would be those of the base model."""
    base = ENCODERS["bert"].write(tmp_path / "base")
    write_adapter(base, tmp_path / "0", 0, target_modules=["pooler.dense"])
    with (
        pytest.raises(ModelLoadError, match=r"would change nothing: the model does not use pooler\.dense"),
        opened_with(tmp_path / "base", [tmp_path / "0"]),
    ):
        pass


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_when_they_are_loaded(value: float, tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base")
    write_adapter(base, tmp_path / "0", 0, target_modules=["query"])
    tensors = load_file(file := tmp_path / "0/adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, file)
    with (
        pytest.raises(ModelLoadError, match=r"query that are not finite in float32"),
        opened_with(tmp_path / "base", [tmp_path / "0"]),
    ):
        pass


def test_an_adapter_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    ENCODERS["bert"].write(tmp_path / "base")
    wide = Case("Bert", {"hidden_size": 96}).write(tmp_path / "wide")
    write_adapter(wide, tmp_path / "0", 0, target_modules=["query"])
    other = ENCODERS["distilbert"].write(tmp_path / "other")
    write_adapter(other, tmp_path / "1", 0)
    for folder, message in (("0", "96 × 96 instead of 64 × 64"), ("1", "q_lin")):
        with (
            pytest.raises(ModelLoadError, match=message),
            opened_with(tmp_path / "base", [tmp_path / folder]),
        ):
            pass


@pytest.mark.parametrize(
    "options", [{"enable_chunked_prefill": True}, {"enable_prefix_caching": True}], ids=str
)
def test_chunked_rows_and_cached_prefixes_are_those_of_their_adapter(
    options: dict[str, Any], tmp_path: Path
) -> None:
    family = decoders.FAMILIES["qwen3"]
    base = decoders.open_backbone(family, family.write(tmp_path / "base"))
    adapted = [write_adapter(base, tmp_path / str(number), number, r=4 + number) for number in range(2)]
    rows = [decoders.ROWS[9]] * 4 + [decoders.ROWS[6]]
    chosen = (0, -1, 1, 0, 1)
    states = reference(base, adapted, rows, chosen, reference_hidden)
    ends = np.cumsum([len(row) for row in rows]) - 1
    more = {
        "enable_generation": False,
        "max_num_batched_tokens": 48,
        "pooler_config": PoolerConfig(pooling_type="LAST"),
    }
    with opened_with(tmp_path / "base", [tmp_path / "0", tmp_path / "1"], **more, **options) as engine:
        for _ in range(2):  # the second time, prefixes may be cached
            found = ask(engine, rows, list(chosen), Task.EMBED, reuse_prefix=True)
            assert np.abs(found - states[ends]).max() <= TOLERANCE
