"""Rotary positions against transformers, for every scaling method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.rotary import Rotary
from penstock.models.options import rope_options

CPU = torch.device("cpu")
LIMIT, DIM = 512, 32
TRAINED = {"original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "old-linear": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-wide": LLAMA3 | {"factor": 32.0, "high_freq_factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **TRAINED},
    "yarn-shrinking": {"rope_type": "yarn", "factor": 1.0, **TRAINED},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, **TRAINED},
    "yarn-betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 8, "beta_slow": 2, **TRAINED},
    "yarn-not-truncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **TRAINED},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.5, **TRAINED},
    "yarn-trained-on-all": {"rope_type": "yarn", "factor": 4.0},
}


def batch_of(positions: Tensor) -> Batch:
    count = len(positions)
    bounds = torch.tensor([0, count], dtype=torch.int32)
    lengths = bounds[1:]
    return Batch(
        token_ids=torch.zeros(count, dtype=torch.int32),
        positions=positions.int(),
        type_ids=None,
        cu_lengths=bounds,
        lengths=lengths,
        skip=None,
        groups=(),
        max_length=count,
        num_tokens=count,
        num_rows=1,
    )


def rotary(base: float = 10_000.0, scaling: dict[str, Any] | None = None, **options: Any) -> Rotary:
    size = options.pop("size", DIM)
    return Rotary(size, LIMIT, base, device=CPU, dtype=torch.float32, scaling=scaling, **options)


@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_queries_are_rotated_like_the_reference(name: str, base: float) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaling = SCALINGS[name]
    config = LlamaConfig(
        head_dim=DIM,
        max_position_embeddings=LIMIT,
        rope_parameters=dict(scaling or {}) | {"rope_theta": base},
    )
    positions = torch.tensor([0, 1, 2, 5, 17, 100, 127, 128, 300, LIMIT - 1])
    x = torch.randn(len(positions), 3, DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)

    ours = rotary(base, scaling)
    turned = ours(x, ours.angles(batch_of(positions)))
    torch.testing.assert_close(turned, theirs[0].transpose(0, 1), rtol=0, atol=5e-5)


def test_a_part_of_each_head_may_stay_unrotated() -> None:
    x = torch.randn(4, 2, DIM, generator=torch.Generator().manual_seed(1))
    half, batch = rotary(size=DIM // 2), batch_of(torch.arange(4))
    turned = half(x, half.angles(batch))
    assert torch.equal(turned[..., DIM // 2 :], x[..., DIM // 2 :])
    assert torch.equal(turned[..., : DIM // 2], half(x[..., : DIM // 2].contiguous(), half.angles(batch)))


def test_interleaved_pairs_rotate_like_halves_in_another_order() -> None:
    x = torch.randn(5, 2, DIM, generator=torch.Generator().manual_seed(2))
    batch, order = batch_of(torch.arange(5)), torch.arange(DIM).view(2, -1).T.flatten()
    halves, pairs = rotary(), rotary(interleaved=True)
    expected = halves(x, halves.angles(batch))[..., order]
    torch.testing.assert_close(pairs(x[..., order], pairs.angles(batch)), expected)


def test_the_product_of_query_and_key_depends_on_their_distance_alone() -> None:
    turn = rotary(scaling=SCALINGS["llama3"])
    query, key = torch.randn(2, 1, 1, DIM, generator=torch.Generator().manual_seed(3)).unbind()

    def product(at: int, other: int) -> float:
        q = turn(query, turn.angles(batch_of(torch.tensor([at]))))
        k = turn(key, turn.angles(batch_of(torch.tensor([other]))))
        return float((q * k).sum())

    assert product(7, 3) == pytest.approx(product(204, 200), abs=1e-4)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope type 'longrope' is not supported"),
        ({"type": "su"}, "rope type 'su' is not supported"),
        ({"rope_type": "linear"}, "needs a number 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs a number 'low_freq_factor'"),
    ],
)
def test_unsupported_scalings_are_refused_by_name(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rotary(scaling=scaling)


OLD, NEW = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
BY_TYPE = {"rope_parameters": {"full_attention": NEW, "sliding_attention": {"rope_theta": 2e4}}}


@pytest.mark.parametrize(
    ("config", "layer_type"),
    [
        ({"rope_theta": 5e5, "rope_scaling": OLD}, None),
        ({"rope_theta": 6e5, "rope_scaling": NEW}, None),
        ({"rope_parameters": NEW}, None),
        (BY_TYPE, "full_attention"),
        (
            BY_TYPE | {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}, "rope_scaling": OLD},
            "full_attention",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": NEW}, None),
    ],
    ids=["old", "base-in-old", "new", "by-layer-type", "overridden-by-layer-type", "overridden"],
)
def test_every_form_of_config_gives_the_same_angles(config: dict[str, Any], layer_type: str | None) -> None:
    base, scaling = rope_options(config, "rope_theta", default=10_000.0, layer_type=layer_type)
    assert base == 5e5
    assert (scaling["rope_type"], scaling["factor"]) == ("linear", 2.0)


def test_layers_with_their_own_base_are_not_scaled() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": OLD}
    for config in (old, BY_TYPE):
        base, scaling = rope_options(
            config, "rope_local_base_freq", default=1e4, layer_type="sliding_attention", scaled=False
        )
        assert base == 2e4
        assert "factor" not in scaling


@pytest.mark.parametrize(
    ("config", "layer_type", "message"),
    [
        (
            {"rope_scaling": OLD, "rope_parameters": {"rope_theta": 5e5}},
            None,
            "both rope_scaling and rope_param",
        ),
        ({"rope_parameters": NEW}, "full_attention", "rope_parameters .* an object for each layer type"),
        (BY_TYPE, None, "rope_parameters .* one object for all layers"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 128},
            None,
            "original_max_position_embeddings = 128 beside",
        ),
    ],
    ids=["two-bases", "flat", "by-layer-type", "trained-length-outside"],
)
def test_forms_of_config_that_transformers_reads_otherwise_are_refused(
    config: dict[str, Any], layer_type: str | None, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_options(config, "rope_theta", default=1e4, layer_type=layer_type)


@pytest.mark.parametrize("mixed", [None, 0.6])
def test_ntk_divides_the_lowest_frequency_by_the_factor_and_the_rest_by_less(mixed: float | None) -> None:
    """The authors' formulas: a larger base and a constant, or a scale that grows with the dimension pair."""
    factor, base = 8.0, 20_000.0
    plain = 1.0 / base ** (torch.arange(0, DIM, 2) / DIM)
    if mixed is None:
        expected = 1.0 / (factor * base) ** (torch.arange(0, DIM, 2) / DIM) / factor ** (2 / DIM)
    else:
        a = torch.tensor(factor).log() / (DIM / 2) ** mixed
        expected = plain / (a * torch.arange(1, DIM // 2 + 1) ** mixed).exp()
    ours = rotary(base, {"type": "ntk", "factor": factor, "mixed_b": mixed})
    angles = torch.arange(LIMIT)[:, None] * expected
    torch.testing.assert_close(ours.cos, angles.cos(), atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.sin, angles.sin(), atol=1e-4, rtol=0)
