"""Import single files of a package that needs a GPU or many other packages, with stubs for everything else.

A stub accepts every call. Its attributes, and the results of its calls, are stubs as well. So a class of a model can be
built, although the classes of its projections and norms do not exist.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from torch import nn

from .model import CannotRecordError


def package_folder(name: str) -> str:
    """Return the folder of an installed package, without importing it.

    Raises:
        CannotRecordError: the package is not installed.
    """
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CannotRecordError(f"{name} is not installed")
    return str(spec.submodule_search_locations[0])


class Nothing:
    """The value of a stub: false, zero and empty. A decorator that is a stub returns what it decorates."""

    __name__ = "nothing"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        decorates = len(arguments) == 1 and not named and callable(arguments[0])
        return arguments[0] if decorates and not isinstance(arguments[0], Nothing | nn.Module) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _value(name)

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __delattr__(self, name: str) -> None:
        pass

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (Stub,)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __index__(self) -> int:
        return 0

    def __contains__(self, _: Any) -> bool:
        return False

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return other is self or (isinstance(other, int) and other == 0)

    def __lt__(self, other: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__
    __int__ = __index__

    def __add__(self, other: Any) -> Any:
        return self

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __add__
    __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __or__ = __ror__ = __getitem__ = __add__


class Plain(nn.Module):
    """The base class of operators that choose a kernel. Here they run in PyTorch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @staticmethod
    def register(*_: Any, **__: Any) -> Any:
        return lambda decorated: decorated

    @staticmethod
    def enabled() -> bool:
        return False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.forward_native(*arguments, **named)


class _One(int):
    """The size of a group of processes, as a value and as the result of a call."""

    def __new__(cls) -> _One:
        return super().__new__(cls, 1)

    def __call__(self, *_: Any, **__: Any) -> int:
        return 1


class _Class(Nothing):
    """The value of a name in CamelCase: a class whose objects are stubs."""

    def __call__(self, *_: Any, **named: Any) -> Any:
        CALLS.append(named)
        return Stub()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return () if nn.Module in bases else (Stub,)

    def __instancecheck__(self, _: Any) -> bool:
        return False


class Stub(nn.Module):
    """The base of the classes of stubs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return _value(name)

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        self._buffers[name] = tensor  # PyTorch's method refuses a name that exists, and all names exist

    def register_parameter(self, name: str, param: Any) -> None:
        self._parameters[name] = param

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def __delattr__(self, name: str) -> None:
        with contextlib.suppress(AttributeError):
            super().__delattr__(name)

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __init_subclass__(cls, **_: Any) -> None:
        pass


CALLS: list[dict[str, Any]] = []
"""The named arguments of each stub that was built. Whoever reads them clears the list before."""
_NOTHING = Nothing()
_CLASSES: dict[str, Any] = {}
_VALUES: dict[str, Any] = {}


def _value(name: str) -> Any:
    """Return the value of a name in a stub: a class for a name in CamelCase."""
    if name in _VALUES:
        return _VALUES[name]
    if name.startswith("register"):
        return lambda *_, **__: lambda decorated: decorated
    if re.search("world_size|_size$|^size$", name):
        return _One()
    if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name):
        return _CLASSES.setdefault(name, _Class())
    return _NOTHING


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return _value(name)


class _Finder:
    """Finds the real modules of a package, stubs for its other modules, and stubs for packages that are missing."""

    def __init__(self, package: str, folder: str, real: tuple[str, ...]) -> None:
        self.package, self.folder, self.real = package, Path(folder), real
        self.transformers = package_folder("transformers")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] == self.package:
            inner = name.partition(".")[2]
            if any(inner == real or inner.startswith(f"{real}.") for real in self.real):
                return self._real(name, self.folder / inner.replace(".", "/"))
            return self._stub(name)
        importer = _importer()
        asks = importer.endswith("utils/import_utils.py")  # whether a package is installed
        if not importer.startswith((str(self.folder), self.transformers)) or asks:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        return None if any(finder.find_spec(name, path) for finder in others) else self._stub(name)

    def _stub(self, name: str) -> ModuleSpec:
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def _real(self, name: str, path: Path) -> ModuleSpec | None:
        if not path.is_dir():
            file = path.with_name(f"{path.name}.py")
            return spec_from_file_location(name, file) if file.exists() else None
        if (path / "__init__.py").exists():
            return spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[str(path)])
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(path)]
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def _importer() -> str:
    """Return the file that imports a module."""
    frame: Any = sys._getframe(1)
    while frame is not None and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


@contextlib.contextmanager
def stubs(package: str, *real: str, values: dict[str, Any] | None = None) -> Iterator[None]:
    """Import modules of an installed package with stubs for all others, while the body runs.

    Args:
        package: the package.
        real: its modules and subpackages that are imported as they are, such as "srt.models".
        values: maps names to the values that they have in all stubs.
    """
    finder: Any = _Finder(package, package_folder(package), real)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    known = {*sys.modules}
    for name in before:
        del sys.modules[name]
    _VALUES.update(values or {})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _VALUES.clear()
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == package or (name not in known and isinstance(module, _Module)):
                del sys.modules[name]
        sys.modules.update(before)


TOWERS = "Vision|Visual|Audio|PerceptionEncoder|QFormer|ViT"
FEED_FORWARD = "(MLP|Mlp|MoE|Moe|MoeBlock|MoEBlock|Experts|FFN)$"


def stub_parts(module: types.ModuleType, *names: str) -> None:
    """Replace the classes of a model's file with such names, which have no rope of its text model."""
    for name, value in vars(module).items():
        is_module = isinstance(value, type) and issubclass(value, nn.Module)
        if is_module and re.search("|".join(names), name) and not re.search("For|Attention|Rotary", name):
            setattr(module, name, Stub)


def make_layers(count: int, layer: Any = None, *others: Any, prefix: str = "", **named: Any) -> Any:
    """Build the layers of a model, as the functions of this name in SGLang do in one process."""
    modules, layer = [], layer or named["layer_fn"]
    for index in range(count):
        try:
            modules.append(layer(idx=index, prefix=f"{prefix}.{index}"))
        except TypeError as error:
            if "idx" not in str(error):
                raise
            modules.append(layer(f"{prefix}.{index}"))
    found = nn.ModuleList(modules)
    return (found, 0, count) if "pp_rank" in named or named.get("return_tuple") else found
