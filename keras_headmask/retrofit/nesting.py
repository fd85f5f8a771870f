"""Layers inside layers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.retrofit.families import adapter_of


def walk(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and layers inside `layer`, in forward order as far as the graph shows it."""
    if adapter_of(layer) is not None:
        return  # its projections are no attention of their own
    inner = children(layer)
    # Operations without a layer: `keras.ops.dot_product_attention` in a graph, say.
    if isinstance(layer, _keras.Functional):
        inner += [x for x in layer.operations if not isinstance(x, keras.Layer)]
    for child in inner:
        place = f"{path}/{child.name}" if path else child.name
        yield place, child
        yield from walk(child, place)


def children(layer: Any) -> list[Any]:
    """The layers that `layer` holds, in forward order as far as its graph shows it."""
    inner = list(layer.layers) if isinstance(layer, keras.Model) else []
    seen = {id(x) for x in inner}
    return inner + [x for x in _keras.sublayers(layer) if id(x) not in seen]


def attention(layer: Any) -> list[keras.Layer]:
    """The attention layers that `layer` is or holds, each once, in the order of `walk`."""
    found = (layer, *(inner for _, inner in walk(layer)))
    return list(dict.fromkeys(x for x in found if adapter_of(x) is not None))


def holds(outer: Any, inner: Any) -> bool:
    """Whether `inner` is `outer`, or a layer inside it."""
    return any(x is inner for x in _keras.layers_of(outer))


def is_inside(layer: Any, owner: Any) -> bool:
    """Whether `owner` is a layer inside `layer`."""
    return owner is not layer and holds(layer, owner)


@contextlib.contextmanager
def without_remat(root: keras.Layer) -> Iterator[None]:
    """Run what stands under a RematScope as it is: it would make one tensor two, or tracers."""
    name, as_it_is = _keras.REMATERIALIZED_CALL, lambda _, call, *args, **kwargs: call
    with contextlib.ExitStack() as stack:
        for layer in _keras.layers_of(root):
            if _keras.remat_mode(layer) is not None:
                stack.enter_context(observers.overriding(layer, name, as_it_is))
        yield
