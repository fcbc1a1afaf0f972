"""The operators `ropewalk::rotate` and `rotate_`: PyTorch's opcheck, and which modes and profilers see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_cases import DTYPES, LAYOUTS, OPCHECKS, check, expected, shape, unchanged
from ropewalk import Rope, Rotation

ROTATE, ROTATE_ = torch.ops.ropewalk.rotate.default, torch.ops.ropewalk.rotate_.default
COS, SIN = torch.randn(2, 5, 4).unbind()
ROTATION = Rotation(COS, SIN, pairing="half", head_dim=12, rotary_offset=1)


def queries(layout: str = "bshd", heads: int = 3) -> Tensor:
    return torch.randn(shape(layout, 2, 5, heads, 12))


def arguments(
    tensors: list[Tensor], layout: str = "bshd", interleaved: bool = False, inverse: bool = False
) -> tuple[Any, ...]:
    return tensors, COS, SIN, layout, interleaved, 1, inverse


@pytest.mark.usefixtures("built")
class TestOperator:
    @pytest.mark.parametrize("operator", [ROTATE, ROTATE_], ids=str)
    def test_opcheck(self, operator: Any) -> None:
        """All checks of opcheck. Gradients are not part of the operator; test_gradients.py checks them."""
        for layout, dtype in zip(LAYOUTS, DTYPES, strict=True):
            for tensors in ([queries(layout).to(dtype), queries(layout, 1).to(dtype)], [queries(layout).to(dtype)]):
                inverse = len(tensors) == 1
                torch.library.opcheck(operator, arguments(tensors, layout, inverse, inverse), test_utils=OPCHECKS)
        torch.library.opcheck(operator, arguments([queries("sbhd").transpose(0, 1)]), test_utils=OPCHECKS)

    @pytest.mark.parametrize("where", ["fake", "meta"])
    def test_shapes_and_strides_of_meta_tensors(self, where: str) -> None:
        views = {
            "dense": queries(),
            "transposed": queries("bhsd").transpose(1, 2),
            "channels apart": torch.randn(2, 5, 3, 24)[..., ::2],
            "channels first": torch.randn(12, 2, 5, 3).permute(1, 2, 3, 0),
            "part of a fused tensor": torch.randn(2, 5, 7, 12)[:, :, 2:5],
            "expanded": torch.randn(2, 5, 1, 12).expand(-1, -1, 3, -1),
            "no heads": torch.randn(2, 5, 0, 12),
        }
        for name, x in views.items():
            (real,) = ROTATE(*arguments([x]))
            if where == "fake":
                with FakeTensorMode() as mode:
                    tensors, cos, sin, *how = arguments([mode.from_tensor(x)])
                    (made,) = ROTATE(tensors, mode.from_tensor(cos), mode.from_tensor(sin), *how)
            else:
                strided = torch.empty_strided(x.shape, x.stride(), device="meta")
                tensors, cos, sin, *how = arguments([strided])
                (made,) = ROTATE(tensors, cos.to("meta"), sin.to("meta"), *how)
                assert ROTATE_(tensors, cos.to("meta"), sin.to("meta"), *how) is None
            assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype), name

    def test_has_no_gradient(self) -> None:
        """Only `ops.rotate` may call the operator while gradients are recorded, because the operator has none."""
        q = queries().requires_grad_()
        (rotated,) = ROTATE(*arguments([q]))
        with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
            rotated.sum().backward()
        assert q.grad is None


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


def by_mode(call: Callable[[], None]) -> list[str]:
    with Log() as log:
        call()
    return log.seen


def by_profiler(call: Callable[[], None]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.name for event in profile.events()]


@pytest.mark.parametrize("watch", [by_mode, by_profiler])
@pytest.mark.parametrize("wants", [False, True])
def test_modes_and_profilers_see_the_operator(calls: list[str], watch: Callable[..., list[str]], wants: bool) -> None:
    q, k = queries(), queries(heads=1)
    wanted = [expected(x, COS, SIN, "bshd", "half", 1, inverse=False) for x in (q, k)]
    unwatched = ROTATION(q, k, layout="bshd")
    q, k = q.requires_grad_(wants), k.requires_grad_(wants)
    rotated: list[Tensor] = []
    names = watch(lambda: rotated.extend(ROTATION(q, k, layout="bshd")))
    assert names.count("ropewalk::rotate") == 1
    for y, plain, (exact, size) in zip(rotated, unwatched, wanted, strict=True):
        check(y, exact, size, "bshd", "watched")
        assert unchanged(y.detach(), plain)
    if wants:
        assert "ropewalk::rotate" in watch(lambda: sum(y.sum() for y in rotated).backward())
    mine = [q.detach().clone(), k.detach().clone()]
    names = watch(lambda: ROTATION.apply_(*mine, layout="bshd"))
    assert names.count("ropewalk::rotate_") == 1
    assert unchanged(mine[0], unwatched[0])
    assert unchanged(mine[1], unwatched[1])


def test_unobserved_calls_skip_the_dispatcher(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipping the dispatcher saves time for one token. The kernel is still called."""
    from ropewalk.rotation import ops

    monkeypatch.setattr(ops, "_rotate", None)
    monkeypatch.setattr(ops, "_rotate_", None)
    ROTATION.apply_(ROTATION(queries(), layout="bshd"), layout="bshd")
    assert calls == ["rotate", "rotate"]
    Rope(12, 1e4, "half").at(torch.arange(3))
    assert calls[2:] == ["angles"]


@pytest.mark.parametrize("together", [False, True])
def test_changing_a_saved_tensor_raises(calls: list[str], together: bool) -> None:
    """As with PyTorch's operators, changing a tensor that was saved for the backward pass makes that pass raise."""
    weight, q, k = queries().requires_grad_(), queries(), queries(heads=1)
    loss, versions = (weight * q).sum(), (q._version, k._version)
    with torch.no_grad():
        ROTATION.apply_(q, k if together else None, layout="bshd")
    assert (q._version, k._version) == (versions[0] + 1, versions[1] + together)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()
    other = queries()
    loss = (weight * other).sum()
    other.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_changing_a_slice_of_a_saved_tensor_raises(calls: list[str]) -> None:
    fused = torch.randn(2, 5, 6, 12)
    weight = torch.randn_like(fused).requires_grad_()
    loss = (weight * fused).sum()
    ROTATION.apply_(fused[:, :, :3], fused[:, :, 3:4], layout="bshd")
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()
    assert calls == ["rotate"]


def test_inference_mode(calls: list[str]) -> None:
    plain = queries()
    exact, size = expected(plain, COS, SIN, "bshd", "half", 1, inverse=False)
    with torch.inference_mode():
        inside = plain.clone()
        rotated = ROTATION(inside, layout="bshd")
        assert rotated.is_inference()
        ROTATION.apply_(inside, layout="bshd")
        ordinary = ROTATION(plain, layout="bshd")
        ROTATION.apply_(plain, layout="bshd")  # an ordinary tensor
        rotation = Rope(12, 1e4, "half").at(torch.arange(5))
        also = rotation(inside, layout="bshd")
    for y in (rotated, inside, ordinary, plain):
        check(y, exact, size, "bshd", "inference mode")
    check(also, *expected(inside, rotation.cos, rotation.sin, "bshd", "half", 0, inverse=False), "bshd", "its tables")
    assert "angles" in calls
    assert calls.count("rotate") == 5
