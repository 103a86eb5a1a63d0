# make demo, make distill, make test and make lint set up .venv themselves; make install does nothing else.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo distill test fast lint clean

install: .venv/installed

.venv/installed: pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[demo,plot,export,dev]'
	touch $@

demo: install
	$(BIN)/python -m vim.prepare digits data/digits
	$(BIN)/python train.py --config configs/demo.yaml
	$(BIN)/python eval.py --checkpoint runs/demo/best.pt --confusion runs/demo/confusion.png
	$(BIN)/python -m vim.export --checkpoint runs/demo/best.pt --format safetensors --out runs/demo/best.safetensors
	@echo "checkpoint        runs/demo/best.pt"
	@echo "curves            runs/demo/curves.png, runs/demo/confusion.png"
	@echo "exported weights  runs/demo/best.safetensors"

distill: install
	$(BIN)/python -m vim.prepare digits data/digits
	$(BIN)/python train.py --config configs/mfd_demo_teacher.yaml
	$(BIN)/python train.py --config configs/mfd_demo.yaml
	$(BIN)/python train.py --config configs/mfd_demo_ft.yaml
	$(BIN)/python eval.py --checkpoint runs/mfd_demo_ft/best.pt
	@echo "fine-tuned weights    runs/mfd_demo_ft/best.pt"
	@echo "pretraining's figure  runs/mfd_demo/distillation.png"

test: install
	$(BIN)/python -m pytest

fast: install
	$(BIN)/python -m pytest -m 'not slow'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf runs data build dist .pytest_cache .ruff_cache
