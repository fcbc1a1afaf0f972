"""Call a target: its arguments lie between guard zones, on the checked device, and new memory holds NaN."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ropewalk import _checks

GUARD = 4096  # bytes before and behind each tensor, a multiple of the alignment of every kernel
LARGEST = 1 << 22  # bytes of a tensor that is copied between guard zones; larger ones are tables
CPU = torch.device("cpu")
PATTERN = 0x42  # of these bytes, which are 48.56 in float32: a number that changes if it is rotated


class CallError(Exception):
    """A call of the target fails, with the code of the bug that this is if another call of the same kind succeeds.

    It is "raises", "wrong-shape" or "wrong-device".
    """

    def __init__(self, code: str, says: str) -> None:
        super().__init__(says)
        self.code = code


@dataclass
class Memory:
    """How targets are called in the block `with memory.used():`. Outside of them, all tensors are on the CPU."""

    device: torch.device = CPU
    poison: bool = False  # whether memory that they allocate holds NaN, or the largest integer, until it is written
    overwritten: list[str] = field(default_factory=list)  # a sentence for each call that changed memory of others
    stays: str = ""  # what the last call said whose tensors were on several devices
    without_gpu: bool = False  # whether the CPU is used in place of a GPU that the target names

    @contextlib.contextmanager
    def used(self) -> Iterator[Memory]:
        """Call targets in this way within the block."""
        token = _MEMORY.set(self)
        try:
            yield self
        finally:
            _MEMORY.reset(token)


def find_device(device: str | torch.device) -> torch.device:
    """Return a device on which tensors can be created and read. Raise RopeError if there is none here."""
    try:
        found = torch.device(device)
        torch.ones(1, device=found).to("cpu").item()
    except Exception as e:  # each kind of device raises another error
        fix = "Pass a device that torch finds on this machine, such as cpu."
        raise _checks.error_from(f"check: device {_checks.shown(device)} cannot be used", e, fix) from e
    return found


_MEMORY: ContextVar[Memory] = ContextVar("_MEMORY")


def current() -> Memory:
    """Return how targets are called now."""
    return _MEMORY.get(None) or Memory()


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a target with copies of its arguments on the device, and return its results on the CPU.

    What the target writes into its arguments is afterwards in `arguments`. Tensors keep their strides, and share memory
    if they did before. If one requires a gradient, none is copied on the CPU, and autograd moves all to a device.
    CallError is raised if the target raises, or returns a tensor on the CPU although its arguments were on a device.
    """
    memory = current()
    tensors: list[Tensor] = []
    map_tensors([*arguments.values()], tensors.append)
    pieces = _Pieces(memory.device, needs_autograd=any(x.requires_grad for x in tensors))
    passed = {name: map_tensors(value, partial(pieces.place, name)) for name, value in arguments.items()}
    me = os.getpid()

    def bring(x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            raise RuntimeError("a result is on the cpu, and the arguments were on the device")
        return x.to("cpu")

    try:
        with _poisoned() if memory.poison else contextlib.nullcontext(), _in_place_of_a_gpu():
            returned = function(**passed)
        memory.overwritten += pieces.bring_back()
        is_moved = memory.device.type != "cpu" and bool(pieces.moved or pieces.storages)
        return map_tensors(returned, bring) if is_moved else returned
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # the target may raise anything
        says = f"{type(e).__name__}: {_checks.message_of(e)[:200]}{place_of(e)}"
        if memory.device.type == "cpu" or not _names_devices(says):
            raise CallError("raises", says) from e
        memory.stays = says
        raise CallError("wrong-device", says) from e
    finally:
        if os.getpid() != me:  # a copy of the process, which the target has forked, must not go on with the check
            os._exit(0)


def place_of(e: BaseException) -> str:
    """Return the last line of the user's code that an exception went through, as " (file.py, line 3)", or ""."""
    ours = (*(os.path.dirname(str(module.__file__)) for module in (_checks, torch)), "<")
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(e.__traceback__)]
    theirs = [place for place in places if not place[0].startswith(ours)]
    return f" ({os.path.basename(theirs[-1][0])}, line {theirs[-1][1]})" if theirs else ""


