"""The tiled way: heads with equal rules together, tiles of queries, and only the keys they may see.

Nothing of size queries x keys is made. `can_tile` says whether this backend can do it for what is
known now; `tiled_attention` equals the dense definition.
"""

from typing import Any

import keras
from keras import ops

from keras_headmask._keras import in_xla
from keras_headmask.attention import tiled_dropout, tiled_python
from keras_headmask.attention.tiled_python import Part, in_order, of_heads
from keras_headmask.rules.base import And, MaskSpec, Or
from keras_headmask.rules.evaluation import Bound
from keras_headmask.rules.inputs import SameSegment, SameSentence
from keras_headmask.rules.per_head import head_groups
from keras_headmask.rules.positions import Chunk, Window

# Measured on a CPU: small tiles follow a narrow rule closely, large ones multiply faster.
_LOCAL_TILE, _WIDE_TILE = 128, 256
_MOST_UNROLLED = 32  # tiles; each adds nodes to the graph, and time to trace it
_SMALLEST = 2**16  # queries x keys; below it one dense product is faster than any loop
_SHORT = 2**16  # queries x keys; to it, all scores of a head stay in the cache
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
    if keras.backend.backend() == "tensorflow" and not in_xla():
        return True
    # (JAX' unknown sizes are no `None`, and cannot be compared.)
    return all(isinstance(number, int) for number in (queries, keys, query_offset))


def is_worth_it(
    spec: MaskSpec, num_heads: int, queries: int | None, keys: int | None, query_offset: Any
) -> bool:
    """Whether the tiled way is likely the faster one, by what was measured on a CPU."""
    if None in (queries, keys):
        return True
    if queries * keys < _SMALLEST:
        return False
    if keras.backend.backend() == "tensorflow" and not in_xla():
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
    dropout: float = 0.0,
    seed: Any = None,
) -> Any:
    """The context `(B, T, H, Dv)` under `spec`, for `query` `(B, T, H, D)`, `key` and `value`."""
    heads_of_all = query.shape[2]
    is_double = keras.backend.standardize_dtype(query.dtype) == "float64"
    operands = [ops.cast(x, "float64" if is_double else "float32") for x in (query, key, value)]
    drop = None
    if dropout:
        drop = tiled_dropout.dropout(dropout, seed, ops.shape(query)[0], heads_of_all, bound)
    of_all = Part(spec, tuple(range(heads_of_all)), bound, 0, scale, dropout=drop)
    return ops.cast(_by_length(of_all, operands, query_offset), value.dtype)


def _by_length(of_all: Part, operands: list[Any], query_offset: Any) -> Any:
    """On TensorFlow, short sequences go head by head, longer ones by tiles."""

    def tiles() -> Any:
        return _group_by_group(of_all, operands, query_offset)

    if keras.backend.backend() != "tensorflow" or in_xla() or of_all.dropout is not None:
        return tiles()
    from keras_headmask.attention import head_by_head

    queries, keys = operands[0].shape[1], operands[1].shape[1]
    if None not in (queries, keys):
        is_short = queries * keys <= _SHORT
        return head_by_head.attend(of_all, *operands) if is_short else tiles()
    is_short = ops.shape(operands[0])[1] * ops.shape(operands[1])[1] <= _SHORT
    return ops.cond(is_short, lambda: head_by_head.attend(of_all, *operands), tiles)


def _group_by_group(of_all: Part, operands: list[Any], query_offset: Any) -> Any:
    contexts, order = [], []
    for rule, heads in head_groups(of_all.rule, len(of_all.heads)):
        local = is_local(rule)
        tile = _LOCAL_TILE if local else _WIDE_TILE
        drop = of_all.dropout and of_all.dropout.for_heads(heads)
        part = Part(rule, heads, of_all.bound, tile, of_all.scale, local, drop)
        contexts.append(
            _attend(part, *(of_heads(x, heads, axis=2) for x in operands), query_offset)
        )
        order.extend(heads)
    context = contexts[0] if len(contexts) == 1 else ops.concatenate(contexts, axis=2)
    return in_order(context, order, axis=2)


def _attend(part: Part, query: Any, key: Any, value: Any, offset: Any) -> Any:
    queries, keys = query.shape[1], key.shape[1]
    known = None not in (queries, keys) and isinstance(offset, int)
    # TensorFlow's own loop can do what depends on data and on lengths not known yet, in a graph of
    # one size. Unrolled in Python, the same tiles train in less time if they are few.
    wants_loop = not known or part.rule.inputs or queries > _MOST_UNROLLED * part.tile
    if wants_loop and keras.backend.backend() == "tensorflow" and not in_xla():
        from keras_headmask.attention import tiled_tensorflow

        return tiled_tensorflow.attend(part, query, key, value)
    plan = tiled_python.plan(part.rule, queries, keys, part.tile, offset)
    return tiled_python.attend(part, plan, query, key, value)
