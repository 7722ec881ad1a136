# Every target creates .venv first when it is missing or out of date, so any of them can be the
# first command in a fresh clone.

PYTHON ?= python3
JOBS ?= 2
# The tests of one file go to one process: what they share, such as a fleet, starts once. Tests of
# processes mostly wait, so two of them share a core; the long files come first.
SPREAD = -n $(shell expr 2 \* $(JOBS)) --dist loadfile --no-loadscope-reorder
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# SGLang pins what it needs, so each version of it has an environment of its own.
SGLANG_DEFAULT := 0.5.17
SGLANG ?= $(SGLANG_DEFAULT)
SGLANG_VENV := .venv-sglang$(if $(filter-out $(SGLANG_DEFAULT),$(SGLANG)),-$(SGLANG))
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_NEEDS := tests/sglang/requirements-$(SGLANG).txt
PEERS_VENV := .venv-peers
DEPLOY_VENV := .venv-deploy
RELEASE_VENV := .venv-release
BENCH_VENV := .venv-bench
ADAPTERS := skyrl-0.3 trl
# Those for which a commit's 25 minutes leave no room.
ADAPTERS_NIGHTLY := areal art ray s3 skyrl-0.2 verl
PEERS_NEEDS := tests/peers/requirements.txt tests/peers/requirements-alone.txt
# What one process has to do alone comes first.
UNIT := $(wildcard tests/architecture tests/stateful tests/fuzz tests/conformance tests/unit)

# The machine's cores belong to several processes at once; each one computes on one thread.
export OMP_NUM_THREADS ?= 1
# Models and tokenizers are built locally; nothing is ever fetched from a hub.
export HF_HUB_OFFLINE ?= 1
# Tests start hundreds of processes, and images of containers like to forbid what spares each of them
# from compiling all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv environments check format format-check lint types unit test test-integration test-sglang test-peers test-adapters nightly fuzz \
	weight-faults sim chaos demo bench baseline docs site pictures vectors release-checks release-audit clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' Makefile

venv: $(STAMP) ## Create .venv and install everything that demo and tests need

ENVIRONMENTS := $(STAMP) $(DEPLOY_VENV)/.installed $(PEERS_VENV)/.installed $(SGLANG_STAMP) \
	$(ADAPTERS:%=.venv-%/.installed)
environments: $(ENVIRONMENTS) ## Create every environment that `make test` needs; --jobs 3 makes three at a time

define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 venv"; exit 1; }
	@echo "Installing into $(1): once, a minute or two, $(2) ..."
	@$(PYTHON) -m venv $(1) || \
		{ echo "No virtual environment could be made; on Debian: apt install python3-venv"; exit 1; }
endef
PIP_INSTALL = python -m pip install -qq --disable-pip-version-check

$(STAMP): pyproject.toml constraints.txt
	$(call make_venv,$(VENV),2.6 GB with the CPU build of torch)
	@$(BIN)/$(PIP_INSTALL) --editable '.[transformers,grammar,replay,gateway,otel,dev,docs]' --constraint constraints.txt
	@touch $@

$(SGLANG_STAMP): pyproject.toml tests/sglang/requirements.txt $(SGLANG_NEEDS)
	$(call make_venv,$(SGLANG_VENV),2.5 GB with the CPU build of torch)
	@$(SGLANG_VENV)/bin/$(PIP_INSTALL) --requirement $(SGLANG_NEEDS) --editable .
	@$(SGLANG_VENV)/bin/$(PIP_INSTALL) --no-deps sglang==$(SGLANG)
	@touch $@

$(PEERS_VENV): $(PEERS_VENV)/.installed
$(PEERS_VENV)/.installed: $(PEERS_NEEDS)
	$(call make_venv,$(PEERS_VENV),0.2 GB)
	@$(PEERS_VENV)/bin/$(PIP_INSTALL) --requirement $(word 1,$(PEERS_NEEDS))
	@$(PEERS_VENV)/bin/$(PIP_INSTALL) --no-deps --requirement $(word 2,$(PEERS_NEEDS))
	@touch $@

