from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.distance_bias import distance_bucket
from penstock.models.registry import Model, build_model
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolPlan
from penstock.weights.stream import DummySource, SafetensorsSource
from tests.checkpoints import BERT_CONFIG, bert_tensors
from tests.helpers import ints, make_request

CPU = torch.device("cpu")


def load(
    folder: Path, tensors: dict[str, Tensor], architecture: str = "BertModel", **config: object
) -> Model:
    save_file(tensors, folder / "model.safetensors")
    weights = SafetensorsSource(folder, torch.float32, CPU)
    return build_model(architecture, BERT_CONFIG | config, LayerBuilder(weights))


def as_batch(plan: PoolPlan) -> Batch:
    return Batch(
        token_ids=torch.from_numpy(plan.token_ids),
        positions=torch.from_numpy(plan.positions),
        type_ids=None if plan.type_ids is None else torch.from_numpy(plan.type_ids),
        cu_lengths=torch.from_numpy(plan.cu_lengths),
        lengths=torch.from_numpy(plan.lengths),
        skip=None,
        groups=plan.groups,
        max_length=plan.max_length,
        num_tokens=plan.num_tokens,
        num_rows=plan.num_rows,
    )


def hidden_of(model: Model, lengths: list[int], type_ids: list[int] | None = None) -> list[Tensor]:
    """Hidden states by row, in the order of `lengths`."""
    request = make_request("a", lengths, type_ids=type_ids)
    plan = build_plan([ScheduledRows(request, ints(range(len(lengths))))])
    with torch.inference_mode():
        rows = model(as_batch(plan)).split(plan.lengths.tolist())
    return [rows[int(slot)] for slot in plan.slices[0].step_rows]


def test_tensors_that_take_no_part_are_reported_once_with_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unused = {f"cls.{number}.weight": torch.zeros(1) for number in range(9)} | {
        "pooler.dense.weight": torch.zeros(1),
        "embeddings.position_ids": torch.zeros(1),  # a buffer, not a weight
    }
    with caplog.at_level("WARNING", "penstock.load"):
        load(tmp_path, bert_tensors(BERT_CONFIG) | unused)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("10 tensors of the checkpoint are not used by BertModel: cls.0.weight, cls.1")
    assert message.endswith("and 2 more") and "position_ids" not in message


def test_a_head_that_is_tied_to_the_word_table_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = bert_tensors(BERT_CONFIG) | {"lm_head.weight": torch.zeros(1)}
    with caplog.at_level("WARNING", "penstock.load"):
        load(tmp_path, tensors, tie_word_embeddings=True)
        assert not caplog.records
        load(tmp_path, tensors, tie_word_embeddings=False)
    assert "1 tensor of the checkpoint is not used by BertModel: lm_head.weight" in caplog.text


