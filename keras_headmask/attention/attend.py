"""Dot-product attention under a mask per head: the dense definition.

Booleans are merged first; -1e9 is added once, in at least float32, before the softmax; a hidden key
has probability exactly 0, and a row with no allowed key gives exactly 0.
"""

import contextlib
import contextvars
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import finite
from keras_headmask.attention.tiling import can_tile, is_worth_it, tiled_attention
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.evaluation import Lengths
from keras_headmask.rules.inputs import KeyFlag, MaskInput, QueryFlag

_CALLED = "hm.dot_product_attention(query, key, value, ...)"


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    mask_spec: MaskSpec | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    scale: float | None = None,
    query_offset: Any = None,
    dropout: float = 0.0,
    return_scores: bool = False,
    bias: Any = None,
    seed: Any = None,
    tiled: bool | None = None,
) -> Any:
    """`softmax(query @ key^T * scale + bias)` over the allowed keys, times `value`.

    Args:
        query: `(B, T, H, D)`.
        key: `(B, S, H, D)`.
        value: `(B, S, H, Dv)`.
        mask: Boolean or integer, True = may attend: `(T, S)`, `(B, T, S)` or
            `(B or 1, H or 1, T, S)`.
        mask_spec: A `MaskSpec`; what it allows is ANDed with `mask`.
        mask_inputs: The tensors that `mask_spec` reads, by name.
        scale: Factor of the scores; `1 / sqrt(D)` by default.
        query_offset: Query i stands at position i + `query_offset` (for `mask_spec`). Left out it
            is 0, with a warning where a rule on positions meets fewer queries than keys: a step
            with a cache of keys needs it.
        dropout: Share of the probabilities set to 0, the rest scaled up; applied whenever it is
            above 0, so pass 0 at inference.
        return_scores: Whether to return the probabilities, before dropout, too.
        bias: Float tensor added to the scores, broadcastable to `(B, H, T, S)`. It grades the
            allowed keys; no bias can open a hidden one.
        seed: For `dropout`: an int or a `keras.random.SeedGenerator`.
        tiled: Whether to skip masked-out work, tile by tile (`True`), or to compute all scores
            (`False`). By default the faster of the two, by size and rule. Returned scores and a
            bias need all scores, and so do symbolic Keras tensors; where nothing restricts there is
            nothing to skip. The two ways draw different dropouts from one seed.

    Returns:
        The context `(B, T, H, Dv)` in the dtype of `value`; with `return_scores`, a pair with the
        probabilities `(B, H, T, S)`.

    Raises:
        TypeError: for a float mask or mask input.
        ValueError: for shapes that do not fit, or mask inputs that the spec does not read or lacks.

    >>> import numpy as np
    >>> from keras_headmask import Window
    >>> x = np.ones((1, 3, 2, 4), "float32")
    >>> _, scores = dot_product_attention(x, x, x, mask_spec=Window(after=0), return_scores=True)
    >>> print(ops.convert_to_numpy(scores[0, 0]).round(2))
    [[1.   0.   0.  ]
     [0.5  0.5  0.  ]
     [0.33 0.33 0.33]]
    """
    query, key, value = (masks.as_tensor(x) for x in (query, key, value))
    _check_operands(query, key, value)
    batch, queries, heads, size = query.shape
    lengths = evaluation.Lengths(batch, heads, queries, key.shape[1])
    if mask is not None:
        masks.check_shape(masks.as_bool(mask), "mask", *lengths)
    if mask_spec is not None:
        check_spec(mask_spec, "mask_spec", _CALLED.replace("...", "mask_spec=SPEC"))
    query_offset = evaluation.given_offset(query_offset, mask_spec, queries, lengths.keys)
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must be at least 0 and below 1. Received: {dropout}.")
    if tiled is not None and not isinstance(tiled, bool):
        raise TypeError(f"`tiled` must be True, False or None. Received: {tiled!r}.")
    evaluation.check_inputs(mask_spec, mask_inputs, lengths, query_offset, _CALLED)
    scale = 1 / math.sqrt(size) if scale is None else scale
    rule, inputs = all_that_restricts(mask_spec, mask_inputs, mask)
    bound = None
    if rule is not None:
        length_q, length_k = ops.shape(query)[1], ops.shape(key)[1]
        bound = evaluation.bind(rule, inputs, length_q, length_k, query_offset)
        # A symbolic Keras tensor cannot enter a loop of the backend's.
        symbolic = keras.backend.is_keras_tensor(query)
        needs_scores = return_scores or bias is not None or symbolic
        if way_is_tiled(tiled, needs_scores, rule, lengths, query_offset):
            operands = query, key, value
            return tiled_attention(*operands, rule, bound, scale, query_offset, dropout, seed)
    drop = None
    if dropout:

        def drop(probabilities: Any) -> Any:
            return keras.random.dropout(probabilities, dropout, seed=seed)

    merged = None if rule is None else evaluation.mask_of_all_heads(rule, bound, heads)
    context, scores = dense_attention(query, key, value, merged, scale, bias, drop)
    return (context, scores) if return_scores else context


