"""Short sequences on TensorFlow: head by head.

Where one tile would hold a whole sequence there is little to skip, and what costs is memory: the
scores of a batch are written and read again by each operation on them. Those of some rows, one head
of one example each, stay in the processor's cache. As in the loop over tiles, the backward pass
computes them again instead of keeping them. A step takes well under a millisecond, so it has few
operations beside its products: what can be is made once, before the loop.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_headmask import graph_sharing
from keras_headmask.evaluation import allowed_tile
from keras_headmask.per_head import head_groups
from keras_headmask.position_leaves import Full
from keras_headmask.specs import MaskSpec
from keras_headmask.tiled_python import Part, in_order, of_heads
from keras_headmask.tiled_tensorflow import alive_or_0, computed_again, masked_scores, widened

_SCORES = 2**20  # of one step: 4 MB


@tf.autograph.experimental.do_not_convert
def attend(part: Part, query: Any, key: Any, value: Any) -> Any:
    """The context `(B, T, H, Dv)`. `part` is of all heads, and its rule may differ between them."""
    return graph_sharing.call(_attend, part, query, key, value)


def _attend(part: Part, query: Any, key: Any, value: Any) -> Any:
    part = part._replace(bound=widened(part.bound))

    def forward(*operands: Any) -> Any:
        return _over_heads(part, _context, 1, *operands)[0]

    def backward(*given: Any) -> tuple:
        d_query, d_key, d_value = _over_heads(part, _gradients, 3, *given)
        return d_query * part.scale, d_key, d_value

    return computed_again(forward, backward, query, key, value)


def _context(allowed: Any, query: Any, key: Any, value: Any) -> tuple:
    """Of some rows `(n, T, Dv)`."""
    scores, alive = _scores(allowed, query, key)
    return (alive_or_0(alive, tf.matmul(tf.nn.softmax(scores), value)),)


def _gradients(
    allowed: Any, query: Any, key: Any, value: Any, upstream: Any, context: Any
) -> tuple:
    """Those of the queries (times the scale), keys and values of some rows."""
    scores, alive = _scores(allowed, query, key)
    probabilities = alive_or_0(alive, tf.nn.softmax(scores))
    delta = tf.reduce_sum(upstream * context, axis=-1, keepdims=True)
    d_scores = probabilities * (tf.matmul(upstream, value, transpose_b=True) - delta)
    return (
        tf.matmul(d_scores, key),
        tf.matmul(d_scores, query, transpose_a=True),
        tf.matmul(probabilities, upstream, transpose_a=True),
    )


def _scores(allowed: Any, query: Any, key: Any) -> tuple[Any, Any]:
    """The scores, the lowest where hidden, and which queries see something (`None`: all do)."""
    scores = tf.matmul(query, key, transpose_b=True)
    return (scores, None) if allowed is None else masked_scores(scores, allowed)


class _Masks:
    """The masks of the rows of some heads with one rule, head after head."""

    def __init__(self, allowed: Any, heads: int, batch: Any):
        """`allowed`: `(B or 1, h or 1, T or 1, S or 1)`."""
        of_examples, of_heads, queries, keys = tf.unstack(tf.shape(allowed))
        self._different = tf.reshape(tf.transpose(allowed, (1, 0, 2, 3)), [-1, queries, keys])
        head = tf.where(of_heads > 1, tf.range(heads), 0)
        example = tf.where(of_examples > 1, tf.range(batch), 0)
        self._of_row = tf.reshape(head[:, None] * of_examples + example, [-1])
        self.hide_nothing = tf.reduce_all(allowed)

    def of(self, cut: Callable) -> Any:
        """Those of the rows that `cut` gives: `(n, T or 1, S or 1)`."""
        return tf.gather(self._different, cut(self._of_row))


def _over_heads(part: Part, step: Callable, results: int, query: Any, *others: Any) -> tuple:
    """The results of `step`, `(n, L, size)` each, for all together: `(B, L, H, size)`."""
    batch, queries, heads, _ = tf.unstack(tf.shape(query))
    scores_of_a_row = tf.maximum(queries * tf.shape(others[0])[1], 1)
    rows = tf.clip_by_value(_SCORES // scores_of_a_row, 1, tf.maximum(heads * batch, 1))
    operands = [tf.transpose(tensor, (2, 0, 1, 3)) for tensor in (query * part.scale, *others)]
    groups = head_groups(part.rule, len(part.heads))
    # (One step at least, of no rows, so that an empty batch has results of its shape.)
    steps = [tf.maximum(-(-len(of_rule) * batch // rows), 1) for _, of_rule in groups]
    arrays = tuple(
        tf.TensorArray(query.dtype, sum(steps), infer_shape=False, element_shape=[None] * 3)
        for _ in range(results)
    )

    def of_rule_alone(
        arrays: tuple, rule: MaskSpec, of_rule: tuple[int, ...], done: Any, count: Any
    ) -> tuple:
        """Write the results of the heads with one rule, after the `done` that are there."""
        own = [_as_rows(of_heads(tensor, of_rule, axis=0)) for tensor in operands]
        masks = None
        if rule != Full():
            masks = _Masks(allowed_tile(rule, part.bound, of_rule), len(of_rule), batch)

        def body(i: Any, arrays: tuple) -> tuple:
            first = i * rows
            size = tf.minimum(rows, len(of_rule) * batch - first)

            def cut(tensor: Any) -> Any:  # along the first axis, which copies nothing
                others = [0] * (tensor.shape.rank - 1)
                return tf.slice(tensor, [first, *others], [size, *(-1 for _ in others)])

            rows_of = [cut(tensor) for tensor in own]
            if masks is None:
                made = step(None, *rows_of)
            else:  # a batch without padding is not masked for it
                made = tf.cond(
                    masks.hide_nothing,
                    lambda: step(None, *rows_of),
                    lambda: step(masks.of(cut), *rows_of),
                )
            written = (array.write(done + i, x) for array, x in zip(arrays, made, strict=True))
            return i + 1, tuple(written)

        return tf.while_loop(lambda i, _: i < count, body, (tf.constant(0), arrays))[1]

    done = tf.constant(0)
    for (rule, of_rule), count in zip(groups, steps, strict=True):
        arrays = of_rule_alone(arrays, rule, of_rule, done, count)
        done += count
    order = [head for _, of_rule in groups for head in of_rule]
    return tuple(_positions_first(array.concat(), order) for array in arrays)


def _as_rows(tensor: Any) -> Any:
    """`(h, B, L, size)` to `(h * B, L, size)`."""
    return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))


def _positions_first(tensor: Any, order: list[int]) -> Any:
    """`(H * B, L, size)`, the heads in some order, to `(B, L, H, size)`."""
    _, length, size = tf.unstack(tf.shape(tensor))
    tensor = tf.reshape(tensor, [len(order), -1, length, size])
    return tf.transpose(in_order(tensor, order, axis=0), (1, 2, 0, 3))
