"""Every page opens in a real browser, without an error and without a request to another host.

The playground is tested with every kind of model. One server in this process has a small seeded model of
each.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from docs.tools.screenshots import PICTURES, SIZE, SUBJECTS, Camera, chromium, take_picture
from penstock.types import EngineSleep
from tests.api.model_server import SleepingModels, serving_models
from tests.docs.playground_page import TIMEOUT_MS, Playground
from tests.docs.stand_ins import STAND_INS
from tests.inputs.images.pictures import noise
from tests.parity.labelled import write_gliclass, write_gliner
from tests.parity.page_retrievers import native_layout
from tests.parity.qwen_vl import make_model, write_model
from tests.parity.rewards import write_reward_model
from tests.thinning import ALL_CASES

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs Debian's chromium package: apt-get install chromium"
)

TABS = {
    "prompts": ["Embed", "Search", "Tokens", "Live"],
    "clip": ["Embed", "Search", "Zero-shot", "Tokens", "Live"],
    "qwen-vl": ["Chat", "Complete", "Tokens", "Live"],
    "pages": ["Rerank", "Tokens", "Live"],
    "m3": ["Embed", "Search", "Sparse", "Tokens", "Live"],
    "splade": ["Sparse", "Tokens", "Live"],
    "cross-encoder": ["Rerank", "Tokens", "Live"],
    "colbert": ["Rerank", "Tokens", "Live"],
    "classifier": ["Classify", "Tokens", "Live"],
    "nli": ["Classify", "Zero-shot", "Tokens", "Live"],
    "tagger": ["Entities", "Tokens", "Live"],
    "llama": ["Chat", "Complete", "Tokens", "Live"],
    "gliner": ["Entities", "Tokens", "Live"],
    "gliclass": ["Zero-shot", "Tokens", "Live"],
    "reward": ["Reward", "Tokens", "Live"],
}
# Tabs of every model, and the models that test them: each kind of tokenizer, with and without generation.
COMMON = {"Tokens": {"prompts", "clip", "qwen-vl", "llama"}, "Live": {"prompts", "llama"}}
NASTY = 'It\'s "quoted", $HOME `id` \\n \\ ünï 水 🙂 %s {} <b>&amp;</b>'
MARKUP = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
KEY = "secret-key"
ADMIN_KEY = "operator"
SHORT = {  # the seeded models are limited to 64 tokens
    "Rerank": {"documents": "the water is there\nhow do they find oil\none word"},
    "Entities": {"input": "she said it to him"},
    "Complete": {"prompt": "the water"},
    "Chat": {"message": "how are they"},
}
BLOCKED = "Failed to load resource"  # the console's message about error statuses, which some tests expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api.expect.set_options(timeout=TIMEOUT_MS)
    with chromium() as found:
        yield found


@pytest.fixture
def camera(browser: Any) -> Iterator[Camera]:
    page = browser.new_page(viewport=SIZE)
    yield Camera(page)
    page.close()


@pytest.fixture
def playground(camera: Camera) -> Iterator[Playground]:
    """A page without errors, except those of requests that a test expects to be refused."""
    yield Playground(camera.page)
    assert [problem for problem in camera.problems if BLOCKED not in problem] == []


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> SleepingModels:
    return SleepingModels(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, states: SleepingModels) -> Iterator[str]:
    """The address of a server with one model of every kind, named after its kind."""
    folder = tmp_path_factory.mktemp("models")
    models = {kind: write(folder / kind) for kind, write in STAND_INS.items()}
    for kind in ("gliner", "gliclass", "reward"):
        (folder / kind).mkdir()
        models[kind] = folder / kind
    write_gliner(folder / "gliner")
    write_gliclass(folder / "gliclass")
    write_reward_model(folder / "reward", "Qwen2ForRewardModel", 1)
    models["qwen-vl"] = write_model(folder / "qwen-vl", make_model("qwen2_5_vl"))
    native_layout(folder / "pages")
    models["pages"] = folder / "pages"
    with serving_models(models, states=states, admin_keys=(ADMIN_KEY,)) as address:
        yield address


def prepare(page: Playground, tab: str) -> Playground:
    """Open a tab, and fill in texts that are short enough for the seeded models."""
    page.choose(tab).fill(**SHORT.get(tab, {}))
    if tab in ("Chat", "Complete"):
        page.open_options().fill(max_tokens="12")
    return page


def requests_of(page: Playground) -> list[Any]:
    sent: list[Any] = []
    page.page.on("request", lambda request: sent.append(request))
    return sent


def works(command: str) -> bool:
    """Whether a curl command gets a valid answer: JSON, a stream or metrics."""
    text = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    if text.startswith("{"):
        return "error" not in json.loads(text)
    return text.rstrip().endswith("data: [DONE]") or text.startswith("# HELP")


def from_module(page: Playground, name: str, function: str, given: Any) -> Any:
    """Call a JavaScript function with a module of the page and `given`; returns its result."""
    module = page.page.get_attribute("script[type=module]", "src").replace("main.js", name)
    return page.page.evaluate(
        f"([name, given]) => import(new URL(name, location.href)).then((it) => ({function})(it, given))",
        [module, given],
    )


def posted(sent: list[Any]) -> list[str]:
    return [request.url.split("/", 3)[3] for request in sent if request.method == "POST"]


# ── Every tab of every kind of model ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", TABS)
def test_every_tab_of_a_model_works(camera: Camera, playground: Playground, url: str, kind: str) -> None:
    playground.open(url, model=kind)
    assert playground.tabs == TABS[kind]
    for tab in TABS[kind]:
        if not ALL_CASES and kind not in COMMON.get(tab, {kind}):
            continue
        prepare(playground, tab) if tab != "Live" else playground.choose(tab)
        if tab == "Live":
            sync_api.expect(playground.panel.locator(".said")).to_have_text("Updated every second.")
        else:
            playground.run()
            assert playground.said != "", tab
            assert playground.results.locator(".empty").count() == 0
        assert playground.errors == []
        assert url in playground.code("python")
        assert works(playground.code("curl")), tab
        assert not playground.scrolls_sideways, tab
        playground.page.set_viewport_size({"width": 360, "height": 740})
        assert not playground.scrolls_sideways, f"{tab} on a phone"
        playground.page.set_viewport_size(SIZE)
    assert camera.problems == []


@pytest.mark.parametrize("name", ["playground-dark", "playground-phone", "playground-compare"])
def test_the_pictures_of_the_documentation_can_be_taken(
    browser: Any, url: str, tmp_path: Path, name: str
) -> None:
    """`python -m docs.tools.screenshots` takes all of them, with better models."""
    model = SUBJECTS[PICTURES[name].subject].stand_in or "prompts"
    problems = take_picture(browser, url, name, tmp_path, model)
    assert [problem for problem in problems if BLOCKED not in problem and "bytes" not in problem] == []
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


# ── What the views show ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["prompts", "cross-encoder", "colbert"])
def test_rankings_come_from_the_rerank_route(playground: Playground, url: str, kind: str) -> None:
    playground.open(url, model=kind).choose("Search" if kind == "prompts" else "Rerank")
    documents = ["the water is there", "how do they find oil", "one word"]
    sent = requests_of(playground)
    playground.fill(query="find water", documents="\n".join(documents)).run()
    assert posted(sent)[0] == "rerank" and "v1/embeddings" not in posted(sent)
    body = {"model": kind, "query": "find water", "documents": documents}
    expected = [row["index"] for row in httpx.post(url + "/rerank", json=body).json()["results"]]
    shown = playground.results.locator(".ranked li :first-child").all_inner_texts()
    assert [documents.index(text) for text in shown if text in documents] == expected


def test_the_token_map_adds_up_to_the_score(playground: Playground, url: str) -> None:
    playground.open(url, model="colbert").choose("Rerank")
    documents = ["the water, is there!", "how do they find oil?"]
    playground.fill(query="who will find water", documents="\n".join(documents)).run()
    seen = []
    for _ in range(2):
        check = playground.results.locator(".check-sum")
        found = [float(check.get_attribute(name)) for name in ("data-sum", "data-score")]
        assert found[0] == pytest.approx(found[1], rel=1e-3)
        assert "error" not in check.get_attribute("class")
        rows = playground.results.locator(".map tbody th").all_inner_texts()
        assert rows[:6] == ["[CLS]", "[Q]", "who", "will", "find", "water"] and rows[-1] == "[MASK]"
        seen.append(playground.results.locator(".map thead th span").all_inner_texts())
        other = playground.results.locator(".ranked button[aria-pressed=false]").first
        quote = playground.results.locator(".quote")
        before = quote.inner_text()
        other.click()
        sync_api.expect(quote).not_to_have_text(before)
    first, second = seen
    assert ["[CLS]", "[D]", "the", "water", "is", "there", "[SEP]"] in (first, second)  # without punctuation


def test_tokens_are_readable(playground: Playground, url: str) -> None:
    text = "The water – 水力発電 🙂👩‍👩‍👧 naïve\nnew line"
    playground.open(url, model="llama").choose("Tokens").fill(prompt=text).run()
    chips = playground.results.locator(".chip .token").all_inner_texts()
    assert "".join(chips).replace("␣", " ").replace("↵", "\n") == text
    split = playground.results.locator(".chip.split").first
    assert split.locator("small").count() > 1  # a character split into several tokens, shown with their bytes
    playground.page.select_option("#model", "classifier")
    playground.choose("Tokens").fill(prompt="finding waters").run()
    chips = playground.results.locator(".chip .token").all_inner_texts()
    assert "".join(chips) == "[CLS]findingwaters[SEP]"
    assert playground.results.locator(".chip.special").count() == 2
    assert playground.results.locator(".chip.joins").count() > 0


def test_bytes_and_spaces_of_sentence_pieces_are_read(playground: Playground, url: str) -> None:
    playground.open(url)
    tokens = ["<s>", "▁the", "▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "<0xE6>", "end"]
    groups = from_module(
        playground, "readable.js", "(module, tokens) => module.groups(tokens, 'metaspace')", tokens
    )
    assert [group["text"] for group in groups] == ["<s>", " the", " ", "🙂", "‹E6›", "end"]
    assert [len(group["tokens"]) for group in groups] == [1, 1, 1, 4, 1, 1]


def test_entities_are_marked_where_they_are(playground: Playground, url: str) -> None:
    text = "🙂🙂 she said it to him and they find oil"
    playground.open(url, model="tagger").choose("Entities").fill(input=text).run()
    answer = httpx.post(url + "/v1/entities", json={"model": "tagger", "input": [text]}).json()
    expected = [entity["text"] for entity in answer["data"][0]["entities"]]
    assert expected
    marked = playground.results.locator("mark").evaluate_all("all => all.map((m) => m.firstChild.data)")
    assert marked == expected


def test_a_conversation_streams_and_goes_on(playground: Playground, url: str) -> None:
    playground.open(url, model="llama").choose("Chat").open_options()
    sent = requests_of(playground)
    playground.fill(message="how are they", max_tokens="6").run()
    facts = playground.results.locator(".facts")
    for words in ("first token", "tokens/s", "prompt"):
        sync_api.expect(facts).to_contain_text(words)
    playground.fill(message="and then")
    playground.field("message").press("Enter")
    playground.wait()
    bodies = [request.post_data_json for request in sent if request.method == "POST"]
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert bodies[1]["stream"] is True
    assert playground.results.locator(".bubble").count() == 4
    assert json.loads(playground.code("curl").split("-d '")[1].removesuffix("'")) == bodies[1]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A file whose name needs quotes in a shell."""
    file = tmp_path / "it's a $picture.png"
    noise(60, 40).save(file)
    return file