def all_that_restricts(
    spec: MaskSpec | None,
    mask_inputs: Mapping[str, Any] | None = None,
    attention_mask: Any = None,
    query_mask: Any = None,
    value_mask: Any = None,
    key_mask: Any = None,
    window: MaskSpec | None = None,
) -> tuple[MaskSpec | None, dict[str, Any]]:
    """One spec for everything that restricts, and its mask inputs; `None` where nothing does.

    The names of what comes from outside the rule are in brackets, as no rule of JSON would have.
    What comes from outside is ANDed after the rule, so that no `~` or `|` inside reopens it.
    """
    parts = [] if spec is None else [spec]
    inputs = dict(mask_inputs or {})
    if attention_mask is not None:
        parts.append(MaskInput("(attention_mask)"))
        inputs["(attention_mask)"] = attention_mask
    if query_mask is not None:
        parts.append(QueryFlag("(query_mask)"))
        inputs["(query_mask)"] = (query_mask, None)
    for name, mask in (("(value_mask)", value_mask), ("(key_mask)", key_mask)):
        if mask is not None:
            parts.append(KeyFlag(name))
            inputs[name] = (None, mask)
    if window is not None:
        parts.append(window)
    return (functools.reduce(operator.and_, parts) if parts else None), inputs


_in_dense_scope: contextvars.ContextVar[bool] = contextvars.ContextVar("dense", default=False)


@contextlib.contextmanager
def dense_scope() -> Iterator[None]:
    """Attention that is run or traced inside computes all scores, whatever its `tiled` says.

    The tiled way is a loop whose sizes the data decide, which ONNX Runtime, OpenVINO and LiteRT do
    not run: a model is exported for them in this scope, by `model.export("model.onnx",
    format="onnx")`. What was traced before stays as it is.

    >>> import numpy as np
    >>> from keras_headmask import Window
    >>> x = np.ones((1, 512, 2, 4), "float32")
    >>> with dense_scope():
    ...     context = dot_product_attention(x, x, x, mask_spec=Window(2, 2))
    >>> context.shape == (1, 512, 2, 4)
    True
    """
    token = _in_dense_scope.set(True)
    try:
        yield
    finally:
        _in_dense_scope.reset(token)


def way_is_tiled(
    tiled: bool | None, needs_scores: bool, rule: MaskSpec, lengths: Lengths, query_offset: Any
) -> bool:
    """Which way to go; an error where `tiled=True` asks for what cannot be."""
    sizes = lengths.queries, lengths.keys
    if 0 in sizes or _in_dense_scope.get():
        return False
    possible = not needs_scores and can_tile(*sizes, query_offset)
    if tiled and not possible:
        raise ValueError(
            "`tiled=True` cannot be: "
            + (
                "returned scores, a bias and symbolic Keras tensors need all scores."
                if needs_scores
                else "off TensorFlow's graphs the tiled way needs known lengths and an int offset. "
                f"Received: queries={sizes[0]}, keys={sizes[1]}, query_offset={query_offset!r}."
            )
        )
    if tiled is not None:
        return tiled
    return possible and is_worth_it(rule, lengths.heads, *sizes, query_offset)


