"""Keep the old names of attributes of schemes for one release, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from typing import Any


class OldName:
    """The old name of a renamed attribute. It warns when it is read, and returns the attribute of the new name.

    Assign an instance to the old name in the class that defines the new name.

    Args:
        new: the new name of the attribute.
    """

    def __init__(self, new: str) -> None:
        self.new = new
        self.old = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    @property
    def message(self) -> str:
        """The text of the DeprecationWarning."""
        return f"{self.old} was renamed to {self.new}. The old name will be removed in the next release."

    def __get__(self, instance: object | None, owner: type) -> Any:
        warnings.warn(self.message, DeprecationWarning, stacklevel=2)
        target: Any = owner if instance is None else instance
        overriding = [cls for cls in owner.__mro__ if vars(cls).get(self.old, self) is not self]
        # Only super() reaches this method from a class that defines the old name.
        return getattr(super(overriding[-1], target) if overriding else target, self.new)


def adopt_old_names(cls: type) -> None:
    """Define the new names of attributes in a class that defines only the old ones. `__init_subclass__` calls this."""
    for base in cls.__mro__[1:]:
        for name, value in vars(base).items():
            if isinstance(value, OldName) and name in vars(cls) and value.new not in vars(cls):
                # The frames are this function, __init_subclass__, ABCMeta.__new__ and the class statement.
                warnings.warn(f"{cls.__name__}: {value.message}", DeprecationWarning, stacklevel=4)
                setattr(cls, value.new, vars(cls)[name])