def test_images_are_embedded_beside_texts(playground: Playground, url: str, picture: Path) -> None:
    playground.open(url, model="clip").choose("Embed").fill(input="w1\nw2")
    assert playground.panel.locator(".previews img").count() == 3  # the initial pictures
    playground.panel.get_by_role("button", name="Remove red-circle.png").click()
    playground.field("images").set_input_files(picture)
    sync_api.expect(playground.panel.locator(".previews img")).to_have_count(3)
    with playground.page.expect_response("**/v1/embeddings") as shown:
        playground.run()
    inputs = shown.value.request.post_data_json["input"]
    assert [list(each) for each in inputs] == [["text"], ["text"], ["image"], ["image"], ["image"]]
    assert playground.results.locator(".matrix th img").count() == 3
    assert playground.results.locator(".vector img").last.get_attribute("alt") == picture.name
    expected = [row["embedding"] for row in shown.value.json()["data"]]
    answer = run_bash(playground.code("curl"), folder=picture.parent)
    assert [row["embedding"] for row in answer["data"]] == expected
    program = [sys.executable, "-c", playground.code("python")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=picture.parent)
    assert done.stdout == "5 32\n"


def test_images_and_texts_are_ranked_together(playground: Playground, url: str, picture: Path) -> None:
    playground.open(url, model="clip").choose("Search").fill(documents="w1\nw2")
    playground.field("images").set_input_files(picture)
    sync_api.expect(playground.panel.locator(".previews img")).to_have_count(4)
    playground.run()
    assert playground.results.locator("ol.ranked li").count() == 6
    assert playground.results.locator("ol.ranked li img").count() == 4


