"""Functions of Keras that this package replaces, each when the first object needs it.

Importing the package replaces none.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from keras_headmask._keras.lookup import find


def around_exports(scopes: Mapping[str, Callable[[], AbstractContextManager]]) -> None:
    """Let `model.export` run in a scope, by the name of Keras' function for the format.

    A model looks these functions up by name whenever it is exported, and says nowhere what for.
    """
    export = find("keras.src.export")
    for name, scope in scopes.items():
        usual = getattr(export, name)

        @functools.wraps(usual)
        def in_scope(
            *args: Any, usual: Callable = usual, scope: Callable = scope, **kwargs: Any
        ) -> Any:
            with scope():
                return usual(*args, **kwargs)

        setattr(export, name, in_scope)


def after_cloning(see: Callable[[Any, Any], None]) -> None:
    """Call `see(operation, clone)` for what the `clone_function` of `clone_model` returns."""

    def wrap(clone_function: Any = None, *args: Any, **kwargs: Any) -> Callable:
        clone = usual(clone_function, *args, **kwargs)

        def clone_and_see(operation: Any) -> Any:
            copy = clone(operation)
            see(operation, copy)
            return copy

        return clone_and_see

    cloning = find("keras.src.models.cloning")
    usual = cloning._wrap_clone_function
    cloning._wrap_clone_function = wrap