def dense_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scale: float,
    bias: Any = None,
    drop: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """The definition, and the oracle of every faster way. `mask` is boolean of rank 4, or `None`.

    Adding -1e9 hides a key as long as the allowed scores are well above -1e9, as all scores are
    that float32 resolves to better than 64; a bias may lie anywhere.

    Returns the context `(B, T, H, Dv)` and the probabilities `(B, H, T, S)` before `drop`, both in
    the dtype of `value`.
    """
    # (`result_type` would make float64 float32 on JAX and torch.)
    is_double = keras.backend.standardize_dtype(query.dtype) == "float64"
    dtype = "float64" if is_double else "float32"
    query, key = ops.cast(query, dtype) * scale, ops.cast(key, dtype)
    given = query, key, value
    if mask is not None:
        all_finite = finite.are_finite(*given, may_branch=not _in_dense_scope.get())
        query, key, value = finite.unless(all_finite, finite.zeroed, *given)
    scores = ops.einsum("bthd,bshd->bhts", query, key)
    if bias is not None:
        scores = scores + ops.cast(bias, dtype)
    if mask is not None:
        if bias is not None:
            scores = scores - _largest_allowed(scores, mask)
        (scores,) = finite.unless(all_finite, lambda x: [x + finite.marks(*given)], scores)
        # A hidden score is taken as 0 first: were it infinite, -1e9 would not hide it.
        scores = ops.where(mask, scores, ops.zeros_like(scores)) + masks.to_additive(mask, dtype)
    probabilities = ops.softmax(scores, axis=-1)
    if mask is not None:
        probabilities = ops.where(mask, probabilities, ops.zeros_like(probabilities))  # dead rows
    probabilities = ops.cast(probabilities, value.dtype)
    kept = probabilities if drop is None else drop(probabilities)
    return ops.einsum("bhts,bshd->bthd", kept, value), probabilities


def _largest_allowed(scores: Any, mask: Any) -> Any:
    """Each row's largest allowed score, finite: taken off, so that -1e9 hides under any bias."""
    lowest = ops.cast(-3e38, scores.dtype)
    largest = ops.max(ops.where(mask, scores, lowest), axis=-1, keepdims=True)
    return ops.stop_gradient(ops.maximum(largest, lowest))


def _check_operands(query: Any, key: Any, value: Any) -> None:
    operands = {"query": query, "key": key, "value": value}
    shapes = {name: x.shape for name, x in operands.items()}
    told = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    if any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(
            "`query`, `key` and `value` must have shape (batch, length, heads, size). "
            f"Received: {told}."
        )
    dtypes = {name: keras.backend.standardize_dtype(x.dtype) for name, x in operands.items()}
    if any("float" not in dtype for dtype in dtypes.values()):
        raise TypeError(f"`query`, `key` and `value` must be floats. Received: {dtypes}.")
    b, h = 0, 2
    fits = (
        _agree(query.shape[b], key.shape[b], value.shape[b])
        and _agree(query.shape[h], key.shape[h], value.shape[h])
        and _agree(key.shape[1], value.shape[1])
        and _agree(query.shape[3], key.shape[3])
    )
    if not fits:
        raise ValueError(
            "`query` (B, T, H, D), `key` (B, S, H, D) and `value` (B, S, H, Dv) do not fit. "
            f"Received: {told}. (Fewer key heads than query heads: repeat the keys and values.)"
        )


def _agree(*sizes: int | None) -> bool:
    return len({size for size in sizes if size is not None}) <= 1
