# Needs Python 3.11 with venv, and pip's package index. Everything made lands in .venv/, .cache/ and demo_out/.

PYTHON ?= python3
MAIN   := 0.32.0rc1
COMPAT := 0.30.0

# Packages are installed without bytecode: whoever imports one first has to be allowed to write it.
unexport PYTHONDONTWRITEBYTECODE
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/.cache/hypothesis
export OSA_TEST_CHECKPOINT := $(CURDIR)/.cache/test-checkpoints

in = .venv/$(1)/bin/python -m

HOSTS  := $(MAIN) $(COMPAT)

.PHONY: demo test lint transitions clean $(HOSTS:%=env-%) $(HOSTS:%=unit-%) $(HOSTS:%=server-%)

demo:
	$(PYTHON) tools/demo.py

# One leg after the other; the first that fails ends the run.
test: lint unit-$(MAIN) server-$(MAIN) unit-$(COMPAT) server-$(COMPAT)

$(HOSTS:%=env-%): env-%:
	$(PYTHON) tools/make_env.py $*

lint: env-$(MAIN)
	$(call in,$(MAIN)) ruff check --cache-dir .cache/ruff .
	$(call in,$(MAIN)) ruff format --check --cache-dir .cache/ruff .
	$(call in,$(MAIN)) mypy --cache-dir .cache/mypy

# What imports no host runs on one leg alone; both have the same torch.
unit-$(COMPAT): HOSTLESS := --ignore tests/runtime --ignore tests/simulator \
	--ignore tests/tools/test_make_env.py

# Two processes of one thread each: more threads only wait for each other at these sizes.
$(HOSTS:%=unit-%): unit-%: env-%
	OMP_NUM_THREADS=1 $(call in,$*) pytest -m "not server and not gpu and not npu" $(HOSTLESS) \
		-n 2 --dist loadscope --no-loadscope-reorder -o cache_dir=.cache/pytest

# By itself: two servers at a time take all of the machine.
$(HOSTS:%=server-%): server-%: env-%
	$(call in,$*) pytest -m "server and not slow" -o cache_dir=.cache/pytest

# Two real two-stage servers held against each other, and each fault in front of one; ten minutes and 12 GB on 2 cores.
transitions: env-$(MAIN)
	$(call in,$(MAIN)) pytest -m "server and slow" -o cache_dir=.cache/pytest tests/transitions

clean:
	rm -rf .venv .cache demo_out
