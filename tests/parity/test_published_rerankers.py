"""Decoder rerankers in their published layouts, without any flag: against each model card's recipe with
transformers, and for CrossEncoder layouts against sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import transformers

from penstock import Engine
from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig, PoolerConfig
from penstock.errors import ModelLoadError, NotPossible
from penstock.types import Task
from tests.api.local_app import local_app
from tests.parity.decoders import change_config
from tests.parity.rerankers import LIMIT, write

QUERY = "how long is the water?"
DOCUMENTS = [
    "water is long.",
    "a way to see oil",
    " the number of words in it \n",
    "{query} is no field",
    "one",
]
QWEN3_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_CHAT = (
    "{%- set told = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first -%}"
    f"<|im_start|>system\n{QWEN3_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {{ told | default('" + INSTRUCTION + "', true) }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
)
GEMMA_TASK = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
    "providing a prediction of either 'Yes' or 'No'."
)
PARTS_CHAT = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}instruction: {{ message.content[0].text }}\n"
    "{% else %}{{ message.role }}: {{ message.content[0].text }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Relevance:{% endif %}"
)
ZERANK_CHAT = (
    "{% for message in messages %}<|im_start|>{{ 'system' if message['role'] == 'query' else 'user' }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


class Recipe(NamedTuple):
    """How the model card, or the model's code, scores a pair."""

    name: str  # name of the repository
    kind: str
    pieces: Callable[[str, str], Sequence[str]]  # tokenised separately, without special tokens
    score: Callable[[Any, Callable[[str], int]], Any]  # from the last logits and the ids of tokens
    bos: bool = False


def qwen3_pieces(query: str, document: str) -> list[str]:
    return [
        f"<|im_start|>system\n{QWEN3_SYSTEM}<|im_end|>\n<|im_start|>user\n",
        f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ]


def zerank_pieces(query: str, document: str) -> list[str]:
    return [
        f"<|im_start|>system\n{query.strip()}<|im_end|>\n<|im_start|>user\n{document.strip()}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ]


def ctxl_pieces(query: str, document: str) -> list[str]:
    return [
        "Check whether a given document contains information helpful to answer the query.\n"
        f"<Document> {document}\n<Query> {query} ??"
    ]


def mxbai_pieces(query: str, document: str) -> list[str]:
    start = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    )
    return [
        start + "<|im_start|>user\n",
        f"query: {query}",
        "\n",
        f"document: {document}",
        "\n",
        MXBAI_TASK,
        "<|im_end|>\n<|im_start|>assistant\n",
    ]


def gemma_pieces(query: str, document: str) -> list[str]:
    return [f"A: {query}", "\n", f"B: {document}", "\n", GEMMA_TASK]


def yes_of_two(logits: Any, number: Callable[[str], int]) -> Any:
    return torch.softmax(logits[[number("no"), number("yes")]], 0)[1]


RECIPES = [
    Recipe("Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", qwen3_pieces, yes_of_two),
    Recipe(
        "mxbai-rerank-base-v2",
        "Qwen2ForCausalLM",
        mxbai_pieces,
        lambda logits, number: torch.sigmoid(logits[number("1")] - logits[number("0")]),
    ),
    Recipe(
        "bge-reranker-v2-gemma",
        "GemmaForCausalLM",
        gemma_pieces,
        lambda logits, number: torch.sigmoid(logits[number("Yes")]),
        bos=True,
    ),
    Recipe(
        "zerank-1-small",
        "Qwen3ForCausalLM",
        zerank_pieces,
        lambda logits, number: torch.sigmoid(logits[number("Yes")] / 5),
    ),
    Recipe(
        "ctxl-rerank-v2-instruct-multilingual-1b",
        "Qwen3ForCausalLM",
        ctxl_pieces,
        lambda logits, _: logits[0],
    ),
    Recipe(
        "ctxl-rerank-v2-instruct-multilingual-6b",
        "MistralForCausalLM",
        ctxl_pieces,
        lambda logits, _: logits[0],
        bos=True,
    ),
]


@torch.inference_mode()
def card_scores(folder: Path, recipe: Recipe, documents: Sequence[str] = DOCUMENTS) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for document in documents:
        ids = [0] if recipe.bos else []
        for piece in recipe.pieces(QUERY, document):
            ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(recipe.score(logits, tokenizer.convert_tokens_to_ids).item())
    return np.array(scores)


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_reranker_is_recognised_by_its_name_and_scores_as_its_card_says(
    tmp_path: Path, recipe: Recipe
) -> None:
    folder = write(tmp_path / recipe.name, recipe.kind, bos=recipe.bos)
    expected = card_scores(folder, recipe)
    assert expected.std() > 1e-3
    with open_engine(folder) as engine:
        assert engine.spec.tasks[0] is Task.SCORE and engine.spec.score_kind == "cross"
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), expected, atol=2e-4)


