# Two lines to know: `make quickstart` and `make test`. PYTHON=python3.12 picks another interpreter.
# `make test-slow` tests what takes minutes, and compiles for TPUs; `make test-gpu-compile` for GPUs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One encoding a run; the table has a column for each.
ENCODINGS := rope carope learned sinusoidal
RUNS := runs/quickstart
FOLDERS := $(addprefix $(RUNS)/,$(ENCODINGS))
LENGTHS := 128 256 512 1024
# Enough of each held-out book for a first look; `eval.py` without --tokens takes all of them.
TOKENS := 16384

.PHONY: quickstart test test-slow test-gpu-compile lint docs clean

quickstart: $(VENV)/.quickstart
	@for encoding in $(ENCODINGS); do \
	  echo "== $$encoding"; \
	  $(BIN)/python train.py --config configs/quickstart.py --workdir $(RUNS)/$$encoding \
	    --model.position $$encoding || exit $$?; \
	done
	$(BIN)/python eval.py --workdir $(FOLDERS) --protocol per_position --lengths $(LENGTHS) \
	  --tokens $(TOKENS) --plot $(RUNS)/loss_by_position.png --json $(RUNS)/per_position.json
	$(BIN)/python eval.py --workdir $(FOLDERS) --protocol paper --lengths $(LENGTHS) \
	  --tokens $(TOKENS) --json $(RUNS)/paper.json --markdown $(RUNS)/table.md
	@echo "table: $(RUNS)/table.md   picture: $(RUNS)/loss_by_position.png"

# The numerics as users compile them; then the rest, whose cost is compiling, without LLVM's
# expensive passes: half the time.
NUMERICS := tests/positions tests/layers tests/benchmarks
QUICK_COMPILE := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0

test: $(VENV)/.test lint
	$(PYTEST) -m "not slow" $(NUMERICS)
	XLA_FLAGS="$$XLA_FLAGS $(QUICK_COMPILE)" $(PYTEST) -m "not slow" $(addprefix --ignore=,$(NUMERICS))

# libtpu has an environment of its own: beside it, JAX looks for TPUs in every process.
test-slow: .venv-tpu/.tpu
	JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=1 XLA_FLAGS="$$XLA_FLAGS $(QUICK_COMPILE)" \
	  .venv-tpu/bin/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 -m slow -rs

# 4.4 GB of wheels, so neither in the default tests nor in the slow ones.
test-gpu-compile: .venv-gpu/.gpu
	JAX_PLATFORMS=cpu .venv-gpu/bin/python -m pytest -m slow -rs tests/training/test_compile_for.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) .venv-tpu .venv-gpu site

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 2; }

$(VENV)/.quickstart $(VENV)/.test $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$*]' --constraint constraints.txt
	touch $@

.venv-tpu/.tpu .venv-gpu/.gpu: .venv-%: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --editable '.[test,$(subst .,,$(@F))]' \
	  --constraint constraints.txt
	touch $@
