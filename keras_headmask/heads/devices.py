"""Heads over several devices, by `keras.distribution`."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit import adapters


def head_layout(
    model: keras.Layer, device_mesh: keras.distribution.DeviceMesh, axis: str = "model"
) -> keras.distribution.LayoutMap:
    """The layout that spreads the heads of `model` over the devices along `axis` of a mesh.

    For `keras.distribution.ModelParallel`, on the JAX backend. Each device holds the weights of its
    own heads and computes their attention, under their rules; one sum over the devices joins what
    the heads say. The two `Dense` layers of a feed-forward block, inside the same layer and next to
    each other, are spread along their inner axis if the devices divide it. All else is copied to
    every device.

    Keras applies a layout when a variable is made: it reaches no model that exists, but a copy that
    is made while the distribution is set. Layers are known by their paths, so the copy must have
    the layer names of `model`, as `apply_head_masks`, `keras.models.clone_model` and
    `keras.saving.load_model` give them.

    Args:
        model: A built Keras model, or a built layer, with `keras.layers.MultiHeadAttention` or a
            subclass in it. Masked or not: a rule has no weights.
        device_mesh: The mesh, such as `keras.distribution.DeviceMesh((2, 4), ("batch", "model"))`.
        axis: The axis of the mesh along which the heads are spread.

    Returns:
        A `keras.distribution.LayoutMap`. Add to it what else is to be spread.

    Raises:
        TypeError: if `model` is no Keras layer, or `device_mesh` no Keras mesh.
        ValueError: if the mesh has no such axis, `model` holds no such attention or is not built,
            the number of devices along `axis` does not divide the heads of each layer, or weights
            of one path must be spread along different axes.

    >>> mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["cpu:0", "cpu:1"])
    >>> x = keras.Input((None, 8))
    >>> model = keras.Model(x, keras.layers.MultiHeadAttention(4, 2, name="attention")(x, x))
    >>> for path, layout in head_layout(model, mesh).items():
    ...     print(path, layout.axes)
    attention/query/kernel (None, 'model', None)
    attention/query/bias ('model', None)
    attention/key/kernel (None, 'model', None)
    attention/key/bias ('model', None)
    attention/value/kernel (None, 'model', None)
    attention/value/bias ('model', None)
    attention/attention_output/kernel ('model', None, None)
    """
    _check(model, device_mesh, axis)
    devices = dict(zip(device_mesh.axis_names, device_mesh.shape, strict=True))[axis]
    found = adapters.attention(model)
    attention = [x for x in found if isinstance(x, keras.layers.MultiHeadAttention)]
    _check_attention(model, attention, axis, devices)
    axes_of: dict[str, tuple[str | None, ...]] = {}
    for weight, place in (*_of_heads(attention), *_of_feed_forward(model, devices)):
        axes = tuple(axis if i == place else None for i in range(len(weight.shape)))
        # A shared layer comes twice, and two towers of one model may name their layers alike.
        if axes_of.setdefault(weight.path, axes) != axes:
            raise ValueError(
                f"Two weights of '{model.name}' have the path {weight.path!r}, and are spread "
                "along different axes. Keras knows a weight by its path: give these layers other "
                "names."
            )
    layout = keras.distribution.LayoutMap(device_mesh)
    for path, axes in axes_of.items():
        layout[re.escape(path)] = axes  # a regex there, and escaped it means this path alone
    return layout


def _of_heads(attention: list[Any]) -> Iterator[tuple[Any, int]]:
    """Weights with an axis of heads, and that axis."""
    for layer in attention:
        projections = layer.query_dense, layer.key_dense, layer.value_dense, _keras.gate(layer)
        for projection in filter(None, projections):  # (dim, H, size), and (H, size)
            for weight in projection.weights:
                if weight.name in ("kernel", "bias"):
                    yield weight, len(weight.shape) - 2
        for weight in layer.output_dense.weights:  # (H, size, dim); its bias is of no head
            if weight.name == "kernel":
                yield weight, 0


def _of_feed_forward(model: keras.Layer, devices: int) -> Iterator[tuple[Any, int]]:
    """Weights with the inner axis of two neighbouring `Dense`, there and back, and that axis."""
    for layer in _keras.layers_of(model):
        inside = adapters.children(layer)
        dense = [x for x in inside if isinstance(x, keras.layers.Dense) and x.built]
        for first, second in itertools.pairwise(dense):
            (wide, narrow), back = first.kernel.shape[::-1], tuple(second.kernel.shape)
            if back == (wide, narrow) and wide > narrow and wide % devices == 0:
                for weight in first.weights:
                    if weight.name in ("kernel", "bias"):
                        yield weight, len(weight.shape) - 1
                yield from ((weight, 0) for weight in second.weights if weight.name == "kernel")


# --- Checks --------------------------------------------------------------------------------------


def _check(model: Any, device_mesh: Any, axis: str) -> None:
    if not isinstance(model, keras.Layer):
        raise TypeError(f"`model` must be a Keras model or layer. Received: {model!r}.")
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise TypeError(
            "`device_mesh` must be a mesh, such as keras.distribution.DeviceMesh((2, 4), "
            f"('batch', 'model')). Received: {device_mesh!r}."
        )
    if axis not in device_mesh.axis_names:
        raise ValueError(
            f"The mesh has no axis {axis!r}. It has: {list(device_mesh.axis_names)}. Name one of "
            "these as `axis`."
        )


def _check_attention(model: Any, attention: list[Any], axis: str, devices: int) -> None:
    if not attention:
        raise ValueError(
            f"'{model.name}' holds no `keras.layers.MultiHeadAttention`, so there are no heads to "
            "spread. If it is a model that makes its layers in its first call, call it on data "
            "first."
        )
    if unbuilt := [layer.name for layer in attention if not layer.built]:
        raise ValueError(
            f"The attention layers {unbuilt} of '{model.name}' are not built, so their weights "
            "have no paths yet. Call the model on data first."
        )
    common = math.gcd(*(layer.num_heads for layer in attention))
    possible = [n for n in range(1, common + 1) if common % n == 0]
    for layer in attention:
        if layer.num_heads % devices:
            raise ValueError(
                f"The axis {axis!r} of the mesh has {devices} devices, which do not divide the "
                f"{layer.num_heads} heads of the attention layer '{layer.name}'. Make a mesh with "
                f"one of these numbers of devices along {axis!r}: {possible}."
            )
