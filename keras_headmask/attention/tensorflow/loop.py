"""The loop over tiles on TensorFlow: each tile of queries meets only the keys that it may see.

It is a `tf.while_loop`, so lengths may be unknown, and skipping may depend on data: on the ids of
packed documents, on padding, on flags. One step computes as many tiles, of one example or several,
as fit into the budget of logits. The backward pass computes the tiles again instead of keeping
them, so peak memory grows with length x tile.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_headmask import _keras
from keras_headmask.attention.request import Part, by_group
from keras_headmask.attention.tensorflow.graph import (
    added,
    attended,
    hiding,
    one_function,
    with_own_gradient,
    zeros_to_add_to,
)
from keras_headmask.attention.tensorflow.plan import Plan
from keras_headmask.masks import Mask, Tensor, sizes
from keras_headmask.rules.evaluation import Bound, mask_at
from keras_headmask.rules.protocol import Places, Sides


@one_function
def attend(part: Part, plans: Sequence[Plan], *operands: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. Sinks follow the three operands, if there are some. There is one plan
    for each head group.
    """
    part = part._replace(bound=_widened(part.bound))
    of_groups = iter(plans)
    return by_group(
        lambda group, *tensors: _attend_group(group, next(of_groups), *tensors), part, *operands
    )


def _widened(bound: Bound) -> Bound:
    """Broadcast whole masks along each axis whose size is unknown until the run.

    Tiles are not cut along an axis of size 1; here nobody knows yet whether it is 1.
    """

    def widen(value: Tensor | Sides) -> Tensor | Sides:
        if isinstance(value, Sides):
            return value
        if value.shape[2] is None:
            value = value & (bound.query_positions >= bound.query_positions)[:, None]
        if value.shape[3] is None:
            value = value & (bound.key_positions >= bound.key_positions)
        return value

    return bound.changed(widen)


def _attend_group(part: Part, plan: Plan, *operands: Tensor) -> Tensor:
    """The context of the heads of `part`, which obey one rule, with its gradient."""

    def forward(*operands: Tensor) -> Tensor:
        steps = _Steps(part, plan, *operands)

        def once(step: Step) -> tuple[Tensor]:
            context, alive = _context(part, step, *step.operands())
            return (_where(alive, context),)

        return steps.over(once)[0]

    def backward(*operands_and_upstream: Tensor) -> tuple:
        *operands, upstream = operands_and_upstream
        steps = _Steps(part, plan, *operands)

        def again(step: Step, *sums: Tensor) -> tuple:
            of_step = step.operands()
            with tf.GradientTape() as tape:
                tape.watch(of_step)
                context, alive = _context(part, step, *of_step)
            # Fully masked rows add nothing, nor do those that nobody wants.
            upstream_of_step = _where(alive & (step.queries >= 0), step.rows(upstream))
            # (Where a `ForwardAccumulator` derives a function, no other tape records.)
            gradient = tape.gradient if tf.executing_eagerly() else tf.gradients
            of_rows, *rest = gradient(context, of_step, upstream_of_step)
            of_keys = [step.added(x, y) for x, y in zip(sums[:2], rest[:2], strict=True)]
            return of_rows, *of_keys, *(x + y for x, y in zip(sums[2:], rest[2:], strict=True))

        nothing = [*map(zeros_to_add_to, steps.of_keys), *map(tf.zeros_like, operands[3:])]
        d_query, *sums = steps.over(again, *nothing)
        return d_query, *map(steps.keys_joined, sums[:2]), *sums[2:]

    return with_own_gradient(forward, backward, *operands)


def _context(
    part: Part, step: "Step", rows: Tensor, keys: Tensor, values: Tensor, *sinks: Tensor
) -> tuple[Tensor, Mask]:
    """The context `(m, h, b, Dv)` of the tiles of a step, and which rows see a key."""
    allowed = mask_at(part.rule, part.bound, part.heads, step.places) & step.are_there
    alive = tf.reduce_any(allowed, axis=-1, keepdims=True)
    hides = hiding(allowed, alive, rows.dtype)
    return attended(part, hides, step.first, rows * part.scale, keys, values, *sinks), alive


def _where(kept: Mask, rows: Tensor) -> Tensor:
    return tf.where(kept, rows, tf.zeros_like(rows))


# --- Steps ---------------------------------------------------------------------------------------


class _Steps:
    """All steps of the loop over the tiles of `plan`."""

    def __init__(self, part: Part, plan: Plan, *operands: Tensor):
        self.part, self.plan = part, plan
        self.query, key, value, *self.sinks = operands
        self.batch, self.keys, self.heads, _ = sizes(key)
        self.lengths = [sizes(x, "int64")[1] for x in (self.query, key)]
        # Each key is read by several tiles: as rows of one head, one head after the other.
        self.by_head = [_heads_first(x) for x in (key, value)]
        self.of_keys = [tf.reshape(x, [-1, x.shape[3]]) for x in self.by_head]

    def keys_joined(self, sums: Tensor) -> Tensor:
        """`(B * h * S, size)` as `(B, S, h, size)`."""
        return _heads_first(tf.reshape(sums, [self.batch, self.heads, self.keys, sums.shape[1]]))

    def over(self, of_step: Callable[..., tuple], *sums: Tensor) -> list[Tensor]:
        """Run `of_step(step, *sums)` for all steps: results `(B, T, h, size)`, and the last sums.

        It returns the results of its tiles, `(m, h, b, size)`, and the new sums. Without sums the
        results are contexts, else gradients of the query.
        """
        of_rows = self.query if sums else self.of_keys[1]
        shape = [self.query.shape[2], of_rows.shape[-1]]
        results = tf.TensorArray(
            of_rows.dtype, self.plan.steps, infer_shape=False, element_shape=[None, *shape]
        )

        def body(i: Tensor, first: Tensor, results: tf.TensorArray, sums: list[Tensor]) -> tuple:
            step, stop = Step.of(self, first)
            result, *sums = of_step(step, *sums)
            rows = tf.reshape(_heads_first(result), [-1, *shape])
            return i + 1, stop, results.write(i, rows), sums

        start = tf.constant(0), tf.constant(0), results, list(sums)
        *_, results, sums = tf.while_loop(
            lambda i, *_: i < self.plan.steps, body, start, parallel_iterations=10
        )
        return [tf.gather(results.concat(), self.plan.slots), *sums]


