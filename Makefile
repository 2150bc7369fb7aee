# The one entry point: `make demo` and `make test` need nothing done before.
PYTHON ?= $$(scripts/find_python.sh)
VENV ?= .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/tools
FUZZ := $(VENV)/fuzz
SCAN := $(VENV)/scan
DOCS := $(VENV)/docs
PYTEST_FLAGS ?=
WORKERS ?= 2

# Where this is set every process compiles all modules that it imports once more.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install wheel publish native native-runnable wheel-check demo up quick check test test-all helm-test chaos fuzz test-clients lint format protos lock audit sbom docs images image-test bench test-gpu clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(RUNTIME) ## make .venv with Baton as it serves; what tests need is added by make test

wheel: $(RUNTIME) ## dist/baton_serve-*.whl for machines of this kind
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	@ls dist/baton_serve-*.whl

publish: wheel $(TOOLS)/.installed ## the wheel to a package index; INDEX=https://.../ with UV_PUBLISH_TOKEN, or user and password
	@$(TOOLS)/bin/uv publish --publish-url "$(INDEX)" dist/baton_serve-*.whl

native: $(RUNTIME) ## build the C helpers and CPU operators again, as far as their sources changed
	@$(BIN)/python scripts/build_native.py --progress

native-runnable: $(RUNTIME)
	@$(BIN)/python scripts/build_native.py --progress --runnable

$(RUNTIME): pyproject.toml $(wildcard requirements/*.txt)
	@scripts/install.sh "$(PYTHON)" $(VENV)
	@touch $@

$(STAMP): $(RUNTIME)
	@echo "adding what the tests need"
	@scripts/install_requirements.sh $(BIN)/python triton dev
	@touch $@

wheel-check: ## build the wheel, install it elsewhere, run the demo from it read-only and without a compiler
	@PYTHON=$(PYTHON) scripts/wheel_check.sh

demo: native ## 1P1D, router and KV store; a chat answer; tokens compared with Hugging Face
	@$(BIN)/baton demo

up: native ## a deployment on this machine; ARGS="--ratio 2P3D --model PATH"
	$(BIN)/baton up $(ARGS)

quick: native $(STAMP) ## what changed: ruff, contracts, types, unit tests of its packages (under a minute); SINCE=HEAD
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/quick.py --since $(or $(SINCE),HEAD)

check: lint ## lint and unit tests (4 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/run_tests.py --workers $(WORKERS) -q -m "not thorough" tests/unit $(PYTEST_FLAGS)

test: native $(STAMP) ## the tests (15 minutes on two cores), on WORKERS=2 processes; PYTEST_FLAGS="tests/unit -k name"
	@scripts/install_redis.sh
	OMP_NUM_THREADS=1 $(BIN)/python scripts/run_tests.py --workers $(WORKERS) -m "not thorough" $(PYTEST_FLAGS)

test-all: native-runnable $(STAMP) $(SCAN)/.installed ## all tests: also kills and faults at random moments, emulators, sanitizers, every model
	@scripts/install_browser.sh
	@scripts/install_redis.sh
	@scripts/install_promtool.sh $(BIN)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/run_tests.py --workers $(WORKERS) --durations=30 $(PYTEST_FLAGS)

helm-test: native $(STAMP) $(SCAN)/.installed ## the chart: linted, rendered, validated, scanned, run as local processes (part of make test-all)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/run_tests.py --workers $(WORKERS) -q tests/helm $(PYTEST_FLAGS)

$(SCAN)/.installed: requirements/scan.txt
	@test -x $(SCAN)/bin/python || $(PYTHON) -m venv $(SCAN)
	@scripts/install_requirements.sh $(SCAN)/bin/python scan
	@touch $@

SEEDS ?= 0-999
chaos: native $(STAMP) ## faults by the thousand against whole deployments; SEEDS="0-9999", or one that failed: SEEDS=4711
	@scripts/install_redis.sh
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.run --log --seeds $(SEEDS)

SECONDS_PER_TARGET ?= 600
TARGETS ?=
fuzz: native $(STAMP) $(FUZZ)/.installed ## every parser of foreign bytes, and native code under sanitizers; SECONDS_PER_TARGET=600 TARGETS=http,table
	PYTHONPATH=$(FUZZ) $(BIN)/python -m tests.fuzz.run --log --seconds $(SECONDS_PER_TARGET) --targets "$(TARGETS)"

$(FUZZ)/.installed: requirements/fuzz.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --upgrade --target $(FUZZ) -r $<
	@touch $@

test-clients: native $(STAMP) ## third-party clients, each in an environment of its own under ~/.cache/baton-clients, against baton up
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/clients $(PYTEST_FLAGS)

test-gpu: native $(STAMP) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_FLAGS)

lint: native $(STAMP) ## ruff, mypy strict, import contracts, generated code up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_names.py
	$(BIN)/python scripts/gen_protos.py --check
	$(BIN)/python scripts/gen_helm.py --check
	$(BIN)/python scripts/gen_monitoring.py --check
	$(BIN)/python scripts/gen_sync_client.py --check

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP) ## regenerate src/baton/api from protos/
	$(BIN)/python scripts/gen_protos.py

$(TOOLS)/.installed: requirements/tools.txt
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@scripts/install_requirements.sh $(TOOLS)/bin/python tools
	@touch $@

lock: $(TOOLS)/.installed ## requirements/*.txt anew from pyproject.toml and constraints.txt, with the hashes of all files
	$(TOOLS)/bin/python scripts/lock.py --uv $(TOOLS)/bin/uv

audit: $(TOOLS)/.installed ## known vulnerabilities of what requirements/*.txt name; fails too where the advisories cannot be asked
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes $(foreach file,$(wildcard requirements/*.txt),-r $(file))

sbom: $(STAMP) $(TOOLS)/.installed ## dist/baton-serve.cdx.json: what this environment is made of (CycloneDX)
	@$(TOOLS)/bin/python scripts/sbom.py --cyclonedx $(TOOLS)/bin/cyclonedx-py --python $(BIN)/python dist/baton-serve.cdx.json

docs: $(DOCS)/.installed ## dist/site: the documents as a site; fails for a link or anchor that leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

$(DOCS)/.installed: requirements/docs.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@scripts/install_requirements.sh $(DOCS)/bin/python docs
	@touch $@

images: ## container images; BASE=python:3.11-slim-bookworm@sha256:... TARGETS="router kvstore prefill decode" TAG=0.1.0
	@scripts/build_images.sh "$(BASE)" "$(TAG)" $(or $(TARGETS),router kvstore prefill decode)

image-test: native $(STAMP) ## the router's image built and run without a daemon, by buildah as root (minutes)
	BATON_IMAGE_TEST=1 $(BIN)/python -m pytest -q -s --timeout 6000 tests/images

bench: native ## benchmarks; results under benchmarks/results
	$(BIN)/python benchmarks/engine.py --threads 2 --write
	$(BIN)/baton bench kv --overlap --json > benchmarks/results/kv/kv.jsonl
	$(BIN)/python benchmarks/kv/overlap.py --write
	$(BIN)/baton bench store --json > benchmarks/results/store/store.jsonl
	$(BIN)/python benchmarks/store/soak.py --write
	$(BIN)/python benchmarks/index.py --write
	-$(BIN)/python benchmarks/control_plane.py --write
	$(BIN)/python benchmarks/http.py --write
	$(BIN)/python benchmarks/http.py --kill --write

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist src/baton/_native kernels/baton_kernels/cpu/lib .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