def construct(constructor: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Construct an object as programs do for the device: a module is moved there, and another object is created there.

    In a block that chooses another default device, nothing is moved.
    """
    device, owner = current().device, getattr(constructor, "owner", constructor)
    if device.type == "cpu" or torch.get_default_device().type != "cpu" or not inspect.isclass(owner):
        with _in_place_of_a_gpu():
            return constructor(**arguments)
    if not issubclass(owner, torch.nn.Module):
        with device:
            return constructor(**arguments)
    built = constructor(**arguments)
    getattr(built, "__self__", built).to(device)
    return built


def on_device(target: Any) -> Any:
    """Return a target that was not constructed here, or a copy of it on the device if it is a module."""
    if current().device.type == "cpu" or not isinstance(target, torch.nn.Module):
        return target
    return copy.deepcopy(target).to(current().device)


def _names_devices(message: str) -> bool:
    """Return whether a message is that of torch or of Triton for a tensor that is still on the CPU."""
    return "cpu" in message and ("device" in message or "cpu tensor" in message)


def map_tensors(value: Any, of: Callable[[Tensor], Any]) -> Any:
    """Apply a function to each tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return of(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(each, of) for each in value)
    return {key: map_tensors(each, of) for key, each in value.items()} if type(value) is dict else value


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Let torch fill the memory of new tensors, as its deterministic mode does."""
    settings: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    try:
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports the compiler
        settings.fill_uninitialized_memory = True
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fills


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            is_gpu = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
            return type(value)("cpu") if is_gpu else value

        if func is Tensor.cuda:
            return args[0]
        return func(*map(here, args), **{name: here(value) for name, value in (kwargs or {}).items()})


@contextlib.contextmanager
def _in_place_of_a_gpu() -> Iterator[None]:
    """Run code that names a GPU on the CPU, if it must."""
    if not current().without_gpu:
        yield
        return
    with _OnTheCpu(), mock.patch.object(torch.cuda, "current_device", return_value=0):
        yield


class _Pieces:
    """The memory of the tensors of one call: a copy of each storage between two guard zones."""

    def __init__(self, device: torch.device, *, needs_autograd: bool) -> None:
        self.device = device
        self.needs_autograd = needs_autograd
        self.storages: dict[int, _Storage] = {}
        self.moved: list[tuple[Tensor, Tensor]] = []

    def place(self, name: str, x: Tensor) -> Tensor:
        """Return the tensor to pass in place of x."""
        is_plain = type(x) is Tensor and x.layout is torch.strided and x.device.type == "cpu"
        if self.needs_autograd or not is_plain or not 0 < x.untyped_storage().nbytes() <= LARGEST:
            self.moved.append((x, x.to(self.device)))
            return self.moved[-1][1]
        key = x.untyped_storage().data_ptr()
        if key not in self.storages:
            self.storages[key] = _Storage(name, x, self.device)
        return self.storages[key].place(x)

    def bring_back(self) -> list[str]:
        """Write into the arguments what the target wrote, and return a sentence for each storage that it overwrote."""
        for x, moved in self.moved:
            if moved is not x and not torch.equal(x.detach(), back := moved.detach().to("cpu")):
                x.copy_(moved.to("cpu") if moved.requires_grad else back)
        return [says for storage in self.storages.values() if (says := storage.bring_back()) is not None]


class _Storage:
    """The copy of a storage, of which tensors of the arguments are views."""

    def __init__(self, name: str, x: Tensor, device: torch.device) -> None:
        self.name = name
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        self.inside = slice(GUARD, GUARD + len(self.bytes))
        copy = torch.full((GUARD + len(self.bytes) + -len(self.bytes) % 16 + GUARD,), PATTERN, dtype=torch.uint8)
        copy[self.inside] = self.bytes
        self.copy = copy.to(device)
        self.views: list[Tensor] = []

    def place(self, x: Tensor) -> Tensor:
        self.views.append(x)
        return self.copy.view(x.dtype).as_strided(x.shape, x.stride(), GUARD // x.element_size() + x.storage_offset())

    def bring_back(self) -> str | None:
        after = self.copy.to("cpu")
        changed = after != PATTERN
        changed[self.inside] = after[self.inside] != self.bytes
        if not bool(changed.any()):
            return None
        for x in self.views:  # what the target may write
            once = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
            size, n = once.element_size(), GUARD + once.storage_offset() * once.element_size()
            strides = [stride * size for stride in once.stride()]
            changed.as_strided((*once.shape, size), (*strides, 1), n).fill_(False)
        self.bytes.copy_(after[self.inside])
        at = changed.nonzero().flatten()
        if not len(at):
            return None
        is_before, is_behind = at[-1] < self.inside.start, at[0] >= self.inside.stop
        where = "before" if is_before else "behind" if is_behind else "between the elements of"
        return f"A call changes {len(at):,} bytes {where} {self.name}."
