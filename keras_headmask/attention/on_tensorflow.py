"""Which implementation TensorFlow runs, by sizes that may show only when the graph runs."""

from collections.abc import Callable

import tensorflow as tf

from keras_headmask.attention import dense, head_by_head
from keras_headmask.attention.parts import Part
from keras_headmask.attention.tensorflow_graph import shared
from keras_headmask.attention.tuning import is_forward_only
from keras_headmask.masks import Tensor
from keras_headmask.rules import evaluation


def attend(
    part: Part,
    tiles: Callable[[], Tensor],
    is_forced: bool,
    at_once: Callable[[], Tensor] | None,
    *operands: Tensor,
) -> Tensor:
    """The context `(B, T, H, Dv)` of all heads by `tiles()`, head by head, or all logits at once.

    `is_forced`: not by all logits where there is a choice. `at_once`: what to do in place of head
    by head, where that cannot do it.
    """
    query, key, _ = operands
    heads, tuning = len(part.heads), part.tuning
    most_pairs = tuning.most_pairs_by_head
    if part.rule.inputs:  # each example may have tiles of its own, with little work in each
        most_pairs = max(most_pairs, tuning.most_logits_by_head // heads)

    def by_head() -> Tensor:
        return head_by_head.attend(part, *operands) if at_once is None else at_once()

    if None not in (query.shape[1], key.shape[1]):
        return by_head() if query.shape[1] * key.shape[1] <= most_pairs else tiles()
    batch, pairs = tf.shape(query)[0], tf.shape(query)[1] * tf.shape(key)[1]

    def by_length() -> Tensor:
        return tf.cond(pairs <= most_pairs, by_head, tiles)

    # (In a file, one branch more for each layer; and OpenVINO computes it wrongly.)
    if is_forced or at_once is not None or is_forward_only():
        return by_length()
    is_small = batch * heads * pairs <= tuning.most_logits_at_once
    return tf.cond(is_small, lambda: _all_logits(part, *operands), by_length)


@shared
def _all_logits(part: Part, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = evaluation.mask_of_all_heads(part.rule, part.bound, len(part.heads))
    return dense.attend(query, key, value, mask, part.scale)[0]
