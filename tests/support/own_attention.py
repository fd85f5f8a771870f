"""The oracle of KerasHub's families: their own code with a softmax in NumPy, under drawn masks."""

import itertools
import sys
import types

import keras
import numpy as np
from contract import numpy
from oracle import mask as mask_by_loops

import keras_headmask as hm
from keras_headmask.retrofit.adapters import attention

RULE = hm.PerHead({0: hm.Window(before=2, after=0), 1: hm.Window(0, 0), 3: ~hm.Window(before=1)})


def drawn(rule, queries, keys):
    """What `rule` says, for each of four heads, by loops."""
    return mask_by_loops(rule, 1, 4, queries, keys)[0]


def softmax_under(allowed):
    """A softmax of logits and a mask, in NumPy, of four heads that `allowed` restricts, too.

    `allowed` has a mask `(4, queries, keys)` for each shape of logits.
    """

    def softmax(logits, mask=None, **_):
        shape = logits.shape
        heads = (shape[0], 4, *shape[-2:])  # Gemma's are (key heads, groups): one after the other
        values = numpy(logits).astype("float64").reshape(heads)
        seen = allowed[shape[-2:]] & (values > -1e8)  # T5's and T5Gemma's hold what is hidden
        if mask is not None:
            mask = numpy(mask).astype(bool)
            seen = seen & mask.reshape(shape[0], -1, *mask.shape[-2:])
        values = np.where(seen, values, -np.inf)
        largest = values.max(-1, keepdims=True)
        weights = np.exp(values - np.where(np.isfinite(largest), largest, 0))
        total = weights.sum(-1, keepdims=True)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
        return keras.ops.convert_to_tensor(weights.reshape(shape).astype("float32"))

    return softmax


def by_oracle(monkeypatch, stock, given, allowed, first_alone=False):
    """What `stock` computes when its attention layers, or the first alone, have that softmax."""
    softmax, usual, calls = softmax_under(allowed), keras.ops.softmax, itertools.count()

    def operation(logits, axis=-1):
        return usual(logits, axis) if first_alone and next(calls) else softmax(logits)

    # (gpt-oss and T5 call the operation.)
    own_ops = types.SimpleNamespace(**vars(keras.ops) | {"softmax": operation})
    own_ops.nn = types.SimpleNamespace(softmax=operation)
    layers = attention(stock)
    with monkeypatch.context() as patch:
        for layer in layers[:1] if first_alone else layers:
            module = sys.modules[type(layer).__module__]
            patch.setattr(module, "fused_attention_op_available", lambda: False, raising=False)
            patch.setitem(vars(layer), "_use_fused_attention_op", lambda: False)
            for name in ("softmax", "_softmax"):
                if hasattr(layer, name):
                    patch.setitem(vars(layer), name, softmax)
                    break
            else:
                patch.setattr(module, "ops", own_ops)
        return keras.tree.map_structure(numpy, stock(given))