def test_a_page_is_ranked_by_its_tokens_and_shown(playground: Playground, url: str, picture: Path) -> None:
    playground.open(url, model="pages").choose("Rerank").fill(documents="")
    playground.field("images").set_input_files(picture)
    sync_api.expect(playground.panel.locator(".previews img")).to_have_count(4)
    playground.run()
    assert playground.errors == []
    assert playground.results.locator("ol.ranked li button img").count() == 4
    sync_api.expect(playground.results.locator(".card", has_text="Image")).to_be_visible()


def test_a_chat_message_has_images(playground: Playground, url: str, picture: Path) -> None:
    playground.open(url, model="qwen-vl").choose("Chat").open_options()
    sent = requests_of(playground)
    playground.field("images").set_input_files(picture)
    sync_api.expect(playground.panel.locator(".previews img")).to_have_count(1)
    playground.fill(message="yes no", max_tokens="4").run()
    assert playground.panel.locator(".previews img").count() == 0  # the next message starts without pictures
    assert playground.results.locator(".bubble.user img").get_attribute("alt") == picture.name
    playground.fill(message="yes").run()
    bodies = [request.post_data_json for request in sent if request.method == "POST"]
    parts = [part["type"] for part in bodies[0]["messages"][0]["content"]]
    assert parts == ["image_url", "text"]
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]  # the conversation keeps it
    assert bodies[1]["messages"][2] == {"role": "user", "content": "yes"}


