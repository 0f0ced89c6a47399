"""Deployment tools accept the files below deploy/. `make deploy-lint` installs most of the tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.files import CHART, COMPOSE, DEPLOY, DOCKERFILE, RAY_SERVICE, ROOT, UNIT, check_config, load
from tests.docs.blocks import Block, read_blocks

VALUES = [CHART / "values.yaml", *sorted((Path(__file__).parent / "values").glob("*.yaml"))]
EXAMPLES = [block for block in read_blocks(ROOT / "docs/guides/deploy.md") if block.language == "yaml"]
CRDS = os.environ.get("PENSTOCK_CRDS")
MAX_EXPOSURE = "20"  # out of 100; systemd-analyze rates 17 to 25 as "OK"

each_values_file = pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)


def needs(tool: str) -> pytest.MarkDecorator:
    reason = f"{tool} is not installed; make deploy-lint says more"
    return pytest.mark.skipif(shutil.which(tool) is None, reason=reason)


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, cwd=ROOT, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def render(values: Path, *options: str) -> list[dict[str, Any]]:
    text = run("helm", "template", "release", CHART, "--namespace", "search", "--values", values, *options)
    return [document for document in yaml.safe_load_all(text) if document]


def refusal(*options: str) -> str:
    """helm's error message about values that it refuses."""
    command = ["helm", "template", "release", str(CHART), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0, done.stdout
    return done.stderr


@needs("hadolint")
def test_hadolint_accepts_the_dockerfile() -> None:
    run("hadolint", DOCKERFILE)


@needs("yamllint")
def test_yamllint_accepts_every_yaml_file() -> None:
    run(
        "yamllint",
        "--strict",
        "--config-file",
        DEPLOY / ".yamllint",
        DEPLOY,
        Path(__file__).parent / "values",
    )


@needs("check-jsonschema")
def test_the_compose_files_meet_the_compose_specification() -> None:
    files = (COMPOSE, COMPOSE.with_name("compose.gpu.yaml"))
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


@needs("check-jsonschema")
def test_the_schema_of_the_values_is_one() -> None:
    run("check-jsonschema", "--check-metaschema", CHART / "values.schema.json")


def has_compose() -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None
        and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not has_compose(), reason="docker compose is not installed")
def test_docker_compose_reads_the_files() -> None:
    for files in ([COMPOSE], [COMPOSE, COMPOSE.with_name("compose.gpu.yaml")]):
        run(
            "docker",
            "compose",
            *(word for file in files for word in ("--file", str(file))),
            "config",
            "--quiet",
        )


@needs("helm")
@each_values_file
def test_helm_lint_accepts_the_chart(values: Path) -> None:
    run("helm", "lint", "--strict", CHART, "--values", values)


@needs("helm")
@needs("kubernetes-validate")
@each_values_file
def test_kubernetes_accepts_the_manifests(values: Path, tmp_path: Path) -> None:
    documents = [each for each in render(values) if not is_custom(each)]
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    run("kubernetes-validate", "--strict", "--quiet", file)
    assert {"Deployment", "Service", "ConfigMap"} <= {each["kind"] for each in documents}


def is_custom(document: dict[str, Any]) -> bool:
    return document["apiVersion"].startswith(("keda.sh/", "monitoring.coreos.com/"))


@needs("helm")
@pytest.mark.skipif(
    not CRDS, reason="no custom resource definitions; give their folder as make deploy-lint CRDS=FOLDER"
)
def test_custom_resources_meet_their_definitions() -> None:
    from jsonschema import Draft202012Validator

    definitions = {
        (crd["spec"]["group"] + "/" + version["name"], crd["spec"]["names"]["kind"]): strict(
            version["schema"]["openAPIV3Schema"]
        )
        for file in Path(CRDS or "").rglob("*.yaml")
        for crd in yaml.safe_load_all(file.read_text())
        if crd and crd["kind"] == "CustomResourceDefinition"
        for version in crd["spec"]["versions"]
    }
    checked = [each for values in VALUES for each in render(values) if is_custom(each)] + [load(RAY_SERVICE)]
    for each in checked:
        Draft202012Validator(definitions[each["apiVersion"], each["kind"]]).validate(each)
    assert {each["kind"] for each in checked} == {"ScaledObject", "ServiceMonitor"}


