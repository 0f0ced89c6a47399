"""On CUDA, too, a last layer that computes only the needed tokens gives the same answers.

pytest -m gpu tests/gpu/test_pruned_last_layer.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.runner import model_runner
from penstock.types import PoolingParams, Task
from tests.runner.small_models import FAMILIES, make_runner, plan_of, seen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (5, 90, 17, 64, 65, 130, 200, 33)
SKIP = (0, 80, 1, 63, 30, 0, 150, 32)
CASES = {
    "bert": ("BertModel", "cls"),
    "bert, labels": ("BertForSequenceClassification", "cls"),
    "nomic": ("NomicBertModel", "mean"),
    "modernbert": ("ModernBertModel", "cls"),
    "gritlm": ("GritLM", "mean"),
    "qwen3": ("Qwen3Model", "last"),
    "experts": ("Qwen3MoeModel", "last"),
    "gemma2": ("Gemma2Model", "last"),
}
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "moe_intermediate_size": 64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_a_pruned_last_layer_gives_the_same_output(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "MIN_PRUNED_SIZE_EAGER", 0)  # steps this small are normally not pruned
    architecture, method = CASES[name]
    config: dict[str, Any] = FAMILIES[architecture] | WIDE
    runner = make_runner(architecture, method, config, torch.device("cuda"), dtype)
    try:
        task = Task.CLASSIFY if "Class" in architecture else Task.EMBED
        plan = plan_of(PoolingParams(task), lengths=LENGTHS, left_out=SKIP)
        (got,), tokens = seen(runner, plan)
        assert tokens < plan.num_tokens
        runner.model.prunes_last_layer = False
        (expected,), tokens = seen(runner, plan)
        assert tokens == plan.num_tokens
        assert float(torch.cosine_similarity(got, expected).min()) > 0.9999
    finally:
        runner.close()