def test_a_file_that_is_no_image_is_refused_in_words(
    playground: Playground, url: str, tmp_path: Path
) -> None:
    file = tmp_path / "notes.png"
    file.write_bytes(b"these are notes")
    playground.open(url, model="clip").choose("Embed")
    playground.field("images").set_input_files(file)
    sync_api.expect(playground.panel.locator(".previews img")).to_have_count(4)
    playground.run()
    assert len(playground.errors) == 1 and "image" in playground.errors[0]


def test_the_live_view_shows_the_load_and_rests_when_it_is_closed(
    playground: Playground, url_of: Callable[[str | None], str]
) -> None:
    address = url_of(None)
    playground.page.clock.install()
    playground.open(address).choose("Live")
    sent = requests_of(playground)

    def polled() -> int:
        return sum(request.url.endswith("/metrics") for request in sent)

    requests = playground.page.locator("#live-requests b")
    with playground.page.expect_response("**/metrics"):
        playground.page.clock.run_for(100)
    for _ in range(30):
        httpx.post(address + "/v1/embeddings", json={"input": ["one", "two"]})
        with playground.page.expect_response("**/metrics"):
            playground.page.clock.run_for(1100)
        if requests.inner_text() not in ("–", "0"):
            break
    assert requests.inner_text() not in ("–", "0")
    assert playground.page.locator("#live .spark").count() == 9
    for name in ("tokens", "queue", "running", "fill"):
        assert playground.page.locator(f"#live-{name} b").inner_text() != "–"
    playground.choose("Tokens")
    playground.page.wait_for_load_state("networkidle")
    before = polled()
    playground.page.clock.run_for(10_000)
    assert polled() == before


# ── Several models ────────────────────────────────────────────────────────────────────────────────


def test_models_stand_side_by_side(playground: Playground, url: str) -> None:
    playground.open(url, model="prompts")
    playground.page.click("#compare-toggle")
    for other in ("m3", "classifier"):
        playground.page.check(f"#compare input[value='{other}']")
    playground.choose("Search").fill(query="find water", documents="the water\none word").run()
    titles = playground.results.locator(".column > .model").all_inner_texts()
    assert titles == ["prompts", "m3", "classifier"]
    columns = playground.results.locator(".column")
    assert [columns.nth(place).locator(".ranked li").count() for place in range(3)] == [2, 2, 0]
    assert playground.errors == ["classifier cannot do this."]
    playground.page.set_viewport_size({"width": 360, "height": 740})
    assert not playground.scrolls_sideways


