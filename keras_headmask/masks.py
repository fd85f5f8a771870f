"""Masks as tensors: one polarity, one rank, one rule to merge them.

`True` means: this query may attend to this key. Masks are lifted to rank 4, `(batch, heads,
queries, keys)`, before they meet, so that a batch axis never lines up with the head axis; size 1
broadcasts. The functions take NumPy arrays, eager tensors and symbolic Keras tensors, and run
inside `tf.function`.
"""

import functools
import warnings
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras

# For readers and type checkers; none of the backends has types that mypy could use.
Tensor: TypeAlias = Any  # of any backend, a NumPy array, or a symbolic Keras tensor
Mask: TypeAlias = Tensor  # boolean, (B or 1, H or 1, T, S); True: may attend
Length: TypeAlias = int | Tensor  # a number of positions: an int, or a scalar where a graph runs

HIDDEN = -1e9  # what is added to a hidden logit
_HIDDEN_FLOAT16 = -3e4  # -1e9 would be -inf in float16, and a row of them NaN
# Additive masks in the wild: -1e4 (in bfloat16 -9984), -3e4, -1e9, the dtype's lowest, -inf.
_HIDES = -9984.0


def as_tensor(value: Any, name: str = "") -> Tensor:
    """`value` as a tensor of the backend; tensors and symbolic Keras tensors pass through."""
    if keras.backend.is_keras_tensor(value):
        return value
    if hasattr(value, "detach") and keras.backend.backend() != "torch":
        value = value.detach().cpu().numpy()
    try:
        if hasattr(value, "row_splits"):
            raise TypeError("Keras would pass a `tf.RaggedTensor` through.")
        return ops.convert_to_tensor(value)
    except Exception as error:  # each backend has its own, none names what was passed
        expected = f"`{name}` must be a tensor" if name else "Expected a tensor"
        raise TypeError(
            f"{expected} or an array, whose rows are equally long. Received: {value!r}. Pad rows: "
            "keras.utils.pad_sequences(rows, padding='post'); a tf.RaggedTensor by `to_tensor()`."
        ) from error


def as_mask_input(value: Any, name: str = "") -> Tensor:
    """`value` as a tensor; a float that stands in for integers becomes integers.

    Keras builds a subclassed model that it loads by running `call` for shapes alone, on floats
    whatever the dtypes of its inputs are. An error there would be swallowed, and layers that are
    not built yet would keep fresh weights. Floats are refused when the model runs on numbers.
    """
    tensor = as_tensor(value, name)
    is_float = "float" in keras.backend.standardize_dtype(tensor.dtype)
    return ops.cast(tensor, "int32") if is_float and has_shape_alone(tensor) else tensor


def has_shape_alone(tensor: Tensor) -> bool:
    """Whether Keras runs a `call` for shapes, with a tensor of the backend in place of numbers.

    Not in a function that is being compiled: it would be run again on numbers, unchecked.
    """
    return _keras.for_shapes_alone() and not keras.backend.is_keras_tensor(tensor)


def as_bool(mask: Any, name: str = "mask") -> Tensor:
    """`mask`, of booleans or of 0 and 1, as booleans; anything else is refused.

    Integers are checked where that costs no wait: in NumPy arrays and eager tensors in the memory
    of the CPU. Elsewhere an integer opens only where it is above 0.
    """
    mask = as_mask_input(mask, name)
    dtype = keras.backend.standardize_dtype(mask.dtype)
    if dtype == "bool":
        return mask
    if "int" not in dtype:
        raise TypeError(
            f"`{name}` must be boolean or integer, True where a query may attend to a key. "
            f"Received dtype {dtype}. An additive mask (0 / -inf) becomes one by "
            "`keras_headmask.from_additive(mask)`, a mask of 0 / 1 by a cast to bool; a "
            "`keras.Input` for a mask needs dtype='bool'."
        )
    values = _values_at_hand(mask)
    odd = None if values is None else values[(values != 0) & (values != 1)]
    if odd is not None and odd.size:
        raise ValueError(
            f"`{name}` holds the integer {odd.flat[0]}: a mask of integers holds 1 where a query "
            "may attend to a key, and 0 elsewhere. An additive mask (0 / -10000), cast to floats, "
            "becomes one by `keras_headmask.from_additive(mask)`; if every value but 0 means True, "
            "pass `mask != 0`."
        )
    return as_flags(mask)


def as_flags(values: Tensor) -> Tensor:
    """Booleans as they are; integers are true above 0.

    So an additive mask (0 / -10000) that was cast to integers opens nothing. A cast to bool would
    invert it.
    """
    is_signed = keras.backend.standardize_dtype(values.dtype).startswith("int")
    return values > 0 if is_signed else ops.cast(values, "bool")


