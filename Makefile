# `make demo` and `make test` do their own set-up; everything runs in .venv on the CPU.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= $(or $(shell for p in python3.11 python3.12; do $$p -c "" 2>/dev/null && echo $$p && break; done),python3.11)
PYTHON_312 ?= python3.12
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

# One thread per process: engines, trainers and workers that spin against each other cost 10-60x.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup wheel test test-all test-fast test-3.12 test-vision lint contract recipes-check test-releases test-faults test-real demo demo-compare bench-control bench-real clean distclean

help:
	@echo "make demo           GRPO with TLT on a toy task: a drafter learns in idle time; a line per step, report in demo-out/"
	@echo "make demo-compare   after the demo: alternates jobs of stock verl and TLT, with the trained drafter"
	@echo "make test           lint, types and the tests that continuous integration runs"
	@echo "make test-all       the same with the heavy tests: more recipes, modes and combinations"
	@echo "make test-fast      lint, types and the unit tests"
	@echo "make test-3.12      the unit tests and the installation on Python 3.12, in .venv-3.12 (8 GB)"
	@echo "make test-vision    policies whose code imports torchvision: Qwen3.5, vision-language models (downloads 8 MB)"
	@echo "make contract       what verl-tlt relies on, in every verl and vLLM release it supports (downloads 1.2 GB)"
	@echo "make test-releases  tests near sampling and of sleep, and a run, on vLLM 0.24, 0.29, 0.31 and 0.32 (half an hour; RELEASES=\"0.29.0\")"
	@echo "make recipes-check  every recipe composed, judged, and run scaled down (about half an hour)"
	@echo "make test-faults    makes parts of TLT fail in real runs, and measures the cost (half an hour)"
	@echo "make test-real      warm-up and engine of a real language model (downloads 93 MB; up to an hour, the policy's fine-tuning included)"
	@echo "make bench-control  the choice of the draft length against oracles, simulated"
	@echo "make bench-real     a real language model: policy, head, race of draft lengths, whole runs (nights; goes on after a kill)"
	@echo "make wheel          what would be released, in dist/"
	@echo "make setup          only the virtual environment"
	@echo "make clean          remove the runs of the demo, builds and caches of tools; measurements in .cache and demo-out stay"
	@echo "make distclean      remove these, too, and the environments"

setup: $(STAMP)

$(STAMP): requirements/cpu.lock requirements/setup.sh requirements/vllm-metadata/pyproject.toml verl_cpu/pyproject.toml \
  pyproject.toml
	@PYTHON="$(PYTHON)" VENV="$(VENV)" requirements/setup.sh

# From an old build/ setuptools would take modules that have been deleted since.
wheel: $(STAMP)
	rm -rf build
	$(BIN)/pip wheel --no-deps --no-build-isolation --wheel-dir dist .

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers, since most tests compute on one thread; they take files in the order of tests/engine/conftest.py, in which
# they end at about the same time. Whole runs have the machine to themselves.
define run-tests
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(1) tests/unit tests/contract tests/engine; parts=$$?; \
	$(BIN)/pytest $(1) tests/e2e && exit $$parts
endef

test: lint
	$(call run-tests,-m "not heavy")

test-all: lint
	$(call run-tests)

test-fast: lint
	$(BIN)/pytest tests/unit

test-3.12:
	@PYTHON="$(PYTHON_312)" VENV=.venv-3.12 requirements/setup.sh
	.venv-3.12/bin/pytest tests/unit tests/contract/test_wheel.py

# Beside .venv and not in it: every process that imports transformers would import it too.
VISION := .cache/torchvision
$(VISION)/laid.txt: requirements/torchvision.patch $(STAMP)
	rm -rf $(VISION)
	$(BIN)/pip install --quiet --no-deps --no-compile --target $(VISION) torchvision==0.28.0
	GIT_CEILING_DIRECTORIES=$(CURDIR)/.cache git -C $(VISION) apply $(CURDIR)/requirements/torchvision.patch
	touch $@

# The actor's tests have processes of their own: verl replaces transformers' Qwen3.5 forward, which then takes no cache.
test-vision: $(VISION)/laid.txt
	export PYTHONPATH=$(CURDIR)/$(VISION); $(BIN)/pytest tests/engine/test_families.py -k "vl or qwen3_5"; parts=$$?; \
	$(BIN)/pytest tests/engine/test_hybrids.py tests/engine/test_mtp_served.py tests/engine/test_mtp_trained.py -k qwen3_5 || parts=$$?; \
	$(BIN)/pytest tests/engine/test_warmup_images.py || parts=$$?; \
	$(BIN)/pytest tests/e2e/test_hybrid_run.py -k qwen3_5 && exit $$parts

contract: $(STAMP)
	TLT_CONTRACT_CACHE=$(CURDIR)/.cache/contract $(BIN)/pytest tests/contract

test-releases: $(STAMP)
	VENV=$(VENV) requirements/releases.sh $(RELEASES)

recipes-check: $(STAMP)
	$(BIN)/python -m recipes.check --run

demo: $(STAMP)
	$(BIN)/python -m demo

# Any Ray cluster that happens to be there is left alone.
demo-compare: $(STAMP)
	test -d demo-out/tlt/drafter || $(MAKE) demo
	OUT=$(CURDIR)/demo-out PATH="$(abspath $(BIN)):$$PATH" $(BIN)/verl-tlt compare --rounds 3 --steps 4 \
	  --drafter demo-out/tlt/drafter --out demo-out/compare -- demo/demo_grpo.sh +ray_kwargs.ray_init.address=local

test-faults: $(STAMP)
	$(BIN)/python -m benchmarks.faults

test-real: $(STAMP)
	$(BIN)/python -m benchmarks.real_policy
	$(BIN)/pytest -o faulthandler_timeout=2100 tests/real

bench-control: $(STAMP)
	$(BIN)/python -m benchmarks.control

# Each line goes on where it was killed. Nothing else may run beside it.
bench-real: $(STAMP)
	$(BIN)/python -m benchmarks.real_policy
	$(BIN)/python -m benchmarks.real_policy.head --out demo-out/real_policy.json
	$(BIN)/python -m benchmarks.control --fixed --out demo-out
	$(BIN)/python -m benchmarks.e2e --rounds 3 --steps 5 --work demo-out/real --out demo-out/real.json
	$(BIN)/python -m benchmarks.e2e --load wide --rounds 3 --steps 5 --work demo-out/real-wide --out demo-out/real_wide.json
	$(BIN)/python -m benchmarks.e2e.along --work demo-out/along --out demo-out/along.json
	$(BIN)/python -m benchmarks.e2e.along --seed 1 --work demo-out/along_1 --out demo-out/along_1.json

# What `make demo`, `make demo-compare` and demo_grpo.sh write. Measurements beside it stay: some take nights.
DEMO_FILES := assets tlt compare report.html hydra trace drafter checkpoints tensorboard metrics.jsonl

clean:
	rm -rf $(addprefix demo-out/,$(DEMO_FILES)) outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf build dist $(foreach folder,. verl_cpu requirements/vllm-metadata,$(folder)/build $(folder)/*.egg-info)

distclean: clean
	rm -rf demo-out .cache site $(VENV) .venv-3.12
