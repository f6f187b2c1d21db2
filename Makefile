# Two commands on a fresh machine: make demo, make test. Both work offline after the first time.
VENV ?= .venv
PYTHON ?= python3
OUT ?= demo-out
JOBS ?= 2

BIN := $(VENV)/bin
# one thread per process: the tests and the demo run processes side by side; they compile to byte code once
QUIET := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
DEMO := $(if $(MODEL),--model '$(MODEL)') $(if $(DATA),--data '$(DATA)') $(if $(EVAL_DATA),--eval-data '$(EVAL_DATA)') \
	$(if $(PATCH),--patch '$(PATCH)') $(if $(OPTIONS),--options '$(OPTIONS)')

.PHONY: help install demo laptop test test-quantised lint types docs gpu-kit clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "variables: VENV=$(VENV) PYTHON=$(PYTHON) JOBS=$(JOBS) OUT=$(OUT); for demo and laptop also MODEL DATA EVAL_DATA ARGS, for demo PATCH OPTIONS"

install: $(VENV)/.kernels  ## make the virtual environment (the other targets do it by themselves)

$(VENV)/.installed: pyproject.toml tools/install.py
	@$(PYTHON) tools/install.py $(VENV)
	@touch $@

# for this machine, into the user's cache; where that does not work, torch's operations do the same
$(VENV)/.kernels: $(VENV)/.installed $(wildcard hf_linattn/ops/cpp/*)
	@HF_LINATTN_CPP=1 $(BIN)/python -c 'from hf_linattn.ops.cpp.build import library; library()' >/dev/null 2>&1 || true
	@touch $@

demo: $(VENV)/.kernels  ## patch, fine-tune and measure a small model, and write a page about it
	@$(if $(MODEL)$(DATA)$(EVAL_DATA),,$(OFFLINE)) PATH="$(abspath $(BIN)):$$PATH" \
		$(BIN)/python -m hf_linattn.demo --output-dir '$(OUT)' --jobs $(JOBS) $(DEMO) $(ARGS)

laptop: OUT := $(if $(filter demo-out,$(OUT)),laptop-out,$(OUT))
laptop: $(VENV)/.kernels  ## convert a real language model (a wheel, 93 MB), measure it and chat with it; resumable
	@$(if $(MODEL)$(DATA)$(EVAL_DATA),,$(OFFLINE)) PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m hf_linattn.demo.laptop \
		--output-dir '$(OUT)' $(if $(MODEL),--model '$(MODEL)') $(if $(DATA),--data '$(DATA)') \
		$(if $(EVAL_DATA),--eval-data '$(EVAL_DATA)') $(ARGS)

test: $(VENV)/.kernels  ## the whole fast test suite
	$(OFFLINE) $(QUIET) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q $(ARGS)

test-quantised: $(VENV)/.installed  ## tests on quantised bases; installs torchao and bitsandbytes for them
	$(BIN)/python -m pip install -q -e '.[quantised]'
	$(OFFLINE) $(QUIET) $(BIN)/python -m pytest -n $(JOBS) -q tests/patching/test_quantised.py $(ARGS)

lint: $(VENV)/.installed  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed  ## mypy --strict on the installed package
	rm -rf build/typed
	$(BIN)/python -m pip install -q --no-deps -t build/typed .
	cd build/typed && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p hf_linattn

docs: $(VENV)/.installed  ## make the tables in docs/ again (about an hour)
	$(OFFLINE) $(QUIET) $(BIN)/python tests/families.py --write docs/families.md
	$(OFFLINE) $(BIN)/python -m tests.helpers.compatibility
	$(OFFLINE) $(BIN)/python -m tools.catalogue --model '$(HF_LINATTN_DATA)/models/stories260k' \
		--data '$(HF_LINATTN_DATA)/text/tinystories' --work-dir build/catalogue --jobs $(JOBS) --output docs/patches
	$(OFFLINE) $(QUIET) $(BIN)/python studies/compare_docs.py --work-dir build/compare

gpu-kit: $(VENV)/.installed  ## make build/gpu-kit, which checks and measures the kernels on a machine with a GPU
	$(BIN)/python tools/gpu_kit/make_kit.py build/gpu-kit

clean:  ## remove build products and caches; not the environment, nor the demo's results
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +
