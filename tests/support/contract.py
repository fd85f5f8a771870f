"""What every route to our layers must give, computed in NumPy from a layer's weights alone."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import ops
from oracle import attention

import keras_headmask as hm
from keras_headmask import _keras


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of our layers, the layer of Keras that it extends, and how both are given their sizes."""

    ours: type
    stock: type
    sizes: Callable[[int, int], dict]

    def __str__(self):
        return self.stock.__name__

    def layer(self, num_heads, size, **arguments):
        """One of ours with so many heads (of the query) of that size."""
        return self.ours(**self.sizes(num_heads, size), **arguments)

    def built(self, num_heads=3, dim=8, size=4, **arguments):
        """The same for `dim` features, with biases that are not 0."""
        layer = self.layer(num_heads, size, **arguments)
        layer.build((None, None, dim), (None, None, dim))
        random_biases(layer)
        return layer

    def twins(self, num_heads=3, dim=8, size=4, mask_spec=None, **arguments):
        """Ours, under a rule if there is one, and stock with the same weights."""
        arguments |= self.sizes(num_heads, size) | {"name": "attention"}
        ours, stock = self.ours(mask_spec=mask_spec, **arguments), self.stock(**arguments)
        for layer in (ours, stock):
            layer.build((None, None, dim), (None, None, dim))
        random_biases(stock)
        ours.set_weights(stock.get_weights())
        return ours, stock


def _sizes_of_grouped(num_heads, size):
    """Two query heads share a key head; all of them where their number is odd."""
    of_keys = num_heads // 2 if num_heads % 2 == 0 else 1
    return {"head_dim": size, "num_query_heads": num_heads, "num_key_value_heads": of_keys}


MULTI_HEAD = Kind(
    hm.PerHeadMaskedMultiHeadAttention,
    keras.layers.MultiHeadAttention,
    lambda num_heads, size: {"num_heads": num_heads, "key_dim": size},
)
GROUPED = Kind(
    hm.PerHeadMaskedGroupedQueryAttention, keras.layers.GroupQueryAttention, _sizes_of_grouped
)


def numpy(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32") if _is_half(tensor) else tensor)


def _is_half(tensor):
    return keras.backend.standardize_dtype(tensor.dtype) in ("bfloat16", "float16")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def by_hand(layer, query, value=None, key=None, mask=None, bias=None):
    """Output `(B, T, dim)` and probabilities `(B, H, T, S)` of `layer`, from its weights.

    `mask` is boolean and broadcasts to `(B, H, T, S)`.
    """
    value = query if value is None else value
    key = value if key is None else key

    def project(dense, x):
        kernel = numpy(dense.kernel).astype("float64")
        bias = 0.0 if dense.bias is None else numpy(dense.bias).astype("float64")
        return np.einsum("btd,dhk->bthk", np.asarray(x, "float64"), kernel) + bias

    *projections, output_dense = _keras.projections(layer)
    pairs = zip(projections, (query, key, value), strict=True)
    q, k, v = (project(dense, x) for dense, x in pairs)
    b, t, h, size = q.shape
    mask = np.broadcast_to(True if mask is None else mask, (b, h, t, k.shape[1]))
    context, probabilities = attention(q, k, v, mask, 1 / np.sqrt(size), bias=bias)
    if layer.get_config().get("use_gate"):
        context = context / (1 + np.exp(-project(layer._gate_dense, query)))
    kernel = numpy(output_dense.kernel).astype("float64")
    bias = 0.0 if output_dense.bias is None else numpy(output_dense.bias)
    return np.einsum("bthk,hkd->btd", context, kernel) + bias, probabilities


def random_biases(layer, seed=1):
    """Biases start at 0, which would hide a bias that is lost: give them values."""
    rng = np.random.default_rng(seed)
    layer.set_weights([w + rng.normal(size=w.shape) * 0.1 for w in layer.get_weights()])
