"""Which tests are slow, and which of them a change need not run."""

import subprocess
from pathlib import Path

import pytest

# The slow tests: training, compilation, other processes, Triton's interpreter and fuzzing. A folder ends in "/". The
# text after "::" is the beginning of a test's name. Before them stands what they watch: `--since COMMIT`
# leaves out those of which neither that nor their own file has changed.
SLOW = {
    "src/ropewalk/attention src/ropewalk/cache src/ropewalk/rotation src/ropewalk/kernels csrc": (
        "cache/test_cache_axes.py::test_compiles_once",
        "cache/test_cache_step.py::TestCompiledLayerByLayer",
        "cache/test_interrupted.py::test_by_real_signals",
        "cache/test_kv_cache.py",
        "cache/test_random_requests.py::test_hundreds_of_random_requests",
        "rotation/test_rotate_and_store.py::TestOtherUses::test_compiled",
        "parallel/test_context.py::test_equals_the_whole",
    ),
    "src/ropewalk/angles src/ropewalk/rotation src/ropewalk/kernels csrc": (
        "kernels/test_backend.py",
        "kernels/test_build.py",
        "kernels/test_c.py",
        "kernels/test_concurrency.py",
        "kernels/test_fuzz.py",
        "kernels/test_gradients.py",
        "kernels/test_machine_code.py",
        "kernels/test_operators.py::TestOperator::test_opcheck",
        "rotation/test_gradients.py",
        "rotation/test_per_head.py::TestEveryVariant::test_by_finite_differences",
        "rotation/test_per_head.py::TestOtherUses::test_compiled_and_exported",
        "rotation/test_qk_norm.py::TestGradients::test_by_finite_differences",
        "rotation/test_qk_norm.py::test_the_same_everywhere[compiled",
        "rotation/test_transforms.py",
        "test_angles.py::test_error_at_the_worst_positions",
        "test_angles.py::test_first_use",
        "test_angles.py::test_polynomial_over_the_whole_turn",
        "test_axes.py::TestCompiled",
        "test_numerics.py::TestPositions::test_compiled_by_inductor",
    ),
    "src/ropewalk/kernels": ("gpu/",),
    "src/ropewalk/rotation src/ropewalk/parallel src/ropewalk/attention examples/train_many_gpus.py": ("distributed/",),
    "src/ropewalk/learned.py src/ropewalk/rotation": (
        "test_learned.py::TestAngles::test_compiled",
        "test_learned.py::TestCasts::test_fsdp2_mixed_precision",
        "test_learned.py::TestGradients::test_gradcheck",
    ),
    "src/ropewalk/configs src/ropewalk/schemes": (
        "configs/gguf/test_read.py::test_every_truncation_of_a_file",
        "configs/gguf/test_read.py::test_mutated_bytes",
        "configs/test_mutations.py",
        "configs/test_source.py::test_files_are_read_or_refused_at_bounded_cost",
        "configs/test_windows.py::test_windows_are_those_of_the_masks",
    ),
    "src/ropewalk/engines src/ropewalk/configs": ("diff/test_stated_twice.py",),
    "src/ropewalk/integrations src/ropewalk/configs": (
        "integrations/test_hub_kernel.py::TestLayers::test_compiled",
        "integrations/test_hub_kernel.py::TestModels",
        "integrations/test_torchtitan.py::TestCall::test_compiled",
        "integrations/test_torchtitan_itself.py",
        "integrations/test_transformers_peft.py",
        "integrations/test_transformers_processes.py",
        "integrations/test_transformers_table.py::test_model",
        "integrations/test_transformers_table.py::test_tower",
        "integrations/test_transformers_vision.py::test_compiled",
    ),
    "src/ropewalk/tools/check src/ropewalk/tools/commands/check.py src/ropewalk/tools/commands/_check_process.py": (
        "conformance/test_right.py::test_forms",
        "conformance/test_right.py::test_transformers",
        "conformance/test_wrong.py",
        "programs/test_check.py::TestAnotherProcess",
    ),
    "src/ropewalk/tools/convert": (
        "checkpoints/test_families.py::test_every_model",
        "checkpoints/test_hostile.py::test_files_of_other_kinds",
        "checkpoints/test_killed.py",
        "checkpoints/test_memory.py",
        "checkpoints/test_pth.py::test_hostile_files_are_refused_at_bounded_cost",
    ),
    "src/ropewalk/tools/bench.py benchmarks": ("programs/test_bench.py", "programs/test_benchmarks.py"),
    "src/ropewalk/tools/demo.py": ("programs/test_demo.py",),
    "src/ropewalk/tools/plots": ("test_explorer_browser.py",),
    "src/ropewalk/__init__.py": ("test_imports.py::test_an_import_may_be_interrupted_at_any_line",),
    "docs README.md": ("test_docs.py",),
    "examples": (
        "test_examples.py::TestChat::test_trained",
        "test_examples.py::TestGPT::test_trained",
        "test_examples.py::test_trained_vit",
        "test_lab.py",
    ),
    "tools": ("test_recorders.py",),
    "tests/conftest.py tests/slow_tests.py pyproject.toml": (
        "test_repository.py::test_pytest_alone_leaves_out_the_slow_tests",
    ),
}
ROOT = Path(__file__).parents[1]


def left_out(since: str) -> list[str]:
    """Return the slow tests of which nothing has changed since this commit."""
    changed = changed_since(since)

    def has_changed(path: str) -> bool:
        return any(name == path or name.startswith(f"{path.rstrip('/')}/") for name in changed)

    unchanged: list[str] = []
    for watched, tests in SLOW.items():
        if not any(map(has_changed, watched.split())):
            unchanged += [test for test in tests if not has_changed(f"tests/{test.split('::')[0]}")]
    return unchanged


def changed_since(commit: str) -> list[str]:
    git = ["git", "-C", str(ROOT), "diff", "--name-only", commit]
    ran = subprocess.run(git, capture_output=True, text=True)
    if ran.returncode:
        raise pytest.UsageError(f"--since {commit}: {ran.stderr}")
    return ran.stdout.split()
