# make up      a cluster on this machine with the demo model, until Ctrl-C
# make test    every test that needs no GPU
# make help    the rest
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
TESTS ?= tests/e2e tests/integration tests/unit  # longest files first, so that both workers are busy to the end
NOTHING_COLLECTED := 5  # pytest's exit code
KERNEL_TESTS := tests/unit/model/test_attention_triton.py tests/unit/model/test_pointwise_triton.py tests/unit/model/test_kernels_compile.py

.DEFAULT_GOAL := help
.PHONY: help venv native up test test-gpu test-kernels chaos lint fmt fmt-check type check proto config-table
.PHONY: docs bench bench-engine bench-handoff bench-store bench-sim bench-coordinator bench-peers bench-gpu clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 19

venv: $(INSTALLED)  ## install the project and its tools into .venv

$(INSTALLED): pyproject.toml scripts/install scripts/build_native.py $(wildcard kvrelay/model/cpp/*.h kvrelay/model/cpp/*.cpp)
	@PYTHON="$(PYTHON)" scripts/install $(VENV)
	@touch $@

native:  ## build the native decoder alone
	@test -x $(BIN)/python || $(MAKE) --no-print-directory venv
	$(BIN)/python scripts/build_native.py

up: $(INSTALLED)  ## start a cluster; ARGS="--prefill 2 --decode 2" for other shapes
	@exec $(BIN)/kvrelay up $(ARGS)

test: $(INSTALLED)  ## run every test that needs no GPU, two files at a time; TESTS=tests/unit for some
	@$(BIN)/kvrelay fetch-model
	$(BIN)/python scripts/run_tests.py -m "not gpu and not alone" -n 2 --dist loadfile --no-loadscope-reorder $(TESTS) $(ARGS) || test $$? -eq $(NOTHING_COLLECTED)
	$(BIN)/python scripts/run_tests.py -m "not gpu and alone" $(TESTS) $(ARGS) || test $$? -eq $(NOTHING_COLLECTED)

test-gpu: $(INSTALLED)  ## run the tests that need a GPU, and the kernels' own on it
	@$(BIN)/kvrelay fetch-model
	$(BIN)/python -m pytest tests/gpu $(KERNEL_TESTS) $(ARGS)

test-kernels: $(INSTALLED)  ## run the Triton kernels in its interpreter, without a GPU; installs triton (670 MB)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet triton
	$(BIN)/python -m pytest $(KERNEL_TESTS) $(ARGS)

chaos: $(INSTALLED)  ## kill, stop, cut and slow a cluster under load; ARGS="--seconds 1800 --seed 7", or --help
	@$(BIN)/python -m tests.chaos $(ARGS)

lint: $(INSTALLED)  ## find mistakes
	$(BIN)/ruff check .

fmt: $(INSTALLED)  ## format the code
	$(BIN)/ruff format .

fmt-check: $(INSTALLED)  ## say what fmt would change
	$(BIN)/ruff format --check .

type: $(INSTALLED)  ## check the types
	$(BIN)/mypy

check: lint fmt-check type  ## lint, format and types

proto: $(INSTALLED)  ## generate kvrelay/pb from proto/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/generate_proto.py

config-table: $(INSTALLED)  ## write the configuration tables of the README
	$(BIN)/python -m kvrelay.config_table README.md

bench: $(INSTALLED)  ## measure a running cluster; ARGS="--concurrency 16 --prompt-tokens 1024"
	$(BIN)/python -m bench $(ARGS)

bench-gpu: $(INSTALLED)  ## measure a Llama-3.1-8B-shaped model on a GPU against what the GPU can do; docs/gpu.md
	$(BIN)/python -m bench.gpu $(ARGS)

bench-engine: $(INSTALLED)  ## measure the engine beside its peers on this CPU; ARGS="--quick" or "--help"
	$(BIN)/python -m bench.engine $(ARGS)

bench-handoff: $(INSTALLED)  ## measure how KV moves between processes, and what that does to all else; ARGS="--quick"
	$(BIN)/python -m bench.handoff $(ARGS)

bench-store: $(INSTALLED)  ## measure the KV store: what it gives, what that is worth to a request, what it costs; ARGS="--quick"
	$(BIN)/python -m bench.store $(ARGS)

bench-sim: $(INSTALLED)  ## compare policies on public traces and up to 1,000 nodes, in virtual time; ARGS="--quick"
	$(BIN)/python -m bench.sim $(ARGS)

bench-coordinator: $(INSTALLED)  ## measure the coordinator alone, and compare its policies on real clusters and in virtual time; ARGS="--quick"
	$(BIN)/python -m bench.coordinator $(ARGS)

bench-peers:  ## make the peers' environments (5 GB); ARGS="mooncake" for some of them
	PYTHON="$(PYTHON)" bench/peers.sh $(ARGS)

docs: $(INSTALLED)  ## build the documentation's site into build/site; installs mkdocs-material
	$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/pip install --quiet "mkdocs-material>=9.6,<10"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

clean:  ## remove what the other targets made; the downloaded model stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
