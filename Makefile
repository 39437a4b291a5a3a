# make demo: SENG, SGD, Adam and K-FAC side by side.  make test: everything that must hold before a commit.
# Both make the same environment in .venv first, once, from pinned versions. Python 3.11 or newer.

PYTHON ?= python3
INSTALL = .venv/bin/python -m pip install -q --disable-pip-version-check

.PHONY: demo test format clean

demo: .venv/installed
	.venv/bin/python -m seng.lab.demo

test: .venv/installed
	sh scripts/chromium.sh
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/pytest

format: .venv/installed
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis demo.png report.html
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# torch comes first and alone, so that a CPU build kept locally is taken and nothing else gets to choose another.
.venv/installed: Makefile requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	$(INSTALL) -r requirements-dev.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@
