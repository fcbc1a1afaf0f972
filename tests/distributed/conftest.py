"""The checks run in processes of their own, and loading them takes seconds: pytest looks at tests alone."""

collect_ignore_glob = ["*_checks.py", "worker.py"]
