# Two commands: `make demo` runs the main job on a small trained model, `make test` checks everything;
# `make test-all` does so on full-size models and more kinds of them, too.
# `make test-versions`, before a release, runs the tests with the lowest and with the newest packages.
# All set up .venv first; only python3 (3.10 to 3.13), pip and a C compiler are assumed.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BINDINGS := build/trt10/.ready

SPHINX = $(BIN)/sphinx-build -q -W --keep-going -j auto -d build/site-pages

# tests start hundreds of processes: packages are compiled once, not in each of them
unexport PYTHONDONTWRITEBYTECODE

# for each kind of file that `make fuzz` changes
SECONDS ?= 60

# what `make test` leaves out; see the markers in pyproject.toml
CHOSEN := -m "not full"

# the development environment: its programs, and what pip is told of versions
install = $(1)/python -m pip install --quiet --disable-pip-version-check --no-compile \
    $(2) --editable '.[dev,examples,hf]'

.PHONY: demo test test-all test-versions test-lowest test-newest lint types imports size docs links unit fuzz bindings clean

demo: $(INSTALLED)
	$(BIN)/twofour prune-export-build examples/digits.py:make \
	    --metric examples/digits.py:evaluate --calibrate examples/digits.py:calibration \
	    --out runs/digits

# side by side: the tests take two cores, the checks one
test: $(INSTALLED)
	$(MAKE) -j2 lint types imports size docs unit

test-all: $(INSTALLED)
	$(MAKE) test CHOSEN=

# 15 GB in build, most of it CUDA's, which older torch brings; test-newest takes TORCH=torch==2.13.0, too
test-versions: test-lowest test-newest

test-lowest: VERSIONS := --constraint constraints-lowest.txt
test-newest: VERSIONS = $(TORCH)

test-lowest test-newest: test-%: $(BINDINGS)
	rm -rf build/$*
	$(PYTHON) -m venv build/$*
	$(call install,build/$*/bin,$(VERSIONS))
	build/$*/bin/pytest $(CHOSEN) -n auto --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python benchmarks/plain_english.py

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

# tokens, modules and modules of the main job may not grow: benchmarks/house.py has the limits
size: $(INSTALLED)
	$(BIN)/python benchmarks/house.py --limit

# the documentation site, in build/site; code blocks and links inside it are checked
docs: $(INSTALLED)
	$(SPHINX) -b html docs build/site
	$(SPHINX) -b doctest docs build/site-doctest

# links to other sites, which need the network
links: $(INSTALLED)
	$(SPHINX) -b linkcheck docs build/site-links

unit: $(INSTALLED) $(BINDINGS)
	$(BIN)/pytest $(CHOSEN) -n auto --dist loadfile --no-loadscope-reorder

# hostile inputs for as long as asked, new ones each time; what fails is kept in build/fuzz
fuzz: $(INSTALLED)
	FUZZ_SECONDS=$(SECONDS) LINEAR_SCALE=4 $(BIN)/pytest -q tests/test_fuzz_*.py \
	    tests/test_linear_work.py

# the Python bindings of TensorRT 8.6, 10 and 11 over stand-ins for its libraries, and the headers of
# CUDA 11, 12 and 13, to check calls against
bindings: $(BINDINGS)

$(BINDINGS): $(INSTALLED) tests/trt_stub/prepare.py tests/trt_stub/make_stubs.py
	$(BIN)/python tests/trt_stub/prepare.py build

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(call install,$(BIN),--constraint constraints.txt)
	touch $@

clean:
	rm -rf .venv build runs
