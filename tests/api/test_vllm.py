"""vLLM's dialect: conversations on pooling routes, vLLM's spellings, and its server routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock.api.app import build_app
from penstock.api.dialects.vllm.server import shown
from penstock.config import EngineConfig, PoolerConfig, ServerConfig, from_mapping
from penstock.errors import ConfigError, ModelLoadError
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Task
from tests.api.local_app import local_app
from tests.api.scripted_app import make_state
from tests.checkpoints import write_bert, write_cross_encoder
from tests.text_models import ScriptedEngine, continue_with, write_text_model

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}"
    "{% if tools %}tools {{ tools | length }} {% endif %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}{{ extra }}"
)
TALK = [{"role": "user", "content": "find the water"}, {"role": "assistant", "content": "in time"}]
RENDERED = "[user] find the water [assistant] in time "


def post(http: TestClient, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http: TestClient, path: str, status: int = 400, /, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "find: "}, "default_prompt_name": "query"})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "tokenizer_class": "BertTokenizer", "vocab_file": "/a/b.txt"})
    )
    return folder


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    with local_app(folder) as (client, _):
        yield client


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = write_cross_encoder(tmp_path_factory.mktemp("classifier"), labels=3)
    with local_app(folder, server={"chat_template": TEMPLATE}) as (client, _):
        yield client


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("reranker"))) as (client, _):
        yield client


def ids_of(http: TestClient, text: str) -> list[int]:
    return post(http, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]  # type: ignore[no-any-return]


# --- conversations ------------------------------------------------------------------------------------------


def test_a_conversation_is_embedded_as_its_template_writes_it(http: TestClient) -> None:
    expected = post(http, "/v1/embeddings", input=[ids_of(http, RENDERED)])
    found = post(http, "/v1/embeddings", messages=TALK)
    assert found["data"][0]["embedding"] == pytest.approx(expected["data"][0]["embedding"], abs=1e-6)
    assert found["usage"] == expected["usage"] and found["object"] == "list"


def test_conversations_come_in_lists_and_under_either_name(http: TestClient) -> None:
    one, two = TALK, [{"role": "user", "content": "how was the oil"}]
    single = [post(http, "/v1/embeddings", messages=each)["data"][0]["embedding"] for each in (one, two)]
    for body in ({"messages": [one, two]}, {"input": [one, two]}):
        rows = post(http, "/v1/embeddings", **body)["data"]
        np.testing.assert_allclose([row["embedding"] for row in rows], single, atol=1e-6)
    assert post(http, "/v1/embeddings", input=one)["data"][0]["embedding"] == pytest.approx(single[0])
    assert (
        "contradict"
        in refused(
            http, "/v1/embeddings", messages=one, continue_final_message=True, add_generation_prompt=True
        )["message"]
    )
    wrongs: tuple[dict[str, Any], ...] = (
        {"messages": [one[0], two]},
        {"messages": []},
        {"messages": one, "input": "text"},
    )
    for wrong in wrongs:
        assert refused(http, "/v1/embeddings", **wrong)["param"] in ("messages", "input")


def test_the_fields_of_templates_mean_what_they_mean_for_vllm(http: TestClient) -> None:
    def tokens(**options: Any) -> list[int]:
        return post(http, "/tokenize", messages=TALK, **options)["tokens"]  # type: ignore[no-any-return]

    assert tokens() == ids_of(http, RENDERED + "[assistant] ")
    assert tokens(add_generation_prompt=False) == ids_of(http, RENDERED)
    assert tokens(add_generation_prompt=False, continue_final_message=True) == ids_of(http, RENDERED.strip())
    assert tokens(add_generation_prompt=False, chat_template_kwargs={"extra": "oil"}) == ids_of(
        http, RENDERED + "oil"
    )
    special = tokens(add_generation_prompt=False, add_special_tokens=True)
    assert special == post(http, "/tokenize", prompt=RENDERED)["tokens"]
    assert tokens(add_generation_prompt=False, tools=[{}]) == ids_of(http, RENDERED + "tools 1 ")


def test_pooling_and_classification_take_conversations(http: TestClient, classifier: TestClient) -> None:
    ids = ids_of(http, RENDERED)
    for task in ("embed", "token_embed"):
        expected = post(http, "/pooling", input=[ids], task=task)["data"][0]["data"]
        found = post(http, "/pooling", messages=TALK, task=task)["data"][0]["data"]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    ids = ids_of(classifier, RENDERED + "[assistant] ")
    expected = post(classifier, "/classify", input=[ids])["data"]
    assert post(classifier, "/classify", messages=TALK, add_generation_prompt=True)["data"] == [
        expected[0] | {"probs": pytest.approx(expected[0]["probs"], abs=1e-6)}
    ]


def test_a_conversation_has_no_prompt_and_keeps_the_other_fields(http: TestClient) -> None:
    for body in ({"prompt_name": "query"}, {"instruction": "a"}, {"model": "model:query"}):
        assert "messages" in refused(http, "/v1/embeddings", messages=TALK, **body)["message"]
    short = post(http, "/v1/embeddings", messages=TALK, dimensions=8, encoding_format="base64")
    assert isinstance(short["data"][0]["embedding"], str)
    long = [{"role": "user", "content": "water " * 500}]
    assert "truncate_prompt_tokens" in refused(http, "/v1/embeddings", messages=long)["message"]
    cut = post(http, "/v1/embeddings", messages=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == post(http, "/tokenize", prompt="a")["max_model_len"]
    assert post(http, "/v1/embeddings", messages=long, chunking="mean")["usage"]["prompt_tokens"] > 500


def test_null_messages_are_absent(http: TestClient) -> None:
    answer = http.post("/v1/embeddings", json={"input": "water", "messages": None})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "messages"


def test_a_model_without_a_template_says_so(reranker: TestClient) -> None:
    for path in ("/pooling", "/tokenize", "/classify"):
        assert "has no chat template" in refused(reranker, path, messages=TALK)["message"]


def test_a_request_brings_a_template_only_where_clients_are_trusted(folder: Path, http: TestClient) -> None:
    body: dict[str, Any] = {"messages": TALK, "chat_template": "{{ messages[0].content }}"}
    error = refused(http, "/tokenize", **body)
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    with local_app(folder, server={"trust_request_chat_template": True}) as (trusting, _):
        assert post(trusting, "/tokenize", **body)["tokens"] == ids_of(trusting, "find the water")
        wrong = refused(trusting, "/tokenize", **body | {"chat_template": "{% for %}"})
        assert wrong["param"] == "chat_template" and "not valid Jinja" in wrong["message"]


# --- answers ------------------------------------------------------------------------------------------------


def test_bytes_only_are_the_bytes_without_their_description(http: TestClient) -> None:
    body = {"input": ["water", "oil"], "embed_dtype": "float16", "endianness": "big"}
    described = http.post("/v1/embeddings", json=body | {"encoding_format": "bytes"})
    plain = http.post("/v1/embeddings", json=body | {"encoding_format": "bytes_only"})
    assert plain.content == described.content and "metadata" not in plain.headers
    assert plain.headers["content-type"] == "application/octet-stream"
    assert json.loads(described.headers["metadata"])["data"][1]["embed_dtype"] == "float16"
    several: dict[str, Any] = {"task": ["embed", "token_embed"], "encoding_format": "bytes_only"}
    assert refused(http, "/pooling", input="a", **several)["param"] == "encoding_format"


def test_token_strings_are_null_unless_asked_for(http: TestClient) -> None:
    assert post(http, "/tokenize", prompt="water")["token_strs"] is None
    named = post(http, "/tokenize", prompt="water", return_token_strs=True)
    assert len(named["token_strs"]) == named["count"]


def test_rankings_return_documents_unless_told_otherwise(reranker: TestClient) -> None:
    documents = ["water", "the oil"]
    rows = post(reranker, "/rerank", query="find", documents=documents)["results"]
    assert {row["index"]: row["document"] for row in rows} == {0: {"text": "water"}, 1: {"text": "the oil"}}
    for body in ({"top_n": 0}, {"max_tokens_per_doc": 0, "max_tokens_per_query": 0}, {"top_n": None}):
        assert post(reranker, "/v1/rerank", query="find", documents=documents, **body)["results"] == rows
    plain = post(reranker, "/rerank", query="find", documents=documents, return_documents=False)["results"]
    assert plain == [{name: row[name] for name in ("index", "relevance_score")} for row in rows]
    odd = [{"text": "water", "id": 2**70}, "the oil"]
    assert post(reranker, "/rerank", query="find", documents=odd)["results"] == rows


def test_texts_of_pairs_may_be_content_parts(reranker: TestClient) -> None:
    parts = {"content": [{"type": "text", "text": "the oil"}]}
    expected = post(reranker, "/score", queries="find", documents=["the oil"])["data"]
    for body in ({"queries": "find", "items": parts}, {"data_1": "find", "data_2": [parts]}):
        assert post(reranker, "/score", **body)["data"] == expected
    row = post(reranker, "/rerank", query={"text": "find"}, documents=parts)["results"][0]
    assert row["relevance_score"] == expected[0]["score"] and row["document"] == {"text": "the oil"}
    image = {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert refused(reranker, "/score", 422, queries="find", documents=image)["param"] == "documents"
    assert refused(reranker, "/rerank", 422, query=image, documents=["a"])["param"] == "query"


def test_an_instruction_may_be_a_variable_of_the_template(reranker: TestClient) -> None:
    body = {"query": "find", "documents": ["water"]}
    direct = refused(reranker, "/rerank", 422, **body, instruction="a")
    assert refused(reranker, "/rerank", 422, **body, chat_template_kwargs={"instruction": "a"}) == direct
    wrong = refused(reranker, "/score", queries="a", documents="b", chat_template_kwargs={"other": 1})
    assert wrong["param"] == "chat_template_kwargs"


# --- pooler options -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def causal_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that classifies texts by their last token."""
    import torch
    import transformers

    folder = write_text_model(tmp_path_factory.mktemp("causal"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=Tokenizer(folder).max_token_id + 4,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    config.num_labels = 3
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "enable_chunked_prefill": True}])
def test_a_causal_classifier_judges_each_token_as_the_end_of_a_text(
    causal_classifier: Path, options: dict[str, Any]
) -> None:
    import torch
    import transformers

    reference = transformers.LlamaForSequenceClassification.from_pretrained(causal_classifier)
    with local_app(causal_classifier, **options) as (http, _):
        ids = ids_of(http, "find the water was long and see how they look")
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([ids])).last_hidden_state
            logits = reference.score(hidden)[0].float()
        for activates, expected in ((None, logits.softmax(-1)), (False, logits)):
            body = {"input": [ids, ids[:3]], "task": "token_classify", "use_activation": activates}
            rows = [np.array(row["data"]) for row in post(http, "/pooling", **body)["data"]]
            np.testing.assert_allclose(rows[0], expected.numpy(), atol=1e-5)
            np.testing.assert_allclose(rows[1], expected.numpy()[:3], atol=1e-5)
        prefix = post(http, "/classify", input=[ids[:3]])["data"][0]["probs"]
        assert prefix == pytest.approx(logits.softmax(-1)[2].tolist(), abs=1e-5)