def _values_at_hand(tensor: Tensor) -> np.ndarray | None:
    """The values of an eager tensor in the memory of the CPU, else `None`."""
    if not _is_eager(tensor):
        return None
    backend = keras.backend.backend()
    if backend == "tensorflow":
        at_hand = "CPU" in tensor.device
    elif backend == "jax":
        at_hand = all(d.platform == "cpu" for d in tensor.devices())
    else:
        at_hand = tensor.device.type == "cpu"
    return known_values(tensor) if at_hand else None


def _is_eager(tensor: Tensor) -> bool:
    """Whether a tensor of the backend is neither symbolic nor a part of a trace."""
    if keras.backend.is_keras_tensor(tensor):
        return False
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return hasattr(tensor, "numpy") and tf.executing_eagerly()
    if backend == "jax":
        import jax

        return not isinstance(tensor, jax.core.Tracer)
    import torch

    return not torch.compiler.is_compiling()


def warn_of_heads(mask: Tensor, name: str, batch: int | None, heads: int) -> None:
    """Warn once if the first axis of an eager mask of rank 3 may have been meant as the heads."""
    if len(mask.shape) == 3 and 1 != mask.shape[0] == batch == heads and _is_eager(mask):
        _warn_of_heads(name, heads)


@functools.cache
def _warn_of_heads(name: str, heads: int) -> None:
    warnings.warn(
        f"`{name}` of rank 3 is read as (batch, queries, keys), and there are as many heads as "
        f"examples: {heads}. If its first axis is the heads, pass mask[None], of shape (1, heads, "
        "queries, keys). If it is the batch, mask[:, None] says so without this warning.",
        UserWarning,
        stacklevel=3,
    )


def lift(mask: Any, name: str = "mask") -> Mask:
    """A mask of rank 2 `(T, S)`, 3 `(B, T, S)` or 4 as booleans of rank 4."""
    mask = as_bool(mask, name)
    rank = len(mask.shape)
    if rank not in (2, 3, 4):
        raise ValueError(
            f"`{name}` must have shape (queries, keys), (batch, queries, keys) or (batch or 1, "
            f"heads or 1, queries, keys). Received: shape {tuple(mask.shape)}."
        )
    if rank == 2:
        return mask[None, None]
    return mask if rank == 4 else ops.expand_dims(mask, 1)


def check_shape(mask: Tensor, name: str, *lengths: int | None) -> None:
    """Each known size of `mask` must be 1 or the one in `lengths`, which are (B, H, T, S).

    `None` is a size not known yet.
    """
    shape, keys = tuple(mask.shape), lengths[-1]
    wanted = dict(zip(("batch", "heads", "queries", "keys"), lengths, strict=True))
    named = {2: ("queries", "keys"), 3: ("batch", "queries", "keys"), 4: tuple(wanted)}
    if len(shape) not in named:
        lift(mask, name)  # raises
    axes = named[len(shape)]
    for size, axis in zip(shape, axes, strict=True):
        if not fits(size, wanted[axis]):
            hint = ""
            if len(shape) == 3:
                hint = _hint_for_rank_3(shape[0], wanted["heads"])
            elif len(shape) == 2 and fits(shape[0], wanted["batch"]) and fits(shape[1], keys):
                hint = " Pass it as `query_mask=`, or add" if name == "attention_mask" else " Add"
                hint = f" A mask of shape (batch, keys) needs an axis of queries.{hint}"
                hint += " the axis: mask[:, None] has shape (batch, 1, keys)."
            counted = "examples" if axis == "batch" else axis
            counted = counted.removesuffix("s") if size == 1 else counted
            raise ValueError(
                f"`{name}` has {size} {counted} where the attention has {wanted[axis]} (1 "
                f"broadcasts). Received: shape {shape}, read as ({', '.join(axes)}).{hint}"
            )


def _hint_for_rank_3(size: int | None, heads: int | None) -> str:
    hint = " A mask of rank 3 is always (batch, queries, keys)"
    if size and heads and size > heads > 1 and size % heads == 0:
        return (
            f"{hint}. Convert a mask of torch.nn.MultiheadAttention, (batch * heads, queries, "
            f"keys), by hm.from_torch(mask, num_heads={heads}): there True hides."
        )
    return (
        f"{hint}; to give each head its own, add the batch axis: mask[None] has shape (1, heads, "
        "queries, keys)."
    )


