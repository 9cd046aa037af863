# Everything a person repeats. `make` alone lists it.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# uv does not read pip's own setting: wheels that this machine keeps are found all the same.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_LINK_MODE ?= copy
# Where it is set, every one of the suite's many processes compiles torch anew: half of all its time.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.installed
QUICK := not slow and not gpu and not bench
# One more than there are processors: some tests wait for processes that end, or for time to pass.
ALL_AT_ONCE := --numprocesses $(shell $(PYTHON) -c 'import os; print(1 + (os.cpu_count() or 1))')
# Each of these starts several processes, which wait for each other and for time to pass much of the time.
BY_FILE := --numprocesses 3 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install quickstart example-reviews example-chat example-preferences example-chain example-summarise example-sums example-distill example-compress test test-releases test-unit test-dist test-ray test-long test-partition test-traced check-kubernetes soak soak-week test-gpu bench-gpu bench-planner published-table bench findings docs check house format lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

install: $(STAMP) ## make the environment in .venv; quick when nothing changed

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 to 3.13; name one with make PYTHON=/path/to/python"; exit 2; }
	@echo "installing into $(VENV): some seconds to some minutes; torch alone is 0.2 GB (CPU) to 5 GB (CUDA)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --group dev --editable .
	@touch $@

quickstart: install ## corpus, training on embedded Ray, export, report: the main job
	@$(BIN)/orchestrator data corpus corpus
	@$(BIN)/orchestrator run examples/quickstart.yaml
	@$(BIN)/python examples/baselines.py runs/quickstart gzip 5-gram

example-reviews: install ## fine-tune a pretrained encoder on film reviews, and the same model from scratch
	@$(BIN)/python examples/reviews.py
	@$(BIN)/orchestrator run examples/reviews.yaml
	@$(BIN)/orchestrator run examples/reviews.yaml --set name=reviews-scratch --set workload.model=hf:reviews/scratch

example-chat: install ## a small chat model: pre-trained on the corpus, then taught to answer questions about functions
	@$(BIN)/orchestrator data corpus corpus
	@$(BIN)/python examples/chat.py
	@$(BIN)/orchestrator run examples/chat_pretrain.yaml
	@$(BIN)/orchestrator run examples/chat.yaml

example-preferences: example-chat ## of two answers the right one is preferred: DPO on top of example-chat
	@$(BIN)/orchestrator run examples/preferences.yaml

example-chain: install ## pre-train a small GPT, fine-tune it, and fan out adapters for two packages
	@$(BIN)/orchestrator data corpus corpus
	@$(BIN)/orchestrator run examples/chain.yaml

example-summarise: install ## summaries of documentation strings by an encoder-decoder, with and without pre-training
	@$(BIN)/orchestrator data corpus corpus
	@$(BIN)/python examples/summarise.py
	@$(BIN)/orchestrator run examples/summarise.yaml

example-sums: install ## a small model that forgets to carry learns to add from rewards (GRPO)
	@$(BIN)/python examples/sums.py
	@$(BIN)/orchestrator run examples/sums_pretrain.yaml
	@$(BIN)/orchestrator run examples/sums.yaml

example-distill: install ## a small GPT learns from a larger one, and alone for comparison
	@$(BIN)/orchestrator data corpus corpus
	@$(BIN)/orchestrator run examples/distill.yaml

example-compress: install ## the classifier of example-reviews, with a tenth of its bytes
	@$(BIN)/python examples/reviews.py
	@$(BIN)/orchestrator run examples/compress.yaml

test: install ## the default suite: unit, dist and ray
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -m "$(QUICK)" $(ALL_AT_ONCE)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/dist tests/ray -m "$(QUICK)" $(BY_FILE)

test-unit: install ## light processes at most
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -m "$(QUICK)" $(ALL_AT_ONCE)

test-dist: install ## processes on gloo, an MLflow server, an S3 server
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/dist -m "$(QUICK)" $(BY_FILE)

test-ray: install ## real Ray nodes on this machine
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/ray -m "$(QUICK)" $(BY_FILE)

test-long: install ## what takes minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -m "slow and not gpu" --timeout 3600 $(ALL_AT_ONCE)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/dist -m "slow and not gpu" --timeout 3600 --numprocesses 2 --dist loadfile
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/ray -m "slow and not gpu" --timeout 3600

test-traced: ## traced memory beside that of real ranks, of 200 random jobs: 20 minutes
	@$(BIN)/pytest tests/dist/train/test_traced_memory.py -m 'slow or not slow' -q -s --timeout 3600

