"""Flags that users copy from vLLM's and TEI's scripts, underscores in flags, and `--config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from docs.tools.reference import RENDERERS
from penstock.checkpoint.describe import describe
from penstock.cli import serve as serving
from penstock.cli.command import plain_flags
from penstock.cli.foreign import FOREIGN_FLAGS, ForeignFlag, Given
from penstock.cli.main import app
from penstock.cli.serve import check_tasks, read_environment
from penstock.config import EngineConfig, ServerConfig
from penstock.errors import ConfigError, ModelLoadError
from penstock.serving import model_settings
from penstock.serving.model_settings import model_config
from tests.checkpoints import write_bert
from tests.command_line import CliRunner, get_command

Serve = Callable[..., tuple[EngineConfig, ServerConfig]]


class Stop(Exception):
    pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run `penstock serve` until its configurations are built, and return them."""
    for name in ("MODEL_ID", "PORT", "VLLM_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str, env: dict[str, str] | None = None) -> tuple[EngineConfig, ServerConfig]:
        made: list[Any] = []

        def keep(settings: Mapping[str, Any], server: ServerConfig) -> Any:
            made.extend((model_config(settings, server).engine, server))
            raise Stop

        monkeypatch.setattr(model_settings, "describe_model", keep)
        result = CliRunner().invoke(app, ["serve", "--device", "null", *args], env=env)
        assert isinstance(result.exception, Stop), result.output
        return made[0], made[1]

    return run


def refusal(*args: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--device", "null", *args])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def values_of(flag: ForeignFlag) -> list[str]:
    return [] if flag.value is None else [(flag.accepts or ("1",))[0]]


HARMLESS = [flag for flag in FOREIGN_FLAGS if flag.sets is None and flag.accepts != ()]
REFUSED = [flag for flag in FOREIGN_FLAGS if flag.sets is None and flag.accepts is not None]


@pytest.mark.parametrize("flag", HARMLESS, ids=lambda flag: flag.name)
def test_a_flag_without_effect_warns_once_and_says_why(
    serve: Serve, flag: ForeignFlag, caplog: pytest.LogCaptureFixture
) -> None:
    for name in flag.names:
        caplog.clear()
        assert serve(name, *values_of(flag)) == serve()
        warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert warnings == [f"{flag.name} changes nothing: {flag.why}"]


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.name)
def test_a_flag_whose_effect_cannot_be_given_is_refused(flag: ForeignFlag) -> None:
    message = refusal(flag.name, *([] if flag.value is None else ["2x"]))
    assert f"{flag.name}" in message and "is not supported: " in message
    assert " ".join(flag.why.split()) in message


def test_no_foreign_flag_hides_one_of_our_own() -> None:
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    names = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    assert len(names) == len(set(names))


def test_the_docs_have_every_foreign_flag() -> None:
    text = RENDERERS["foreign-flags"]()
    assert [flag.name for flag in FOREIGN_FLAGS if f"`{flag.name}`" not in text] == []
    assert "Only 1:" in text and "Refused:" in text and "Changes nothing:" in text


def test_the_flags_of_a_tei_script_work(serve: Serve) -> None:
    engine, server = serve(
        *("--model-id", "some/model", "--revision", "abc", "--dtype", "float32", "--pooling", "last-token"),
        *("--max-concurrent-requests", "512", "--max-batch-tokens", "16384", "--max-batch-requests", "64"),
        *("--max-client-batch-size", "32", "--auto-truncate", "false", "--hostname", "0.0.0.0"),
        *("-p", "3000", "--huggingface-hub-cache", "/data", "--payload-limit", "2000000"),
        *("--api-key", "secret", "--cors-allow-origin", "https://a.example", "--prometheus-port", "9000"),
        *("--served-model-name", "name", "--default-prompt-name", "query", "--json-output"),
    )
    assert (engine.model, engine.revision, engine.dtype) == ("some/model", "abc", "float32")
    assert engine.pooler_config.pooling_type == "last" and engine.download_dir == "/data"
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (16384, 64)
    assert engine.model_names == ("name",) and engine.default_prompt_name == "query"
    assert (server.host, server.port, server.max_rows) == ("0.0.0.0", 3000, 32)
    assert server.max_concurrent_requests == 512 and server.max_body_bytes == 2_000_000
    assert server.auto_truncate is False and server.api_keys == ("secret",)
    assert server.allowed_origins == ("https://a.example",) and server.admin_port == 9000


def test_the_flags_of_a_vllm_script_work(serve: Serve) -> None:
    engine, server = serve(
        *("some/model", "--runner", "pooling", "--convert", "embed", "--max-model-len", "128"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--enforce-eager", "-tp", "1"),
        *("--disable-log-requests", "--trust-remote-code", "--gpu-memory-utilization", "0.9"),
        *("--allowed-origins", '["https://a.example", "https://b.example"]', "--root-path", "/api/"),
        *("--enable-prefix-caching", "--swap-space", "4", "--uvicorn-log-level", "warning"),
        *("--kv-cache-memory-bytes", "2G", "--enable-log-requests", "--dtype", "half"),
        *("--uds", "/run/s", "--ssl-cert-reqs", "0", "--enable-ssl-refresh"),
    )
    assert engine.model == "some/model" and engine.enable_generation is False and engine.enforce_eager
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (128, 8, 512)
    assert engine.kv_cache_gb == 2 and engine.enable_prefix_caching is True and engine.dtype == "half"
    assert server.allowed_origins == ("https://a.example", "https://b.example")
    assert server.root_path == "/api" and server.access_log
    assert server.uds == "/run/s" and server.ssl_cert_reqs == "none"


@pytest.mark.parametrize(("task", "generates"), [("generate", True), ("embed", False), ("auto", None)])
def test_the_task_turns_generation_on_or_off(serve: Serve, task: str, generates: bool | None) -> None:
    assert serve("--task", task)[0].enable_generation is generates


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--task", "transcription"), "use auto, generate, embed"),
        (("--convert", "other"), "use auto, none, embed"),
        (("--pooling", "rank"), "use cls, mean, splade, last-token"),
        (("--payload-limit", "2 MB"), "number of bytes"),
        (("--payload-limit", "5", "--max-body-mb", "3"), "contradict each other"),
        (("--pooling", "cls", "--pooler-config", '{"pooling_type": "mean"}'), "contradict each other"),
        (("--root-path", "api"), "use a path such as"),
        (("--uds-permissions", "rw"), "three octal digits"),
        (("--ssl-cert-reqs", "3"), "'none', 'optional', 'required'"),
        (("--allowed-origins", "[1]"), "JSON list"),
        (("--no-such-flag",), "No such option"),
        (("--auto-truncate=maybe",), "auto-truncate"),
    ],
)
def test_wrong_values_are_refused_with_the_accepted_ones(args: tuple[str, ...], message: str) -> None:
    assert message in refusal(*args)