def write_cross_encoder(
    folder: Path,
    tokens: tuple[str, str | None],
    chat: str,
    options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write the layout of sentence-transformers. `tokens` are the true and the false token."""
    write(folder, "Qwen3ForCausalLM", tie_word_embeddings=True)
    ids = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    (folder / "chat_template.jinja").write_text(chat)
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    way = {"method": "forward", "method_output_name": "logits"}
    ways = {"text": way, "message": {**way, "format": "auto"}}
    settings = {"transformer_task": "text-generation", "modality_config": ways, **(options or {})}
    settings["module_output_name"] = "causal_logits"
    pair = dict(zip(("true_token_id", "false_token_id"), (t and ids(t) for t in tokens), strict=True))
    (folder / "1_LogitScore").mkdir()
    for name, value in {
        "modules.json": rows,
        "sentence_bert_config.json": settings,
        "1_LogitScore/config.json": pair,
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", **(config or {})},
    }.items():
        (folder / name).write_text(json.dumps(value))
    return folder


PARTS_OPTIONS = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
RAW = {"activation_fn": "torch.nn.modules.linear.Identity"}
TOLD = {"prompts": {"web": "be strict"}, "default_prompt_name": "web"}
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "qwen3": (("yes", "no"), QWEN3_CHAT),
    "zerank": (("Yes", None), ZERANK_CHAT, None, RAW),
    "parts": (("yes", "no"), PARTS_CHAT, PARTS_OPTIONS),
    "told": (("yes", "no"), PARTS_CHAT, PARTS_OPTIONS, TOLD),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cross_encoder_of_logits_scores_as_sentence_transformers_does(tmp_path: Path, layout: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = write_cross_encoder(tmp_path / "renamed", *LAYOUTS[layout])
    reference = sentence_transformers.CrossEncoder(
        str(folder), device="cpu", model_kwargs={"dtype": "float32"}
    )
    long = " ".join(["water. oil"] * 300)
    pairs = [(QUERY, document) for document in [*DOCUMENTS, ""]]
    expected = reference.predict(pairs)
    assert np.std(expected) > 1e-3
    with open_engine(folder) as engine:
        np.testing.assert_allclose(engine.score(QUERY, [*DOCUMENTS, ""]), expected, atol=2e-4)
        if layout != "zerank":  # zerank's template has no instruction
            told = reference.predict(pairs, prompt="find words")
            np.testing.assert_allclose(
                engine.score(QUERY, [*DOCUMENTS, ""], instruction="find words"), told, atol=2e-4
            )
        cut = engine.score(QUERY, [long], truncate_prompt_tokens=-1)
        assert cut.shape == (1,) and np.isfinite(cut).all()
        if layout in ("qwen3", "zerank"):  # the template ends with special tokens, which both libraries keep
            np.testing.assert_allclose(cut, reference.predict([(QUERY, long)]), atol=2e-4)


def test_a_cross_encoder_of_plain_text_joins_the_texts_by_the_tokenizer(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    text = {"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}
    folder = write_cross_encoder(tmp_path / "plain", ("yes", "no"), QWEN3_CHAT, text)
    reference = sentence_transformers.CrossEncoder(
        str(folder), device="cpu", model_kwargs={"dtype": "float32"}
    )
    expected = reference.predict([(QUERY, document) for document in DOCUMENTS])
    with open_engine(folder) as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), expected, atol=2e-4)


def test_a_long_document_leaves_the_question_after_it_whole(tmp_path: Path) -> None:
    recipe = RECIPES[4]
    folder = write(tmp_path / recipe.name, recipe.kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    long = " ".join(["water. oil"] * 300)
    whole = recipe.pieces(QUERY, long)[0]
    at = whole.index(long) + len(long)
    begin, end = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (whole[:at], whole[at:]))
    with torch.inference_mode():
        logits = model(torch.tensor([begin[: LIMIT - len(end)] + end])).logits[0, -1]
    with open_engine(folder) as engine:
        found = engine.score(QUERY, [long], truncate_prompt_tokens=-1)
        np.testing.assert_allclose(found, [logits[0].item()], atol=2e-4)
        told = engine.score(QUERY, DOCUMENTS[:1], instruction="be strict")
    assert recipe.pieces(QUERY + " be strict", DOCUMENTS[0])[0].endswith("? be strict ??")
    strict = recipe._replace(pieces=lambda query, document: ctxl_pieces(query + " be strict", document))
    np.testing.assert_allclose(told, card_scores(folder, strict, DOCUMENTS[:1]), atol=2e-4)


def test_a_conversion_to_one_label_is_asked_as_the_model_it_was_made_from(tmp_path: Path) -> None:
    recipe = RECIPES[0]
    folder = write(tmp_path / "lm" / recipe.name, recipe.kind, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    converted = transformers.Qwen3ForSequenceClassification(config)
    converted.model.load_state_dict(model.model.state_dict())
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    converted.score.weight.data = (model.lm_head.weight.data[yes] - model.lm_head.weight.data[no])[None]
    target = tmp_path / f"{recipe.name}-seq-cls"
    converted.save_pretrained(target)
    tokenizer.save_pretrained(target)
    with open_engine(target) as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), card_scores(folder, recipe), atol=2e-4)
    plain = describe(EngineConfig(model=str(target), score_template="none"))
    assert plain.score is not None and plain.score.template == ()


def test_a_classifier_reads_pairs_through_its_chat_template_where_its_layout_says_so(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = write(tmp_path / "classifier", "Qwen3ForSequenceClassification", num_labels=1)
    (folder / "chat_template.jinja").write_text(QWEN3_CHAT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentence_transformers.CrossEncoder(str(folder), device="cpu").save_pretrained(str(tmp_path / "saved"))
    assert tokenizer.chat_template is not None and (tmp_path / "saved/modules.json").is_file()
    reference = sentence_transformers.CrossEncoder(str(tmp_path / "saved"), device="cpu")
    expected = reference.predict([(QUERY, document) for document in DOCUMENTS])
    with open_engine(tmp_path / "saved") as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), expected, atol=2e-4)
        assert engine.spec.score is not None and engine.spec.score.template


def read(folder: Path, **options: Any) -> Any:
    return describe(EngineConfig(model=str(folder), **options))


@pytest.mark.parametrize(
    ("name", "card", "found"),
    [
        ("Qwen3-0.6B", "", "nothing marks Qwen3ForCausalLM"),
        ("some-reranker-1b", "", "how this Qwen3ForCausalLM is asked is not known"),
        (
            "model",
            "---\npipeline_tag: text-ranking\n---\n",
            "how this Qwen3ForCausalLM is asked is not known",
        ),
        ("model", "---\npipeline_tag: text-generation\n---\n", "nothing marks"),
    ],
)
def test_a_language_model_that_nothing_marks_does_not_score(
    tmp_path: Path, name: str, card: str, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / name, "Qwen3ForCausalLM")
    (folder / "README.md").write_text(card)
    with open_engine(folder) as engine:
        assert Task.SCORE not in engine.spec.tasks and Task.EMBED in engine.spec.tasks
        with pytest.raises(NotPossible, match=found) as refused:
            engine.score(QUERY, DOCUMENTS)
        assert "classifier_from_token" in str(refused.value) and "--score-template" in str(refused.value)
    assert "may mean nothing" in caplog.text


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("my-embedding-model", {}, {}),
        ("plain", {"architectures": ["Qwen3Model"]}, {}),
        ("plain", {"is_causal": False}, {}),
        ("plain", {}, {"pooler_config": PoolerConfig(pooling_type="last")}),
    ],
)
def test_a_decoder_that_is_known_to_embed_scores_by_its_vectors(
    tmp_path: Path, name: str, change: dict[str, Any], options: dict[str, Any]
) -> None:
    folder = write(tmp_path / name, "Qwen3ForCausalLM")
    change_config(folder, lambda config: config | change)
    spec = read(folder, **options)
    assert spec.score_kind == "bi" and not spec.is_unmarked


def test_a_renamed_reranker_is_recognised_by_what_it_was_saved_from(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "Qwen3ForCausalLM")
    change_config(folder, lambda config: config | {"_name_or_path": "zeroentropy/zerank-2"})
    assert read(folder).score.scale == 5.0
    cached = write(tmp_path / "models--Qwen--Qwen3-Reranker-4B/snapshots/abc", "Qwen3ForCausalLM")
    assert read(cached, served_model_name="ranks").score.instruction == INSTRUCTION


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("LayerWiseMiniCPMForCausalLM", "minicpm"), ("CostWiseGemmaForCausalLM", "cost_wise_gemma")],
)
def test_rerankers_with_code_of_their_own_are_refused(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    folder = write(tmp_path / "bge-reranker-v2-minicpm-layerwise", "Qwen2ForCausalLM")
    change_config(folder, lambda config: config | {"architectures": [architecture], "model_type": model_type})
    with pytest.raises(ModelLoadError, match=f"architecture '{architecture}' is not supported"):
        read(folder)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ("{{ messages[0].content | upper }} {{ messages[1].content }}", "changes the texts|as they are"),
        ("{{ messages[0].content }}", "as they are, once each"),
        ("{{ raise_exception('no roles') }}", "fails on messages of the roles query, document"),
    ],
)
def test_a_chat_template_that_does_not_carry_a_pair_is_refused(
    tmp_path: Path, chat: str, message: str
) -> None:
    folder = write_cross_encoder(tmp_path / "odd", ("yes", "no"), chat)
    with pytest.raises(ModelLoadError, match=message):
        read(folder)


def test_ranking_routes_answer_422_for_a_language_model_and_say_why(tmp_path: Path) -> None:
    folder = write(tmp_path / "Qwen3-0.6B", "Qwen3ForCausalLM")
    with local_app(folder) as (http, _):
        for route, body in {
            "/rerank": {"query": "a", "documents": ["b"]},
            "/v2/rerank": {"query": "a", "documents": ["b"]},
            "/score": {"queries": "a", "documents": ["b"]},
            "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        }.items():
            refused = http.post(route, json=body)
            expected = 424 if route == "/similarity" else 422  # TEI's status
            assert refused.status_code == expected, refused.text
            assert "nothing marks Qwen3ForCausalLM as an embedder or a reranker" in refused.text
        assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200
