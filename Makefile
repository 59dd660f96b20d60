# The seven targets a person needs, and four for optional libraries; each sets up what it uses.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed-$(shell cat requirements.lock pyproject.toml schemas/pyproject.toml Makefile | cksum | cut -d' ' -f1)
GYM_STAMP := .venv/.reasoning-gym-$(shell cat requirements-reasoning-gym.lock | cksum | cut -d' ' -f1)
LM_EVAL_STAMP := .venv/.lm-eval-$(shell cat requirements-lm-eval.lock | cksum | cut -d' ' -f1)
SCHEMATHESIS_STAMP := .venv/.schemathesis-$(shell cat requirements-schemathesis.lock | cksum | cut -d' ' -f1)
CLIENTS := .venv-clients
TINKER_STAMP := $(CLIENTS)/.tinker038-$(shell cat requirements.lock requirements-client-tinker038.lock | cksum | cut -d' ' -f1)
MINT_STAMP := $(CLIENTS)/.mint022-$(shell cat requirements.lock requirements-client-mint022.lock | cksum | cut -d' ' -f1)
TORCH_WHEELS := https://download.pytorch.org/whl/cpu/torch/
SMOLLM2 := $(or $(MINT_CACHE),$(HOME)/.cache/mint)/bases/smollm2-135m

.PHONY: setup reasoning-gym lm-eval schemathesis tinker-clients check test test-slow demo clean

setup: $(STAMP) $(SMOLLM2)/model.safetensors

# The CPU build of torch is not on PyPI. Its page is tried briefly: a machine that cannot reach it may
# have the wheel configured for pip elsewhere.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit("MinT needs Python 3.11 or newer, found " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --no-deps --retries 1 --timeout 15 --find-links $(TORCH_WHEELS) "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install -qq --no-deps -r requirements.lock
	$(BIN)/python -m pip install -qq --no-deps --no-index --no-build-isolation --editable schemas --editable .
	@rm -f .venv/.installed-*
	@touch $@

$(SMOLLM2)/model.safetensors: | $(STAMP)
	$(BIN)/python -m services.learner.convert_smollm2 $(SMOLLM2)

# The puzzles of reasoning-gym: an extra, since one of its parts is compiled from C.
reasoning-gym: $(GYM_STAMP)

$(GYM_STAMP): | $(STAMP)
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -r requirements-reasoning-gym.lock
	@rm -f .venv/.reasoning-gym-*
	@touch $@

# lm-eval with what its API models need: an extra, since only its own test imports it. Metrics of some tasks
# ask for more (scikit-learn, evaluate, rouge-score).
lm-eval: $(LM_EVAL_STAMP)

$(LM_EVAL_STAMP): | $(STAMP)
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -r requirements-lm-eval.lock
	@rm -f .venv/.lm-eval-*
	@touch $@

# schemathesis: an extra, since only its own test imports it.
schemathesis: $(SCHEMATHESIS_STAMP)

$(SCHEMATHESIS_STAMP): | $(STAMP)
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -r requirements-schemathesis.lock
	@rm -f .venv/.schemathesis-*
	@touch $@

# The two generations of the public clients, each in a small environment of its own; what they import of
# what is large (torch, transformers, numpy) is the project's, which stands behind their own on the path.
tinker-clients: $(TINKER_STAMP) $(MINT_STAMP)

define client
	rm -rf $(CLIENTS)/$(1)
	$(BIN)/python -m venv --without-pip $(CLIENTS)/$(1)
	$(BIN)/python -m pip --python $(CLIENTS)/$(1)/bin/python install -qq --no-deps -r requirements-client-$(1).lock
	where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$where" > "$$($(CLIENTS)/$(1)/bin/python -c "$$where")/project.pth"
	@rm -f $(CLIENTS)/.$(1)-*
	@touch $@
endef

$(TINKER_STAMP): | $(STAMP)
	$(call client,tinker038)

$(MINT_STAMP): | $(STAMP)
	$(call client,mint022)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python schemas/generate.py --check
	$(BIN)/python schemas/compat.py
	$(BIN)/python -m shared.bus.render --check

test: setup tinker-clients $(GYM_STAMP)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile tests/unit
	$(BIN)/python -m pytest -m "not slow" --ignore tests/unit

test-slow: setup tinker-clients $(GYM_STAMP) $(LM_EVAL_STAMP) $(SCHEMATHESIS_STAMP)
	$(BIN)/python -m pytest -m slow

demo: setup
	$(BIN)/python -m cli.demo

clean:
	-test -x $(BIN)/mint && test -d build/demo/data && $(BIN)/mint down --now --data build/demo/data
	rm -rf .venv $(CLIENTS) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
