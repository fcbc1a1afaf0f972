"""Let pytest collect only tests here. The checks run in separate processes and take seconds to import."""

collect_ignore_glob = ["*_checks.py", "*worker.py"]