def sizes(tensor: Tensor, dtype: str = "int32") -> list[Length]:
    """`ops.shape`, but by two nodes of a TensorFlow graph instead of four for each axis.

    (TensorFlow goes through all nodes many times before the first answer.) `dtype` is that of sizes
    that are unknown until the run.
    """
    is_of_keras = keras.backend.backend() != "tensorflow" or keras.backend.is_keras_tensor(tensor)
    if is_of_keras or None not in tuple(tensor.shape):
        return list(ops.shape(tensor))
    import tensorflow as tf

    sizes_at_run = tf.unstack(tf.shape(tensor, out_type=dtype))
    return [
        x if known is None else known for x, known in zip(sizes_at_run, tensor.shape, strict=True)
    ]


def fits(size: int | None, wanted: int | None) -> bool:
    """Whether an axis of that size may broadcast to the wanted one; `None` is not known yet."""
    return size is None or wanted is None or size in (1, wanted)


def and_masks(*masks: Tensor | None) -> Mask | None:
    """The mask that allows where every mask allows; `None` restricts nothing.

    Args:
        *masks: Boolean or integer masks of rank 2 `(T, S)`, 3 `(B, T, S)` or 4, or `None`.

    Returns:
        A boolean mask of rank 4; `None` if no mask is given.

    Raises:
        TypeError: for a float mask.
        ValueError: for another rank, or an integer other than 0 and 1.

    >>> and_masks(None, np.array([[True, True]]), np.array([[1, 0]])).shape == (1, 1, 1, 2)
    True
    """
    lifted = [lift(mask) for mask in masks if mask is not None]
    return functools.reduce(ops.logical_and, lifted) if lifted else None


def or_masks(*masks: Tensor | None) -> Mask | None:
    """The mask that allows where at least one mask allows; `None` allows everything.

    Args:
        *masks: Boolean or integer masks of rank 2 `(T, S)`, 3 `(B, T, S)` or 4, or `None`.

    Returns:
        A boolean mask of rank 4; `None` if one of the masks is `None`.

    Raises:
        TypeError: for a float mask.
        ValueError: without any mask, for another rank, or an integer other than 0 and 1.

    >>> print(keras.ops.convert_to_numpy(or_masks(np.array([[True, False]]), np.array([[0, 0]]))))
    [[[[ True False]]]]
    """
    if not masks:
        raise ValueError("`or_masks` needs at least one mask.")
    if any(mask is None for mask in masks):
        return None
    return functools.reduce(ops.logical_or, map(lift, masks))


def not_mask(mask: Tensor) -> Mask:
    """The mask that allows where `mask` hides.

    Args:
        mask: A boolean or integer mask of rank 2 `(T, S)`, 3 `(B, T, S)` or 4.

    Returns:
        A boolean mask of rank 4.

    Raises:
        TypeError: for a float mask.
        ValueError: for `None`, another rank, or an integer other than 0 and 1.

    >>> print(keras.ops.convert_to_numpy(not_mask(np.array([[True, False]]))))
    [[[[False  True]]]]
    """
    if mask is None:
        raise ValueError("`None` allows everything at any shape; its complement has no shape.")
    return ops.logical_not(lift(mask))


def to_additive(mask: Tensor, dtype: str = "float32") -> Tensor:
    """The additive mask of `mask`, to be added once to the logits, before the softmax.

    Args:
        mask: A boolean or integer mask of any shape.
        dtype: The float dtype of the result, which is that of the logits.

    Returns:
        0 where `mask` allows and -1e9 where it hides (float16: -3e4), in the shape of `mask`.

    Raises:
        TypeError: for a `dtype` that is not a float, or a float mask.
        ValueError: for an integer other than 0 and 1.

    >>> print(keras.ops.convert_to_numpy(to_additive(np.array([[True, False]]))))
    [[ 0.e+00 -1.e+09]]
    """
    dtype = keras.backend.standardize_dtype(dtype)
    if "float" not in dtype:
        raise TypeError(f"An additive mask needs a float dtype. Received: {dtype!r}.")
    mask = as_bool(mask)
    hidden = ops.cast(_HIDDEN_FLOAT16 if dtype == "float16" else HIDDEN, dtype)
    return ops.where(mask, ops.cast(0.0, dtype), hidden)