def by_hand(tensors: dict[str, Tensor], ids: list[int], segments: list[int]) -> Tensor:
    """BERT on one row, step by step as in the paper."""
    heads, hidden = 4, 32

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (x.var(-1, unbiased=False, keepdim=True) + 1e-12).sqrt()
        return scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    x = tensors["embeddings.word_embeddings.weight"][ids]
    x = x + tensors["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + tensors["embeddings.token_type_embeddings.weight"][segments], "embeddings.LayerNorm")
    for i in range(2):
        at = f"encoder.layer.{i}."
        q, k, v = (linear(x, at + "attention.self." + n) for n in ("query", "key", "value"))
        context = []
        for head in range(heads):
            part = slice(head * hidden // heads, (head + 1) * hidden // heads)
            scores = q[:, part] @ k[:, part].T / math.sqrt(hidden // heads)
            context.append(scores.softmax(-1) @ v[:, part])
        attended = linear(torch.cat(context, -1), at + "attention.output.dense")
        x = norm(x + attended, at + "attention.output.LayerNorm")
        inner = linear(x, at + "intermediate.dense")
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
        x = norm(x + linear(inner, at + "output.dense"), at + "output.LayerNorm")
    return x


def test_hidden_states_equal_the_arithmetic_written_out(tmp_path: Path) -> None:
    tensors = bert_tensors(BERT_CONFIG)
    lengths = [5, 1, 9, 5]
    model = load(tmp_path, tensors)
    first = 1
    for length, row in zip(lengths, hidden_of(model, lengths), strict=True):
        ids = list(range(first, first + length))
        torch.testing.assert_close(row, by_hand(tensors, ids, [0] * length), atol=2e-5, rtol=1e-4)
        first += length


def test_segments_pick_their_own_embedding(tmp_path: Path) -> None:
    tensors = bert_tensors(BERT_CONFIG)
    segments = [0, 0, 1, 1, 1, 0, 1]
    a, b = hidden_of(load(tmp_path, tensors), [5, 2], segments)
    torch.testing.assert_close(a, by_hand(tensors, [1, 2, 3, 4, 5], segments[:5]), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(b, by_hand(tensors, [6, 7], segments[5:]), atol=2e-5, rtol=1e-4)


def test_a_row_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    model = load(tmp_path, bert_tensors(BERT_CONFIG))
    alone = hidden_of(model, [7])[0]
    torch.testing.assert_close(hidden_of(model, [7, 1, 30, 7, 12])[0], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_checkpoints_with_and_without_the_family_prefix_load(tmp_path: Path, prefix: str) -> None:
    tensors = bert_tensors(BERT_CONFIG)
    model = load(tmp_path, {prefix + name: tensor for name, tensor in tensors.items()})
    torch.testing.assert_close(
        hidden_of(model, [4])[0], by_hand(tensors, [1, 2, 3, 4], [0] * 4), atol=2e-5, rtol=1e-4
    )


def test_old_names_of_norm_parameters_load(tmp_path: Path) -> None:
    tensors = bert_tensors(BERT_CONFIG)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    torch.testing.assert_close(
        hidden_of(load(tmp_path, old), [3])[0], by_hand(tensors, [1, 2, 3], [0] * 3), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    "extra",
    [
        "pooler.dense.weight",
        "cls.predictions.bias",
        "embeddings.position_ids",
        "lm_head.bias",
        "qa_outputs.bias",
        "vocab_projector.bias",
    ],
)
def test_heads_and_buffers_of_other_tasks_are_ignored(tmp_path: Path, extra: str) -> None:
    model = load(tmp_path, bert_tensors(BERT_CONFIG) | {extra: torch.zeros(3)})
    assert model.hidden_size == BERT_CONFIG["hidden_size"] and not model.heads


def test_a_tensor_that_the_architecture_does_not_use_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"encoder\.layer\.2\.output\.dense\.weight"):
        load(tmp_path, bert_tensors(BERT_CONFIG) | {"encoder.layer.2.output.dense.weight": torch.zeros(3)})


@pytest.mark.parametrize(
    "name",
    [
        "embeddings.position_embeddings.weight",
        "encoder.layer.1.attention.self.key.weight",
        "encoder.layer.0.output.LayerNorm.bias",
        "encoder.layer.1.attention.self.value.bias",
    ],
)
def test_a_missing_tensor_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    tensors = bert_tensors(BERT_CONFIG)
    del tensors[name]
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        load(tmp_path, tensors)


@pytest.mark.parametrize(
    "name", ["output.dense.bias", "attention.self.query.bias", "intermediate.dense.bias"]
)
def test_a_missing_bias_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    tensors = bert_tensors(BERT_CONFIG)
    del tensors[f"encoder.layer.0.{name}"]
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        load(tmp_path, tensors)


def test_an_unsupported_architecture_is_refused_with_the_supported_ones() -> None:
    build = LayerBuilder(DummySource(0, torch.float32, CPU))
    with pytest.raises(ModelLoadError, match=r"'GPT5Model' is not supported .*Bert.*XLMRoberta"):
        build_model("GPT5Model", BERT_CONFIG, build)


@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        "BertForMaskedLM",
        "BertForPreTraining",
        "RobertaModel",
        "XLMRobertaModel",
        "CamembertModel",
        "DistilBertModel",
        "MPNetForMaskedLM",
        "bert",
        "xlm-roberta",
    ],
)
def test_encoder_families_are_found_by_class_name_and_model_type(name: str) -> None:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 1}
    build = LayerBuilder(DummySource(0, torch.float32, CPU))
    assert build_model(name, BERT_CONFIG | sizes, build).hidden_size == 32


def test_positions_that_are_not_absolute_are_refused() -> None:
    build = LayerBuilder(DummySource(0, torch.float32, CPU))
    with pytest.raises(ModelLoadError, match="relative_key"):
        build_model("BertModel", BERT_CONFIG | {"position_embedding_type": "relative_key"}, build)


def test_an_unsupported_activation_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'geglu' is not supported; supported: gelu"):
        load(tmp_path, bert_tensors(BERT_CONFIG), hidden_act="geglu")


@pytest.mark.parametrize("buckets", [32, 16])
def test_distance_buckets_equal_those_of_mpnet(buckets: int) -> None:
    modeling = pytest.importorskip("transformers.models.mpnet.modeling_mpnet")
    distance = torch.arange(-600, 601)
    wanted = modeling.MPNetEncoder.relative_position_bucket(distance, num_buckets=buckets)
    assert torch.equal(distance_bucket(distance, buckets), wanted)
