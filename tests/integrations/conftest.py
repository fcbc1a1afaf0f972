"""Settings for the tests of the integrations."""

collect_ignore_glob = ["hub_kernel_worker.py"]  # a program, which changes transformers when it is imported
