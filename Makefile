# make demo    a 24-block Steps-DeiT against its baseline on digits, both tuned, with a report (some 4 minutes on 2 idle cores)
# make test    everything that CI checks
# make docs    these pages and the API reference as a site: docs/_build/html/index.html
# They make .venv with the pinned versions of constraints.txt on first use.
PYTHON ?= python3
RUN ?= runs/demo
BIN := .venv/bin

.PHONY: demo test lint unit contract docs lowest readme clean

demo: .venv/installed
	$(BIN)/stepsnet compare digits/tuned --run $(RUN) --auto-resume

test: lint unit contract docs

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# timm's own tests of its models, from timm's source distribution, on ours
contract: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/timm_contract.py

docs: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --builder html --fresh-env --fail-on-warning --keep-going --quiet docs docs/_build/html

# the tests with the lowest versions that pyproject.toml allows, in an environment of their own (some 45 minutes)
lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --upgrade pip uv
	.venv-lowest/bin/uv pip compile --quiet --resolution lowest-direct --extra dev -o .venv-lowest/versions.txt pyproject.toml
	.venv-lowest/bin/python -m pip install --quiet -r .venv-lowest/versions.txt
	.venv-lowest/bin/python -m pip install --quiet --no-deps -e .
	OMP_NUM_THREADS=1 .venv-lowest/bin/pytest -n 2

# render the README's and the docs' tables from results/ and the commands
readme: .venv/installed-dev
	$(BIN)/python docs/render.py

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train]"
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-lowest runs docs/_build
