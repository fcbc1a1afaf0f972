"""These tests need vLLM, in an environment of its own (environment.sh). Elsewhere they are not collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
