# Each target is one line; PYTHON is the environment with '.[dev]' installed.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python)
T ?= tests

.PHONY: check test demo docs

check:
	$(PYTHON) -m ruff format --check && $(PYTHON) -m ruff check && $(PYTHON) -m mypy && $(PYTHON) -c "from importlinter.cli import lint_imports_command as main; main()" && $(PYTHON) -m pytest -q -m "not gpu"

test:
	$(PYTHON) -m pytest -q $(T)

demo:
	$(PYTHON) -m spectune sweep --backend simulated --quick --output-dir "$$(mktemp -d)/demo"

docs:
	$(PYTHON) -m spectune.cli.docs