def test_an_encoder_classifies_whole_texts_only(classifier: TestClient) -> None:
    error = refused(classifier, "/pooling", 422, input="water", task="token_classify")
    assert "its tasks are: classify" in error["message"]


def test_the_pooler_config_sets_the_task_and_the_activation(causal_classifier: Path) -> None:
    pooler = PoolerConfig(task="token_classify", use_activation=False)
    with local_app(causal_classifier, pooler_config=pooler) as (http, _):
        rows = post(http, "/pooling", input="find the water")["data"][0]["data"]
        assert len(rows) == len(ids_of(http, "find the water")) and len(rows[0]) == 3
        assert abs(sum(rows[-1]) - 1) > 1e-3
        probs = post(http, "/classify", input="find the water")["data"][0]["probs"]
        assert probs == pytest.approx(rows[-1], abs=1e-6)
        activated = post(http, "/classify", input="find the water", use_activation=True)["data"][0]["probs"]
        assert sum(activated) == pytest.approx(1)
    with (
        pytest.raises(ModelLoadError, match="names task 'sparse'"),
        local_app(causal_classifier, pooler_config=PoolerConfig(task="sparse")),
    ):
        pass


def test_the_pooler_config_turns_off_normalisation(folder: Path) -> None:
    with local_app(folder, pooler_config=PoolerConfig(use_activation=True)) as (http, _):
        unit = post(http, "/v1/embeddings", input="water")["data"][0]["embedding"]
        raw = post(http, "/v1/embeddings", input="water", use_activation=False)["data"][0]["embedding"]
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-5)
    with local_app(folder, pooler_config=PoolerConfig(use_activation=False)) as (http, _):
        assert post(http, "/v1/embeddings", input="water")["data"][0]["embedding"] == pytest.approx(raw)