def test_other_names_of_a_model_are_not_other_models(playground: Playground, url: str) -> None:
    def answer(route: Any) -> None:
        body = route.fetch().json()
        first = next(entry for entry in body["data"] if entry["id"] == "prompts")
        route.fulfill(json={**body, "data": [first, {**first, "id": "alias"}]})

    playground.page.route("**/v1/models", answer)
    playground.open(url)
    assert playground.page.locator("#model option").all_inner_texts() == ["prompts"]
    assert playground.page.locator("#model").is_hidden()
    assert playground.page.locator("#model-name").inner_text() == "prompts"


def test_what_only_other_models_can_do_is_a_click_away(playground: Playground, url: str) -> None:
    page = playground.open(url, model="prompts").page
    others = page.locator("#elsewhere button").all_inner_texts()
    assert {"Chat", "Rerank", "Classify"} <= set(others) and not {"Embed", "Tokens"} & set(others)
    page.locator("#elsewhere button", has_text="Chat").click()
    assert playground.tabs == TABS["llama"] and page.url.endswith("#chat/llama")
    page.reload()
    page.locator("[role=tab]").first.wait_for()
    assert playground.tabs == TABS["llama"]
    playground.page.select_option("#model", "prompts")
    playground.choose("Embed").fill(input="my own text")
    for other in ("classifier", "m3"):  # a model without the tab, then one with it
        page.select_option("#model", other)
    assert playground.field("input").input_value() == "my own text"
    page.goto(f"{url}/#classify")
    sync_api.expect(page.locator("#model")).to_have_value("nli")


def test_the_page_says_that_a_model_wakes(playground: Playground, url: str, states: SleepingModels) -> None:
    states.set("llama", EngineSleep.ASLEEP)
    page = playground.open(url, model="prompts", tab="Embed").page
    assert "llama · asleep" in page.locator("#model option").all_inner_texts()
    states.set("llama", EngineSleep.AWAKE)
    states.set("prompts", EngineSleep.WAKING)  # after the page has fetched the state
    held: list[Any] = []
    page.route("**/v1/embeddings", lambda route: held.append(route))
    said, badge = playground.panel.locator(".said"), page.locator("#model-state")
    playground.panel.locator("button.main").click()
    sync_api.expect(said).to_have_text("waking prompts …")
    sync_api.expect(badge).to_have_text("waking")
    states.set("prompts", EngineSleep.AWAKE)
    sync_api.expect(badge).to_have_text("awake")
    sync_api.expect(said).to_have_text("")
    error = {"message": "prompts did not wake in 30 s", "type": "server_error"}
    held[0].fulfill(status=503, json={"error": error}, headers={"retry-after": "5"})
    playground.wait()
    assert playground.errors == ["503 prompts did not wake in 30 s. Try again in 5 s."]


def test_an_operator_has_models_sleep_and_wake(playground: Playground, url: str) -> None:
    page = playground.open(url, tab="Live").page
    rows, buttons = page.locator("#live-models tbody tr"), page.locator("#live-models button:visible")
    sync_api.expect(rows).to_have_count(len(TABS))

    def use_key(key: str) -> None:
        page.click("#key-toggle")
        page.fill("#key", key)
        page.click("#key-form button")

    use_key("wrong")
    sync_api.expect(playground.panel.locator(".ordered")).to_have_text("The server does not know this key.")
    assert buttons.count() == 0
    use_key(ADMIN_KEY)
    sync_api.expect(buttons).to_have_count(len(TABS))
    row = rows.filter(has=page.get_by_role("rowheader", name="llama", exact=True))
    for order, state in (("Sleep", "asleep"), ("Wake", "awake")):
        row.get_by_role("button", name=f"{order} llama").click()
        sync_api.expect(row.locator(".badge")).to_have_text(state)
        sync_api.expect(playground.panel.locator(".ordered")).to_have_text(f"llama is {state}, after 0.1 s.")
    assert playground.errors == []
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
    page.set_viewport_size({"width": 360, "height": 740})
    assert not playground.scrolls_sideways


