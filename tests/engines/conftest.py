"""Collect these tests only if vLLM is installed, which needs a virtual environment of its own (environment.sh)."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
