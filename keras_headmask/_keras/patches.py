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


def before_cloning(see: Callable[[Any], None]) -> None:
    """Call `see(model)` for each model that `clone_model` calls anew layer by layer."""
    cloning = find("keras.src.models.cloning")
    for name in ("_clone_functional_model", "_clone_sequential_model"):
        usual = getattr(cloning, name)

        @functools.wraps(usual)
        def see_and_clone(model: Any, *args: Any, usual: Callable = usual, **kwargs: Any) -> Any:
            see(model)
            return usual(model, *args, **kwargs)

        setattr(cloning, name, see_and_clone)