class Step(NamedTuple):
    """One step of the loop: m tiles of b queries, and w keys for each tile.

    `first` is the number of its first tile. `queries` `(m, 1, b, 1)` is -1 for one whose result
    nobody wants. `are_there` `(m, 1, 1, w)` is false for filler keys. `at_keys` `(m, h, w)`: where
    the keys are. `meets_all`: whether it is one tile that meets all keys of its example.
    """

    steps: _Steps
    first: Tensor
    queries: Tensor
    places: Places  # in the whole sequences
    are_there: Mask
    at_keys: Tensor
    meets_all: Tensor

    @classmethod
    def of(cls, steps: _Steps, first: Tensor) -> tuple["Step", Tensor]:
        """The step that begins with tile `first`, and the first tile of the next one."""
        plan, block, (of_queries, of_keys) = steps.plan, steps.part.tuning.block, steps.lengths
        one, begin = tf.constant([1]), tf.stack([first])
        of_step = tf.strided_slice(plan.sizes, begin, begin, one, shrink_axis_mask=1)
        fits, width = tf.unstack(of_step, 2)
        stop = first + fits
        end = tf.stack([stop])

        def of_tiles(tensor: Tensor) -> Tensor:
            return tf.strided_slice(tensor, begin, end, one)

        example, queries, blocks = map(of_tiles, (plan.examples, plan.queries, plan.blocks))
        place = tf.range(tf.cast(width, tf.int64))
        keys = tf.gather(blocks, place // block, axis=3) * block + place % block
        meets_all = (fits == 1) & (width == steps.keys)
        if plan.columns is not None:
            keys = tf.concat([keys, of_tiles(plan.columns)], 3)
            meets_all &= tf.shape(plan.columns)[3] == 0
        there, rows = tf.clip_by_value(keys, 0, of_keys - 1), tf.maximum(queries, 0)
        of_all = example * of_queries + rows, example * of_keys + there
        places = Places(example, rows, there, *of_all, tf.gather)
        heads = np.arange(steps.heads, dtype="int64")[:, None, None]
        at_keys = tf.squeeze((example * steps.heads + heads) * of_keys + there, 2)
        step = cls(steps, first, queries, places, tf.equal(keys, there), at_keys, meets_all)
        return step, stop

    def operands(self) -> list[Tensor]:
        """Queries, keys and values of the tiles, `(m, h, b or w, size)`, and the sinks."""
        return [self.rows(self.steps.query), *self.of_keys(), *self.steps.sinks]

    def of_keys(self) -> list[Tensor]:
        def gathered() -> list[Tensor]:
            return [tf.gather(x, self.at_keys) for x in self.steps.of_keys]

        def as_they_lie() -> list[Tensor]:  # not copied
            example = tf.reshape(self.places.examples, [1])
            one = tf.ones_like(example)
            return [tf.strided_slice(x, example, example + one, one) for x in self.steps.by_head]

        if _keras.in_forward_mode(*self.steps.of_keys):
            return gathered()  # (it raises for a branch here)
        return tf.cond(self.meets_all, as_they_lie, gathered)

    def rows(self, tensor: Tensor) -> Tensor:
        """The queries of the tiles, `(m, h, b, size)`, of `(B, T, h, size)`."""
        heads, size = tensor.shape[2:]
        at = self.places.rows * heads + np.arange(heads, dtype="int64")[:, None, None]
        return tf.gather(tf.reshape(tensor, [-1, size]), tf.squeeze(at, 3))

    def added(self, sums: Tensor, addend: Tensor) -> Tensor:
        """Add `addend` `(m, h, w, size)` to `sums` `(B * h * S, size)` at the keys of this step."""
        size = addend.shape[3]
        # One row at a time, or all of an example as one: TensorFlow adds row by row.
        count = tf.where(self.meets_all, self.steps.heads * self.steps.keys, 1)
        where = tf.reshape(self.at_keys, [-1])[::count] // tf.cast(count, tf.int64)
        as_rows = [tf.reshape(x, [-1, count * size]) for x in (sums, addend)]
        made = tf.reshape(added(as_rows[0], where, as_rows[1], self.steps.plan.is_gpu), [-1, size])
        return tf.ensure_shape(made, sums.shape)  # which the loop expects again


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, h, size)` to `(B, h, L, size)`, and back."""
    return tf.transpose(tensor, (0, 2, 1, 3))
