"""Images in the bodies of every dialect: vectors, rankings, chat and refusals."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from starlette.testclient import TestClient

from penstock.api.images import uploaded_files
from penstock.batches.records import FileRecord
from penstock.batches.store import BatchStore
from penstock.errors import NotFound
from penstock.inputs.images.sources import ImageSources
from tests.api.local_app import CountingClient, WholeClient, local_app
from tests.checkpoints import write_bert
from tests.inputs.images.pictures import encoded, noise, png_header
from tests.parity.dual import CLIP, DualReference
from tests.parity.embedding_gemma2 import CASES as GEMMA_CASES
from tests.parity.pages import CASES as PAGE_CASES
from tests.parity.qwen_vl import config_of, make_model, write_files, write_model
from tests.parity.reference import randomise

PICTURES = [noise(40, 30), noise(21, 50, seed=3)]
FILES = [encoded(picture) for picture in PICTURES]
GEMMA = GEMMA_CASES[0]
BASE64 = [base64.b64encode(file).decode() for file in FILES]
URIS = [f"data:image/png;base64,{text}" for text in BASE64]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DualReference]:
    folder = tmp_path_factory.mktemp("clip")
    return folder, CLIP.write(folder)


@pytest.fixture(scope="module")
def http(clip: tuple[Path, DualReference], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    media = tmp_path_factory.mktemp("media")
    (media / "a.png").write_bytes(FILES[0])
    options = {
        "allowed_local_media_path": str(media),
        "max_image_pixels": 5000,
        "limit_mm_per_prompt": {"image": 3},
    }
    with local_app(clip[0], dtype="float32", server=options) as (client, _):
        client.media = media  # type: ignore[attr-defined]
        yield client


@pytest.fixture(scope="module")
def large_images(clip: tuple[Path, DualReference]) -> Iterator[TestClient]:
    """The same model with a server's default limits."""
    with local_app(clip[0], dtype="float32") as (client, _):
        yield client


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = write_model(tmp_path_factory.mktemp("qwen") / "model", make_model("qwen3_vl"))
    with local_app(folder, dtype="float32", client=WholeClient, enable_generation=True) as (client, _):
        yield client


def vectors(http: TestClient, path: str, **body: Any) -> np.ndarray:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    if "embeddings" in content:
        return np.array(content["embeddings"]["float"])
    return np.array([item["embedding"] for item in content["data"]])


def refused(http: TestClient, path: str, status: int = 400, **body: Any) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.text


def content(*parts: Any) -> dict[str, Any]:
    return {"content": list(parts)}


def url_part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def test_every_dialect_gives_the_vectors_of_the_reference(
    http: TestClient, clip: tuple[Path, DualReference]
) -> None:
    images, texts = clip[1].images(PICTURES), clip[1].texts(["w1 w2"])
    both = np.concatenate([images, texts])
    given = [{"image": URIS[0]}, {"image": BASE64[1]}, {"text": "w1 w2"}]
    assert np.abs(vectors(http, "/v1/embeddings", input=given) - both).max() < 1e-5
    cohere = vectors(http, "/v2/embed", images=URIS, input_type="image", embedding_types=["float"])
    assert np.abs(cohere - images).max() < 1e-5
    inputs = [
        content(url_part(URIS[0])),
        content(url_part(URIS[1])),
        content({"type": "text", "text": "w1 w2"}),
    ]
    mixed = vectors(http, "/v2/embed", inputs=inputs, input_type="image", embedding_types=["float"])
    assert np.abs(mixed - both).max() < 1e-5
    infinity = vectors(http, "/embeddings", input=URIS, modality="image")
    assert np.abs(infinity - images).max() < 1e-5
    segments = [
        content({"type": "image_base64", "image_base64": URIS[0]}),
        content({"type": "image_url", "image_url": URIS[1]}),
        content({"type": "text", "text": "w1 w2"}),
    ]
    answer = http.post("/v1/multimodalembeddings", json={"inputs": segments})
    voyage = np.array([item["embedding"] for item in answer.json()["data"]])
    assert np.abs(voyage - both).max() < 1e-5
    assert answer.json()["usage"]["image_pixels"] == 40 * 30 + 21 * 50


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_coheres_billed_units_count_images_where_there_are_any(http: TestClient, version: str) -> None:
    def billed(**body: Any) -> dict[str, int]:
        answer = http.post(f"/{version}/embed", json={"embedding_types": ["float"], **body})
        units: dict[str, int] = answer.json()["meta"]["billed_units"]
        return units

    assert billed(images=URIS, input_type="image")["images"] == len(URIS)
    text = content({"type": "text", "text": "w1 w2"})
    assert billed(inputs=[text, content(url_part(URIS[0]))])["images"] == 1
    assert "images" not in billed(texts=["w1 w2"])


