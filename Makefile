# make demo   8 requests on 5 GPU slots, from a fresh clone
# make test   the whole suite        make lint   ruff and mypy        make test-long   wider explorations too
# make prove  every interleaving of small worlds, every guard taken out, thousands of seeds, every cancellation
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-long prove lint clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[plot]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps $(patsubst %,"%; sys_platform == 'linux'",kvikio-cu13 libkvikio-cu13 rapids-logger nvidia-cufile)
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/swapkv demo --gpu-slots 5 --requests 8 $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not long' $(ARGS)

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

prove: $(VENV)/.dev
	$(BIN)/python -m tests.prove $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
