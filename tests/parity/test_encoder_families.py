"""ModernBERT, NomicBERT, GTE, Jina's XLM-R and DeBERTa against transformers, on the same files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from torch import nn

from penstock.config import PoolerConfig
from penstock.errors import ConfigError, ModelLoadError
from penstock.types import Task
from tests.parity.encoders import (
    ADAPTED,
    BACKBONES,
    CASES,
    LENGTHS,
    MASKED_LM,
    VOCABULARY,
    Opened,
    dense_terms,
    make_rows,
    opened,
    reference_hidden,
    reference_logits,
    reference_terms,
)
from tests.parity.reference import Vectors, cosines
from tests.waiting import PATIENCE_S

ROWS = make_rows()
SPLITS = np.cumsum(LENGTHS)[:-1]
TABLE_ONLY = ("electra-wide", "jina-bert-plain", "mt5")  # only the parity table compares these
ALL = {name: case for name, case in (CASES | BACKBONES).items() if name not in TABLE_ONLY}
HEADED = {name: case for name, case in CASES.items() if name != "ernie"}  # ernie has BERT's heads


class Pair(NamedTuple):
    reference: nn.Module
    hidden: list[Vectors]  # the reference's states, one array per row
    ours: Opened
    folder: Path


@pytest.fixture(scope="module", params=ALL)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    reference = ALL[request.param].write(folder)
    with opened(folder, max_num_batched_tokens=512) as ours:
        yield Pair(reference, reference_hidden(reference, ROWS), ours, folder)


def mean(hidden: list[Vectors]) -> Vectors:
    return np.stack([row.mean(0) for row in hidden])


def test_the_reference_sees_order_and_far_tokens(pair: Pair) -> None:
    """Otherwise agreement with it would mean little."""
    row = ROWS[-1]
    turned, last = row[:1] + row[:0:-1], [*row[:-1], row[-1] % 50 + 1]
    first = [reference_hidden(pair.reference, [each])[0][:1] for each in (row, turned, last)]
    assert cosines(first[0], first[1])[0] < 0.9999
    assert np.abs(first[0] - first[2]).max() > 1e-3


def test_fp32_hidden_states_and_vectors_equal_the_references(pair: Pair) -> None:
    tokens = pair.ours.ask(ROWS, Task.TOKEN_EMBED)
    assert cosines(tokens, np.concatenate(pair.hidden)).min() >= 0.99999
    np.testing.assert_allclose(tokens, np.concatenate(pair.hidden), atol=2e-4)
    vectors = pair.ours.ask(ROWS, Task.EMBED)
    assert cosines(vectors, mean(pair.hidden)).min() >= 0.99999


def test_a_row_has_the_same_hidden_states_alone_and_in_a_batch(pair: Pair) -> None:
    batch = np.split(pair.ours.ask(ROWS, Task.TOKEN_EMBED), SPLITS)
    for row, together in zip(ROWS, batch, strict=True):
        np.testing.assert_allclose(pair.ours.ask([row], Task.TOKEN_EMBED), together, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_bf16_stays_near_the_reference(name: str, tmp_path: Path) -> None:
    scale = 0.05 if "t5" in name else 0.1  # T5 does not scale its attention scores
    hidden = reference_hidden(ALL[name].write(tmp_path, scale=scale), ROWS)
    with opened(tmp_path, dtype="bfloat16") as ours:
        tokens, vectors = ours.ask(ROWS, Task.TOKEN_EMBED), ours.ask(ROWS, Task.EMBED)
    # Rounding may route a token to another expert if two are nearly tied.
    share = 0.02 if name == "nomic-moe" else 0.0
    assert np.quantile(cosines(tokens, np.concatenate(hidden)), share) >= 0.999
    assert np.quantile(cosines(vectors, mean(hidden)), share) >= (0.998 if share else 0.999)


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("name", HEADED)
def test_classifiers_give_the_references_logits(name: str, kind: str, tmp_path: Path) -> None:
    reference = CASES[name].write(tmp_path, kind)
    task = Task.CLASSIFY if kind == "ForSequenceClassification" else Task.TOKEN_CLASSIFY
    with opened(tmp_path) as ours:
        logits = ours.ask(ROWS, task)
    expected = reference_logits(reference, ROWS)
    assert expected.std(0).min() > 0.05
    np.testing.assert_allclose(logits, expected, atol=2e-4)


@pytest.mark.parametrize("name", HEADED | MASKED_LM)
def test_a_masked_language_head_gives_splade_by_the_formula(name: str, tmp_path: Path) -> None:
    reference = (CASES | MASKED_LM)[name].write(tmp_path, "ForMaskedLM")
    expected = reference_terms(reference, ROWS)
    assert 0.05 < (expected > 0).mean() < 1, "some weights are zero, some are not"
    with opened(tmp_path, pooler_config=PoolerConfig(pooling_type="splade")) as ours:
        terms = ours.ask(ROWS, Task.SPARSE)
    np.testing.assert_allclose(dense_terms(terms, VOCABULARY), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["nomic-original", "deberta-v2", "deberta-no-distances", "albert"])
def test_segments_are_added_as_the_reference_does(name: str, tmp_path: Path) -> None:
    reference = ALL[name].write(tmp_path)
    row = ROWS[-1]
    segments = [0] * 90 + [1] * 110
    with torch.inference_mode():
        answer = reference(input_ids=torch.tensor([row]), token_type_ids=torch.tensor([segments]))
    with opened(tmp_path) as ours:
        tokens = ours.ask([row], Task.TOKEN_EMBED, segments)
        assert np.abs(tokens - ours.ask([row], Task.TOKEN_EMBED)).max() > 0.1
    np.testing.assert_allclose(tokens, answer.last_hidden_state[0].numpy(), atol=2e-4)


def test_an_adapter_is_merged_into_every_weight(tmp_path: Path) -> None:
    reference = ADAPTED.write(tmp_path)
    expected = np.concatenate(reference_hidden(reference, ROWS))
    with opened(tmp_path, ADAPTED.overrides) as ours:
        tokens = ours.ask(ROWS, Task.TOKEN_EMBED)
    with opened(tmp_path) as plain:
        assert cosines(plain.ask(ROWS, Task.TOKEN_EMBED), expected).min() < 0.99
    np.testing.assert_allclose(tokens, expected, atol=2e-4)


def test_each_row_of_a_step_has_its_own_adapter(tmp_path: Path) -> None:
    """Rows of all adapters, and of none, run together. Each result is as if only its adapter were merged."""
    ADAPTED.write(tmp_path)
    names = json.loads((tmp_path / "config.json").read_text())["lora_adaptations"]
    merged = []
    for name in names:
        with opened(tmp_path, {"lora_task": name}) as alone:
            merged.append(alone.ask(ROWS[:4], Task.TOKEN_EMBED))
    with opened(tmp_path) as ours:
        merged.append(ours.ask(ROWS[:4], Task.TOKEN_EMBED))
        futures = [
            ours.engine.submit(Opened.request(ROWS[:4], Task.TOKEN_EMBED, adapter=number))
            for number in [*range(len(names)), -1]
        ]
        together = [future.result(timeout=PATIENCE_S).values for future in futures]
    for number, expected in enumerate(merged):
        np.testing.assert_allclose(together[number], expected, atol=2e-4)
    assert cosines(merged[0], merged[1]).min() < 0.99


@pytest.mark.parametrize("name", ALL)
def test_a_configuration_alone_runs_with_dummy_weights(name: str, tmp_path: Path) -> None:
    ALL[name].write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with opened(tmp_path, load_format="dummy") as ours:
        assert np.isfinite(ours.ask(ROWS, Task.EMBED)).all()


@pytest.mark.parametrize("name", ["modernbert", "nomic", "gte", "jina", "deberta-v3"])
def test_int8_keeps_the_direction(name: str, tmp_path: Path) -> None:
    hidden = reference_hidden(ALL[name].write(tmp_path, scale=0.1), ROWS)
    with opened(tmp_path, quantization="int8") as ours:
        assert cosines(ours.ask(ROWS, Task.EMBED), mean(hidden)).min() >= 0.99


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling = 'max'"),
    ("modernbert", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("modernbert", {"hidden_activation": "mish"}, "activation 'mish'"),
    ("nomic-original", {"prenorm": True}, "prenorm = True"),
    ("nomic-original", {"causal": True}, "causal = True"),
    ("nomic-original", {"num_experts": 8, "moe_every_n_layers": 2}, "activation_function = 'swiglu'"),
    ("nomic-original", {"rotary_emb_fraction": 0.0}, "rotary_emb_fraction = 0.0"),
    ("nomic-original", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
    ("nomic", {"head_dim": 8}, "head_dim = 8"),
    ("gte-original", {"layer_norm_type": "rms_norm"}, "layer_norm_type = 'rms_norm'"),
    ("gte-original", {"logn_attention_scale": True}, "logn_attention_scale = True"),
    ("gte-original", {"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'"),
    ("gte-original", {"rope_scaling": {"type": "spiral", "factor": 2}}, "rope type 'spiral'"),
    ("jina-flash", {"use_reg_tokens": True}, "use_reg_tokens = True"),
    ("jina-flash", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
    ("jina-flash", {"lora_task": "poetry"}, "lora_task is 'poetry'.*retrieval.query"),
    ("jina-bert", {"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'"),
    ("jina-bert", {"feed_forward_type": "swiglu"}, "feed_forward_type = 'swiglu'"),
    ("albert", {"num_hidden_groups": 3}, "num_hidden_groups = 3"),
    ("electra", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    ("deberta-v3", {"pos_att_type": ["p2p"]}, "pos_att_type p2p"),
    ("deberta-v3", {"norm_rel_ebd": "rms"}, "norm_rel_ebd = 'rms'"),
    ("deberta-v3", {"conv_kernel_size": 4}, "conv_kernel_size = 4"),
    ("deberta-v3", {"attention_head_size": 8}, "attention_head_size = 8"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_an_unsupported_option_is_refused_by_name(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    CASES[name].write(tmp_path, "ForSequenceClassification")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelLoadError, match=message), opened(tmp_path):
        pass


def test_nomic_is_limited_to_its_trained_length_where_angles_would_depend_on_the_length(
    tmp_path: Path,
) -> None:
    CASES["nomic-original"].write(tmp_path)
    with opened(tmp_path) as ours:
        assert len(ours.ask(ROWS, Task.EMBED)) == len(ROWS)
    with (
        pytest.raises(ConfigError, match="128 tokens"),
        opened(tmp_path, {"rotary_scaling_factor": 2}, max_model_len=256),
    ):
        pass
