"""The files below deploy/ match the server: flags, routes, ports, metrics and folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from docs.tools.reference import RENDERERS
from penstock.api.app import ROUTES
from penstock.serving.supervisor import DRAIN_GRACE_S, ENGINE_EXIT_S
from tests.deploy.files import (
    CHART,
    COMPOSE,
    DEPLOY,
    DOCKERFILE,
    RAY_SERVE,
    RAY_SERVICE,
    ROOT,
    UNIT,
    check_config,
    load,
    seconds,
    serve_flags,
    unit_settings,
    yaml_files,
)

PORT = 8000
EXIT_S = DRAIN_GRACE_S + ENGINE_EXIT_S  # in addition to the drain
CONFIGS = [DEPLOY / "compose/penstock.yaml", DEPLOY / "systemd/config.yaml"]
TEMPLATES = sorted((CHART / "templates").iterdir())
PROBING = [CHART / "templates" / name for name in ("deployment.yaml", "servicemonitor.yaml")]
WRITTEN = {  # variables that name a folder for written files
    "XDG_CACHE_HOME",
    "HF_HOME",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
}


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def text_files() -> list[Path]:
    files = (file for file in DEPLOY.rglob("*") if file.is_file() and file.suffix != ".json")
    return sorted(files)


@pytest.mark.parametrize("file", yaml_files(), ids=name_of)
def test_a_yaml_file_parses(file: Path) -> None:
    assert isinstance(load(file), dict)


@pytest.mark.parametrize("file", CONFIGS, ids=name_of)
def test_the_server_accepts_a_configuration(file: Path, tmp_path: Path) -> None:
    config = load(file)
    check_config(config, tmp_path)
    assert config["host"] == "0.0.0.0" and config["port"] == PORT


@pytest.mark.parametrize("config", [RAY_SERVE, RAY_SERVICE], ids=name_of)
def test_ray_serve_accepts_an_application(config: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    from penstock.scale.serve import build_app

    content = load(config)
    if config == RAY_SERVICE:
        content = yaml.safe_load(content["spec"]["serveConfigV2"])
    (application,) = schema.ServeDeploySchema.model_validate(content).applications
    assert application.import_path == "penstock.scale.serve:build_app"
    build_app(application.args)
    assert content["http_options"]["port"] == PORT


def test_pods_of_ray_leave_time_to_drain() -> None:
    spec = load(RAY_SERVICE)["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > application["args"]["drain"]


def test_the_server_accepts_what_the_chart_configures(tmp_path: Path) -> None:
    values = load(CHART / "values.yaml")
    check_config({"models": values["models"], **values["config"]}, tmp_path)


def test_every_flag_in_a_command_exists() -> None:
    commands = {
        DOCKERFILE: re.search(r"^CMD (.*)", DOCKERFILE.read_text(), re.MULTILINE),
        UNIT: re.search(r"^ExecStart=(.*)", UNIT.read_text(), re.MULTILINE),
        COMPOSE: re.search(r"^ +command: (\[serve.*)", COMPOSE.read_text(), re.MULTILINE),
        CHART: re.search(r"^ +args: (.*)", (CHART / "templates/deployment.yaml").read_text(), re.MULTILINE),
    }
    for file, command in commands.items():
        assert command is not None and "serve" in command[1], f"{file} starts no server"
        assert set(re.findall(r"--[a-z-]+", command[1])) <= serve_flags(), file


def test_every_flag_in_a_comment_exists() -> None:
    others = {"--build-arg", "--build", "--config"}
    for file in text_files():
        comments = re.findall(r"^ *#.*", file.read_text(encoding="utf-8"), re.MULTILINE)
        named = {flag for line in comments for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
        assert named <= serve_flags() | others, file


def test_every_metric_exists() -> None:
    known = set(re.findall(r"penstock_\w+", RENDERERS["metrics"]()))
    named = {
        metric
        for file in [*TEMPLATES, CHART / "values.yaml"]
        for metric in re.findall(r"\bpenstock_[a-z_]+", file.read_text(encoding="utf-8"))
    }
    assert "penstock_queue_tokens" in named
    assert named <= known


def test_every_probed_route_exists() -> None:
    routes = {route.path for route in ROUTES}
    texts = [file.read_text(encoding="utf-8") for file in [*PROBING, DOCKERFILE]]
    probed = {path for text in texts for path in re.findall(r"(?:path: |:8000)(/\w+)", text)}
    assert probed == {"/live", "/ready", "/metrics", "/health"}
    assert probed <= routes


def test_all_name_the_same_port() -> None:
    image, chart = DOCKERFILE.read_text(), (CHART / "templates/deployment.yaml").read_text()
    assert f"EXPOSE {PORT}" in image and f"127.0.0.1:{PORT}/health" in image
    assert f"containerPort: {PORT}\n" in chart
    assert f'"port" {PORT}' in (CHART / "templates/_helpers.tpl").read_text()
    assert load(COMPOSE)["services"]["penstock"]["ports"][0].endswith(f":{PORT}")


def test_prometheus_scrapes_the_server_of_compose() -> None:
    (job,) = load(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"penstock:{PORT}"]}]
    assert "penstock" in load(COMPOSE)["services"]


def test_a_stop_leaves_time_to_drain() -> None:
    service = load(COMPOSE)["services"]["penstock"]
    assert seconds(service["stop_grace_period"]) > load(CONFIGS[0])["drain"] + EXIT_S
    stop = seconds(unit_settings(UNIT)["TimeoutStopSec"][0])
    assert stop > load(CONFIGS[1])["drain"] + EXIT_S
    added = re.search(r"add \.Values\.drainSeconds (\d+)", (CHART / "templates/deployment.yaml").read_text())
    assert added is not None and int(added[1]) > EXIT_S


def test_a_read_only_root_has_room_for_what_is_written() -> None:
    image = DOCKERFILE.read_text()
    written = dict(re.findall(r"\b([A-Z_]+)=(/cache\S*)", image))
    assert written.keys() == WRITTEN
    assert 'VOLUME ["/cache"]' in image
    service = load(COMPOSE)["services"]["penstock"]
    assert service["read_only"] is True
    assert [volume.split(":")[1] for volume in service["volumes"]] == ["/cache"]
    assert [mount.split(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    deployment = (CHART / "templates/deployment.yaml").read_text()
    assert "mountPath: /cache\n" in deployment and "mountPath: /tmp\n" in deployment
    assert load(CHART / "values.yaml")["securityContext"]["readOnlyRootFilesystem"] is True
    unit = unit_settings(UNIT)
    assert {
        name for line in unit["Environment"] for name in re.findall(r"(\w+)=%C/penstock", line)
    } == WRITTEN
    assert unit["CacheDirectory"] == ["penstock"] and unit["ProtectSystem"] == ["strict"]


def test_no_container_has_privileges() -> None:
    for name, service in load(COMPOSE)["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    values = load(CHART / "values.yaml")
    assert values["podSecurityContext"]["runAsNonRoot"] is True
    assert values["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_every_file_that_compose_mounts_is_in_the_repository() -> None:
    compose = load(COMPOSE)
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
        if volume.startswith(".")
    ]
    folder = COMPOSE.parent
    missing = [source for source in mounted if not (folder / source).is_dir()]
    assert not missing
    assert (folder / compose["configs"]["penstock"]["file"]).is_file()


def test_secrets_are_kept_out_of_the_repository() -> None:
    for secret in load(COMPOSE)["secrets"].values():
        assert Path(secret["file"]).parent == Path("secrets")
    assert (COMPOSE.parent / "secrets/.gitignore").read_text().splitlines() == ["*", "!.gitignore"]