# Programs that look at the files of deploy/; tests find them there.
$(DEPLOY_VENV)/.installed: tests/deploy/requirements.txt
	$(call make_venv,$(DEPLOY_VENV),0.2 GB)
	@$(DEPLOY_VENV)/bin/$(PIP_INSTALL) --requirement $<
	@touch $@

# Programs that look at what is released; they would only be in the way in .venv.
$(RELEASE_VENV)/.installed: tests/release/requirements.txt
	$(call make_venv,$(RELEASE_VENV),0.2 GB)
	@$(RELEASE_VENV)/bin/$(PIP_INSTALL) --requirement $<
	@touch $@

# `import` finds what .venv has, too.
define beside
	@cd $(1)/lib/python3*/site-packages && \
		echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python3*/site-packages)')" >beside.pth
endef

# What commands could travel by instead of the bus; only benchmarks/command_path.py uses it.
$(BENCH_VENV)/.installed: benchmarks/requirements-peers.txt $(STAMP)
	$(call make_venv,$(BENCH_VENV),0.4 GB)
	$(call beside,$(BENCH_VENV))
	@$(BENCH_VENV)/bin/$(PIP_INSTALL) --requirement $<
	@touch $@

# A framework's environment has what .venv has, and on top what the framework asks for; and what is
# to be installed alone, because its dependencies are others than those here.
.PRECIOUS: .venv-%/.installed
.venv-%/.installed: tests/adapters/%/requirements.txt $(STAMP)
	$(call make_venv,.venv-$*,up to 0.6 GB)
	$(call beside,.venv-$*)
	@.venv-$*/bin/$(PIP_INSTALL) --requirement $<
	@! test -f $(<D)/requirements-alone.txt || \
		.venv-$*/bin/$(PIP_INSTALL) --no-deps --requirement $(<D)/requirements-alone.txt
	@touch $@

check: $(STAMP) ## What a commit must pass before it is pushed, in 2 minutes
	+$(MAKE) --no-print-directory --jobs 2 format-check lint types unit

format: $(STAMP) ## Format the code and apply safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP) ## Lint with every rule that pyproject.toml does not name
	$(BIN)/ruff check .

types: $(STAMP) ## Check types with pyright, strict
	$(BIN)/pyright

unit: $(STAMP) ## Unit, stateful, conformance, fuzz and architecture tests; ARGS="-k name"
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not integration and not gpu and not simulation" \
		$(UNIT) $(ARGS)

test: export FUZZ_SECONDS ?= 10
test: export FUZZ_EXAMPLES ?= 600
test: $(STAMP) $(DEPLOY_VENV)/.installed ## The whole test suite, without a GPU; ARGS="-k name -x" leaves test-sglang out
	$(BIN)/python -m pytest $(SPREAD) -m "not gpu and not sglang and not peers and not adapters" tests $(ARGS)
	$(if $(ARGS),,$(MAKE) --jobs $(JOBS) --output-sync=target test-peers test-adapters)
	$(if $(ARGS),,$(MAKE) test-sglang)

test-integration: $(STAMP) $(DEPLOY_VENV)/.installed ## Only the tests with real sockets and processes
	$(BIN)/python -m pytest $(SPREAD) -m "integration and not gpu and not sglang and not peers and not adapters" tests $(ARGS)

test-adapters: $(addprefix test-adapter-,$(ADAPTERS)) ## Real trainers on a fleet; one: make test-adapter-trl

test-adapter-%: $(STAMP) .venv-%/.installed
	$(BIN)/python -m pytest -m adapters tests/adapters/$* $(ARGS)

test-peers: $(STAMP) $(PEERS_VENV)/.installed ## Clients of other projects, unmodified, at a gateway
	$(BIN)/python -m pytest -m peers tests/peers $(ARGS)

