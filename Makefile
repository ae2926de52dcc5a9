# Every target is one call of tools/bootstrap.py, which makes .venv first and also works without make:
#   python3 tools/bootstrap.py lab        Windows: py tools/bootstrap.py lab
# make lab                     JupyterLab on the first notebook (ARGS="--no-browser --port 8899")
# make run                     execute the notebooks on copies (NOTEBOOK=03: one; DEEPER=1: the optional ones too)
# make test                    the tests (ARGS="-k explorers"); test-all adds the slow ones
# make results                 take a GPU machine's run into results/ and rewrite the tables
# make badges REPO=you/fork BRANCH=main
# PYTHON=python3.12 chooses the Python that makes .venv.
PYTHON ?= python3

lab test test-all results:
	@$(PYTHON) tools/bootstrap.py $@ $(ARGS)

run:
	@$(PYTHON) tools/bootstrap.py run $(if $(NOTEBOOK),--notebook "$(NOTEBOOK)") $(if $(filter-out 0,$(DEEPER)),--deeper) $(ARGS)

badges:
	@$(PYTHON) tools/bootstrap.py badges $(if $(REPO),--repo "$(REPO)") $(if $(BRANCH),--branch "$(BRANCH)") $(ARGS)

.PHONY: lab run test test-all results badges