test-partition: install ## networks that are cut between real nodes, in namespaces: Linux, as root; ten minutes
	$(BIN)/pytest tests/ray/test_partition.py tests/ray/test_ssh_partition.py -m slow --timeout 3600

check-kubernetes: install ## manifests: against KubeRay's schema (CRDS=folder), and by a real API server where one is found or given (KUBECONFIG=file)
	$(BIN)/pytest tests/unit/orchestrator/extensions/render -q $(if $(CRDS),--kuberay-crds $(CRDS))
	@test -n "$(KUBECONFIG)" || echo "no API server was asked: give KUBECONFIG=file"
	@test -z "$(KUBECONFIG)" || $(BIN)/orchestrator cluster render kuberay examples/quickstart.yaml --runs s3://bucket/runs --image training-orchestrator:cpu --kubeconfig "$(KUBECONFIG)" --to build/kubernetes

soak: install ## 10,000 random faults of every kind, in rounds that a second call goes on with: hours
	$(BIN)/python tests/bench/soak.py runs/soak --faults 10000

soak-week: install ## a week of spot machines in an hour: what it costs a run, and whether anything leaks; on a machine that does nothing else
	rm -rf runs/soak-week
	OMP_NUM_THREADS=1 $(BIN)/python tests/bench/soak_week.py runs/soak-week

test-gpu: install ## what needs a GPU, in ten minutes on one that reaches no network; elsewhere what of it runs on a CPU
	OMP_NUM_THREADS=1 timeout 600 $(BIN)/pytest tests/gpu/test_processes.py tests/gpu/test_computation.py tests/unit/orchestrator/checkpoint/test_saver.py -m "gpu or not slow" --timeout 300 --durations 0 -s

bench-gpu: install ## speed, memory and predictions on one GPU, in ten minutes
	timeout 600 $(BIN)/python tests/gpu/bench_gpu.py

bench-planner: install ## predicted and measured steps of random small jobs, and the chosen layout beside all others: 45 minutes, on a quiet machine
	OMP_NUM_THREADS=1 $(BIN)/python tests/bench/bench_planning.py 12 19
	OMP_NUM_THREADS=1 $(BIN)/python tests/bench/bench_brute_force.py

published-table: install ## the tables of published steps in docs/predictions.md, made anew
	$(BIN)/python tests/bench/published_table.py

bench: install ## measurements; their tables are in docs/benchmarks.md
	$(BIN)/python tests/bench/bench_overhead.py
	$(BIN)/python tests/bench/bench_recovery.py
	$(BIN)/python tests/bench/bench_checkpoint.py
	$(BIN)/python tests/bench/bench_workloads.py
	$(BIN)/python tests/bench/bench_parallel.py
	$(BIN)/python tests/bench/bench_evaluation.py
	$(BIN)/python tests/bench/bench_deepspeed.py --ranks 2 --rounds 3
	$(BIN)/python tests/bench/bench_tune.py
	$(BIN)/python tests/bench/bench_mup.py
	$(BIN)/python tests/bench/bench_generation.py

docs: install ## the documentation site, into build/docs; needs no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the site is in build/docs: open build/docs/index.html"

test-releases: install ## quantised exports, GGUF files by llama.cpp and the contract tests by older and newer releases of libraries: half an hour; torch with CUDA
	$(BIN)/python tests/bench/read_by_releases.py build/releases
	$(BIN)/python tests/bench/llama_cpp_by_releases.py build/releases
	$(BIN)/python tests/bench/contract_by_releases.py build/releases

findings: ## what public software does that good guesses miss: run each script of findings/, an hour or more
	@failed=0; for script in findings/*.sh; do \
	  began=$$(date +%s); result=holds; \
	  seen=$$(bash $$script 2>&1) || { result=CHANGED; failed=1; }; \
	  printf '%-34s %-8s %4d s  %s\n' "$$(basename $$script .sh)" $$result $$(($$(date +%s) - began)) \
	    "$$(printf '%s\n' "$$seen" | tail -1)"; \
	done; exit $$failed

check: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

house: install ## counts of the source: files, functions, what takes the whole job
	@$(BIN)/python tests/house_counts.py

format: install ## let ruff write
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: install ## write constraints.txt from this environment
	$(BIN)/uv pip freeze --exclude-editable --python $(BIN)/python | sed -e 's/+cpu$$//' -e '/^uv==/d' -e '/^nvidia-/d' -e '/^triton==/d' > constraints.txt

clean: ## remove the environment and caches; runs stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
