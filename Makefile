# Everything works from a fresh clone: each target first makes .venv as lock/dev.txt says.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WORKERS ?= 2
# Two processes take the tests from one list; tests/conftest.py says which stay together.
SHARED := --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Dask and Ray must have the version of the cluster that they speak to, which only its owner knows.
LOCKED := --extra sim --extra valkey
PIP := $(BIN)/python -m pip --disable-pip-version-check install

.PHONY: help demo test validate coverage check fmt bench attack soak docs lock apiserver clean

help:                 ## what there is to make
	@sed -n 's/^\([a-z]*\):[^#]*## /\1 /p' Makefile | while read -r target what; do \
	  printf 'make %-10s %s\n' "$$target" "$$what"; done

demo: $(STAMP)        ## round robin against Homing behind a real Envoy, at most three minutes
	@$(BIN)/python -m sim.demo

test: $(STAMP)        ## every test, in two processes (WORKERS=2)
	$(BIN)/python -m pytest $(SHARED)

coverage: $(STAMP)    ## every test, slower: which lines and branches they reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(SHARED)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

validate: $(STAMP)    ## the simulator against whole-hour traces, some minutes
	$(BIN)/python -m pytest -m long tests/sim

check: $(STAMP)       ## format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(STAMP)         ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)       ## the performance report: bench-report/report.md, at most fifteen minutes
	@$(BIN)/python -m bench

attack: $(STAMP)      ## attack the picker, alone and behind a real Envoy, five minutes
	@$(BIN)/python -m bench.attack

soak: $(STAMP)        ## ten minutes of load while pods, pages, configuration and endpoints change
	@$(BIN)/python -m bench.soak

docs: $(STAMP)        ## write the generated parts of docs/ anew
	$(BIN)/python -m docs.reference

lock: $(STAMP)        ## write the lock files anew from pyproject.toml
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links --no-header $(LOCKED) --group dev pyproject.toml -o lock/dev.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links --no-header $(LOCKED) -c lock/dev.txt pyproject.toml -o lock/runtime.txt

apiserver: $(STAMP)   ## build kube-apiserver and etcd for the tests that need them, with Go, minutes
	@$(BIN)/python -m tests.apiserver.binaries

clean:                ## remove what was made, .venv too
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* demo bench-report

$(STAMP): lock/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Homing needs Python 3.11 or newer, found " + sys.version.split()[0])'
	@echo 'Installing into .venv what Homing and its tests need: about 90 packages, 200 MB to load, half a minute to some minutes.'
	@$(PYTHON) -m venv .venv
	@# Where somebody watches, pip shows each package and how far it is.
	@quiet=; test -t 1 || quiet=--quiet; \
	  $(PIP) $$quiet --require-hashes -r lock/dev.txt && \
	  $(PIP) $$quiet --no-deps --no-build-isolation -e .
	@touch $@