def strict(schema: Any) -> Any:
    """The schema, changed to refuse unknown fields wherever it lists the known ones."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault(
            "additionalProperties", "metadata" in schema["properties"] and "spec" not in schema["properties"]
        )
    return closed


@needs("helm")
@each_values_file
def test_the_server_accepts_the_rendered_configuration(values: Path, tmp_path: Path) -> None:
    (config,) = (each["data"]["config.yaml"] for each in render(values) if each["kind"] == "ConfigMap")
    check_config(yaml.safe_load(config), tmp_path)


@needs("helm")
def test_keda_scales_the_deployment_on_waiting_tokens() -> None:
    by_kind = {each["kind"]: each for each in render(CHART / "values.yaml", *KEDA)}
    scaled, deployment = by_kind["ScaledObject"]["spec"], by_kind["Deployment"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]  # otherwise a release would reset KEDA's number
    assert scaled["minReplicaCount"] >= 1  # without a server there is no metric of waiting requests
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["query"] == 'sum(penstock_queue_tokens{namespace="search", service="release"})'


KEDA = ("--set", "keda.enabled=true,keda.prometheusAddress=http://prometheus:9090")


@needs("helm")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "model=x"), "model"),
        (("--set", "keda.minReplicas=0"), "greater than or equal to 1"),
        (("--set", "keda.enabled=true"), "keda.prometheusAddress is empty"),
        (("--set", "replicas=2,cache.persistence.enabled=true"), "ReadWriteMany"),
        (("--set", "config.port=80"), "config.port is set by the chart"),
        (("--set-json", "models=[]"), "models"),
        ((*KEDA, "--set", "keda.minReplicas=9"), "larger than keda.maxReplicas"),
    ],
)
def test_the_chart_refuses_values_that_cannot_work(options: tuple[str, ...], words: str) -> None:
    assert words in refusal(*options)


@needs("helm")
def test_metrics_are_read_where_the_admin_port_is() -> None:
    options = (*KEDA, "--set", "admin.enabled=true,serviceMonitor.enabled=true")
    documents = render(CHART / "values.yaml", *options)
    ports = {
        each["metadata"]["name"]: [port["name"] for port in each["spec"]["ports"]]
        for each in documents
        if each["kind"] == "Service"
    }
    assert ports == {"release": ["http"], "release-admin": ["admin"]}
    by_kind = {each["kind"]: each.get("spec") for each in documents}
    assert by_kind["ServiceMonitor"]["endpoints"][0]["port"] == "admin"
    assert 'service="release-admin"' in by_kind["ScaledObject"]["triggers"][0]["metadata"]["query"]


@needs("helm")
@needs("promtool")
def test_prometheus_can_run_the_query_that_keda_sends(tmp_path: Path) -> None:
    (scaled,) = (each for each in render(CHART / "values.yaml", *KEDA) if each["kind"] == "ScaledObject")
    rule = {"record": "waiting", "expr": scaled["spec"]["triggers"][0]["metadata"]["query"]}
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": [rule]}]}))
    run("promtool", "check", "rules", file)


@needs("helm")
@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.name)
def test_the_chart_accepts_the_values_in_the_guide(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(block.code)
    run("helm", "lint", "--strict", CHART, "--values", file)
    (config,) = (each["data"]["config.yaml"] for each in render(file) if each["kind"] == "ConfigMap")
    check_config(yaml.safe_load(config), tmp_path)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The unit with and without a GPU, with a command that exists on this machine."""
    for name in ("cpu", "gpu"):
        folder = tmp_path / name
        shutil.copytree(UNIT.parent, folder)
        unit = folder / UNIT.name
        unit.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text()))
    shutil.rmtree(tmp_path / "cpu/penstock.service.d")
    return tmp_path


@needs("systemd-analyze")
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_systemd_accepts_the_unit(units: Path, name: str) -> None:
    file = units / name / UNIT.name
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=120
    )
    complaints = [line for line in done.stderr.splitlines() if "penstock" in line]
    assert not complaints


@needs("systemd-analyze")
def test_the_unit_is_confined(units: Path) -> None:
    run(
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={MAX_EXPOSURE}",
        units / "cpu" / UNIT.name,
    )
