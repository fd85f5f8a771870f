"""What TensorFlow's loop adds up for gradients of a bias, of a table by position and of sinks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.logits import Changes
from keras_headmask.attention.tensorflow.tile import times
from keras_headmask.masks import Mask, Tensor, sizes
from keras_headmask.rules.places import rows_at
from keras_headmask.rules.protocol import Places


class GradientsOfChanges:
    """Of the tensors of `changes`, in their order: sums over all steps."""

    def __init__(self, part: Part, changes: Changes):
        self.part, self.changes = part, changes

    def nothing(self) -> list[Tensor]:
        return [tf.zeros_like(tensor) for tensor in self.changes.tensors]

    def added(
        self,
        sums: Sequence[Tensor],
        visit: Any,
        products: Tensor,
        d_changed: Tensor,
        log_sum: Tensor | None,
        delta: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """The gradient of the `products` of a step, `(m, h, b, w)`, and `sums` with those of it.

        `d_changed` is the gradient of what is made of the products. `log_sum` and `delta`, with an
        axis of size 1 more, are of its rows.
        """
        if not self.changes.are_some:
            return d_changed, []
        places = visit.places
        here = self.changes.at(places)
        tensors = [x for x in (here.bias, here.table) if x is not None]
        with tf.GradientTape() as tape:
            tape.watch([products, *tensors])
            changed = here.of_logits(products, self.part.heads, self.part.positions_at(places))
        d_products, *found = tape.gradient(changed, [products, *tensors], d_changed)
        # (A hidden product may make the gradient of a soft cap NaN.)
        d_products = tf.where(tf.equal(d_changed, 0), d_changed, d_products)
        made, rest = [], list(sums)
        if here.bias is not None:
            made.append(self._with_bias(rest.pop(0), found.pop(0), places, visit.valid))
        if here.table is not None:
            made.append(rest.pop(0) + found.pop(0))
        if here.sinks is not None:
            of_sinks = tf.exp(here.sinks[:, None] - log_sum)
            made.append(rest.pop(0) - tf.reduce_sum(times(delta[..., 0], of_sinks), (0, 2)))
        return d_products, made

    def _with_bias(self, total: Tensor, of_tiles: Tensor, places: Places, valid: Mask) -> Tensor:
        """`total`, of the shape of the bias, with what the tiles add: `(m, h, b or 1, w or 1)`."""
        keys = sizes(total)[3]
        rows = rows_at(total, places)
        if total.shape[3] != 1:
            of_tiles = _at_all_keys(of_tiles, places, valid, keys)
        flat = tf.reshape(total, [-1, keys])
        return tf.reshape(
            tf.tensor_scatter_nd_add(flat, rows[..., None], of_tiles), tf.shape(total)
        )


def _at_all_keys(of_tiles: Tensor, places: Places, valid: Mask | None, keys: Tensor) -> Tensor:
    """The keys of each tile among all keys, 0 between: by gathering, as a scatter is slow."""
    to = places.keys
    if valid is not None:
        to = tf.where(valid, to, tf.cast(keys, to.dtype))
    to = to[:, 0, 0]
    shape = tiles, count = sizes(to)
    number, place = (tf.cast(tf.range(size), to.dtype) for size in shape)
    at = tf.stack([tf.broadcast_to(number[:, None], shape), to], -1)
    nowhere = tf.fill([tiles, keys + 1], tf.cast(count, to.dtype))
    which = tf.tensor_scatter_nd_update(nowhere, at, tf.broadcast_to(place, shape))[:, :-1]
    with_0 = tf.pad(of_tiles, [[0, 0], [0, 0], [0, 0], [0, 1]])
    return tf.gather(with_0, which, axis=3, batch_dims=1)