def test_a_task_that_the_model_lacks_is_refused() -> None:
    check_tasks({"--task embed": "embed"}, "m", ["embed", "score"])
    with pytest.raises(ConfigError, match="--convert classify: model m has no task classify"):
        check_tasks({"--convert classify": "classify"}, "m", ["embed"])


def test_a_hub_token_is_put_into_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict[str, str]()
    monkeypatch.setattr(serving.os, "environ", environment)
    serve("--hf-token", "hf_secret")
    assert environment["HF_TOKEN"] == "hf_secret"


def test_the_environment_names_the_model_the_port_and_the_key(serve: Serve) -> None:
    env = {"MODEL_ID": "some/model", "PORT": "3000", "VLLM_API_KEY": "secret"}
    engine, server = serve(env=env)
    assert (engine.model, server.port, server.api_keys) == ("some/model", 3000, ("secret",))
    engine, server = serve("another/model", "--port", "8000", "--api-key", "own", env=env)
    assert (engine.model, server.port, server.api_keys) == ("another/model", 8000, ("own",))
    fields: dict[str, Any] = {}
    read_environment(fields, fields)
    assert fields == {}


def test_the_environment_has_several_keys_between_commas(serve: Serve) -> None:
    _, server = serve(env={"PENSTOCK_API_KEY": "one, two", "PENSTOCK_ADMIN_KEY": "boss"})
    assert (server.api_keys, server.admin_keys) == (("one", "two"), ("boss",))
    ran = CliRunner().invoke(app, ["serve", "--device", "null"], env={"PENSTOCK_API_KEY": "s3 cret"})
    assert ran.exit_code == 2 and "separate keys by commas" in ran.output and "cret" not in ran.output