def from_additive(bias: Tensor) -> Tensor:
    """The booleans of an additive mask: 0 is allowed; -1e4 and below, -inf too, is hidden.

    It needs the floats. A `keras.Input(..., dtype="bool")` casts an additive mask to booleans
    before any layer sees it, which inverts it: declare that input as float32.

    Args:
        bias: A float tensor of any shape.

    Returns:
        A boolean tensor of the same shape, `True` = may attend.

    Raises:
        TypeError: for a mask that does not hold floats.
        ValueError: for a value between, which is a bias, not a mask; where values are known (NumPy
            arrays and eager tensors).

    >>> print(keras.ops.convert_to_numpy(from_additive(np.array([[0.0, -np.inf, -1e9]]))))
    [[ True False False]]
    """
    bias = as_tensor(bias)
    dtype = keras.backend.standardize_dtype(bias.dtype)
    if "float" not in dtype:
        raise TypeError(
            f"An additive mask holds floats, 0 or a large negative number. Received dtype {dtype}; "
            "a mask of booleans or integers needs no conversion."
        )
    values = known_values(bias)
    if values is not None:
        values = values.astype("float64")
        odd = values[~((values == 0) | (values <= _HIDES))]
        if odd.size:
            raise ValueError(
                "An additive mask holds 0 (allowed) or at most -1e4 (hidden). Received the value "
                f"{odd[0]:g}. A mask of 1 / 0 is `mask.astype(bool)`; a bias that grades keys is "
                "no mask."
            )
    return bias > ops.cast(_HIDES, bias.dtype)


def from_torch(mask: Tensor, num_heads: int | None = None) -> Mask:
    """The rank-4 mask of a `torch.nn.MultiheadAttention` `attn_mask`.

    There `True` means hidden. (A `key_padding_mask` `(batch, keys)` is the complement of a Keras
    padding mask: pass `~key_padding_mask` as `value_mask`. `scaled_dot_product_attention` has our
    polarity: no conversion.)

    Args:
        mask: `(queries, keys)`, or for each head `(batch * heads, queries, keys)`. A float mask is
            read as additive.
        num_heads: Number of heads; needed for a mask of rank 3.

    Returns:
        A boolean mask `(1, 1, queries, keys)` or `(batch, heads, queries, keys)`, `True` = may
        attend.

    Raises:
        ValueError: for another shape, a mask of rank 3 without `num_heads`, a `num_heads` that is
            not a positive whole number or does not divide its first axis, a float mask that is not
            additive, or an integer other than 0 and 1.

    >>> hides = np.zeros((6, 4, 5), "bool")  # 2 examples of 3 heads
    >>> from_torch(hides, num_heads=3).shape == (2, 3, 4, 5)
    True
    """
    if num_heads is not None and (type(num_heads) is not int or num_heads < 1):
        raise ValueError(f"`num_heads` must be a positive whole number. Received: {num_heads!r}.")
    mask = as_tensor(mask)
    is_float = "float" in keras.backend.standardize_dtype(mask.dtype)
    if is_float:
        allowed = from_additive(mask)
    else:
        as_bool(mask)  # refuses what is wrong with values at hand; of others only 0 opens
        allowed = ops.equal(ops.cast(mask, "int32"), 0)
    shape = tuple(allowed.shape)
    if len(shape) == 2:
        return allowed[None, None]
    problem = ""
    if len(shape) != 3:
        problem = "that is neither"
    elif num_heads is None:
        problem = "pass `num_heads`"
    elif shape[0] is not None and shape[0] % num_heads:
        problem = f"{shape[0]} is no multiple of num_heads={num_heads}"
    if problem:
        raise ValueError(
            "A torch `attn_mask` has shape (queries, keys) or (batch * heads, queries, keys). "
            f"Received: shape {shape}: {problem}."
        )
    sizes = ops.shape(allowed)
    return ops.reshape(allowed, (-1, num_heads, sizes[1], sizes[2]))


def zero_dead_rows(context: Tensor, mask: Mask) -> Tensor:
    """`context` (B, T, H, D), with 0 where a query has no key in `mask` (boolean, rank 4)."""
    alive = ops.any(mask, axis=-1)  # (B or 1, H or 1, T or 1)
    # As floats: oneDNN has no transpose of booleans, and logs so.
    ones = ops.where(alive, ops.cast(1, "float32"), ops.cast(0, "float32"))
    alive = ops.transpose(ones, (0, 2, 1))[..., None] > 0
    return ops.where(alive, context, ops.zeros_like(context))


def known_values(tensor: Tensor) -> np.ndarray | None:
    """The tensor's values if it has any now; `None` for symbolic tensors and inside a trace."""
    if keras.backend.is_keras_tensor(tensor) or _keras.in_symbolic_scope():
        return None  # (PyTorch's stand-ins hold ones)
    try:
        return ops.convert_to_numpy(tensor)
    except Exception:  # each backend's tracer has an error of its own
        return None
