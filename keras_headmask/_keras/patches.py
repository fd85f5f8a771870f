"""Functions of Keras that this package replaces, each when the first object needs it.

Importing the package replaces none.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from keras.src import backend
from keras.src.models import cloning

_attention_seen_by: list[Callable[[], None]] = []
_ATTENTION_LOCK: Any = threading.Lock()


@contextlib.contextmanager
def dot_product_attention_seen(see: Callable[[], None]) -> Iterator[None]:
    """Call `see` whenever `keras.ops.dot_product_attention` computes, in any thread.

    It is not a layer. Contexts may overlap; the last to end gives Keras its own function back.
    """
    nn = getattr(backend, "ops", backend).nn  # `backend.nn` before Keras 3.16
    with _ATTENTION_LOCK:
        if not _attention_seen_by:
            usual = nn.dot_product_attention

            @functools.wraps(usual)
            def dot_product_attention(*args: Any, **kwargs: Any) -> Any:
                for each in dict.fromkeys(_attention_seen_by):
                    each()
                return usual(*args, **kwargs)

            nn.dot_product_attention = dot_product_attention
        _attention_seen_by.append(see)
    try:
        yield
    finally:
        with _ATTENTION_LOCK:
            _attention_seen_by.remove(see)
            if not _attention_seen_by:
                nn.dot_product_attention = nn.dot_product_attention.__wrapped__


def around_exports(scopes: Mapping[str, Callable[[], AbstractContextManager]]) -> None:
    """Let `model.export` run in a scope, by the name of Keras' function for the format.

    A model looks these functions up by name whenever it is exported, and says nowhere what for.
    """
    from keras.src import export

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

    usual = cloning._wrap_clone_function
    cloning._wrap_clone_function = wrap