def test_underscores_and_values_of_switches_are_understood(serve: Serve) -> None:
    engine, server = serve(
        *("--max_model_len", "64", "--max_num_seqs=4", "--auto_truncate", "--strict_fields", "true"),
        *("--enable_prefix_caching=False", "--any-model-name", "false", "--access_log"),
    )
    assert (engine.max_model_len, engine.max_num_seqs, engine.enable_prefix_caching) == (64, 4, False)
    assert server.auto_truncate and server.strict_fields and server.access_log
    assert not server.any_model_name
    assert serve("--auto-truncate", "False")[1].auto_truncate is False
    assert serve("--no_auto_truncate")[1].auto_truncate is False
    assert serve("--served_model_name", "a_b")[0].model_names == ("a_b",)


def test_values_and_arguments_keep_their_underscores() -> None:
    params = get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    for args in (
        ["--model", "--max_rows"],
        ["my_model", "--api-key", "a_b=c"],
        ["--", "--max_rows"],
        ["--no_such_flag", "a_b"],
    ):
        assert plain_flags(args, params) == args


CONFIG = """
model: some/model
served_model_name: [first, second]
port: 8080
max-num-seqs: 4
hf-overrides: {a: 1}
allowed-origins: ["https://a.example"]
auto-truncate: false
strict_fields: true
any-model-name: false
trust-remote-code: true
gpu-memory-utilization: 0.9
api-key:
"""


def test_flags_are_read_from_a_file(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flags.yaml").write_text(CONFIG)
    engine, server = serve("--config", str(tmp_path / "flags.yaml"))
    assert engine.model == "some/model" and engine.model_names == ("first", "second")
    assert engine.max_num_seqs == 4 and engine.hf_overrides == {"a": 1}
    assert (server.port, server.auto_truncate, server.strict_fields) == (8080, False, True)
    assert server.allowed_origins == ("https://a.example",) and server.api_keys == ()
    warned = " ".join(record.getMessage() for record in caplog.records)
    assert "--trust-remote-code changes nothing" in warned and "--gpu-memory-utilization" in warned


def test_flags_of_the_command_line_come_before_the_file(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(CONFIG)
    engine, server = serve(
        *("another/model", "--port", "9", "--served-model-name", "third", "--auto-truncate"),
        f"--config={file}",
    )
    assert engine.model == "another/model" and engine.model_names == ("third",)
    assert server.port == 9 and server.auto_truncate
    assert serve("--model", "another/model", "--config", str(file))[0].model == "another/model"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 8080", "has 'prot', which is no flag of this command; did you mean"),
        ("- port", "must map names of flags to values"),
        ("port: [", "is not valid YAML"),
        ("strict-fields: maybe", "use true or false"),
        ("port: many", "port"),
        ("pipeline-parallel-size: 2", "--pipeline-parallel-size 2 is not supported"),
        ("config: other.yaml", "no flag of this command"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(content)
    assert message in refusal("--config", str(file))


def test_a_file_that_is_missing_or_empty(serve: Serve, tmp_path: Path) -> None:
    assert "cannot be read" in refusal("--config", str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    assert serve("--config", str(tmp_path / "empty.yaml")) == serve()


def test_settings_of_two_flags_that_agree_are_one(serve: Serve) -> None:
    given = Given(settings={("server", "max_body_bytes"): 5})
    assert given.merged("server", {"max_body_bytes": 5}) == {"max_body_bytes": 5}
    assert given.merged("engine", {"model": "a"}) == {"model": "a"}


def test_a_default_prompt_goes_before_texts_without_one(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "find: "}}))
    base = EngineConfig(model=str(folder))
    assert describe(base).default_prompt_name is None
    named = describe(msgspec.structs.replace(base, default_prompt_name="query"))
    assert named.prompts[named.default_prompt_name or ""] == "find: "
    given = describe(msgspec.structs.replace(base, default_prompt="look: "))
    assert given.prompts[given.default_prompt_name or ""] == "look: "
    with pytest.raises(ModelLoadError, match="no prompt named 'other'; it has: query"):
        describe(msgspec.structs.replace(base, default_prompt_name="other"))
    with pytest.raises(ModelLoadError, match="exclude each other"):
        describe(msgspec.structs.replace(base, default_prompt_name="query", default_prompt="look: "))
