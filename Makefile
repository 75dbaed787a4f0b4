# `make help` lists all targets. After `make setup` a target works offline, unless its help line says
# that it downloads, installs or builds images.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# The packages of .venv, locked with hashes; `make lock` writes these files.
LOCKS := $(patsubst %,requirements/%.txt,build control stores reward weight-sync inference trainer dev)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Many processes share few cores, so each uses one thread.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
# Tests start hundreds of our processes: compiled once, or each time where this is set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup gpu-kit demo test test-fast test-changed test-failed test-long test-all durations mutants chaos chaos-short chaos-sessions elastic elastic-sglang fuzz lint format typecheck imports layout proto docs models signatures lock manifests e2e-kubernetes verify bench scale soak learn examples e2e-kubernetes-run e2e-ray e2e-slurm sglang sglang-gpu test-sglang test-harness test-clients test-agents-sdk test-verifiers test-liger test-transformers images e2e-compose clean

##@ Start

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@/ {printf "\n\033[1m%s\033[0m\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  \033[36m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch is installed separately, with the lock torch-$(TORCH).txt: `cpu`, or `cuda` for GPUs (docs/gpu.md).
# What is installed stays, until setup gets another TORCH.
TORCH ?= $(or $(shell cat $(VENV)/.torch 2>/dev/null),cpu)

setup: ## Create .venv with everything that the other targets need (downloads once; TORCH=cuda: for GPUs)
	@test "$$(cat $(VENV)/.torch 2>/dev/null || echo cpu)" = $(TORCH) || rm -f $(STAMP)
	@$(MAKE) --no-print-directory $(STAMP)

$(STAMP): pyproject.toml $(LOCKS) requirements/torch-$(TORCH).txt tools/install_torch.py tools/get_helm.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --require-hashes $(addprefix -r ,$(LOCKS))
	$(BIN)/python tools/install_torch.py requirements/torch-$(TORCH).txt
	@echo $(TORCH) >$(VENV)/.torch
	@# The original project, and earlier versions of this one, are named `areal` and have the same import package.
	$(BIN)/python -m pip uninstall --quiet --yes areal 2>/dev/null
	$(PIP) --no-deps --no-index --no-build-isolation --editable .
	$(BIN)/python tools/get_helm.py $(BIN)
	@touch $@

demo: $(STAMP) ## Train a tiny policy to add, on this machine's CPU
	$(BIN)/areal run examples/arithmetic_grpo.py $(ARGS)

##@ Test

# Workers take whole files, the longest first (tests/plugins/order.py). They are more than two cores,
# since tests spend much of their time waiting for processes.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## Run the tests that need no cluster, all but the long ones
	$(BIN)/python -m pytest -m 'not long' $(PARALLEL) $(ARGS)

test-fast: $(STAMP) ## Run unit tests and the ledger's, as far as they start no process
	$(BIN)/python -m pytest -m 'not process and not long' -n 2 --dist loadfile --no-loadscope-reorder tests/unit tests/contract/test_ledger*.py $(ARGS)

test-changed: $(STAMP) ## Run the tests that your change reaches, for a minute (ARGS='--since main')
	$(BIN)/python tools/changed_tests.py $(ARGS)

test-failed: $(STAMP) ## Run the tests that failed in the last run again, one at a time
	@echo 'flaky if they pass now:'; $(BIN)/python -m pytest --cache-show 'cache/lastfailed' -q | tail -n +3
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 3 $(ARGS)

# Long tests run one at a time: most of them keep all cores busy by themselves.
test-long: $(STAMP) ## Run the long tests, for over an hour (ARGS='--share=COMMIT': a few minutes of them)
	CHAOS_MINUTES=$${CHAOS_MINUTES:-1.5} $(BIN)/python -m pytest -m long $(ARGS)

test-all: test test-long ## Run all tests that need no cluster

durations: $(STAMP) ## Record what each test costs, in tests/durations.json (ARGS='-m long')
	rm -rf build/costs
	$(BIN)/python -m pytest --costs=build/costs $(or $(ARGS),-m 'not long' $(PARALLEL)) || true
	PYTHONPATH=. $(BIN)/python -m tests.plugins.costs build/costs --write

mutants: $(STAMP) ## Plant bugs and see which tests catch them, for half an hour (ARGS='eng06 buf07')
	PYTHONPATH=services:. $(BIN)/python -m tools.mutants $(ARGS)

chaos: $(STAMP) ## Train while processes are killed at random (CHAOS_MINUTES=3 CHAOS_SEED=0 CHAOS_RANKS=1 CHAOS_TABLE=FILE)
	$(BIN)/python -m pytest -q -s tests/chaos $(ARGS)

chaos-short: $(STAMP) ## Run chaos for a minute and a half
	CHAOS_MINUTES=1.5 $(BIN)/python -m pytest -q -s tests/chaos/test_chaos.py $(ARGS)

chaos-sessions: $(STAMP) ## Kill what serves outside agents, in 200 sessions with 30 kills for each seed (CHAOS_SEEDS='0 1 2')
	for seed in $(or $(CHAOS_SEEDS),0 1 2); do \
		CHAOS_SEED=$$seed CHAOS_AGENTS=$${CHAOS_AGENTS:-200} CHAOS_KILLS=$${CHAOS_KILLS:-30} \
			$(BIN)/python -m pytest -q -s tests/chaos/test_sessions.py $(ARGS) || exit 1; \
	done

elastic: $(STAMP) ## Train while the number of servers changes (2, 4, 1, 3) and one is killed (ELASTIC_SEED=0 ELASTIC_STEPS=120)
	$(BIN)/python -m pytest -q -s tests/chaos/test_elastic.py $(ARGS)

elastic-sglang: $(STAMP) sglang ## Train on two real SGLang servers while a third joins and one is killed (ELASTIC_STEPS=160)
	AREAL_TEST_SGLANG=1 $(BIN)/python -m pytest -q -s tests/chaos/test_elastic_sglang.py $(ARGS)

e2e-kubernetes: $(STAMP) ## Install, train, scale, upgrade and delete pods on the cluster of KUBECONFIG (ARGS='--build --scarce')
	PYTHONPATH=services:. $(BIN)/python -m tests.kubernetes $(ARGS)

fuzz: $(STAMP) ## Send malformed input to every RPC and endpoint, 50 times as much as `make test` does (AREAL_FUZZ=50)
	AREAL_FUZZ=$${AREAL_FUZZ:-50} $(BIN)/python -m pytest tests/integration/test_fuzz_services.py tests/contract/test_store_fuzz.py $(ARGS)

sglang: .venv-sglang/.set-up ## Install SGLang for CPUs into .venv-sglang (downloads 2.6 GB once)

.venv-sglang/.set-up: tools/sglang_cpu/requirements.txt tools/sglang_cpu/install.sh $(wildcard tools/sglang_cpu/shims/*)
	PYTHON=$(PYTHON) tools/sglang_cpu/install.sh .venv-sglang
	@touch $@

sglang-gpu: .venv-sglang-gpu/.set-up ## Install SGLang for GPUs into .venv-sglang-gpu, where `areal run` looks for it

.venv-sglang-gpu/.set-up:
	$(PYTHON) -m venv .venv-sglang-gpu
	.venv-sglang-gpu/bin/python -m pip install --quiet --disable-pip-version-check sglang==0.5.23
	@touch $@

gpu-kit: ## Pack what measures the trainer on a GPU into build/gpu-kit, with wheels (downloads 20 MB; GPU_PYTHON=3.12)
	$(PYTHON) tools/gpu/pack.py build/gpu-kit $(or $(GPU_PYTHON),3.12)

test-sglang: $(STAMP) sglang ## Run the engines' conformance suite on the CPU engine and on real SGLang
	AREAL_TEST_SGLANG=1 $(BIN)/python -m pytest --timeout 600 tests/contract/test_engine_*.py tests/integration/test_agent_sessions.py tests/integration/test_gateway_engines.py $(ARGS)

test-harness: $(STAMP) sglang ## Test mini-swe-agent, Claude Code and Codex, unmodified, as agents (downloads them into .venv-harness)
	$(BIN)/python -m venv .venv-harness
	.venv-harness/bin/pip install -q uv==0.13.9
	.venv-harness/bin/uv pip install -q --python .venv-harness/bin/python mini-swe-agent==2.4.6 'litellm[proxy]==1.106.2' mcp==2.3.0
	npm install --silent --no-audit --no-fund --prefix .venv-harness @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0
	AREAL_TEST_HARNESS=$(CURDIR)/.venv-harness AREAL_TEST_SGLANG=1 $(BIN)/python -m pytest -q tests/integration/test_cli_harness.py $(ARGS)

test-clients: $(STAMP) ## Test LangChain, LiteLLM, AI SDK and others, thirteen clients, unmodified, as agents (downloads them into .venv-clients; AREAL_TEST_SGLANG=1 after make sglang: on SGLang too)
	$(BIN)/python -m venv .venv-clients
	.venv-clients/bin/pip install -q uv==0.13.9
	.venv-clients/bin/uv pip install -q --python .venv-clients/bin/python openai==3.57.0 anthropic==2.14.0 langchain-openai==1.7.4 langchain-anthropic==1.7.10 litellm==1.110.2 'pydantic-ai-slim[openai]==2.38.0' 'smolagents[openai]==1.26.0' dspy==3.4.1 openai-agents==0.24.0 inspect-ai==0.3.285
	if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix .venv-clients openai@6.49.0 ai@6.0.326 @ai-sdk/openai@3.0 zod@4; fi
	AREAL_TEST_CLIENTS=$(CURDIR)/.venv-clients $(BIN)/python -m pytest -q tests/integration/test_client_suite.py $(ARGS)

test-agents-sdk: $(STAMP) ## Test OpenAI's Agents SDK, unmodified, as an agent (downloads it into build/agents-sdk)
	$(BIN)/python -m venv .venv-agents-sdk
	.venv-agents-sdk/bin/pip install -q --no-deps --upgrade --target build/agents-sdk openai-agents==0.24.0 griffelib==2.4.1 mcp==2.3.0 mcp-types==2.3.0 pyjwt==2.15.1 python-multipart==0.0.34 sse-starlette==3.7.0 websockets==16.1.1
	PYTHONPATH=build/agents-sdk $(BIN)/python -m pytest -q -k sdk tests/unit/test_example_lines.py tests/unit/test_learning_table.py tests/integration/test_agent_sessions.py tests/integration/test_agent_recipes.py $(ARGS)

test-verifiers: $(STAMP) ## Test unmodified verifiers and OpenEnv environments (downloads them into .venv-verifiers)
	$(BIN)/python -m venv .venv-verifiers
	.venv-verifiers/bin/pip install -q uv==0.13.9
	.venv-verifiers/bin/uv pip install -q --python .venv-verifiers/bin/python 'verifiers[openenv]==0.4.0'
	AREAL_TEST_VERIFIERS=$(CURDIR)/.venv-verifiers/bin/python $(BIN)/python -m pytest -q tests/integration/test_verifiers_env.py $(ARGS)

test-liger: $(STAMP) ## Compare Liger's kernels with eager ones, on the CPU with Triton's interpreter (downloads them into build/liger)
	$(BIN)/python -m venv .venv-liger
	.venv-liger/bin/pip install -q --no-deps --upgrade --target build/liger liger-kernel==0.8.5 triton==3.9.0
	AREAL_TEST_LIGER=$(CURDIR)/build/liger $(BIN)/python -m pytest -q tests/unit/areal_torch/engines/parallel/test_liger.py $(ARGS)

test-transformers: $(STAMP) ## Run the GPU kit in miniature with the oldest supported transformers (downloads it into build/transformers)
	$(PIP) --no-deps --upgrade --target build/transformers transformers==5.17.0 huggingface-hub==1.33.0
	AREAL_TEST_TRANSFORMERS=$(CURDIR)/build/transformers $(BIN)/python -m pytest -q -m long tests/integration/test_gpu_kit.py $(ARGS)

e2e-slurm: $(STAMP) ## Train on a Slurm cluster of two nodes, both on this machine (needs Debian's slurm-wlm and munge)
	AREAL_TEST_SLURM=1 $(BIN)/python -m pytest -q tests/e2e/test_slurm_run.py $(ARGS)

e2e-kubernetes-run: $(STAMP) ## Run `areal run --on kubernetes` on the cluster of KUBECONFIG (AREAL_TAG=dev)
	AREAL_TEST_KUBERNETES=1 $(BIN)/python -m pytest -q tests/e2e/test_kubernetes_run.py $(ARGS)

.PHONY: test-trackers
test-trackers: $(STAMP) ## Test the experiment trackers in their offline modes (downloads their packages into build/trackers)
	$(PIP) --no-deps --require-hashes --upgrade --target build/trackers -r requirements/trackers.txt
	PYTHONPATH=build/trackers $(BIN)/python -m pytest -q tests/unit/areal_torch/training/test_step_tracker.py $(ARGS)

.PHONY: test-e2b
test-e2b: $(STAMP) ## Test the sandbox service with E2B's own SDK (downloads it into .venv-e2b)
	$(BIN)/python -m venv .venv-e2b
	.venv-e2b/bin/pip install -q e2b==2.63.0
	AREAL_TEST_E2B=$(CURDIR)/.venv-e2b/bin/python $(BIN)/python -m pytest -q tests/integration/test_e2b_sdk.py $(ARGS)

e2e-ray: $(STAMP) ## Train on a local Ray cluster (installs Ray into .venv)
	$(PIP) --no-deps --require-hashes -r requirements/ray.txt
	AREAL_TEST_RAY=1 $(BIN)/python -m pytest -q tests/e2e/test_ray_run.py $(ARGS)

bench: $(STAMP) ## Run all benchmarks; each also measures another program or a bound
	@for file in tools/bench/*.py; do echo "== $$file"; PYTHONPATH=services:. $(BIN)/python $$file || exit 1; done

scale: $(STAMP) ## Measure the control plane with 10, 100 and 1000 simulated servers (ARGS="1000x50000")
	$(BIN)/python tools/scale_simulator.py $(ARGS)

soak: $(STAMP) ## Train for hours and print how memory, files and Redis grow (HOURS=2, ARGS='--json FILE')
	PYTHONPATH=services:. $(BIN)/python tools/soak.py --hours $${HOURS:-2} $(ARGS)

learn: $(STAMP) ## Train the runs that docs/learning.md does not have yet, two at a time (ARGS='grpo --seeds 0')
	PYTHONPATH=services:. $(BIN)/python -m tools.learn $(ARGS)

examples: $(STAMP) ## Run each example in miniature (ARGS='dpo distill')
	PYTHONPATH=services:. $(BIN)/python -m tools.examples $(ARGS)

##@ Check

verify: $(STAMP) proto docs manifests lint typecheck imports layout ## Run all checks; fails if a generated file was not current
	git diff --exit-code -- proto services/areal/v1 docs README.md manifests charts
	@test -z "$$(git ls-files --others --exclude-standard -- services/areal/v1 docs manifests charts)" || \
		{ echo 'generated files are not committed:'; git ls-files --others --exclude-standard -- services/areal/v1 docs manifests charts; exit 1; }

lint: $(STAMP) ## Run ruff and buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint proto
	$(BIN)/buf format --diff --exit-code proto

format: $(STAMP) ## Format with ruff and buf
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write proto

typecheck: $(STAMP) ## Run mypy in strict mode
	$(BIN)/mypy

imports: $(STAMP) ## Check which package may import which (.importlinter)
	PYTHONPATH=services $(BIN)/lint-imports

layout: $(STAMP) ## Check that every service has the same files
	$(BIN)/python tools/check_layout.py

##@ Deploy

# TORCH: cpu or cuda. TORCH_INDEX: another package index for torch. BASE_IMAGE: another base image (Debian, Python 3.11 or newer).
images: ## Build the images areal/{stores,control,reward,weight-sync,sandbox,inference-cpu,trainer}:dev (TAG, BASE_IMAGE, TORCH, TORCH_INDEX, IMAGES; IMAGES=gpu: docs/gpu.md)
	@for target in $(or $(IMAGES),stores control reward weight-sync sandbox inference-cpu trainer); do \
		echo "== areal/$$target:$(or $(TAG),dev)"; \
		docker build --quiet --target $$target --tag areal/$$target:$(or $(TAG),dev) \
			--build-arg VERSION=$(or $(TAG),dev) --build-arg REVISION=$$(git rev-parse --short HEAD 2>/dev/null || echo unknown) \
			$(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
			$(if $(filter cuda,$(TORCH)),--build-arg TORCH=cuda) $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) . || exit 1; \
	done

e2e-compose: $(STAMP) ## Build images, train with docker-compose.yaml in a fresh clone, scale and kill services (E2E_STEPS=400)
	$(BIN)/python -m pytest -q -s tests/e2e/compose $(ARGS)

##@ Generate

proto: $(STAMP) ## Generate services/areal/v1 from proto/
	$(BIN)/python tools/gen_proto.py

docs: $(STAMP) ## Generate configuration, api, algorithms, metrics and migration in docs/, and the import graph
	PYTHONPATH=services $(BIN)/python tools/gen_docs.py
	$(BIN)/python tools/import_graph.py --write

models: $(STAMP) ## Generate docs/models.md by trying every architecture of transformers (minutes)
	PYTHONPATH=services $(BIN)/python tools/gen_models.py

signatures: $(STAMP) ## Look up what we call of torch and transformers in all supported versions (downloads 500 MB; ARGS=FOLDER keeps them)
	PYTHONPATH=services:. $(BIN)/python -m tools.api_signatures $(ARGS)

lock: build/lock/.set-up ## Lock requirements/*.txt with hashes, from pyproject.toml; downloads from PyPI (ARGS=--upgrade)
	PYTHONPATH=. build/lock/bin/python tools/lock.py $(ARGS)

build/lock/.set-up: requirements/lock.txt
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

manifests: $(STAMP) ## Generate the chart's schema, its copy of an example, and manifests/rendered
	PYTHONPATH=services:. $(BIN)/python tools/gen_chart_schema.py
	$(BIN)/python tools/gen_manifests.py

clean: ## Delete generated and cached files, but not the environment or runs
	rm -rf build dist *.egg-info services/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find services tests tools examples -name __pycache__ -type d -exec rm -rf {} +
