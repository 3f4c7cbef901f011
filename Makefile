# Every target calls a script, so that people and CI run the same thing.
.DEFAULT_GOAL := help
.PHONY: help venv run serve test check verify bench vllm test-vllm verify-vllm clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

venv: ## make .venv with the package and the tools; instant when nothing changed
	@scripts/setup

run: ## decode three prompts with the bundled checkpoint, drafts on, and print the figures
	@scripts/run

serve: ## serve the bundled checkpoint with the OpenAI API on 127.0.0.1:8000
	@scripts/serve

test: ## run the tests (minutes)
	@scripts/test

check: ## formatting, lint, types, layers, sizes
	@scripts/check

verify: ## compare K > 0 with K = 0 over the full matrix (long)
	@scripts/verify

bench: ## measure K = 1 to 4 against K = 0
	@scripts/bench

vllm: ## make .venv-vllm and serve the bundled checkpoint on vLLM, on the CPU, on 127.0.0.1:8000
	@scripts/vllm

test-vllm: ## run the tests of the plugin with vLLM (minutes)
	@scripts/test-vllm

verify-vllm: ## judge what vLLM writes by our own engine, over the matrix of layouts (long)
	@scripts/verify-vllm

clean: ## remove .venv, caches and builds
	@scripts/clean