def test_the_load_of_each_model_is_told_apart(playground: Playground, url: str) -> None:
    text = """penstock_queue_rows{model="a"} 3.0
penstock_queue_rows{model="b \\"x\\""} 4.0
penstock_queue_wait_seconds{kind="small",model="a"} 1.0
penstock_queue_wait_seconds{kind="large",model="a"} 2.0"""
    function = """({ parseMetrics }, text) => {
      const { total, of } = parseMetrics(text);
      const rows = "penstock_queue_rows", wait = "penstock_queue_wait_seconds";
      return [total.get(rows), of("a").get(rows), of('b "x"').get(rows), of("a").get(wait), of("c").size];
    }"""
    assert from_module(playground.open(url), "live.js", function, text) == [7, 3, 4, 3, 0]


# ── Errors, keys, hostile texts ───────────────────────────────────────────────────────────────────


def test_no_result_stands_beside_an_error(playground: Playground, url: str) -> None:
    playground.open(url, model="prompts").choose("Embed").run()
    assert playground.results.locator(".matrix").count() == 1
    playground.open_options().fill(dimensions="9999").run()
    (error,) = playground.errors
    assert error.startswith("400 · dimensions")
    assert playground.field("dimensions").get_attribute("aria-invalid") == "true"
    assert playground.results.locator(".matrix, .timing").count() == 0
    assert playground.said == ""
    playground.fill(dimensions="").run()
    assert playground.errors == [] and playground.results.locator(".matrix").count() == 1
    playground.fill(input="").run()
    assert playground.errors == ["input Give at least one text."]
    assert playground.results.locator(".matrix").count() == 0


def test_a_late_answer_does_not_replace_a_newer_one(playground: Playground, url: str) -> None:
    held: list[Any] = []

    def hold_first(route: Any) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    playground.open(url, model="prompts").choose("Embed").fill(input="one\ntwo\nthree")
    playground.page.route("**/v1/embeddings", hold_first)
    with playground.page.expect_request("**/v1/embeddings"):
        playground.panel.locator("button.main").click()
    with playground.page.expect_event("requestfailed"):  # the page cancels the first request
        playground.fill(input="one").run()
    assert playground.said == "1 vector"
    assert playground.results.locator(".vector").count() == 1


def test_a_request_can_be_stopped(playground: Playground, url: str) -> None:
    playground.open(url, model="prompts").choose("Embed")
    playground.page.route("**/v1/embeddings", lambda route: None)  # never answered
    playground.panel.locator("button.main").click()
    playground.panel.get_by_role("button", name="Stop").click()
    playground.wait()
    assert playground.said == "Stopped." and playground.errors == []