def test_pooler_options_that_contradict_each_other_are_refused() -> None:
    for wrong in (
        {"normalize": True, "use_activation": False},
        {"pooling_type": "CLS", "seq_pooling_type": "CLS"},
        {"max_embed_len": 100},
    ):
        with pytest.raises(ConfigError):
            from_mapping(EngineConfig, {"pooler_config": wrong})
    named = from_mapping(EngineConfig, {"pooler_config": {"seq_pooling_type": "MEAN"}})
    assert named.pooler_config.pooling_type == "MEAN"


# --- the server ---------------------------------------------------------------------------------------------


def test_ping_and_load(http: TestClient) -> None:
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}


def test_server_info_holds_no_secret(folder: Path) -> None:
    with local_app(folder, server={"api_keys": ("hush",), "admin_keys": ("other-hush",)}) as (http, _):
        assert http.get("/server_info").status_code == 401
        answer = http.get("/server_info", headers={"Authorization": "Bearer hush"})
        assert answer.status_code == 200 and "hush" not in answer.text and str(folder) not in answer.text
        assert answer.json()["models"][0]["name"] == "model" and answer.json()["server_config"]["max_rows"]
        assert http.get("/ping").status_code == http.get("/load").status_code == 200


def test_server_info_holds_no_path_of_the_server() -> None:
    paths = ("api_key_file", "admin_key_file", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password_file")
    paths += ("ssl_ca_certs", "batch_folder", "allowed_local_media_path", "lora_root", "uds")
    urls = ("otlp_endpoint", "result_cache_redis")
    given = dict.fromkeys(paths + urls, "/srv/secret")
    assert "/srv/secret" not in str(shown(ServerConfig(**given)))


def test_tokenizer_info_needs_its_flag(folder: Path, http: TestClient) -> None:
    missing = http.get("/tokenizer_info")
    assert missing.status_code == 404 and "--enable-tokenizer-info-endpoint" in missing.text
    with local_app(folder, server={"enable_tokenizer_info_endpoint": True}) as (open_http, _):
        info = open_http.get("/tokenizer_info").json()
        assert info == {"chat_template": TEMPLATE, "tokenizer_class": "BertTokenizer"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["water"]}),
        ("/v1/embeddings", {"messages": TALK, "model": "model"}),
        ("/pooling", {"input": "water", "task": "token_embed"}),
    ],
)
def test_invocations_answer_like_the_route_that_a_body_is_for(
    http: TestClient, path: str, body: dict[str, Any]
) -> None:
    assert post(http, "/invocations", **body)["data"] == post(http, path, **body)["data"]


