CONFIG ?= examples/laptop.yaml
DEVICE ?= cpu
export DEVICE

PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help install serve performance dashboards test test-engines test-all quick lint typecheck format bench-overhead bench-steps bench-front-end bench-store bench-prefix bench-documents bench-pd bench-adaptive bench-deadlines bench-weave bench-migrate bench-rebalance bench-continue bench-start bench-elastic bench-decisions bench-peers gpu-check gpu-first-hour gpu-bundle image image-base check-image hashes sbom clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## make .venv with everything needed (DEVICE=cpu or cuda)
	@scripts/install.sh

# exec: signals reach the server itself, and no shell stands between it and make.
serve: install ## serve CONFIG (default examples/laptop.yaml) until Ctrl-C
	@exec .venv/bin/loomserve serve $(CONFIG)

test: install ## run all unit tests, the control plane on simulated engines, and a test of each claim on real ones
	@$(PYTHON) -m tests.rings test

test-engines: install ## run all other tests of real engines and clusters
	@$(PYTHON) -m tests.rings engines

test-all: install ## run both, and the tests that take minutes each
	@$(PYTHON) -m tests.rings test engines slow

quick: install ## run the tests that the changes since main reach (ENGINES=1: those of engines, too)
	@$(PYTHON) -m tests.reached $(if $(ENGINES),--engines)

lint: install ## check style, and which package imports which
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@PYTHONPATH=scripts/typing .venv/bin/lint-imports --no-logo --cache-dir .mypy_cache/imports

typecheck: install ## check types
	@$(PYTHON) -m mypy

format: install ## format the code and sort its imports
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

bench-overhead: install ## measure what the platform costs over bare vLLM
	@$(PYTHON) -m benchmarks.overhead

bench-steps: install ## measure what the scheduler, the KV store and the meter add to each step
	@$(PYTHON) -m benchmarks.step_overhead

bench-front-end: install ## measure how many tokens one front end passes on, on a core
	@$(PYTHON) -m benchmarks.front_end

bench-store: install ## measure the KV store against memory and disk
	@$(PYTHON) -m benchmarks.store

bench-prefix: install ## measure what the KV store gains on shared prefixes
	@$(PYTHON) -m benchmarks.prefix

bench-documents: install ## measure what the KV store gains on documents that are asked about again
	@$(PYTHON) -m benchmarks.documents

bench-pd: install ## measure what separating prefill from decode gains or costs
	@$(PYTHON) -m benchmarks.disaggregation

bench-adaptive: install ## measure what swapping by cost and fair queues gain where memory is short
	@$(PYTHON) -m benchmarks.adaptive

bench-deadlines: install ## measure what they, and refusals, gain through the platform
	@$(PYTHON) -m benchmarks.deadlines

bench-weave: install ## measure what a hot model gains from a cold one that computes its attention
	@$(PYTHON) -m benchmarks.weave

bench-migrate: install ## measure how long streams pause when attention heads or layers move
	@$(PYTHON) -m benchmarks.migrate

bench-rebalance: install ## measure what the controller gains while the popularity of models shifts
	@$(PYTHON) -m benchmarks.rebalance

bench-continue: install ## measure what clients see when engines are killed, stopped and drained
	@$(PYTHON) -m benchmarks.continuation

bench-elastic: install ## measure how models come back that sleep or are unloaded, and many names at once
	@$(PYTHON) -m benchmarks.elastic

bench-start: install ## measure how long engines take to start, beside vLLM's own servers
	@$(PYTHON) -m benchmarks.start

bench-decisions: install ## measure decisions of routing, rebalancing and placement at 10 to 1,000
	@$(PYTHON) -m benchmarks.decisions

bench-peers: install ## measure it beside vLLM behind vllm-router and LiteLLM, and Ray Serve LLM
	@scripts/install_peers.sh
	@$(PYTHON) -m benchmarks.peers

performance: install ## make the pages' figures from the files of results that they cite
	@$(PYTHON) -m benchmarks.pages

gpu-check: install ## run the steps of docs/lending_gpus.md on a GPU, or what of them needs none (OUT, BUDGET, STEPS)
	@PYTHONPATH=scripts/typing $(PYTHON) -m benchmarks.gpu

gpu-first-hour: install ## make the calls that wait for a GPU, the most worth knowing first (OUT, BUDGET, CALLS, DRY)
	@PYTHONPATH=scripts/typing $(PYTHON) -m benchmarks.gpu.first_hour

gpu-bundle: install ## pack into .gpu what those steps need on a machine without a network
	@PYTHONPATH=scripts/typing $(PYTHON) -m benchmarks.gpu.bundle

image: ## build the container image, for DEVICE, with podman, buildah or docker
	@image/build.sh

image-base: ## make a base for IMAGE_BASE of Debian's packages, where no registry can be reached
	@image/base.sh

check-image: ## run an image (IMAGE) as pods do, and see that it answers a request
	@image/check.sh

dashboards: install ## write Grafana's dashboards from dashboards/pages, and the chart's files of them and of alerts
	@$(PYTHON) -m dashboards

# Not after an installation, which refuses what has no hash.
hashes: ## write hashes.txt anew, after a change of constraints.txt
	@(echo "# Hashes of all files of each package, which the installer checks. Made by make hashes." && \
	    { grep -v '^#' constraints.txt; grep -o 'torch==[0-9.]*' pyproject.toml; } | \
	    .venv/bin/uv --quiet pip compile --no-deps --no-annotate --no-header --generate-hashes -) > hashes.new
	@mv hashes.new hashes.txt

sbom: $(if $(IMAGE),,install) ## write sbom.json, what is installed here (or in IMAGE) in CycloneDX's format
ifdef IMAGE
	@image/run.sh $(IMAGE) cat /opt/loomserve/sbom.json >sbom.new
	@mv sbom.new sbom.json
else
	@.venv/bin/uvx --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py environment --pyproject pyproject.toml \
	    --output-reproducible --output-format JSON --output-file sbom.json $(PYTHON)
endif

clean: ## remove caches and build output (delete .venv to start over)
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
