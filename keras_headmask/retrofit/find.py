"""Layers inside layers: where attention stands in a model."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.retrofit.adapters import adapter_of


def walk(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and layers inside `layer`, in forward order as far as the graph shows it."""
    if adapter_of(layer) is not None:
        return  # (no attention is inside attention)
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
    """Run layers of a RematScope without it: remat copies or traces tensors."""
    name, as_it_is = _keras.REMATERIALIZED_CALL, lambda _, call, *args, **kwargs: call
    with contextlib.ExitStack() as stack:
        for layer in _keras.layers_of(root):
            if _keras.remat_mode(layer) is not None:
                stack.enter_context(observers.overriding(layer, name, as_it_is))
        yield


class AttentionLayer(NamedTuple):
    """An attention layer and the names of the layers around it, outermost first.

    `kind` is "self", "cross", or "unclear". `runs_on_two`: it is called more than once, and not on
    one sequence after the other. `untracked`: a weight in it that Keras does not track. `ran`: a
    call of it was seen, in a graph or by running the layer around it for shapes.
    """

    layer: keras.Layer
    path: str
    kind: str
    runs_on_two: bool = False
    untracked: str = ""
    ran: bool = True

    @property
    def num_heads(self) -> Any:
        """The number of query heads; `None` if the layer has no `num_heads`."""
        adapter = adapter_of(self.layer)
        return getattr(self.layer, "num_heads", None) if adapter is None else adapter.num_heads

    def __str__(self) -> str:
        return f"'{self.path}' ({type(self.layer).__name__})"
