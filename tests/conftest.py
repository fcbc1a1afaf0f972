"""Settings for all tests."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

import toolchain

# Must be set before torch is loaded: if there are as many processes as cores, waiting threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No test may fail because a machine is slow, so there is no deadline. Every run uses the same examples.
settings.register_profile(
    "ropewalk", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("ropewalk")

# The slow tests: training, compilation, other processes, Triton's interpreter and fuzzing. A folder ends in "/". The
# text after "::" is the beginning of a test's name.
SLOW = (
    "attention/test_cache_axes.py::test_compiles_once",
    "attention/test_cache_step.py::TestCompiledLayerByLayer",
    "attention/test_interrupted.py::test_by_real_signals",
    "attention/test_kv_cache.py",
    "attention/test_paged_attention.py::TestCompiled",
    "attention/test_paged_attention.py::TestFlexAttention",
    "attention/test_paged_cache.py::test_thousands_of_random_requests",
    "attention/test_random_requests.py::test_hundreds_of_random_requests",
    "attention/test_fused_step.py::TestOtherUses::test_compiled",
    "conformance/test_check.py::test_graph_breaks",
    "conformance/test_right.py::test_transformers",
    "conformance/test_wrong.py",
    "checkpoints/test_families.py::test_every_model",
    "checkpoints/test_hostile.py::test_files_of_other_kinds",
    "checkpoints/test_killed.py",
    "checkpoints/test_memory.py",
    "checkpoints/test_pth.py::test_hostile_files_are_refused_at_bounded_cost",
    "configs/gguf/test_read.py::test_every_truncation_of_a_file",
    "configs/gguf/test_read.py::test_mutated_bytes",
    "configs/test_hf.py::test_nothing_but_ropes_or_rope_errors",
    "configs/test_mutations.py",
    "configs/test_source.py::test_files_are_read_or_refused_at_bounded_cost",
    "configs/test_windows.py::test_windows_are_those_of_the_masks",
    "distributed/",
    "gpu/",
    "integrations/test_hub_kernel.py::TestLayers::test_compiled",
    "integrations/test_hub_kernel.py::TestModels",
    "integrations/test_torchtitan.py::TestCall::test_compiled",
    "integrations/test_torchtitan_itself.py",
    "integrations/test_transformers_peft.py",
    "integrations/test_transformers_processes.py",
    "integrations/test_transformers_table.py::test_model",
    "integrations/test_transformers_table.py::test_tower",
    "integrations/test_transformers_vision.py::test_compiled",
    "kernels/test_backend.py",
    "kernels/test_build.py",
    "kernels/test_c.py",
    "kernels/test_concurrency.py",
    "kernels/test_fuzz.py",
    "kernels/test_gradients.py",
    "kernels/test_operators.py::TestOperator::test_opcheck",
    "lab/",
    "parallel/test_context.py::test_equals_the_whole",
    "positions/test_multimodal_models.py::test_hundreds_of_mixtures",
    "programs/test_bench.py",
    "programs/test_bench_on_gpu.py",
    "programs/test_check.py::TestAnotherProcess",
    "programs/test_demo.py",
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
    "test_docs.py",
    "test_examples.py::TestChat::test_trained",
    "test_examples.py::TestGPT::test_trained",
    "test_examples.py::test_trained_vit",
    "test_explorer_browser.py",
    "test_imports.py::test_an_import_may_be_interrupted_at_any_line",
    "test_learned.py::TestAngles::test_compiled",
    "test_learned.py::TestCasts::test_fsdp2_mixed_precision",
    "test_learned.py::TestGradients::test_gradcheck",
    "test_learned.py::TestTraining",
    "test_recorders.py",
)


@pytest.fixture
def compiler() -> str:
    """The path of the C++ compiler, which Inductor calls. Tests that compile with Inductor use this fixture."""
    return toolchain.need(toolchain.CXX)


@pytest.fixture
def built() -> None:
    """Skip the test if the CPU kernels were not compiled. With ROPEWALK_REQUIRE_KERNEL=1, fail instead."""
    from ropewalk.kernels import cpu

    if reason := cpu.unavailable():
        toolchain.skip(f"the CPU kernels are {reason}")


@pytest.fixture
def used(built: None) -> None:
    """Skip the test also if ROPEWALK_BACKEND disables the kernels."""
    from ropewalk.kernels import backend

    if backend.BACKEND == "reference":
        pytest.skip("ROPEWALK_BACKEND=reference")


def pytest_runtest_setup() -> None:
    """Seed PyTorch for each test, so that its random numbers do not depend on earlier tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """Deselect slow tests if pytest is called without paths. With paths, as in `pytest tests src`, run all tests."""
    alone = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if alone and not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, and run files with slow tests first, so that short tests balance the workers at the end."""
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    with_slow_tests = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in with_slow_tests)
