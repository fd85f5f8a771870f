"""Short sequences on TensorFlow: head by head.

Where one tile would hold a whole sequence there is little to skip, and what costs is memory: the
scores of a batch are written and read again by each operation on them. Those of one head stay in
the processor's cache. (Of a large batch a step takes some examples, of a small one some heads.) As
in the loop over tiles, the backward pass computes them again instead of keeping them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask import graph_sharing
from keras_headmask.evaluation import allowed_tile
from keras_headmask.per_head import head_groups
from keras_headmask.position_leaves import Full
from keras_headmask.specs import MaskSpec
from keras_headmask.tiled_python import Part, in_order, of_heads
from keras_headmask.tiled_tensorflow import alive_or_0, computed_again, masked_scores, widened

_SCORES = 2**19  # of one step: 2 MB


@tf.autograph.experimental.do_not_convert
def attend(part: Part, query: Any, key: Any, value: Any) -> Any:
    """The context `(B, T, H, Dv)`. `part` is of all heads, and its rule may differ between them."""
    return graph_sharing.call(_attend, part, query, key, value)


def _attend(part: Part, query: Any, key: Any, value: Any) -> Any:
    part = part._replace(bound=widened(part.bound))

    def forward(*operands: Any) -> Any:
        return _over_heads(part, _context, 1, *operands)[0]

    def backward(*given: Any) -> tuple:
        return _over_heads(part, _gradients, 3, *given)

    return computed_again(forward, backward, query, key, value)


def _context(scale: float, allowed: Any, query: Any, key: Any, value: Any) -> tuple:
    """Of some heads and examples `(h, n, T, Dv)`."""
    scores, alive = _scores(scale, allowed, query, key)
    return (alive_or_0(alive, tf.matmul(tf.nn.softmax(scores), value)),)


def _gradients(
    scale: float, allowed: Any, query: Any, key: Any, value: Any, upstream: Any, context: Any
) -> tuple:
    """Those of the queries, keys and values of some heads and examples."""
    scores, alive = _scores(scale, allowed, query, key)
    probabilities = alive_or_0(alive, tf.nn.softmax(scores))
    delta = tf.reduce_sum(upstream * context, axis=-1, keepdims=True)
    d_scores = probabilities * (tf.matmul(upstream, value, transpose_b=True) - delta) * scale
    return (
        tf.matmul(d_scores, key),
        tf.matmul(d_scores, query, transpose_a=True),
        tf.matmul(probabilities, upstream, transpose_a=True),
    )


def _scores(scale: float, allowed: Any, query: Any, key: Any) -> tuple[Any, Any]:
    """The scores, the lowest where hidden, and which rows see something."""

    def plain() -> Any:
        return tf.matmul(query * scale, key, transpose_b=True)

    if allowed is None:
        return plain(), None
    # A batch without padding is not masked for it. (The product stands in each branch, so that a
    # branch may write over it.)
    return tf.cond(
        tf.reduce_all(allowed),
        lambda: (plain(), tf.ones([1, 1, 1, 1], tf.bool)),
        lambda: masked_scores(plain(), allowed),
    )


class _Step(NamedTuple):
    """Some heads with one rule and all examples, or one head and some examples."""

    first_head: Any
    heads: Any
    first_example: Any
    examples: Any
    batch: Any

    def of(self, tensor: Any) -> Any:
        """`(h, B, ...)`, cut: along one axis, the first, which copies nothing."""
        size = tf.shape(tensor)[2:]
        flat = tf.reshape(tensor, tf.concat([[-1], size], 0))
        start = self.first_head * self.batch + self.first_example
        cut = flat[start : start + self.heads * self.examples]
        return tf.reshape(cut, tf.concat([[self.heads, self.examples], size], 0))

    def of_mask(self, allowed: Any) -> Any:
        """`(h or 1, B or 1, T or 1, S or 1)`, cut."""
        heads, batch = tf.unstack(tf.shape(allowed)[:2])
        head = tf.where(heads > 1, self.first_head, 0)
        example = tf.where(batch > 1, self.first_example, 0)
        return allowed[head : head + self.heads, example : example + self.examples]


def _over_heads(part: Part, step: Callable, results: int, query: Any, *others: Any) -> tuple:
    """The results of `step`, `(h, n, L, size)` each, for all together: `(B, L, H, size)`."""
    operands = [tf.transpose(tensor, (2, 0, 1, 3)) for tensor in (query, *others)]
    heads, batch, length, _ = tf.unstack(tf.shape(operands[0]))
    scores_of_one = length * tf.shape(operands[1])[2]
    examples = tf.clip_by_value(_SCORES // scores_of_one, 1, batch)
    together = tf.clip_by_value(_SCORES // (scores_of_one * batch), 1, heads)
    chunks = -(-batch // examples)
    groups = head_groups(part.rule, len(part.heads))
    steps = [-(-len(of_rule) // together) * chunks for _, of_rule in groups]
    arrays = tuple(
        tf.TensorArray(query.dtype, sum(steps), infer_shape=False, element_shape=[None] * 3)
        for _ in range(results)
    )

    def of_rule_alone(
        arrays: tuple, rule: MaskSpec, of_rule: tuple[int, ...], done: Any, count: Any
    ) -> tuple:
        """Write the results of the heads with one rule, after the `done` that are there."""
        own = [of_heads(tensor, of_rule, axis=0) for tensor in operands]
        allowed = None
        if rule != Full():
            allowed = tf.transpose(allowed_tile(rule, part.bound, of_rule), (1, 0, 2, 3))

        def body(i: Any, arrays: tuple) -> tuple:
            head, example = (i // chunks) * together, (i % chunks) * examples
            sizes = tf.minimum(together, len(of_rule) - head), tf.minimum(examples, batch - example)
            this = _Step(head, sizes[0], example, sizes[1], batch)
            mask = None if allowed is None else this.of_mask(allowed)
            written = []
            for array, x in zip(arrays, step(part.scale, mask, *map(this.of, own)), strict=True):
                x = tf.reshape(x, tf.concat([[-1], tf.shape(x)[2:]], 0))
                written.append(array.write(done + i, x))
            return i + 1, tuple(written)

        return tf.while_loop(lambda i, _: i < count, body, (tf.constant(0), arrays))[1]

    done = tf.constant(0)
    for (rule, of_rule), count in zip(groups, steps, strict=True):
        arrays = of_rule_alone(arrays, rule, of_rule, done, count)
        done += count
    order = [head for _, of_rule in groups for head in of_rule]
    return tuple(_positions_first(array.concat(), order) for array in arrays)


def _positions_first(tensor: Any, order: list[int]) -> Any:
    """`(H * B, L, size)`, the heads in some order, to `(B, L, H, size)`."""
    _, length, size = tf.unstack(tf.shape(tensor))
    tensor = tf.reshape(tensor, [len(order), -1, length, size])
    return tf.transpose(in_order(tensor, order, axis=0), (1, 2, 0, 3))
