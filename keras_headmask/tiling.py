"""The tiled way: heads with equal rules together, tiles of queries, and only the keys they may see.

Nothing of size queries x keys is made. `can_tile` says whether this backend can do it for what is
known now; `tiled_attention` equals the dense definition.
"""

from typing import Any

import keras
from keras import ops

from keras_headmask import tiled_python
from keras_headmask.evaluation import Bound
from keras_headmask.leaves import Chunk, SameSegment, SameSentence, Window
from keras_headmask.per_head import head_groups
from keras_headmask.specs import And, MaskSpec, Or

# Measured on a CPU: small tiles follow a narrow rule closely, large ones multiply faster.
_LOCAL_TILE, _WIDE_TILE = 128, 256
_MOST_UNROLLED = 64  # tiles; each adds nodes to the graph, and time to trace it
_SMALLEST = 2**16  # queries x keys; below it one dense product is faster than any loop
_LARGEST_SHARE = 0.5  # of the score matrix, where the loop is Python's


def is_local(rule: MaskSpec) -> bool:
    """Whether a query sees few keys however long the sequence is (flagged ones aside)."""
    if isinstance(rule, And):
        return any(is_local(part) for part in rule.specs)
    if isinstance(rule, Or):
        return any(is_local(part) for part in rule.specs)
    bounded = isinstance(rule, Window) and None not in (rule.before, rule.after)
    return bounded or isinstance(rule, (Chunk, SameSegment, SameSentence))


def can_tile(queries: int | None, keys: int | None, query_offset: Any) -> bool:
    """Whether the tiled way can be gone: on TensorFlow always, elsewhere if the sizes are known."""
    if keras.backend.backend() == "tensorflow" and not _in_xla():
        return True
    return None not in (queries, keys) and isinstance(query_offset, int)


def is_worth_it(
    spec: MaskSpec, num_heads: int, queries: int | None, keys: int | None, query_offset: Any
) -> bool:
    """Whether the tiled way is likely the faster one, by what was measured on a CPU."""
    if None in (queries, keys):
        return True
    if queries * keys < _SMALLEST:
        return False
    if keras.backend.backend() == "tensorflow" and not _in_xla():
        return True
    # Elsewhere a tile costs more to start, and only what positions tell is skipped.
    shares = []
    for rule, heads in head_groups(spec, num_heads):
        tile = _LOCAL_TILE if is_local(rule) else _WIDE_TILE
        plan = tiled_python.plan(rule, queries, keys, tile, query_offset)
        shares.extend([plan.share(keys)] * len(heads))
    return sum(shares) / len(shares) <= _LARGEST_SHARE


def tiled_attention(
    query: Any,
    key: Any,
    value: Any,
    spec: MaskSpec,
    bound: Bound,
    scale: float,
    query_offset: Any = 0,
) -> Any:
    """The context `(B, T, H, Dv)` under `spec`, for `query` `(B, T, H, D)`, `key` and `value`."""
    heads_of_all = query.shape[2]
    is_double = keras.backend.standardize_dtype(query.dtype) == "float64"
    dtype = "float64" if is_double else "float32"
    groups = head_groups(spec, heads_of_all)
    contexts, order = [], []
    for rule, heads in groups:
        q, k, v = (_heads_first(x, heads, dtype) for x in (query, key, value))
        q = q * ops.cast(scale, dtype)
        contexts.append(_attend(rule, heads, bound, q, k, v, query_offset))
        order.extend(heads)
    context = contexts[0] if len(contexts) == 1 else ops.concatenate(contexts, axis=1)
    if order != sorted(order):
        context = ops.take(context, [order.index(head) for head in range(heads_of_all)], axis=1)
    return ops.cast(ops.transpose(context, (0, 2, 1, 3)), value.dtype)


def _attend(
    rule: MaskSpec, heads: tuple[int, ...], bound: Bound, q: Any, k: Any, v: Any, offset: Any
) -> Any:
    tile = _LOCAL_TILE if is_local(rule) else _WIDE_TILE
    if (
        keras.backend.backend() == "tensorflow"
        and not _in_xla()
        and _wants_loop(rule, q, k, offset)
    ):
        from keras_headmask import tiled_tensorflow

        return tiled_tensorflow.attend(tiled_tensorflow.Part(rule, heads, bound, tile), q, k, v)
    plan = tiled_python.plan(rule, q.shape[2], k.shape[2], tile, offset)
    return tiled_python.attend(rule, heads, bound, plan, q, k, v)


def _wants_loop(rule: MaskSpec, q: Any, k: Any, offset: Any) -> bool:
    """Whether TensorFlow's own loop is needed, or the better way.

    It can do what depends on data and on lengths not known yet, in a graph of one size. Unrolled in
    Python, the same tiles train in half the time, as long as they are few.
    """
    if None in (q.shape[2], k.shape[2]) or not isinstance(offset, int):
        return True
    return bool(rule.inputs) or q.shape[2] > _MOST_UNROLLED * _LOCAL_TILE


def _heads_first(tensor: Any, heads: tuple[int, ...], dtype: str) -> Any:
    """`(B, T, H, D)` to `(B, these heads, T, D)`."""
    first, last = heads[0], heads[-1]
    if heads == tuple(range(first, last + 1)):
        if len(heads) != tensor.shape[2]:
            tensor = tensor[:, :, first : last + 1]
    else:
        tensor = ops.take(tensor, list(heads), axis=2)
    return ops.cast(ops.transpose(tensor, (0, 2, 1, 3)), dtype)


def _in_xla() -> bool:
    """Whether XLA compiles what is being traced: it allows no slice of a length not known."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util  # no public name for this question

    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
