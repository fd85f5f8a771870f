"""Ours and stock Keras, on TensorFlow, in one process."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_headmask as hm
from benchmarks import cases, measure


def pin_threads(threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def run(names: list[str], dtype: str, quick: bool, repetitions: int) -> dict[str, dict]:
    """The results of the cases that are asked for, by name."""
    every = cases.all_cases(quick)
    results = {}
    for name in names:
        try:
            if name in every:
                results[name] = attention(every[name], dtype, repetitions)
            elif name == "training":
                results[name] = training(every["window"], dtype, repetitions)
            elif name == "layer":
                results[name] = layer_without_rule(every["bert"], dtype, repetitions)
            elif name == "layer-window":
                results[name] = layer_with_window(every["window"], dtype, repetitions)
        except Exception as error:  # one case must not cost the others
            results[name] = {"errors": {"all": measure.message(error)}}
    return results


def ours(case: cases.Case, dtype: str, length: int | None) -> Callable:
    """Ours as a graph, for one length or, with `None`, for any."""
    spec = case.spec()
    operand = tf.TensorSpec((case.batch, length, case.heads, case.size), dtype)
    inputs = {
        name: tf.TensorSpec((case.batch, length), array.dtype)
        for name, array in case.data().items()
    }

    @tf.function(input_signature=[operand, operand, operand, inputs])
    def attend(query: Any, key: Any, value: Any, mask_inputs: Any) -> Any:
        return hm.dot_product_attention(
            query, key, value, mask_spec=spec, mask_inputs=mask_inputs or None
        )

    return attend


@tf.function
def stock(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    return keras.ops.dot_product_attention(query, key, value, mask=mask)


def attention(case: cases.Case, dtype: str, repetitions: int) -> dict[str, Any]:
    """Attention alone, forward."""
    data = case.data()
    allowed = case.mask(data)
    operands = [tf.cast(tf.constant(x), dtype) for x in case.operands()]
    inputs = {name: tf.constant(array) for name, array in data.items()}
    batch, length, heads, _ = case.shape
    mask = tf.broadcast_to(tf.constant(allowed), (batch, heads, length, length))
    static, unknown = ours(case, dtype, length), ours(case, dtype, None)
    result = measure.interleaved(
        {
            "ours": lambda: static(*operands, inputs),
            "ours, unknown T": lambda: unknown(*operands, inputs),
            "stock": lambda: stock(*operands, mask),
            "stock, no mask": lambda: stock(*operands),
        },
        repetitions,
    )
    alive = np.swapaxes(np.broadcast_to(allowed.any(-1), (batch, heads, length)), 1, 2)
    expected = tf.cast(stock(*operands, mask), "float32").numpy()[alive]
    result["difference"] = max(
        float(np.abs(tf.cast(attend(*operands, inputs), "float32").numpy()[alive] - expected).max())
        for attend in (static, unknown)
    )
    result["allowed_share"] = float(allowed.mean())
    return result


def training(case: cases.Case, dtype: str, repetitions: int) -> dict[str, Any]:
    """Attention alone, forward and the gradients of query, key and value."""
    operands = [tf.cast(tf.constant(x), dtype) for x in case.operands()]
    upstream = tf.cast(tf.constant(case.operands(seed=1)[0]), dtype)
    shape = (case.batch, case.heads, case.length, case.length)
    mask = tf.broadcast_to(tf.constant(case.mask(case.data())), shape)
    static = step(ours(case, dtype, case.length), case.shape, dtype)
    unknown = step(ours(case, dtype, None), (case.batch, None, *case.shape[2:]), dtype)
    of_mask = tf.TensorSpec(shape, "bool")
    stock_step = step(lambda q, k, v, mask: stock(q, k, v, mask), case.shape, dtype, of_mask)
    result = measure.interleaved(
        {
            "ours": lambda: static(*operands, upstream, {}),
            "ours, unknown T": lambda: unknown(*operands, upstream, {}),
            "stock": lambda: stock_step(*operands, upstream, mask),
        },
        repetitions,
    )
    expected = stock_step(*operands, upstream, mask)
    result["difference"] = max(
        float(tf.reduce_max(tf.abs(tf.cast(got - wanted, "float32"))))
        for other in (static, unknown)
        for got, wanted in zip(other(*operands, upstream, {}), expected, strict=True)
    )
    return result


def step(attend: Callable, shape: tuple, dtype: str, last: Any = ()) -> Callable:
    """`attend` as a training step: the context and the gradients of query, key and value.

    `last` is the signature of what `attend` takes beside them: mask inputs, or the mask.
    """
    operand, last = tf.TensorSpec(shape, dtype), last or {}

    @tf.function(input_signature=[operand] * 4 + [last])
    def forward_and_gradient(query: Any, key: Any, value: Any, upstream: Any, last: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((query, key, value))
            context = attend(query, key, value, last)
        gradients = tape.gradient(context, (query, key, value), output_gradients=upstream)
        return (context, *gradients)

    return forward_and_gradient


def layer_without_rule(case: cases.Case, dtype: str, repetitions: int) -> dict[str, Any]:
    """The whole layer with a rule that hides nothing, against the stock layer."""
    layers = {
        "stock": keras.layers.MultiHeadAttention,
        "ours, Full()": lambda *sizes, **kw: hm.PerHeadMaskedMultiHeadAttention(
            *sizes, mask_spec=hm.Full(), **kw
        ),
        "ours, no spec": hm.PerHeadMaskedMultiHeadAttention,
    }
    return _layers(case, dtype, layers, {}, repetitions * 3)


def layer_with_window(case: cases.Case, dtype: str, repetitions: int) -> dict[str, Any]:
    """The whole layer, projections included, under the window rule."""
    layers = {
        "stock": keras.layers.MultiHeadAttention,
        "ours": lambda *sizes, **kw: hm.PerHeadMaskedMultiHeadAttention(
            *sizes, mask_spec=case.spec(), **kw
        ),
    }
    shape = (case.batch, case.heads, case.length, case.length)
    mask = tf.broadcast_to(tf.constant(case.mask(case.data())), shape)
    return _layers(case, dtype, layers, {"stock": {"attention_mask": mask}}, repetitions)


def _layers(
    case: cases.Case, dtype: str, layers: dict, given: dict[str, dict], repetitions: int
) -> dict[str, Any]:
    size = case.heads * case.size
    rng = np.random.default_rng(0)
    x = tf.constant(rng.standard_normal((case.batch, case.length, size), "float32"), dtype)
    functions, weights = {}, None
    for name, make in layers.items():
        layer = make(case.heads, case.size, dtype=dtype)
        call, arguments = tf.function(layer), given.get(name, {})
        call(x, x, **arguments)
        weights = layer.get_weights() if weights is None else weights
        layer.set_weights(weights)
        functions[name] = lambda call=call, arguments=arguments: call(x, x, **arguments)
    result = measure.interleaved(functions, repetitions)
    outputs = [tf.cast(function(), "float32").numpy() for function in functions.values()]
    result["difference"] = max(float(np.abs(other - outputs[0]).max()) for other in outputs[1:])
    return result
