# make smoke       install, run suites/smoke.toml on this machine, simulate every published experiment, print the claims table
# make simulate    simulate every published experiment, and print the claims table
# make test        install with the test extra, run the tests without the slow ones and those of DeepSpeed and Megatron-core
# make test-slow   the slow tests: commands of the documentation, faults of real ranks, rates of emulated links
# make engines     install DeepSpeed and Megatron-core, so that smoke runs them as well
# make test-engines  install DeepSpeed and Megatron-core, run the tests that train with them
# make test-slurm  run the tests of a real SLURM on this machine (root; make slurm-packages installs it)
# make test-pythons  run some tests and a training with each supported Python that this machine has
# make test-gpu    run the tests of kernels and training steps on a CUDA device
# make bench-gpu   measure the bandwidth of each kernel and of torch's operator on a CUDA device, and record it in RESULTS
# make gpu-kit     pack the source and missing wheels for a GPU machine without internet (docs/gpu-without-internet.md)
# make test-gpu-kit  pack a kit for this machine, and run it without a network
# make check       run the formatter, the linter, the type checker and the limits of the package sizes
# make structure   print files and lines of each package and their limits in tests/structure.toml
# make mutants     put faults into the lines that changed since BASE, or into a PACKAGE, and print those that no test detects
# make mutation-table  print the verdicts that change when the simulator has faults (store RESULTS, ten minutes)
# make readability print 60 random docstrings, comments and messages, for a reading test without the code; SEED selects them
# make benchmarks  run the comparisons of tests/benchmarks with pytest-benchmark
# make docs        build the documentation as a website, build/docs/index.html; a broken link is an error
# make artifact    write reports/artifact.md (claim, command, expected value, tolerance, cost), docs/commands.md and docs/keys.md
# make notebooks   open the notebooks of reports/ in JupyterLab
# make browser-packages  install Chromium for the browser tests (Debian, Ubuntu; root)
# make pictures    run the experiments of the README's pictures, and draw them in reports/pictures (half an hour)
# make slurm-packages  install SLURM, munge and MariaDB without starting them (Debian, Ubuntu; root)
# make slurm-lab   start a SLURM cluster on this machine for trials of `repro submit`; make slurm-lab-down stops it
# make clean       remove the files that these targets write, except results/ and .venv/
#
# Variables, on the command line or in the environment:
#   PYTHON       interpreter of .venv (3.10 or newer)                                 python3
#   TORCH_INDEX  package index for torch; empty: the default index                     PyTorch's index of CPU builds
#                on Linux without an NVIDIA driver, if that index answers; else the default index
#   UV           the uv program for installations; empty: pip                          uv, if it is installed
#   CONSTRAINTS  constraints file for pip, which pins torch and other packages         constraints-cpu.txt
#   KEEP_TORCH   1: use the torch of PYTHON or of the environment VENV, and never replace it;
#                the environment remembers this choice
#   PYTHON       for gpu-kit: Python of the GPU machine, a version or a program        3.12
#   PLATFORM     for gpu-kit: x86_64, aarch64 or a platform tag of pip                 x86_64
#   PRESENT      for gpu-kit: packages that the GPU machine has                        torch numpy
#   KIT          archive that gpu-kit writes                                           build/gpu-kit.tar.gz
#   VENV         folder of the virtual environment; created if missing                 .venv
#   RESULTS      folder of the records                                                 results
#   TODAY        system of today for which smoke and simulate repeat the claims        dgx-h100
#   N, GPUS, RATE, DBD, LAB, ...   options of slurm-lab; slurm/lab --help explains them
#   REPORT_ARGS  more arguments for the report of smoke, e.g. --notebooks after `make test`
#   WORKERS      number of parallel tests in `make test` and `make test-slow`          2
#   LABS         number of SLURM clusters of `make test-slurm`, one for each parallel test    3
#   BASE         for make mutants: commit to compare with                              main
#   PACKAGE, SAMPLE, SEED  for make mutants: package of tests/mutants/packages.toml; number of random faults; random seed
#   PYTEST_ARGS  more arguments for pytest, e.g. PYTEST_ARGS='-x -k zero'

