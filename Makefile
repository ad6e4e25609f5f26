# `make serve` and `make test` do everything, set-up included. The environment is .venv, here.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
SOURCES := cli decode engine gateway kvtransfer operator policy prefill simulate telemetry worker
CHECKED := $(SOURCES) $(wildcard tests e2e benchmarks conftest.py)
ARGS ?=

.PHONY: help
help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: serve
serve: $(INSTALLED) ## the whole house on this machine (options: make serve ARGS="--prefill 2")
	@exec $(BIN)/antiphon serve $(ARGS)

.PHONY: test
test: $(INSTALLED) ## all tests, in two lanes (options: make test ARGS="tests/policy -x")
	$(BIN)/pytest $(or $(ARGS),-n 2 --dist loadscope)

.PHONY: lint
lint: $(INSTALLED) ## style, types and import rules
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(INSTALLED) ## what a tool can mend of the style
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

.PHONY: proto
proto: $(INSTALLED) ## generated code of the .proto files
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto \
	  --grpc_python_out=proto --mypy_out=proto --mypy_grpc_out=proto proto/antiphon_proto/*.proto

.PHONY: docs
docs: $(INSTALLED) ## what is made from code: CRDs, plain manifests, reference pages, tables of options and metrics
	$(BIN)/python -m antiphon_operator.resource.crd
	$(BIN)/python -m antiphon_operator.resource.reference
	$(BIN)/python -m tests.support.plain_manifests
	$(BIN)/python -m tests.support.reference_tables
	$(BIN)/python -m tests.support.plan_examples

.PHONY: setup
setup: $(INSTALLED) ## the environment only

.PHONY: clean
clean: ## remove the environment and all caches of tools in this folder
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@for python in "$${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3; do \
	  [ -n "$$python" ] && command -v "$$python" >/dev/null || continue; \
	  "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  echo "making $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv $(VENV); \
	  exit 0; \
	done; \
	echo "Antiphon needs Python 3.11 or newer with its venv module, and there is none on the PATH." >&2; \
	echo "Install it (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
	exit 1

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(PIP) install --editable '.[dev]'
	$(PIP) install --no-deps 'nixl-cu12==1.5.1' || \
	  echo "The ucx transport (nixl-cu12) does not install here: KV blocks will move over tcp." >&2
	touch $@
