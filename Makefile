# Every command of the project. On a fresh machine `make test` needs git, make and some Python: it sets up first.
# EXTRA=cpu or EXTRA=gpu chooses the packages; by default gpu where nvidia-smi lists a GPU.
ifndef EXTRA
EXTRA := $(if $(findstring GPU 0:,$(shell nvidia-smi -L 2>/dev/null)),gpu,cpu)
endif
PYTHON := .venv/bin/python
STAMP := .venv/.synced-$(EXTRA)

.PHONY: help setup tiny tiny-rl up down test slow doctor lint families layouts study bench-store bench-flow bench-data bench-convert bench-save bench-packed kubernetes bench-team bench-libraries faults recovery scale gpu gpu-kit schema presets docs image push licences clean

help: ## list these targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s  %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv from uv.lock; instant if it is up to date
	@echo "setup: .venv is up to date with uv.lock (extra $(EXTRA))"

$(STAMP): pyproject.toml uv.lock
	@EXTRA=$(EXTRA) sh setup.sh
	@rm -f .venv/.synced-* && touch $@

tiny: $(STAMP) ## run the whole pipeline on a tiny model, on this CPU
	@$(PYTHON) -m flows.finetune tiny

tiny-rl: $(STAMP) ## the same with reinforcement learning after training
	@$(PYTHON) -m flows.finetune tiny-rl

up: $(STAMP) ## start a Prefect server, MLflow and workers on this host
	@$(PYTHON) -m flows.services up

down: ## stop what make up started
	@$(PYTHON) -m flows.services down

# Tests often wait for servers and imports. tests/conftest.py decides which run together, and which run last.
JOBS ?= 3
SIDE_BY_SIDE = -n $(JOBS) --dist loadscope --no-loadscope-reorder -rfEs
test: $(STAMP) ## run the tests that need no GPU and little time, JOBS files at a time
	$(PYTHON) -m pytest $(SIDE_BY_SIDE)

slow: $(STAMP) ## run the tests that take minutes, JOBS files at a time
	$(PYTHON) -m pytest -m slow $(SIDE_BY_SIDE)

# Without a working .venv, any Python from 3.8 on reports what is missing.
doctor: ## check this host, with a remedy for each problem
	@for python in $(PYTHON) python3 /usr/bin/python3; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then \
			exec $$python -m flows.doctor --extra $(EXTRA); \
		fi; \
	done; echo "doctor: no Python 3.8 or newer on PATH: make setup" >&2; exit 1

lint: $(STAMP) ## check style, format and types
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m basedpyright

families: $(STAMP) ## compare every family with transformers, PEFT and vLLM, on this CPU; resumes
	$(PYTHON) -m benchmarks.families --workdir runs/families

layouts: $(STAMP) ## train at every parallel layout on this CPU and compare with one process
	$(PYTHON) -m benchmarks.layouts

GPUS ?= 1
CONF ?= $(if $(SHORT),tiny,gpt2-large)
study: $(STAMP) ## measure the layouts of a configuration; CONF=NAME GPUS=2 PROFILE=1; SHORT=1: on this CPU
	@$(PYTHON) -m benchmarks.study $(CONF) --gpus $(if $(SHORT),2,$(GPUS)) --track $(if $(PROFILE),--profile) $(if $(SHORT),--steps 6)

# SHORT=1: at most five minutes each, with smaller files and fewer rounds.
SHORT ?=
SHORTLY := $(if $(SHORT),--short)
bench-store: $(STAMP) ## compare transfers to S3 with boto3
	$(PYTHON) -m benchmarks.store $(SHORTLY)

bench-flow: $(STAMP) ## measure start-up, caching and orchestration
	$(PYTHON) -m benchmarks.flow $(SHORTLY)

bench-data: $(STAMP) ## compare preparation of data with Megatron-Bridge
	$(PYTHON) -m benchmarks.data $(SHORTLY)

