"""Flags: one per configuration field, equal for all commands, and complete in the help."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cli import flags
from penstock.cli.flags import ENGINE, INTERNAL, SERVER, ConfigFlags
from penstock.cli.main import app
from penstock.config import EngineConfig, ServerConfig, from_mapping
from penstock.errors import ConfigError
from tests.cli.runs import error_of
from tests.command_line import CliRunner, get_command

ENGINE_COMMANDS = [
    *(["serve"], ["embed"], ["rerank"], ["score"], ["generate"], ["chat"], ["info"]),
    *(["bench", "throughput"], ["bench", "latency"], ["bench", "quality"]),
]
ALL_COMMANDS = [[], ["bench"], ["doctor"], ["bench", "serve"], ["bench", "compare"], ["bench", "kernels"]]
ALL_COMMANDS += ENGINE_COMMANDS


def command(path: list[str]) -> Any:
    found = get_command(app)
    for name in path:
        found = found.commands[name]  # type: ignore[attr-defined]
    return found


def names(path: list[str]) -> list[str]:
    return [name for param in command(path).params for name in (*param.opts, *param.secondary_opts)]


def help_text(path: list[str]) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("group", [ENGINE, SERVER], ids=["engine", "server"])
def test_every_field_has_one_flag_or_a_reason_to_have_none(group: ConfigFlags) -> None:
    with_flag = Counter(flag.field for flag in group.flags)
    fields = set(group.config.__struct_fields__)
    assert set(with_flag) == fields - set(INTERNAL)
    assert set(with_flag.values()) == {1}
    assert all(INTERNAL.values())


def test_internal_fields_exist() -> None:
    assert set(INTERNAL) <= {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}


@pytest.mark.parametrize("group", [ENGINE, SERVER], ids=["engine", "server"])
def test_defaults_of_flags_are_those_of_the_configuration(group: ConfigFlags) -> None:
    empty = group.config()
    for flag in group.flags:
        if flag.field == "api_server_count":  # "auto" depends on the machine
            assert group.default(flag) == "auto"
            continue
        default = group.default(flag)
        expected = getattr(empty, flag.field)
        if default is None or default == []:
            assert expected in (None, (), {}) or expected == type(expected)()
        else:
            assert group.to_field(flag, default) == expected, flag.name


def test_a_command_without_flags_sets_no_field() -> None:
    for group in (ENGINE, SERVER):
        values = {parameter.name: parameter.default for parameter in group.parameters(frozenset())}
        assert group.build(values) == {}


@pytest.mark.parametrize("path", ENGINE_COMMANDS, ids=" ".join)
def test_every_command_with_an_engine_takes_all_engine_flags(path: list[str]) -> None:
    found = Counter(names(path))
    for flag in ENGINE.flags:
        assert found[flag.name] == 1, f"{flag.name} of {path}"


def test_no_command_declares_a_flag_twice() -> None:
    for path in ALL_COMMANDS:
        assert [name for name, count in Counter(names(path)).items() if count > 1] == []


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=lambda path: " ".join(path) or "penstock")
def test_help_truncates_no_flag_name_on_80_columns(path: list[str]) -> None:
    shown = help_text(path)
    assert max(map(len, shown.splitlines())) <= 80
    words = set(re.split(r"[\s,/\[\]]+", shown))
    for param in command(path).params:
        if param.param_type_name == "option" and not param.hidden:
            assert {*param.opts, *param.secondary_opts} <= words, param.name


def test_help_of_serve_groups_all_flags() -> None:
    shown = help_text(["serve"])
    titles = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
    assert titles == [
        *("Arguments", "Options", "Model", "Server", "Scheduling", "Memory", "LoRA adapters", "Generation"),
        *("Observability", "Ray"),
    ]
    alone = shown.split("Options:")[1].split("Model:")[0]
    assert alone.split() == ["--help", "Show", "this", "message", "and", "exit."]


def test_every_flag_of_a_configuration_has_help_that_is_a_sentence() -> None:
    for flag in (*ENGINE.flags, *SERVER.flags):
        assert flag.help.endswith("."), flag.name


@pytest.mark.parametrize(
    ("flag", "value", "field", "expected"),
    [
        ("--max-model-len", "128", "max_model_len", 128),
        ("--quantization", "int8", "quantization", "int8"),
        ("--hf-overrides", '{"a": 1}', "hf_overrides", {"a": 1}),
        ("--speculative-config", '{"method": "ngram"}', "speculative_config", {"method": "ngram"}),
        ("--seed", "7", "seed", 7),
        ("--weights-seed", "7", "seed", 7),
        ("--unquantized-layers", "3", "unquantized_layers", (3,)),
    ],
)
def test_a_flag_sets_its_field(
    flag: str, value: str, field: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.cli import info

    seen: list[EngineConfig] = []
    monkeypatch.setattr(info, "gather", lambda config: seen.append(config) or {})
    assert CliRunner().invoke(app, ["info", "--json", flag, value]).exit_code == 0
    assert getattr(seen[0], field) == expected
    assert msgspec.structs.replace(seen[0], **{field: getattr(EngineConfig(), field)}) == EngineConfig()


def test_seed_is_the_sampling_seed_in_commands_that_sample() -> None:
    assert names(["generate"]).count("--seed") == 1
    assert "--weights-seed" in names(["generate"])


def test_a_body_limit_in_mebibytes_becomes_bytes() -> None:
    (flag,) = (flag for flag in SERVER.flags if flag.name == "--max-body-mb")
    assert SERVER.to_field(flag, 0.5) == 512 * 1024
    assert from_mapping(ServerConfig, {}).max_body_bytes == SERVER.to_field(flag, SERVER.default(flag))


def test_two_models_are_refused_and_the_same_twice_is_not() -> None:
    fields: dict[str, Any] = {"model": "a"}
    ENGINE._add_model_argument(fields, "a")
    assert fields == {"model": "a"}
    assert "two models" in error_of("info", "some/model", "--model", "another/model")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "--hf-overrides is not valid JSON"), ("[1]", "takes a JSON object")]
)
def test_a_json_flag_names_itself_in_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flags.json_object("--hf-overrides", text)
    assert message in error_of("info", "--hf-overrides", text)


def test_max_queued_tokens_warns_in_offline_commands(capsys: pytest.CaptureFixture[str]) -> None:
    values = {parameter.name: parameter.default for parameter in ENGINE.parameters(frozenset())}
    assert ENGINE.build({**values, "engineconfig_max_queued_tokens": 9}) == {"max_queued_tokens": 9}
    warning = capsys.readouterr().err
    assert warning.startswith("warning: --max-queued-tokens changes nothing") and warning.count("\n") == 1
    assert flags.SERVED_ENGINE.build({**values, "engineconfig_max_queued_tokens": 9}) == {
        "max_queued_tokens": 9
    }
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--target-itl-ms", "inf", "is inf; use a finite number"),
        ("--drain", "inf", "is inf; use a finite number"),
        ("--max-rows", str(10**20), "must fit into 64 bits"),
    ],
)
def test_numbers_that_other_processes_cannot_be_told_are_refused(flag: str, value: str, reason: str) -> None:
    found = error_of("serve", flag, value)
    assert found.startswith(flag) and reason in found


def test_a_configuration_file_has_finite_numbers_too(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("target-itl-ms: .inf\n")
    assert "--target-itl-ms is inf" in error_of("serve", "--config", tmp_path / "server.yaml")


@pytest.mark.parametrize("command", ["serve", "info"])
def test_an_error_about_a_setting_names_its_flag(command: str) -> None:
    found = error_of(command, "--device", "cpu", "--target-itl-ms", "1e9")
    assert found.startswith("--target-itl-ms is 1000000000.0; use milliseconds")