PYTHON ?= python3
VENV ?= .venv
KEPT := $(VENV)/kept-torch.txt
KEEP_TORCH ?= $(if $(wildcard $(KEPT)),1)
CONSTRAINTS ?= $(if $(KEEP_TORCH),,constraints-cpu.txt)
CPU_INDEX := https://download.pytorch.org/whl/cpu
UV ?= $(if $(KEEP_TORCH),,$(shell command -v uv 2>/dev/null))
RESULTS ?= results
TODAY ?= dgx-h100
PYTEST_ARGS ?=
WORKERS ?= 2
LABS ?= 3
PLATFORM ?= x86_64
PRESENT ?= torch numpy
KIT ?= build/gpu-kit.tar.gz
KIT_PYTHON = $(if $(filter file,$(origin PYTHON)),3.12,$(PYTHON))
REHEARSED_KIT := build/gpu-kit-rehearsal.tar.gz
REPORT_ARGS ?=
BASE ?= main
PACKAGE ?=
SAMPLE ?=
SEED ?=

BIN := $(VENV)/bin
CREATED := $(BIN)/python
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
INSTALLED_ENGINES := $(VENV)/.installed-engines
INSTALLED_MUTANTS := $(VENV)/.installed-mutants
INSTALLED_DOCS := $(VENV)/.installed-docs
NVRTC13 := $(VENV)/nvrtc13/.installed
# uv does not see the packages of the system's Python, so pip installs into an environment with KEEP_TORCH.
PIP := $(if $(UV),$(UV) pip install --python $(BIN)/python,PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install) \
	--quiet $(if $(KEEP_TORCH),-c $(KEPT)) $(if $(strip $(CONSTRAINTS)),-c $(CONSTRAINTS))

# Installs torch alone; the packages that torch needs come from the default index. `timeout` also limits the search for the
# host, which the time limit of urlopen does not.
define install_cpu_torch
if $(BIN)/python -c 'import ctypes, importlib.util as u; u.find_spec("torch") or ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then :; \
elif ! timeout 8 $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; then \
  echo "note: $(CPU_INDEX) does not answer; the default index has torch for Linux with CUDA: 3 GB to download, 5 GB installed"; \
elif $(PIP) --no-deps --index-url $(CPU_INDEX) torch; then echo "torch for CPUs: 0.2 GB downloaded from $(CPU_INDEX)"; \
else echo "note: $(CPU_INDEX) has no torch for this Python; the default index has it with CUDA: 3 GB to download, 5 GB installed"; fi
endef

# A virtual environment created by another one sees the system's packages, not those of the other environment.
define find_torch
$(PYTHON) -c 'from importlib.metadata import version; version("torch")' 2>/dev/null || { \
  echo "error: $(PYTHON) has no torch; name a Python that has it: make KEEP_TORCH=1 PYTHON=/path/to/python" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' || { \
  echo "error: the torch of $(PYTHON) is in a virtual environment; install into it: make KEEP_TORCH=1 VENV=/path/to/environment" >&2; exit 1; }
endef

# The present torch becomes a constraint: pip reports packages that need another torch, and does not replace it.
define keep_torch
version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) || { \
  echo "error: $(VENV) has no torch; name a Python that has it: make KEEP_TORCH=1 PYTHON=/path/to/python" >&2; exit 1; }; \
echo "torch==$$version" > $(KEPT) && echo "keeping torch $$version"
endef

ifneq ($(KEEP_TORCH),)
PREPARE_TORCH = $(keep_torch)
else ifneq ($(strip $(TORCH_INDEX)),)
PREPARE_TORCH = $(PIP) --no-deps --index-url $(TORCH_INDEX) torch
else ifeq ($(origin TORCH_INDEX) $(shell uname -s),undefined Linux)
PREPARE_TORCH = $(install_cpu_torch)
else
PREPARE_TORCH = :
endif

