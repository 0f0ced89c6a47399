"""Cross-encoders of every encoder family against sentence-transformers, on the same files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch
import transformers
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer, processors

from penstock import Engine
from tests.checkpoints import wordpiece_tokenizer
from tests.parity.reference import LIMIT, byte_level_bpe, make_texts, randomise, unigram

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 0,
}
PAD_1 = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": LIMIT + 2}
TEXTS = make_texts(40)
PAIRS = [(query, document) for query in TEXTS[:8] for document in TEXTS[::3]]


def double_separator(make: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    """Frame pairs like RoBERTa: two separators in the middle, one segment."""

    def made() -> Tokenizer:
        tokenizer = make()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")],
        )
        return tokenizer

    return made


@dataclass(frozen=True)
class Family:
    name: str
    tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer
    options: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("input_ids", "token_type_ids", "attention_mask")

    def write(self, folder: Path, seed: int = 1, **settings: Any) -> Path:
        tokenizer = self.tokenizer()
        sizes = SIZES | {"vocab_size": tokenizer.get_vocab_size(), "num_labels": 1} | self.options | settings
        config = getattr(transformers, f"{self.name}Config")(**sizes)
        model = getattr(transformers, f"{self.name}ForSequenceClassification")(config).eval()
        randomise(model, seed)
        model.save_pretrained(folder)
        names = (
            ("<s>", "</s>", "<pad>") if self.options.get("pad_token_id") == 1 else ("[CLS]", "[SEP]", "[PAD]")
        )
        special = dict(zip(("cls_token", "sep_token", "pad_token"), names, strict=True))
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            model_max_length=LIMIT,
            model_input_names=list(self.inputs),
            **special,
        ).save_pretrained(folder)
        return folder


PLAIN = ("input_ids", "attention_mask")
FAMILIES = {
    "bert": Family("Bert"),
    "roberta": Family(
        "Roberta", double_separator(byte_level_bpe), PAD_1 | {"type_vocab_size": 1}, inputs=PLAIN
    ),
    "xlm-roberta": Family(
        "XLMRoberta", double_separator(unigram), PAD_1 | {"type_vocab_size": 1}, inputs=PLAIN
    ),
    "distilbert": Family(
        "DistilBert",
        options={"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96},
        inputs=PLAIN,
    ),
    "modernbert": Family("ModernBert", inputs=PLAIN, options={"cls_token_id": 2, "sep_token_id": 3}),
    "gte": Family("Gte", options={"type_vocab_size": 2}),
    "deberta": Family(
        "DebertaV2",
        options={
            "relative_attention": True,
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
}


@dataclass
class Pair:
    reference: CrossEncoder
    engine: Engine


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = FAMILIES[request.param].write(tmp_path_factory.mktemp(request.param))
    with Engine(str(folder), device="cpu", threads=1) as engine:
        yield Pair(CrossEncoder(str(folder), device="cpu"), engine)


def reference_scores(reference: CrossEncoder, pairs: list[tuple[str, str]], **options: Any) -> Any:
    return np.array([reference.predict(pair, **options) for pair in pairs]).reshape(-1)


def test_raw_and_activated_scores_equal_the_references(pair: Pair) -> None:
    """Pairs that are too long are truncated as in the reference: the longer text first."""
    queries, documents = map(list, zip(*PAIRS, strict=True))
    raw = reference_scores(pair.reference, PAIRS, activation_fn=torch.nn.Identity())
    assert raw.std() > 0.05
    ours = pair.engine.score(queries, documents, use_activation=False, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(ours, raw, atol=2e-4)
    active = pair.engine.score(queries, documents, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(active, reference_scores(pair.reference, PAIRS), atol=1e-4)


def test_the_order_of_documents_equals_the_references(pair: Pair) -> None:
    documents = TEXTS[5:30]
    theirs = pair.reference.rank("the long water", documents)
    ours = pair.engine.rerank("the long water", documents, truncate_prompt_tokens=-1)
    assert [row.index for row in ours] == [row["corpus_id"] for row in theirs]
    np.testing.assert_allclose([row.score for row in ours], [row["score"] for row in theirs], atol=1e-4)


@pytest.mark.parametrize("form", ["config", "old", "modules"])
def test_a_checkpoint_may_say_that_scores_stay_raw(tmp_path: Path, form: str) -> None:
    folder = FAMILIES["bert"].write(tmp_path / "model")
    name = "torch.nn.modules.linear.Identity"
    if form == "modules":
        CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity()).save_pretrained(
            str(folder)
        )
    else:
        file = folder / "config.json"
        says = {"sbert_ce_default_activation_function": name}
        if form == "config":
            says = {"sentence_transformers": {"activation_fn": name}}
        file.write_text(json.dumps(json.loads(file.read_text()) | says))
    expected = reference_scores(CrossEncoder(str(folder), device="cpu"), PAIRS[:9])
    assert np.abs(expected).max() > 1
    with Engine(str(folder), device="cpu", threads=1) as engine:
        ours = engine.score(*map(list, zip(*PAIRS[:9], strict=True)), truncate_prompt_tokens=-1)
    np.testing.assert_allclose(ours, expected, atol=2e-4)


def test_one_text_with_two_labels_scores_as_their_difference(tmp_path: Path) -> None:
    """The input format of `reranker-mini`: `Query: …` and `Sentence: …` in one segment."""
    folder = FAMILIES["bert"].write(tmp_path / "model", num_labels=2)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for query, document in PAIRS:
        ids = tokenizer(
            f"Query: {query}\nSentence: {document}", truncation=True, max_length=LIMIT, return_tensors="pt"
        )
        with torch.inference_mode():
            logits = model(**ids).logits[0]
        expected.append(float(logits[1] - logits[0]))
    options = {
        "score_template": "Query: {query}\nSentence: {document}",
        "pooler_config": {"score_labels": [1, 0]},
    }
    with Engine(str(folder), device="cpu", threads=1, **options) as engine:
        queries, documents = map(list, zip(*PAIRS, strict=True))
        raw = engine.score(queries, documents, use_activation=False, truncate_prompt_tokens=-1)
        np.testing.assert_allclose(raw, expected, atol=2e-4)
        active = engine.score(queries, documents, truncate_prompt_tokens=-1)
        np.testing.assert_allclose(active, 1 / (1 + np.exp(-np.array(expected))), atol=1e-4)
