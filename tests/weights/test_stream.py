from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.weights.stream import DummySource, SafetensorsSource, open_weights
from tests.weights.samples import write, write_shards

CPU = torch.device("cpu")


def source(folder: Path, dtype: torch.dtype = torch.float32) -> SafetensorsSource:
    return SafetensorsSource(folder, dtype, CPU)


@pytest.fixture
def parts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 3, generator=generator) for name in ("q.weight", "k.weight", "v.weight")}


def test_a_tensor_is_taken_by_name_in_the_models_dtype(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    weights = source(write(tmp_path, parts), torch.bfloat16)
    taken = weights.take("k.weight", 4, 3)
    assert taken.dtype == torch.bfloat16
    assert torch.equal(taken, parts["k.weight"].bfloat16())


def test_fused_tensors_are_concatenated_in_the_given_order(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    fused = source(write(tmp_path, parts)).fuse(["v.weight", "q.weight", "k.weight"], 4, 3)
    assert torch.equal(fused, torch.cat([parts["v.weight"], parts["q.weight"], parts["k.weight"]]))


def test_fused_tensors_may_differ_in_size(tmp_path: Path) -> None:
    parts = {"q": torch.randn(6, 3), "k": torch.randn(2, 3), "bias": torch.randn(4)}
    weights = source(write(tmp_path, parts))
    assert torch.equal(weights.fuse(["q", "k"], [6, 2], 3), torch.cat([parts["q"], parts["k"]]))
    assert torch.equal(weights.fuse(["bias"], 4), parts["bias"])
    with pytest.raises(ModelLoadError, match="'k' has shape"):
        weights.fuse(["q", "k"], [6, 3], 3)


def test_half_precision_weights_are_widened_exactly(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    half = {name: tensor.half() for name, tensor in parts.items()}
    fused = source(write(tmp_path, half)).fuse(list(half), 4, 3)
    assert torch.equal(fused, torch.cat(list(half.values())).float())


def test_a_missing_tensor_is_an_error_that_names_it(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    weights = source(write(tmp_path, parts))
    assert not weights.has("o.weight")
    with pytest.raises(ModelLoadError, match=r"no tensor 'o\.weight'"):
        weights.take("o.weight", 4, 3)
    with pytest.raises(ModelLoadError, match=r"no tensor 'o\.weight'"):
        weights.fuse(["q.weight", "o.weight"], 4, 3)


def test_a_tensor_of_another_shape_is_an_error_with_both_shapes(
    tmp_path: Path, parts: dict[str, Tensor]
) -> None:
    with pytest.raises(ModelLoadError, match=r"'q\.weight' has shape \[4, 3\].* asks for \[3, 4\]"):
        source(write(tmp_path, parts)).take("q.weight", 3, 4)


def test_tensors_that_were_never_read_are_an_error_that_names_them(
    tmp_path: Path, parts: dict[str, Tensor]
) -> None:
    weights = source(write(tmp_path, parts))
    weights.take("q.weight", 4, 3)
    with pytest.raises(ModelLoadError, match=r"does not use: k\.weight, v\.weight"):
        weights.check_all_read(())


def test_unread_tensors_that_are_ignored_are_no_error(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    weights = source(write(tmp_path, parts | {"pooler.dense.weight": torch.zeros(2)}))
    weights.fuse(list(parts), 4, 3)
    assert weights.check_all_read(("pooler.",)) == ["pooler.dense.weight"]
    with pytest.raises(ModelLoadError, match=r"pooler\.dense\.weight"):
        weights.check_all_read(())


def test_many_unread_tensors_are_counted_after_the_first_few(tmp_path: Path) -> None:
    weights = source(write(tmp_path, {f"extra.{i:02}": torch.zeros(1) for i in range(30)}))
    with pytest.raises(ModelLoadError, match="and 22 more"):
        weights.check_all_read(())


@pytest.mark.parametrize(("old", "new"), [("gamma", "weight"), ("beta", "bias")])
def test_old_names_of_norm_parameters_are_renamed(tmp_path: Path, old: str, new: str) -> None:
    weights = source(write(tmp_path, {f"encoder.LayerNorm.{old}": torch.arange(3.0)}))
    assert weights.take(f"encoder.LayerNorm.{new}", 3).tolist() == [0, 1, 2]
    weights.check_all_read(())


def test_only_norm_parameters_are_renamed(tmp_path: Path) -> None:
    weights = source(write(tmp_path, {"mixer.gamma": torch.zeros(1)}))
    assert weights.has("mixer.gamma")


@pytest.mark.parametrize("prefix", ["", "bert.", "model.encoder."])
def test_the_prefix_before_a_name_is_found(tmp_path: Path, prefix: str) -> None:
    weights = source(write(tmp_path, {f"{prefix}embeddings.word.weight": torch.zeros(1)}))
    assert weights.prefix_of("embeddings.word.weight") == prefix


def test_a_checkpoint_without_the_name_has_no_prefix(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    with pytest.raises(ModelLoadError, match=r"ends in 'embeddings\.word\.weight'"):
        source(write(tmp_path, parts)).prefix_of("embeddings.word.weight")


def test_shards_are_read_as_one_checkpoint(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    (first, tensor), *rest = parts.items()
    weights = source(write_shards(tmp_path, [{first: tensor}, dict(rest)]))
    assert torch.equal(weights.fuse(list(parts), 4, 3), torch.cat(list(parts.values())))
    weights.check_all_read(())


def test_a_missing_shard_is_named(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    (first, tensor), *rest = parts.items()
    write_shards(tmp_path, [{first: tensor}, dict(rest)])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors is missing"):
        source(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_invalid_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        source(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, parts: dict[str, Tensor], kept: int) -> None:
    file = write(tmp_path, parts) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a readable safetensors file"):
        source(tmp_path)


@pytest.mark.parametrize("content", [b"not tensors at all", b"\xff" * 64])
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a readable safetensors file"):
        source(tmp_path)


def test_a_folder_without_weights_suggests_dummy_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="--load-format dummy"):
        source(tmp_path)


def test_dummy_weights_follow_their_seed() -> None:
    def draw(seed: int) -> Tensor:
        weights = DummySource(seed, torch.float32, CPU)
        weights.take("a.weight", 5, 7)
        return weights.take("b.weight", 5, 7)

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_dummy_weights_have_any_shape_unit_norms_and_no_bias(tmp_path: Path) -> None:
    weights = open_weights(tmp_path, "dummy", 0, torch.bfloat16, CPU)
    assert weights.has("anything")
    assert weights.prefix_of("x") == ""
    assert weights.take("layer.weight", 64, 64).std().item() == pytest.approx(0.02, rel=0.1)
    assert weights.take("layer.weight", 2).dtype == torch.bfloat16
    assert weights.take("output.LayerNorm.weight", 3).tolist() == [1, 1, 1]
    assert weights.take("layer.bias", 3).tolist() == [0, 0, 0]
    weights.check_all_read(())


def test_dummy_fp8_tensors_follow_the_seed_and_have_the_usual_scale() -> None:
    def made(seed: int) -> torch.Tensor:
        source = open_weights(Path("/nowhere"), "dummy", seed, torch.bfloat16, torch.device("cpu"))
        values = source.read_fp8("layers.0.up_proj.weight", (64, 256))
        assert values.dtype == torch.float8_e4m3fn
        return values.float() * source.read("layers.0.up_proj.weight_scale_inv", (1, 2))[0, 0]

    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))
    assert abs(float(made(1).std()) - 0.02) < 0.001


def test_fp8_tensors_are_read_only_by_read_fp8(tmp_path: Path) -> None:
    stored = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file({"small": stored, "wide": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    source = open_weights(tmp_path, "safetensors", 0, torch.float32, torch.device("cpu"))
    assert torch.equal(source.read_fp8("small", (4, 4)).float(), torch.ones(4, 4))
    for ask in (lambda: source.take("small", 4, 4), lambda: source.fuse(["small"], 4, 4)):
        with pytest.raises(ModelLoadError, match="'small' is stored in fp8"):
            ask()
    with pytest.raises(ModelLoadError, match="'wide' has scales, but is stored as torch"):
        source.read_fp8("wide", (4, 4))