# Published layouts on up to thousands of GPUs, traced without their twins (twin-*).
PUBLISHED := zero_memory zero_r turing_nlg deepspeed_lowbw deepspeed_64gpu deepspeed_dgx2 zero_throughput \
	zero_superlinear megatron_2019 megatron_2021 megatron_figures v100_clusters a100_clusters selective yuan one_node today b200 a100_pcie memory

# Simulate all published layouts, and repeat the claims on a system of today. The next commands run even if an
# experiment failed.
define simulated
$(BIN)/repro run $(PUBLISHED:%=suites/%.toml) --evidence simulated --only '?[!w]*' --results $(RESULTS) || status=$$?; \
case $$status in 2|130|143) exit $$status;; esac; \
$(BIN)/repro run suites/again.toml --evidence simulated --system $(TODAY) --results $(RESULTS) || status=$$?; \
case $$status in 2|130|143) exit $$status;; esac
endef

# Experiments and figures of the README's pictures.
SHOWN := zero-fig2 memory-timeline states windtunnel
PICTURES := build/pictures

# Tests and runs start hundreds of processes that import the same files, so compiled bytecode is cached even if the
# environment disables the cache. `make clean` removes it.
export PYTHONDONTWRITEBYTECODE :=

# In a folder with a non-ASCII path, Python, pip and torch need UTF-8 in every locale. The file 0-utf8.pth restarts each
# Python of such an environment in UTF-8 mode, also when make does not start it.
export PYTHONUTF8 := 1
define UTF8_PTH
import os, sys; sys.getfilesystemencoding() == "utf-8" or sys.prefix.isascii() or \
os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})
endef

.PHONY: help smoke simulate test test-slow engines test-engines test-slurm test-pythons driver test-gpu bench-gpu gpu-kit test-gpu-kit check structure mutants readability benchmarks format clean slurm-packages slurm-lab slurm-lab-down \
	docs artifact notebooks browser-packages pictures
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

$(CREATED):
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "error: no $(PYTHON); install Python 3.10 or newer, or name its path: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $$($(PYTHON) --version 2>&1) is too old; Python 3.10 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments; install its venv package" >&2; \
	  echo "       (Debian, Ubuntu: apt-get install python3-venv; Fedora: dnf install python3-pip)" >&2; exit 1; }
	@$(if $(KEEP_TORCH),$(find_torch),:)
	@echo "making $(VENV) with $$($(PYTHON) --version 2>&1)"
	@$(PYTHON) -m venv --clear $(if $(KEEP_TORCH),--system-site-packages) $(VENV)
	@for folder in $(VENV)/lib/python*/site-packages; do [ ! -d $$folder ] || echo '$(UTF8_PTH)' > $$folder/0-utf8.pth; done

$(KEPT): | $(CREATED)
	@test ! -e $(INSTALLED) || { \
	  echo "error: $(VENV) has the pinned torch; create another environment: make KEEP_TORCH=1 VENV=DIR" >&2; exit 1; }
	@$(keep_torch)

# The second stamp depends on the first, so that `make -j` never runs two pips in one environment.
$(INSTALLED): pyproject.toml setup.py $(CONSTRAINTS) $(if $(KEEP_TORCH),$(KEPT)) | $(CREATED)
	@echo "installing the harness and torch in $(VENV) (the first time takes a minute or more)"
	@$(PREPARE_TORCH)
	@$(PIP) -e '.[lab,report,slurm,text]'
	@touch $@

$(INSTALLED_TEST): $(INSTALLED)
	@echo "installing the test extra in $(VENV)"
	@$(PIP) -e '.[test]'
	@touch $@

$(INSTALLED_ENGINES): $(INSTALLED)
	@echo "installing DeepSpeed and Megatron-core in $(VENV)"
	@$(PIP) -e '.[engines]'
	@touch $@

engines: $(INSTALLED_ENGINES)

$(INSTALLED_MUTANTS): $(INSTALLED_TEST)
	@echo "installing cosmic-ray in $(VENV)"
	@$(PIP) -e '.[mutants]'
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	@echo "installing mkdocs-material in $(VENV)"
	@$(PIP) -e '.[docs]'
	@touch $@

