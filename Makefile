# The two commands of the README, and what they are made of. Needs Python 3.11 or newer, make and a package
# registry; nothing else. `make serve MODEL=openai/gpt-oss-20b ARGS="--port 9000"` passes options on.

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=
bin := $(VENV)/bin

SINCE ?= main~1

.PHONY: serve test test-all lint types check coverage mutants docs deploy-check release clean

serve: export CHORALE_PORT_HINT = make serve ARGS="--port 9000"
serve: $(VENV)/.installed
	$(bin)/chorale serve $(MODEL) $(ARGS)

# exec: pytest ends with make, however make ends (tests/conftest.py). Some containers set PYTHONDONTWRITEBYTECODE:
# each of the hundreds of processes would then compile the package, which takes 0.3 s.
test: $(VENV)/.installed-test
	exec env -u PYTHONDONTWRITEBYTECODE $(bin)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

# With the tests that take minutes each: forty kills of a server, a thousand structured answers, and their like.
test-all: $(VENV)/.installed-test
	exec env -u PYTHONDONTWRITEBYTECODE $(bin)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.installed-dev
	$(bin)/ruff format --check .
	$(bin)/ruff check .

types: $(VENV)/.installed-dev
	$(bin)/mypy

# Everything that CI runs beside the tests.
check: lint types

# Branch coverage of `make test`, child processes included; fails below the floor in pyproject.toml. Not the kernels
# through Triton's interpreter: they take minutes, and more than twenty if each line is recorded.
coverage: $(VENV)/.installed-dev
	rm -rf .coverage
	mkdir -p .coverage
	status=0; \
	$(bin)/python -m coverage run -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not slow" \
		--ignore=tests/kernels/triton $(ARGS) || status=$$?; \
	$(bin)/python -m coverage combine --quiet && $(bin)/python -m coverage report && exit $$status

# Small faults in the functions that changed since a commit, and whether a test sees each:
# `make mutants SINCE=HEAD~3`, or `make mutants SINCE= ARGS="chorale/api/usage.py --limit 20"`.
mutants: $(VENV)/.installed-dev
	$(bin)/python scripts/mutants $(if $(SINCE),--since $(SINCE)) $(ARGS)

# The site in site/, from docs/. A link that leads nowhere is an error.
docs: $(VENV)/.installed-docs
	$(bin)/python -m zensical build --strict

# The linters of deploy/ that this machine has; lists those that it has not, and how to get them.
deploy-check: $(VENV)/.installed-test
	PATH="$(CURDIR)/$(bin):$$PATH" sh scripts/check_deploy.sh

# The files of a release in dist/: sdist, wheel of this machine, software bill of materials, checksums.
release:
	sh scripts/release.sh "$(PYTHON)"

$(VENV)/bin/python:
	sh scripts/make-venv.sh "$(PYTHON)" "$(VENV)"

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	sh scripts/install.sh "$(VENV)" "."
	@touch $@

$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml evals/pyproject.toml
	sh scripts/install.sh "$(VENV)" ".[test]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml evals/pyproject.toml
	sh scripts/install.sh "$(VENV)" ".[dev]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(VENV)/.installed-docs: $(VENV)/bin/python pyproject.toml
	sh scripts/install.sh "$(VENV)" ".[docs]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist site .cache .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