SIZE_GB ?= 12
BRIDGE ?= 1
bench-convert: $(STAMP) ## compare conversion and export with cp -r and Megatron-Bridge; SIZE_GB=2, BRIDGE= without
	$(PYTHON) -m benchmarks.convert --size-gb $(SIZE_GB) $(if $(BRIDGE),,--no-bridge)

bench-save: $(STAMP) ## compare host memory of a save with the plan
	$(PYTHON) -m benchmarks.save

bench-packed: $(STAMP) ## measure LoRA on each packed base
	$(PYTHON) -m benchmarks.packed_quality $(SHORTLY)

API_SERVER ?=
kubernetes: $(STAMP) ## check the Helm chart and run a gang against an API server; API_SERVER=real: Debian's, compiled in 15 minutes
	sh tests/support/kubernetes_programs.sh runs/kubernetes $(API_SERVER)
	API_SERVER=$(API_SERVER) $(PYTHON) -m pytest -m "" tests/test_chart.py tests/tasks/gang/engines/test_kubernetes_gang.py

bench-team: $(STAMP) ## run the services of deploy/compose as processes, and 20 flows at once; LIMIT=4 at a time
	$(PYTHON) -m benchmarks.team $(if $(LIMIT),--limit $(LIMIT))

bench-libraries: $(STAMP) ## compare libraries with our code; docs/adr/ has the decisions
	$(PYTHON) -m benchmarks.libraries

N ?= 5
EVERY ?= 5
faults: $(STAMP) ## kill, stop and cut off hosts of gangs on this machine, N times each; APART=1: a disk for each host; MINUTES=60: one training
	$(PYTHON) -m benchmarks.gang_faults $(N) $(SHORTLY) $(if $(APART),--apart) $(if $(MINUTES),--minutes $(MINUTES) --every $(EVERY))

recovery: $(STAMP) ## measure the time from a killed rank or a lost host to the next step, N times; compare with torchrun
	$(PYTHON) -m benchmarks.recovery $(N)

scale: $(STAMP) ## measure a gang of 1000 fake hosts, and when a dead one is noticed
	$(PYTHON) -m benchmarks.gang_scale $(SHORTLY)

gpu: ## compare training on this GPU with the CPU
	bash benchmarks/gpu/run

gpu-kit: $(STAMP) ## pack the GPU tests for a machine without network; FLOW=1: the whole flow
	$(PYTHON) benchmarks/gpu/kit.py $(if $(FLOW),--flow)

schema: $(STAMP) ## write conf/schema.json, docs/reference/keys.md and docs/migrate from the code
	$(PYTHON) -m conf.schema --json > conf/schema.json
	$(PYTHON) -m benchmarks.keys > docs/reference/keys.md
	$(PYTHON) -m benchmarks.migration docs/migrate

presets: $(STAMP) ## write the tables of docs/start/configurations.md from the configurations
	$(PYTHON) -m benchmarks.presets docs/start/configurations.md

# uv installs mkdocs-material into an environment of its own, from the group docs of uv.lock.
docs: ## build docs/ as a site in runs/site; a dead link is an error
	PATH="$(CURDIR)/.uv/bin:$$PATH" NO_MKDOCS_2_WARNING=1 uv run --frozen --isolated --only-group docs mkdocs build --strict

IMAGE ?= finetune:$(EXTRA)
image: ## build the container image IMAGE of the last commit, with buildah, podman or docker
	sh deploy/image/build.sh $(IMAGE) EXTRA=$(EXTRA) $(if $(BASE),BASE=$(BASE)) $(if $(KUBECTL),KUBECTL=$(KUBECTL))

push: ## push IMAGE to its registry, with the program that built it
	@$$(for name in buildah podman docker; do command -v $$name && break; done) push $(IMAGE)

licences: $(STAMP) ## list the licences of the installed packages
	@$(PYTHON) -m benchmarks.licences

clean: ## remove the environment and caches of the project; runs/ stays
	rm -rf .venv .uv .pytest_cache .ruff_cache .hypothesis build dist finetune.egg-info
	find contract conf flows tasks trainer tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