# A second NVRTC in a separate folder, because it would hide the first. Tests load it in a separate process.
$(NVRTC13): | $(INSTALLED_TEST)
	@echo "installing NVRTC 13 in $(VENV)/nvrtc13"
	@if $(PIP) --upgrade --target $(VENV)/nvrtc13 'nvidia-cuda-nvrtc>=13,<14' 'cuda-bindings>=13,<14'; \
	then mkdir -p $(@D) && touch $@; else echo "note: without it one test is skipped" >&2; fi

# The headline claims are simulated first, so that their table is printed early. The exit code is that of the runs.
smoke: $(INSTALLED)
	@status=0; $(BIN)/repro run --claim headlines --evidence simulated --results $(RESULTS) || status=$$?; \
	case $$status in 2|130|143) exit $$status;; esac; \
	$(BIN)/repro claims --results $(RESULTS) || status=$$?; \
	$(BIN)/repro run suites/smoke.toml suites/engines.toml suites/windtunnel_smoke.toml --results $(RESULTS) || status=$$?; \
	case $$status in 2|130|143) exit $$status;; esac; \
	$(simulated); \
	$(BIN)/repro validate --covered 80 97 --results $(RESULTS) || status=$$?; \
	$(BIN)/repro report --results $(RESULTS) $(REPORT_ARGS) || status=$$?; \
	$(BIN)/repro claims --results $(RESULTS) || status=$$?; \
	exit $$status

simulate: $(INSTALLED)
	@status=0; $(simulated); \
	$(BIN)/repro claims --results $(RESULTS) || status=$$?; \
	exit $$status

test: $(INSTALLED_TEST)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

# test-slow and test-pythons give way to test-slurm, whose daemons have timers, if all three run in parallel.
test-slow: $(INSTALLED_TEST) $(NVRTC13)
	nice $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m 'slow and not library' $(PYTEST_ARGS)

test-engines: $(INSTALLED_TEST) $(INSTALLED_ENGINES)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m library $(PYTEST_ARGS)

test-slurm: $(INSTALLED_TEST)
	REPRO_SLURM=1 $(BIN)/python -m pytest -n $(LABS) --dist loadgroup tests/slurm_lab $(PYTEST_ARGS)

test-pythons: $(INSTALLED_TEST)
	nice $(BIN)/python -m tests.supported_pythons

# test-gpu and bench-gpu need a GPU. This check fails with one line before the installation, which takes minutes.
driver: | $(CREATED)
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null || { \
	  echo "error: no NVIDIA driver on this machine (libcuda.so.1), so no GPU; make test runs the tests that need no GPU" >&2; exit 1; }

test-gpu: driver $(INSTALLED_TEST)
	@$(BIN)/python -m repro.launch.doctor.machine
	$(BIN)/python -m pytest -m 'gpu and not benchmarks' -rs $(PYTEST_ARGS)

bench-gpu: driver $(INSTALLED_TEST)
	@$(BIN)/python -m repro.launch.doctor.machine
	KERNEL_RECORDS=$(RESULTS) $(BIN)/python -m pytest tests/gpu/test_bandwidth.py -rs --benchmark-only \
	  --override-ini='addopts=--import-mode=importlib --strict-markers' $(PYTEST_ARGS)

gpu-kit:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) gpu/kit.py --python '$(KIT_PYTHON)' --platform '$(PLATFORM)' \
	  --present '$(PRESENT)' --output '$(KIT)'

# The tests run the kit with a Python that has three packages, without network, from a read-only folder.
test-gpu-kit: $(INSTALLED_TEST)
	@$(BIN)/python gpu/kit.py --python $(BIN)/python --present 'torch numpy transformers' --output $(REHEARSED_KIT)
	REPRO_GPU_KIT=$(abspath $(REHEARSED_KIT)) $(BIN)/python -m pytest -n $(WORKERS) tests/gpu_kit $(PYTEST_ARGS)