def test_invocations_rank_score_and_classify(reranker: TestClient, classifier: TestClient) -> None:
    ranking = {"query": "find", "documents": ["water", "oil"]}
    assert (
        post(reranker, "/invocations", **ranking)["results"]
        == post(reranker, "/rerank", **ranking)["results"]
    )
    scores = {"text_1": "find", "text_2": ["water", "oil"]}
    assert post(reranker, "/invocations", **scores)["data"] == post(reranker, "/score", **scores)["data"]
    assert post(classifier, "/invocations", input="water")["data"][0]["num_classes"] == 3


def test_invocations_refuse_what_fits_no_route(http: TestClient) -> None:
    assert "give one of messages" in refused(http, "/invocations", nothing=1)["message"]
    assert refused(http, "/invocations", input=1)["param"] == "input"
    for raw in (b"", b"[]", b"nothing", b'{"model": 3}', b"[" * 100_000):
        assert http.post("/invocations", content=raw).status_code == 400
    assert http.post("/invocations", json={"model": "other", "input": "a"}).status_code == 404
    unknown = http.post("/invocations", json={"input": "a", "unknown": 1})
    assert unknown.headers["x-ignored-fields"] == "unknown"


# --- generation ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("writer"))


@pytest.fixture
def engine(writer_folder: Path) -> ScriptedEngine:
    return ScriptedEngine(continue_with(Tokenizer(writer_folder), "the water was long", "another"))


