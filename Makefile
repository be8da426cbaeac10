# Everything a person or CI runs. `make` alone lists the commands; each does its own set-up first.

PYTHON ?= python3
VENV   ?= .venv
# Extra words for the installation of torch. Away from a mirror of CPU wheels this saves gigabytes:
#   make setup TORCH_PIP_ARGS='--index-url https://download.pytorch.org/whl/cpu'
TORCH_PIP_ARGS ?=

BIN      := $(VENV)/bin
STAMP    := $(VENV)/.weightcast-set-up
PACKAGES := codec weight_store coordinator trainer_agent rollout_agent weightcast
PIP      := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test sim walks soak fuzz check format packaging tree ci bench-codec deltas clean

help: ## List these commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv, install everything, build the native codec (once)

# torch goes first and pinned: asked for by anything else, pip would take the newest, which is gigabytes of CUDA.
# For the same reason the project is built without isolation: its build requirements are in the dev group.
# A change of native code or dependencies installs again; editing Python does not, the install is editable.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(shell find codec/native -type f 2>/dev/null)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "weightcast needs Python 3.11 or newer; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "set-up: $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "set-up: installing (a few minutes the first time)"
	@$(PIP) install -qq --upgrade "pip>=25.1"
	@$(PIP) install -qq --constraint constraints.txt $(TORCH_PIP_ARGS) torch
	@$(PIP) install -qq --constraint constraints.txt --group build
	@echo "set-up: building"
	@$(PIP) install -qq --constraint constraints.txt --no-build-isolation --group dev --editable .
	@touch $@

demo: setup ## Run the whole path on this machine and prove it bit-exact (ARGS='--steps 5')
	@$(BIN)/weightcast demo $(ARGS)

# Test files side by side; each worker has its own S3 server. JOBS=0: one after the other, in this process.
JOBS ?= 2
test: setup ## Run all tests against a real S3 server and real processes (ARGS='tests/codec -x', JOBS=2)
	@$(BIN)/python -m pytest -q -m "not packaging" -n $(JOBS) --dist loadfile $(ARGS)

sim: setup ## Simulate the whole system under faults with random seeds (SECONDS=600; ARGS='--seed N' replays one)
	@$(BIN)/python -m tests.sim --seconds $(or $(SECONDS),600) $(ARGS)

walks: setup ## Walk one replica (PART=trainer_agent: a job's side) at random through crashes, faults, damage (SECONDS, ARGS as sim)
	@$(BIN)/python -m tests.$(or $(PART),rollout_agent).walks --seconds $(or $(SECONDS),600) $(ARGS)

soak: setup ## Kill, cut and harm real processes at random, again and again (SECONDS=600; ARGS=--steady: what grows without end)
	@$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),600) $(ARGS)

packaging: setup ## Build the sdist and from it the wheel; install that in a fresh environment and use it
	@$(BIN)/python -m pytest -q -m packaging tests/house

fuzz: setup ## Fuzz every parser, guided by coverage (SECONDS=600 in all; TARGET=name for one; ARGS=--list)
	@$(BIN)/python -m tests.fuzz --seed $$(date +%s) --seconds $(or $(SECONDS),600) $(addprefix --target ,$(TARGET)) $(ARGS)

check: setup ## Lint, format, types, layers and size budget
	@$(BIN)/ruff check --quiet . && echo "check: ruff"
	@$(BIN)/ruff format --quiet --check . && echo "check: format"
	@$(BIN)/mypy --no-error-summary && echo "check: mypy --strict"
	@$(BIN)/lint-imports > $(VENV)/layers.txt 2>&1 || { cat $(VENV)/layers.txt; exit 1; }
	@echo "check: layers"
	@$(BIN)/python tools/check_sizes.py $(PACKAGES)
	@$(BIN)/python tools/tree.py --check && echo "check: README tree"

format: setup ## Let ruff rewrite what it can
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

tree: setup ## Rewrite the tree of files in README.md
	@$(BIN)/python tools/tree.py

ci: check packaging test ## What CI runs: check, packaging, test

# The peers are fetched when they are first compared with; without them their rows say so.
BENCH_STAMP := $(VENV)/.weightcast-bench
$(BENCH_STAMP): $(STAMP)
	@$(PIP) install -qq --constraint constraints.txt --group bench
	@touch $@

bench-codec: $(BENCH_STAMP) ## Compare the codec with its peers (DATA=a folder of deltas, OUT=results)
	@$(BIN)/weightcast bench codec $(if $(DATA),--data "$(DATA)") --out "$(or $(OUT),build/bench)" $(ARGS)

deltas: setup ## Make real deltas from a small packaged model, in minutes (OUT=folder; ARGS=--tiny)
	@$(BIN)/python -m bench.make_deltas "$(or $(OUT),build/deltas)" $(ARGS)

clean: ## Remove .venv, builds and caches
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