# mypy sees the packages where an installation has them: kernels/ as repro.kernels.
check: $(INSTALLED_TEST)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	@rm -rf build/typed && mkdir -p build/typed/repro
	@ln -s $(CURDIR)/repro/* $(CURDIR)/kernels build/typed/repro
	cd build/typed && $(abspath $(BIN))/python -m mypy --config-file $(CURDIR)/pyproject.toml
	@$(BIN)/python -m tests.structure >/dev/null
	$(BIN)/python -m pytest -q tests/test_text.py

structure: $(INSTALLED_TEST)
	@$(BIN)/python -m tests.structure

# An interrupted run resumes, and undetected faults are tried again.
mutants: $(INSTALLED_MUTANTS)
	$(BIN)/python -m tests.mutants.run --workers $(WORKERS) --base $(BASE) $(PACKAGE:%=--package %) $(SAMPLE:%=--sample %) $(SEED:%=--seed %)

mutation-table: $(INSTALLED_TEST)
	$(BIN)/python -m tests.claims.mutations --workers $(WORKERS) $(RESULTS)

readability: $(INSTALLED_TEST)
	@$(BIN)/python -m tests.readability $(or $(SEED),1)

format: $(INSTALLED_TEST)
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

benchmarks: $(INSTALLED_TEST)
	$(BIN)/python -m pytest --benchmark-only --override-ini='addopts=--import-mode=importlib' $(PYTEST_ARGS)

# The variable suppresses an announcement of the theme's authors.
docs: $(INSTALLED_DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@! grep -rlE '<(script|link|img)[^>]* (src|href)="?(https?:)?//' build/docs --include='*.html' || { \
	  echo "error: these pages load files of other hosts" >&2; exit 1; }
	@echo "the documentation: build/docs/index.html"

artifact: $(INSTALLED)
	$(BIN)/repro artifact --output reports/artifact.md
	$(BIN)/python -m tests.command_reference > docs/commands.md
	$(BIN)/python -m tests.key_reference > docs/keys.md

# This setting makes JupyterLab open Python files of cells as notebooks.
notebooks: $(INSTALLED)
	@$(PIP) -e '.[notebooks]'
	@$(BIN)/jupytext-config --sys-prefix set-default-viewer python
	$(BIN)/python -m jupyter lab --notebook-dir=. reports

browser-packages:
	@tests/report/browser-packages

# The experiments of the pictures run first, with their own store.
pictures: $(INSTALLED)
	$(BIN)/repro run suites/smoke.toml --only 'states-*' --results $(PICTURES)/results
	$(BIN)/repro run suites/zero_throughput.toml --evidence simulated --only 'fig2-*' --results $(PICTURES)/results
	$(BIN)/repro run suites/zero_memory.toml --evidence simulated --only '7.5b-z?-n64' --results $(PICTURES)/results
	$(BIN)/repro run suites/zero_r.toml --evidence simulated --only 'fig[67]-c?-40b' --results $(PICTURES)/results
	$(BIN)/repro run windtunnel_3p75x windtunnel_between windtunnel_within --results $(PICTURES)/results
	$(BIN)/repro report --results $(PICTURES)/results --out $(PICTURES)/report
	cp $(foreach name,$(SHOWN),$(PICTURES)/report/figures/$(name).png) reports/pictures/

slurm-packages:
	@slurm/packages

slurm-lab: $(INSTALLED)
	@slurm/lab up
	@echo "show the jobs of a suite:    slurm/lab exec $(BIN)/repro submit suites/smoke.toml --profile slurm/lab.toml --dry-run"
	@echo "submit it:                   slurm/lab exec $(BIN)/repro submit suites/smoke.toml --profile slurm/lab.toml"
	@echo "follow it:                   slurm/lab exec $(BIN)/repro status --watch"
	@echo "slow links:                  slurm/lab rate 100mbit"
	@echo "stop it:                     make slurm-lab-down"

slurm-lab-down:
	@slurm/lab down

clean:
	rm -rf reports/out build .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find repro kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