def test_files_below_the_allowed_folder_are_read_and_others_are_not(http: TestClient) -> None:
    media = http.media  # type: ignore[attr-defined]
    by_file = vectors(http, "/v1/embeddings", input=[{"image": f"file://{media}/a.png"}])
    assert np.array_equal(by_file, vectors(http, "/v1/embeddings", input=[{"image": URIS[0]}]))
    message = refused(http, "/v1/embeddings", input=[{"image": f"file://{media}/../b.png"}])
    assert "not below --allowed-local-media-path" in message


def test_bad_images_are_refused_with_their_field(http: TestClient) -> None:
    bad = {
        "data:image/jpeg;base64," + base64.b64encode(encoded(noise(60, 60), "JPEG")[:500]).decode(): "broken",
        "data:image/png;base64," + base64.b64encode(encoded(noise(100, 60))).decode(): "100 × 60 pixels",
        "https://example.com/a.png": "--allowed-media-domains",
        "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(): "SVG",
        "": "data URI",
    }
    for source, words in bad.items():
        assert words in refused(http, "/v1/embeddings", input=[{"image": source}]), source
    many = [content(*[url_part(URIS[0])] * 4)]
    assert "has 4 images; the server accepts 3" in refused(
        http, "/v2/embed", inputs=many, embedding_types=["float"]
    )
    both = [{"image": URIS[0], "text": "w1"}]
    assert "a text or an image, not both" in refused(http, "/v1/embeddings", input=both)