@pytest.fixture
def writer(writer_folder: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(build_app(make_state(writer_folder, engine))) as client:
        yield client


def chat(http: TestClient, **body: Any) -> Any:
    return post(http, "/v1/chat/completions", **{"messages": TALK[:1], "max_tokens": 40, **body})


def prompt_text(http: TestClient, engine: ScriptedEngine) -> str:
    ids = engine.requests[-1].token_ids.tolist()
    return post(http, "/detokenize", tokens=ids)["prompt"]  # type: ignore[no-any-return]


def test_token_ids_are_returned_where_asked_for(writer: TestClient) -> None:
    plain, shown = chat(writer), chat(writer, return_token_ids=True)
    ids = post(writer, "/tokenize", messages=TALK[:1])["tokens"]
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
    assert shown["prompt_token_ids"] == ids
    (choice,) = shown["choices"]
    text = post(writer, "/detokenize", tokens=choice["token_ids"], skip_special_tokens=True)["prompt"]
    assert text == choice["message"]["content"]
    assert len(choice["token_ids"]) == shown["usage"]["completion_tokens"]
    prompts = ["find", "the water"]
    rows = post(writer, "/v1/completions", prompt=prompts, max_tokens=40, return_token_ids=True)["choices"]
    for row, prompt in zip(rows, prompts, strict=True):
        assert row["prompt_token_ids"] == post(writer, "/tokenize", prompt=prompt)["tokens"]
        assert row["token_ids"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_has_all_token_ids_once(writer: TestClient, path: str) -> None:
    body: dict[str, Any] = {"messages": TALK[:1]} if "chat" in path else {"prompt": "find"}
    body |= {"max_tokens": 40, "return_token_ids": True}
    whole = post(writer, path, **body)
    text = writer.post(path, json=body | {"stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if "{" in line]
    found = [i for event in events for choice in event["choices"] for i in choice.get("token_ids", ())]
    assert found == whole["choices"][0]["token_ids"]
    prompts = [event for event in events if "prompt_token_ids" in json.dumps(event)]
    assert prompts == events[:1]


@pytest.mark.parametrize(
    "body",
    [
        {"tools": None},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"functions": [], "function_call": "none"},
        {"store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"parallel_tool_calls": False, "modalities": ["text"], "verbosity": "medium"},
        {"prediction": {"type": "content", "content": "a"}, "safety_identifier": "a"},
        {"prompt_cache_key": "a", "prompt_cache_retention": "24h", "user": "me"},
        {"top_logprobs": 0, "logprobs": False, "n": None, "seed": None, "stop": None, "stop_token_ids": []},
        {"response_format": {"type": "text"}, "logit_bias": None, "bad_words": [], "reasoning_effort": "low"},
        {"use_beam_search": False, "length_penalty": 1.0, "include_reasoning": True, "vllm_xargs": {}},
    ],
)
def test_fields_without_effect_change_nothing(
    writer: TestClient, engine: ScriptedEngine, body: dict[str, Any]
) -> None:
    answer = writer.post("/v1/chat/completions", json={"messages": TALK[:1], "max_tokens": 40, **body})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    assert answer.json()["choices"][0]["message"]["content"] == "the water was long"
    assert prompt_text(writer, engine).endswith("find the water<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "a", "format": "wav"}),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("moderation", {"model": "a"}),
        ("use_beam_search", True),
        ("include_reasoning", False),
        ("thinking_token_budget", 3),
        ("logprob_token_ids", [1]),
        ("return_prompt_text", True),
        ("kv_transfer_params", {"a": 1}),
        ("vllm_xargs", {"a": 1}),
        ("structured_outputs", {"structural_tag": "a"}),
        ("response_format", {"type": "structural_tag", "format": {}}),
        ("top_logprobs", 2),
    ],
)
def test_fields_whose_effect_is_not_given_are_refused(writer: TestClient, name: str, value: Any) -> None:
    error = refused(writer, "/v1/chat/completions", messages=TALK[:1], **{name: value})
    assert error["param"] == name
    if "return_prompt_text" not in name and "tool" not in name:
        assert "supported" in error["message"] or "needs" in error["message"] or "use" in error["message"]


def test_completions_refuse_what_they_cannot_do(writer: TestClient) -> None:
    for name, value in {
        "suffix": "a",
        "prompt_embeds": "AAAA",
        "best_of": 3,
        "use_beam_search": True,
    }.items():
        assert refused(writer, "/v1/completions", prompt="find", **{name: value})["param"] == name
    answer = post(
        writer, "/v1/completions", prompt="find", suffix="", n=None, best_of=1, store=False, max_tokens=40
    )
    assert answer["choices"][0]["text"] == "the water was long"


TOOLS_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
}


def test_a_history_with_tool_calls_is_rendered_by_the_template(
    writer_folder: Path, engine: ScriptedEngine
) -> None:
    state = make_state(writer_folder, engine, {"chat_template": TOOLS_TEMPLATE})
    history = [
        *TALK[:1],
        CALLED,
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12"}]},
    ]
    with TestClient(build_app(state)) as http:
        chat(http, messages=history)
        assert prompt_text(http, engine) == '<user>find the water<assistant>f{"a": 1}<tool>12'
        refusal = [*TALK[:1], {"role": "assistant", "content": None, "refusal": "no", "tool_calls": []}]
        chat(http, messages=[*refusal, {"role": "developer", "content": "be short"}])
        assert prompt_text(http, engine) == "<user>find the water<assistant>no<system>be short"
        parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
        chat(http, messages=[{"role": "user", "content": parts}])
        assert prompt_text(http, engine) == "<user>a\nb"
        broken = {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        for wrong in (
            broken,
            {**CALLED, "tool_calls": [{"type": "custom", "custom": {}}]},
            {**CALLED, "tool_calls": 3},
            {"role": "user", "content": None},
            {"role": "function", "name": "f", "content": "12"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
            {"content": "a"},
        ):
            assert refused(http, "/v1/chat/completions", messages=[wrong])["param"] == "messages"
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        assert refused(http, "/v1/chat/completions", 422, messages=[image])["param"] == "messages"


def test_templates_get_documents_and_the_effort_of_reasoning(
    writer_folder: Path, engine: ScriptedEngine
) -> None:
    template = (
        "{{ documents | length }} {{ reasoning_effort }} {{ enable_thinking }}{{ messages[0].content }}"
    )
    state = make_state(writer_folder, engine, {"chat_template": template})
    with TestClient(build_app(state)) as http:
        chat(http, documents=[{"text": "a"}], reasoning_effort="none")
        assert prompt_text(http, engine) == "1 none Falsefind the water"
        chat(http, documents=[], reasoning_effort="high", chat_template_kwargs={"enable_thinking": 7})
        assert prompt_text(http, engine) == "0 high 7find the water"


def test_invocations_generate_where_the_model_does(writer: TestClient) -> None:
    talk = post(writer, "/invocations", messages=TALK[:1], max_tokens=40)
    assert talk["object"] == "chat.completion"
    assert post(writer, "/invocations", prompt="find", max_tokens=40)["object"] == "text_completion"
    stream = writer.post("/invocations", json={"prompt": "find", "max_tokens": 40, "stream": True})
    assert stream.text.endswith("data: [DONE]\n\n")
    assert writer.get("/server_info").json()["models"][0]["tasks"][0] == Task.GENERATE