def test_a_server_with_a_key_asks_for_it(
    playground: Playground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_models({"bert": STAND_INS["prompts"](tmp_path / "bert")}, api_keys=(KEY,)) as address:
        page = playground.page
        page.goto(address + "/")
        page.locator("#key-form").wait_for()
        assert playground.errors == ["This server needs an API key."]
        for given in ("wrong", KEY):
            page.fill("#key", given)
            with page.expect_response("**/v1/models"):
                page.click("#key-form button")
            if given == "wrong":
                sync_api.expect(page.locator("#key-error")).to_contain_text("401")
        page.locator("[role=tab]").first.wait_for()
        assert page.locator("#key-form").is_hidden()
        playground.run()
        assert playground.errors == [] and playground.said != ""
        command = playground.code("curl")
        assert KEY not in command and "$PENSTOCK_API_KEY" in command
        monkeypatch.setenv("PENSTOCK_API_KEY", KEY)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert "data" in json.loads(done.stdout)
        assert page.evaluate("localStorage.length") == 0
        playground.open(address)  # the key is stored for this browser tab
        assert playground.errors == []
        page.evaluate("sessionStorage.clear()")
        playground.open_without_tabs(address)
        assert playground.errors == ["This server needs an API key."]


def test_texts_and_names_are_never_markup(playground: Playground, url: str) -> None:
    def answer(route: Any) -> None:
        body = route.fetch().json()
        for entry in body["data"]:
            entry["labels"] = [MARKUP] * len(entry["labels"])
        body["data"].append({**body["data"][0], "id": MARKUP, "root": MARKUP, "prompts": {MARKUP: MARKUP}})
        route.fulfill(json=body)

    playground.page.route("**/v1/models", answer)
    playground.open(url, model="classifier").choose("Classify").fill(input=MARKUP[:40]).run()
    assert MARKUP in playground.results.locator(".bars").first.inner_text()
    playground.choose("Tokens").fill(prompt=MARKUP).run()
    playground.page.select_option("#model", "prompts")
    playground.choose("Embed").fill(input="<img src=x onerror=alert(1)>\nb").run()
    playground.choose("Search").fill(query="<b>b</b>", documents="<img src=x>\n<b>a").run()
    playground.page.select_option("#model", "tagger")
    playground.choose("Entities").fill(input="<img src=x onerror=a>").run()
    assert playground.page.locator("main img, main script, main b b").count() == 0
    assert playground.page.title() == "Penstock playground"


def test_the_policy_of_the_page_forbids_other_hosts_and_inline_scripts(url: str) -> None:
    policy = httpx.get(url + "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


# ── Code ──────────────────────────────────────────────────────────────────────────────────────────


def run_bash(command: str, folder: Path | None = None) -> Any:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=folder)
    return json.loads(done.stdout)


def test_the_curl_command_sends_what_is_on_screen(playground: Playground, url: str) -> None:
    playground.open(url, model="llama").choose("Tokens").fill(prompt=f"{NASTY}\nsecond 'line'\t")
    with playground.page.expect_response("**/tokenize") as shown:
        playground.panel.locator("button.main").click()
    expected = shown.value.json()
    assert run_bash(playground.code("curl"))["tokens"] == expected["tokens"]
    program = playground.code("python")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert str(expected["tokens"]) in done.stdout
    playground.choose("Complete").fill(prompt=f"{NASTY} 'x'")
    playground.open_options().fill(max_tokens="3")
    command = playground.code("curl")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("data: {") and done.stdout.rstrip().endswith("data: [DONE]")
    playground.page.select_option("#model", "prompts")
    playground.choose("Embed").fill(input='It\'s\nsaid "so"').open_options().fill(dimensions="8")
    answer = run_bash(playground.code("curl"))
    assert [len(row["embedding"]) for row in answer["data"]] == [8, 8]
    program = playground.code("python")
    assert "from openai import OpenAI" in program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2 8\n"


# ── For everybody ─────────────────────────────────────────────────────────────────────────────────


def test_the_keyboard_is_enough(playground: Playground, url: str) -> None:
    playground.open(url, model="prompts")
    first, second = playground.page.locator("[role=tab]").all()[:2]
    first.focus()
    playground.page.keyboard.press("ArrowRight")
    sync_api.expect(second).to_be_focused()
    sync_api.expect(second).to_have_attribute("aria-selected", "true")
    playground.page.keyboard.press("Home")
    sync_api.expect(first).to_be_focused()
    playground.field("input").press("Control+Enter")
    sync_api.expect(playground.results.locator(".matrix")).to_be_visible()
    playground.page.goto(f"{url}/#tokens")
    playground.page.reload()
    sync_api.expect(playground.page.get_by_role("tab", name="Tokens")).to_have_attribute(
        "aria-selected", "true"
    )


@pytest.mark.parametrize("kind", ["prompts", "nli", "llama"])
def test_every_field_has_a_label(playground: Playground, url: str, kind: str) -> None:
    playground.open(url, model=kind)
    unnamed = playground.page.locator("input, select, textarea").evaluate_all(
        "all => all.filter((f) => !f.labels.length && !f.getAttribute('aria-label')).map((f) => f.outerHTML)"
    )
    assert unnamed == []


CONTRAST = """(selectors) => {
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const solid = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  return selectors.map((selector) => {
    const node = document.querySelector(selector);
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(solid(node))].sort((x, y) => y - x);
    return [selector, (a + 0.05) / (b + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_colour_schemes(playground: Playground, url: str, scheme: str) -> None:
    playground.page.emulate_media(color_scheme=scheme)
    playground.open(url, model="prompts").choose("Embed").run()
    selectors = [
        "h1",
        ".about",
        "#model-facts",
        ".timing p",
        ".legend",
        "button.main",
        "pre",
        ".vector small",
    ]
    selectors += [
        "#model-state",
        "#elsewhere",
        "#elsewhere button",
        "[role=tab][aria-selected=false]",
        "label",
        ".said",
        "textarea",
        "nav a",
    ]
    ratios = dict(playground.page.evaluate(CONTRAST, selectors))
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
    background = playground.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(14, 21, 27)") is (scheme == "dark")


def test_every_kind_of_model_is_tried() -> None:
    assert set(TABS) >= set(STAND_INS)
