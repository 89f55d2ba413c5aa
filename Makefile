# make demo: train the tiny model on real data, evaluate it, draw the report,
# ask it something. make test, make lint: what CI runs. Each sets up .venv.
VENV := .venv
PYTHON := $(VENV)/bin/python
RUN ?= runs/demo
EXTRAS ?= cpu,test,aot
export JAX_PLATFORMS ?= cpu
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.5

.PHONY: demo test lint clean

demo: $(VENV)/run
	rm -rf $(RUN)
	$(PYTHON) -m experiments.train --config=configs/tiny.py --workdir=$(RUN)
	$(PYTHON) -m experiments.evaluate --workdir=$(RUN)
	$(PYTHON) -m experiments.report --workdir=$(RUN)
	$(PYTHON) -m experiments.generate --workdir=$(RUN) --sample_image \
	  --prompt="Which digit?" --temperature=0

test: $(VENV)/test
	$(PYTHON) -m pytest -q -n 2 -m "not exact" tests --ignore=tests/multidevice
	$(PYTHON) -m pytest -q -n 2 tests/multidevice
	XLA_FLAGS= $(PYTHON) -m pytest -q -n 2 -m exact tests \
	  --ignore=tests/multidevice

lint: $(VENV)/lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyink --check -q sparsemm_jax pallas_kernels experiments \
	  configs tests

clean:
	rm -rf $(VENV) .cache runs *.egg-info

# One environment; each stamp adds the packages that its command needs.
$(VENV)/run: setup.cfg constraints.txt
	python=$$(tools/find_python) && $$python -m venv $(VENV)
	$(PYTHON) -m pip install -q --disable-pip-version-check \
	  -c constraints.txt -e .[cpu]
	touch $@

$(VENV)/test: $(VENV)/run
	$(PYTHON) -m pip install -q --disable-pip-version-check \
	  -c constraints.txt -e .[$(EXTRAS)]
	touch $@

$(VENV)/lint: $(VENV)/run
	$(PYTHON) -m pip install -q --disable-pip-version-check \
	  -c constraints.txt -e .[lint]
	touch $@
