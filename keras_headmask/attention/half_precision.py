"""In which dtype operands are multiplied: half precision only where that is faster and no worse.

Logits, softmax and what lies between products are float32 (float64 for float64). Products of half
operands are, too, on a CPU: it multiplies float32 faster. An accelerator multiplies half operands
faster, and sums them in float32: JAX by `preferred_element_type`, PyTorch by the `out_dtype` of
`bmm` on CUDA, TensorFlow in XLA. Outside of XLA TensorFlow has no kernel from half operands to
float32, on any device; products are float32 there, which an NVIDIA GPU since Ampere computes on
its tensor cores as TF32: the operands fit into that unrounded.
"""

from contextlib import AbstractContextManager

import keras
from keras import ops

from keras_headmask._keras.tensorflow import custom_gradient, in_xla
from keras_headmask.attention import device
from keras_headmask.attention.subscripts import axes, left_gradient, right_gradient
from keras_headmask.attention.tuning import Held, holding, is_forward_only
from keras_headmask.masks import Tensor

HALF = ("float16", "bfloat16")

_half_products: Held[bool | None] = Held("half_products", None)


def half_products(wanted: bool | None = True) -> AbstractContextManager[bool | None]:
    """Let half operands be multiplied as such wherever they can be, or (`False`) nowhere.

    For what is traced here and runs elsewhere. `None`: on an accelerator of this process.
    """
    return holding(_half_products, wanted)


def half_dtype(scale: float, *operands: Tensor) -> str | None:
    """The half precision in which `operands` are multiplied; `None`: in float32 at least.

    The queries are multiplied by `scale` first, which must not take them out of float16.
    """
    dtype = common_half(*operands)
    if dtype is None or any(map(keras.backend.is_keras_tensor, operands)):
        return None
    if dtype == "float16" and not (isinstance(scale, (int, float)) and abs(scale) <= 1):
        return None
    wanted, backend = _half_products.get(), keras.backend.backend()
    if wanted is False or (backend == "tensorflow" and not in_xla()):
        return None
    return dtype if wanted or _is_on_accelerator(operands[0]) else None


def common_half(*operands: Tensor) -> str | None:
    """The half precision that all `operands` have."""
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in operands}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {*HALF} else None


def _is_on_accelerator(tensor: Tensor) -> bool:
    """Whether one multiplies half operands into float32."""
    if keras.backend.backend() == "torch":
        from keras_headmask.attention.torch.products import has_kernel

        return has_kernel(tensor)
    return device.kind(tensor) in ("gpu", "tpu")


# --- Products ------------------------------------------------------------------------------------


def product(subscripts: str, left: Tensor, right: Tensor, half: str | None) -> Tensor:
    """`ops.einsum`; with `half` of operands rounded to it, summed in float32, and float32.

    `subscripts` as of one product for each pair of a batch and a head: two letters that all three
    have, one that each two have.
    """
    if half is None:
        return ops.einsum(subscripts, left, right)
    backend = keras.backend.backend()
    if backend == "jax":
        import jax.numpy as jnp

        operands = (ops.cast(x, half) for x in (left, right))
        return jnp.einsum(subscripts, *operands, preferred_element_type="float32")
    # Neither backend has a gradient of such products.
    if backend == "tensorflow":
        return _in_tensorflow(subscripts, half, left, right)
    from keras_headmask.attention.torch.products import Product

    return Product.apply(left, right, subscripts, half)


def _in_tensorflow(subscripts: str, half: str, left: Tensor, right: Tensor) -> Tensor:
    import tensorflow as tf

    def with_gradient(left: Tensor, right: Tensor) -> tuple:
        rows, columns, back = axes(subscripts)
        rounded = (tf.transpose(tf.cast(x, half), o) for x, o in ((left, rows), (right, columns)))
        rounded_product = tf.transpose(tf.matmul(*rounded, output_type=tf.float32), back)

        def gradient(upstream: Tensor) -> tuple:
            d_left = product(left_gradient(subscripts), upstream, right, half)
            d_right = product(right_gradient(subscripts), left, upstream, half)
            return tf.cast(d_left, left.dtype), tf.cast(d_right, right.dtype)

        return rounded_product, gradient

    if is_forward_only():
        return with_gradient(left, right)[0]
    return custom_gradient(with_gradient)(left, right)