# Two engines start at a time: most of a start is one thread that imports SGLang. Tests with the
# fleet that all share run in one process, those of a file with a fleet of its own in one.
test-sglang: $(SGLANG_STAMP) ## Tests with the real SGLang on the CPU; SGLANG=0.5.23 for that version
	$(SGLANG_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m sglang \
		tests/sglang $(ARGS)

nightly: export FUZZ_SECONDS ?= 600
nightly: export FUZZ_EXAMPLES ?= 600
nightly: $(STAMP) $(DEPLOY_VENV)/.installed ## Everything in full: all cases, 2,000 seeds, chaos, weight matrix, fuzz, both SGLangs
	$(BIN)/python -m pytest $(SPREAD) --exhaustive -m "not gpu and not sglang and not peers and not adapters" tests
	$(MAKE) test-peers
	$(MAKE) test-adapters $(addprefix test-adapter-,$(ADAPTERS_NIGHTLY)) ARGS=--exhaustive
	$(MAKE) sim ARGS="--mutants --single-faults --jobs $(JOBS)"
	$(MAKE) chaos ARGS=--quiet
	$(MAKE) weight-faults ARGS=
	$(MAKE) fuzz
	$(MAKE) test-sglang ARGS=--exhaustive
	$(MAKE) test-sglang ARGS=--exhaustive SGLANG=0.5.23

fuzz: $(STAMP) ## Hostile bytes: a million frames, then a siege of a live fleet with keys
	$(BIN)/python tests/fuzz/frames.py --n 1000000
	FUZZ_EXAMPLES=5000 FUZZ_SECONDS=600 $(BIN)/python -m pytest -q tests/fuzz/test_frames.py \
		tests/fuzz/test_guided.py
	$(BIN)/python tests/fuzz/live.py --raw 100000 --authenticated 100000
	$(BIN)/python tests/fuzz/live.py --raw 100000 --authenticated 100000 --secure $$(mktemp -d)

sim: $(STAMP) ## The shipped cores in virtual time, seed after seed; ARGS="--seeds 200 --jobs 2"
	$(BIN)/python -m tests.drills.simulation $(ARGS)

chaos: $(STAMP) ## Break a real fleet and account for every request; ARGS="--faults 40 --minutes 1"
	$(BIN)/python -m tests.drills.chaos $(ARGS)

weight-faults: $(STAMP) ## Kill each party in each phase of a weight update; ARGS="--seed 1"
	$(BIN)/python -m tests.drills.weights $(ARGS)

release-checks: $(RELEASE_VENV)/.installed ## Build, check metadata, install on each Python, list what comes along; PYTHONS="3.11 3.13"
	.ci/release-checks

release-audit: $(RELEASE_VENV)/.installed ## Known vulnerabilities of what is installed; needs the network
	.ci/release-audit $(ARGS)

demo: $(STAMP) ## Train a tiny model over the bus with two workers; ARGS="--seed 1"
	$(BIN)/rolloutbus demo $(ARGS)

bench: $(STAMP) ## Measure the router against libzmq's own proxy
	$(BIN)/python benchmarks/router_loop.py --json $(ARGS)

baseline: $(STAMP) ## Count the work of the hot paths again and commit to it: benchmarks/work_counts.json
	$(BIN)/python -m benchmarks.work_counts --write

docs: $(STAMP) ## Write what is made from the code into docs/: tables, command line, errors, options
	$(BIN)/python docs/draw_life_cycles.py
	$(BIN)/python docs/list_limits.py
	$(BIN)/python docs/list_metrics.py
	$(BIN)/python docs/list_commands.py
	$(BIN)/python docs/list_errors.py
	$(BIN)/python docs/list_engine_options.py
	$(BIN)/python docs/list_supported.py
	$(BIN)/python docs/list_surface.py

site: export NO_MKDOCS_2_WARNING := 1
site: $(STAMP) ## Build the pages as a site into site/, strictly: a dead link is an error
	$(BIN)/mkdocs build --strict --quiet

pictures: $(STAMP) ## Record small runs and draw the pictures of docs/; needs chromium; look at them
	$(BIN)/python docs/draw_pictures.py
	$(BIN)/python docs/draw_page.py

vectors: $(STAMP) ## Write the protocol's hex vectors again; read the diff before committing it
	$(BIN)/python -m tests.conformance.make_vectors

clean: ## Delete environments, build outputs and caches; runs/ stays
	rm -rf $(VENV) .venv-* build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
