"""Specs join the language under permanent names."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from keras_headmask.rules import config
from keras_headmask.rules.base import MaskSpec

_Class = TypeVar("_Class", bound=type)


def register_spec(kind: str) -> Callable[[_Class], _Class]:
    """Class decorator: let a spec of your own join the language under a permanent name.

    The class must be a frozen dataclass that subclasses `MaskSpec`. Its fields are what is saved
    and what is compared: specs with equal fields are one. In a test of your own, let
    `hm.testing.check_spec` try it: a spec that answers differently for a tile than for the
    whole mask gives wrong numbers, and no error.

    Args:
        kind: The name under which the spec is saved, an identifier.

    Returns:
        The decorator, which returns its class.

    Raises:
        TypeError: for another kind of class, a field that hides a member of `MaskSpec`, a field
            with `compare=False`, or `eq=False` without an `__eq__`.
        ValueError: for a name that another class has, or that is not an identifier.
    """

    def decorate(cls: Any) -> Any:
        is_spec = isinstance(cls, type) and issubclass(cls, MaskSpec)
        params = vars(cls).get("__dataclass_params__") if is_spec else None
        if params is None or not params.frozen:
            raise TypeError(
                "A spec must be a frozen dataclass that subclasses MaskSpec: put "
                f"@dataclass(frozen=True) right under @register_spec({kind!r}). Received: {cls!r}."
            )
        if taken := sorted({f.name for f in dataclasses.fields(cls)} & set(dir(MaskSpec))):
            raise TypeError(
                f"A field named `{taken[0]}` would hide the `{taken[0]}` that every spec has. "
                f"Rename it in {cls.__name__}."
            )
        if hidden := [f.name for f in dataclasses.fields(cls) if not f.compare]:
            raise TypeError(
                f"Every field of a spec must compare, since specs that are equal are merged: with "
                f"compare=False on {hidden}, one value of `{hidden[0]}` would replace another. "
                f"Received: {cls.__name__}. Leave `compare` out."
            )
        if cls.__eq__ is object.__eq__:
            raise TypeError(
                "Specs are values: those with equal fields must be equal, or a saved rule would "
                f"not equal itself. {cls.__name__} has eq=False and no `__eq__`: leave eq=False "
                "out."
            )
        config.register(kind, cls)
        cls.kind = kind
        if params.init and "__init__" in vars(cls):
            cls.__init__ = _with_checked_names(cls.__init__)
        return cls

    return decorate


def _with_checked_names(init: Callable) -> Callable:
    """The constructor that `dataclass` wrote, with an error that lists the fields."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            config.check_keywords(type(self), kwargs)
        init(self, *args, **kwargs)

    return checked
