"""What every route to the layer must give, computed in NumPy from the layer's weights alone."""

import keras
import numpy as np
from keras import ops
from oracle import attention


def numpy(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32") if _is_half(tensor) else tensor)


def _is_half(tensor):
    return keras.backend.standardize_dtype(tensor.dtype) in ("bfloat16", "float16")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def by_hand(layer, query, value=None, key=None, mask=None):
    """Output `(B, T, dim)` and probabilities `(B, H, T, S)` of `layer`, from its weights.

    `mask` is boolean and broadcasts to `(B, H, T, S)`.
    """
    value = query if value is None else value
    key = value if key is None else key

    def project(dense, x):
        kernel = numpy(dense.kernel).astype("float64")
        bias = 0.0 if dense.bias is None else numpy(dense.bias).astype("float64")
        return np.einsum("btd,dhk->bthk", np.asarray(x, "float64"), kernel) + bias

    q, k, v = (
        project(dense, x)
        for dense, x in (
            (layer.query_dense, query),
            (layer.key_dense, key),
            (layer.value_dense, value),
        )
    )
    b, t, h, _ = q.shape
    mask = np.ones((b, h, t, k.shape[1]), bool) if mask is None else mask
    mask = np.broadcast_to(mask, (b, h, t, k.shape[1]))
    context, probabilities = attention(q, k, v, mask, 1 / np.sqrt(layer.key_dim))
    if layer._use_gate:
        context = context / (1 + np.exp(-project(layer._gate_dense, query)))
    kernel = numpy(layer.output_dense.kernel).astype("float64")
    bias = 0.0 if layer.output_dense.bias is None else numpy(layer.output_dense.bias)
    return np.einsum("bthk,hkd->btd", context, kernel) + bias, probabilities


def random_biases(layer, seed=1):
    """Biases start at 0, which would hide a bias that is lost: give them values."""
    rng = np.random.default_rng(seed)
    layer.set_weights([w + rng.normal(size=w.shape) * 0.1 for w in layer.get_weights()])


def gradient(function, *arrays):
    """Gradients of the scalar `function(*tensors)` with respect to each array, as NumPy."""
    tensors = [ops.convert_to_tensor(a) for a in arrays]
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            loss = function(*tensors)
        grads = tape.gradient(loss, tensors)
    elif backend == "jax":
        import jax

        # One compilation, not one for each operation.
        grads = jax.jit(jax.grad(function, argnums=tuple(range(len(tensors)))))(*tensors)
    else:
        tensors = [t.clone().requires_grad_(True) for t in tensors]
        function(*tensors).backward()
        grads = [t.grad for t in tensors]
    return [numpy(g) for g in grads]
