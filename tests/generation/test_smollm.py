"""Generation with real weights. PENSTOCK_SMOLLM2 names the folder of SmolLM2-135M-Instruct; without it the
tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from penstock import SamplingParams
from tests.generation.families import check_nothing_is_held, engine

FOLDER = Path(os.environ.get("PENSTOCK_SMOLLM2", "models/smollm2"))
pytestmark = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").is_file(),
    reason="no weights: set PENSTOCK_SMOLLM2 to a folder of SmolLM2-135M-Instruct",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Count from one to five."]


def chat(question: str) -> str:
    """The prompt that the model's chat template gives."""
    turns = (("system", SYSTEM), ("user", question))
    return (
        "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in turns) + "<|im_start|>assistant\n"
    )


def test_the_capital_of_france_is_paris() -> None:
    params = SamplingParams(max_tokens=80, temperature=0)
    texts = [chat(question) for question in QUESTIONS]
    with engine(FOLDER, pipeline_depth=2, max_model_len=512) as used:
        got = used.generate(texts, params, add_special_tokens=False)
        assert got[0].text == "The capital of France is Paris."
        assert got[0].finish_reason == "stop"
        ids = used.tokenize(texts, add_special_tokens=False)
        again = used.generate(ids, params)
        assert [row.token_ids for row in again] == [row.token_ids for row in got]
        check_nothing_is_held(used)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for row, made in zip(ids, got, strict=True):
        new = made.token_ids + ([] if made.stop_token is None else [made.stop_token])
        with torch.inference_mode():
            logits = model(torch.tensor([row + new])).logits[0, len(row) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen).max() < 1e-3