JPEG = encoded(noise(300, 200), "JPEG")
UNUSABLE: dict[str, tuple[Any, str]] = {
    "a truncated jpeg": (JPEG[: len(JPEG) // 2], "cut off or broken"),
    "a truncated jpeg header": (JPEG[:20], "header is broken|unknown type"),
    "a png bomb": (png_header(30_000, 30_000), "max-image-pixels"),
    "an animated gif": (
        encoded(noise(30, 20), "GIF", save_all=True, append_images=[noise(30, 20, seed=1)]),
        "GIF has more than one frame",
    ),
    "no bytes": (b"", "0 bytes|is empty|data URI"),
    "an svg": (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    "a pdf": (b"%PDF-1.7 ...", "PDF document"),
    "text": (b"this is no image at all", "unknown type"),
    "no base64": ("data:image/png;base64,%%%", "base64"),
    "a number": (7, "image"),
}


def as_uri(data: Any) -> Any:
    """The bytes of a file as a data URI that claims to be a PNG; other values unchanged."""
    if not isinstance(data, bytes):
        return data
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_image_is_an_error_of_its_request_in_every_dialect(
    large_images: TestClient, qwen: TestClient, name: str
) -> None:
    data, words = UNUSABLE[name]
    uri = as_uri(data)
    messages = [{"role": "user", "content": [url_part(uri), {"type": "text", "text": "what?"}]}]
    for client, path, body in (
        (large_images, "/v1/embeddings", {"input": [{"image": URIS[0]}, {"image": uri}]}),
        (large_images, "/v2/embed", {"inputs": [content(url_part(uri))], "embedding_types": ["float"]}),
        (large_images, "/rerank", {"query": "w1", "documents": [{"image": uri}]}),
        (
            large_images,
            "/v1/multimodalembeddings",
            {"inputs": [content({"type": "image_url", "image_url": uri})]},
        ),
        (qwen, "/v1/embeddings", {"messages": messages}),
        (qwen, "/v1/chat/completions", {"messages": messages, "max_tokens": 2}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 or (answer.status_code == 422 and uri == 7), (path, answer.text)
        assert re.search(words, answer.text), (path, answer.text)
    assert np.abs(vectors(large_images, "/v1/embeddings", input=[{"image": URIS[0]}])).max() > 0  # still up


def test_unusual_image_formats_are_decoded_as_displayed(
    large_images: TestClient, clip: tuple[Path, DualReference]
) -> None:
    """CMYK, alpha, palette, grey and rotated images: the vector is that of the displayed image."""
    picture = noise(48, 32)
    cmyk, clear = picture.convert("CMYK"), noise(48, 32, "RGBA", seed=5)
    on_white = Image.new("RGBA", clear.size, "white")
    on_white.alpha_composite(clear)
    turned = Image.Exif()
    turned[0x0112] = 6  # Exif orientation: rotate by 90 degrees
    given = {
        encoded(cmyk, "TIFF"): cmyk.convert("RGB"),
        encoded(clear): on_white.convert("RGB"),
        encoded(picture.convert("P")): picture.convert("P").convert("RGB"),
        encoded(picture.convert("L")): picture.convert("L").convert("RGB"),
        encoded(picture, "PNG", exif=turned): picture.transpose(Image.Transpose.ROTATE_270),
        encoded(picture, "GIF"): Image.open(BytesIO(encoded(picture, "GIF"))).convert("RGB"),
    }
    got = vectors(large_images, "/v1/embeddings", input=[{"image": as_uri(data)} for data in given])
    assert np.abs(got - clip[1].images(list(given.values()))).max() < 1e-5


def test_documents_and_queries_of_rankings_may_be_images(
    http: TestClient, clip: tuple[Path, DualReference]
) -> None:
    scores = clip[1].texts(["w1 w2"])[0] @ clip[1].images(PICTURES).T
    for documents in ([content(url_part(uri)) for uri in URIS], [{"image": uri} for uri in URIS]):
        answer = http.post("/rerank", json={"query": "w1 w2", "documents": documents})
        assert answer.status_code == 200, answer.text
        got = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
        assert np.abs(np.array([got[0], got[1]]) - scores).max() < 1e-5
    answer = http.post("/score", json={"queries": content(url_part(URIS[0])), "documents": ["w1 w2", "w4"]})
    assert answer.status_code == 200, answer.text
    wanted = clip[1].images(PICTURES[:1])[0] @ clip[1].texts(["w1 w2", "w4"]).T
    assert np.abs(np.array([row["score"] for row in answer.json()["data"]]) - wanted).max() < 1e-5


def test_a_conversation_is_a_text_or_an_image_where_each_has_a_tower(
    clip: tuple[Path, DualReference],
) -> None:
    contents = "{%- for message in messages -%}{{- message['content'] -}}{%- endfor -%}"
    options = {"chat_template": contents, "trust_request_chat_template": True}
    text = {"type": "text", "text": "w1 w2"}

    def talk(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}]

    with local_app(clip[0], dtype="float32", server=options) as (client, _):
        given = [talk(url_part(URIS[0])), talk(text)]
        both = vectors(client, "/v1/embeddings", messages=given, add_special_tokens=True)
        wanted = np.concatenate([clip[1].images(PICTURES[:1]), clip[1].texts(["w1 w2"])])
        assert np.abs(both - wanted).max() < 1e-5
        bad = {
            "the text 'w1 w2' with an image": {"messages": talk(url_part(URIS[0]), text)},
            "2 images": {"messages": talk(url_part(URIS[0]), url_part(URIS[1]))},
            "the text 'User:'": {"messages": talk(url_part(URIS[0])), "chat_template": "User:" + contents},
        }
        for words, body in bad.items():
            assert words in refused(client, "/v1/embeddings", **body), words


def test_messages_with_images_are_rendered_by_the_chat_template(qwen: TestClient) -> None:
    def embed(*parts: Any) -> np.ndarray:
        return vectors(qwen, "/v1/embeddings", messages=[{"role": "user", "content": list(parts)}])[0]

    text = {"type": "text", "text": "what is it?"}
    first, again = embed(url_part(URIS[0]), text), embed({"type": "image", "image": BASE64[0]}, text)
    assert np.abs(first - again).max() < 1e-6
    assert np.abs(first - embed(text, url_part(URIS[0]))).max() > 1e-4
    assert np.abs(first - embed(url_part(URIS[1]), text)).max() > 1e-4
    pooled = qwen.post(
        "/pooling",
        json={"messages": [{"role": "user", "content": [url_part(URIS[0]), text]}], "task": "embed"},
    )
    assert np.abs(np.array(pooled.json()["data"][0]["data"]) - first).max() < 1e-6
    claims = [{"role": "user", "content": [url_part(URIS[0]), {"type": "text", "text": "<|image_pad|>"}]}]
    assert "times for 1 images" in refused(qwen, "/v1/embeddings", messages=claims)


def test_messages_are_inputs_where_the_model_has_no_chat_template(
    http: TestClient, clip: tuple[Path, DualReference]
) -> None:
    """vLLM's clients send messages to CLIP in this form."""

    def talk(*parts: Any) -> list[Any]:
        return [{"role": "user", "content": list(parts)}]

    text = {"type": "text", "text": "w1 w2"}
    given = [talk(url_part(URIS[0])), talk(text), [{"role": "user", "content": "w4"}]]
    wanted = np.concatenate([clip[1].images(PICTURES[:1]), clip[1].texts(["w1 w2", "w4"])])
    assert np.abs(vectors(http, "/v1/embeddings", messages=given) - wanted).max() < 1e-5
    one = vectors(http, "/v1/embeddings", messages=given[0], add_special_tokens=False)
    assert np.abs(one[0] - wanted[0]).max() < 1e-5
    assert "not both in one" in refused(http, "/v1/embeddings", messages=talk(url_part(URIS[0]), text))
    for messages in ([*given[1], *given[1]], [{"role": "assistant", "content": "w4"}], [[]]):
        assert "one message of the role 'user'" in refused(http, "/v1/embeddings", messages=messages)


def test_options_of_the_image_processor_are_refused(qwen: TestClient) -> None:
    """Such options change the model's input."""
    messages = [{"role": "user", "content": [url_part(URIS[0])]}]
    for path in ("/v1/embeddings", "/v1/chat/completions"):
        options = {"max_pixels": 100}
        message = refused(qwen, path, messages=messages, mm_processor_kwargs=options)
        assert "mm_processor_kwargs is not supported" in message
        assert qwen.post(path, json={"messages": messages, "mm_processor_kwargs": {}}).status_code == 200


def test_chat_answers_about_images(qwen: TestClient) -> None:
    def chat(uri: str) -> str:
        messages = [{"role": "user", "content": [url_part(uri), {"type": "text", "text": "what?"}]}]
        body = {"messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True}
        answer = qwen.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return repr([round(token["logprob"], 4) for token in choice["logprobs"]["content"]])

    assert chat(URIS[0]) == chat(URIS[0]) != chat(URIS[1])


def test_a_model_of_texts_refuses_images(tmp_path: Path) -> None:
    with local_app(write_bert(tmp_path)) as (client, _):
        for path, body in (
            ("/v1/embeddings", {"input": [{"image": URIS[0]}]}),
            ("/v2/embed", {"images": URIS, "embedding_types": ["float"]}),
            ("/embeddings", {"input": URIS, "modality": "image"}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code in (400, 422)  # depends on the dialect
            assert "reads texts, not images" in answer.text


def test_an_uploaded_file_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    store.upload_path("file-1").write_bytes(FILES[0])
    store.add_upload(
        FileRecord(
            id="file-1", owner="anna", bytes=len(FILES[0]), created_at=0, filename="a.png", purpose="vision"
        )
    )
    for owner in ("anna", "ben"):
        state = SimpleNamespace(batches=SimpleNamespace(store=store))
        find = uploaded_files(SimpleNamespace(state=state, key=SimpleNamespace(name=owner)))  # type: ignore[arg-type]
        assert find is not None
        if owner == "anna":
            assert ImageSources().read("file-1", find) == FILES[0]
        else:
            with pytest.raises(NotFound):
                ImageSources().read("file-1", find)
    store.close()
    assert uploaded_files(SimpleNamespace(state=SimpleNamespace(batches=None), key=None)) is None  # type: ignore[arg-type]


def test_cached_results_tell_images_apart(clip: tuple[Path, DualReference]) -> None:
    class Client(CountingClient):
        revision = "first"

    with local_app(clip[0], dtype="float32", client=Client, server={"result_cache_mb": 8}) as (http, engine):
        first = vectors(http, "/v1/embeddings", input=[{"image": URIS[0]}, {"image": URIS[1]}])
        again = vectors(http, "/v1/embeddings", input=[{"image": URIS[1]}, {"image": URIS[0]}])
        assert len(engine.requests) == 1
    assert np.array_equal(first, again[::-1]) and not np.array_equal(first[0], first[1])


def test_embeddinggemma_reads_images_and_texts_in_one_input(tmp_path: Path) -> None:
    reference = GEMMA.write(tmp_path)
    with local_app(tmp_path, dtype="float32") as (http, _):
        apart = vectors(http, "/v1/embeddings", input=[{"image": URIS[0]}, {"text": "a cat"}])
        segments = [{"type": "text", "text": "a cat: "}, {"type": "image_base64", "image_base64": URIS[1]}]
        answer = http.post("/v1/multimodalembeddings", json={"inputs": [content(*segments)]})
        assert answer.status_code == 200, answer.text
        both = np.array(answer.json()["data"][0]["embedding"])
    for got, parts in (
        (apart[0], [PICTURES[0]]),
        (apart[1], ["a cat"]),
        (both, ["a cat: ", PICTURES[1]]),
    ):
        assert float(got @ reference.vector(parts)) / float(np.linalg.norm(got)) > 0.9999


def write_colqwen(folder: Path) -> None:
    config = transformers.ColQwen2Config(vlm_config=config_of("qwen2_vl").to_dict(), embedding_dim=16)
    model = transformers.ColQwen2ForRetrieval(config).eval()
    randomise(model, 4)
    model.save_pretrained(folder)
    write_files(folder)


RETRIEVERS: dict[str, Callable[[Path], object]] = {
    "colqwen": write_colqwen,
    **{case.name: case.write for case in PAGE_CASES},
}


@pytest.mark.parametrize("name", RETRIEVERS)
def test_pages_are_ranked_by_maxsim(name: str, tmp_path: Path) -> None:
    RETRIEVERS[name](tmp_path)
    with local_app(tmp_path, dtype="float32") as (http, _):

        def token_vectors(given: Any, input_type: str) -> np.ndarray:
            body = {"input": [given], "return_multivector": True, "input_type": input_type}
            answer = http.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            return np.array(answer.json()["data"][0]["embeddings"])

        query = token_vectors({"text": "what is it?"}, "query")
        pages = [token_vectors({"image": uri}, "document") for uri in URIS]
        expected = [(query @ page.T).max(axis=1).sum() for page in pages]
        answer = http.post(
            "/rerank", json={"query": "what is it?", "documents": [{"image": uri} for uri in URIS]}
        )
        assert answer.status_code == 200, answer.text
        got = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
        assert np.abs(np.array([got[0], got[1]]) - expected).max() < 1e-3
