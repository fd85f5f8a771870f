"""Private names of Keras by which attention that is made gets another number of heads."""

import operator
from typing import Any

import keras

# What each layer does once it is built: on PyTorch, list the parameters of all layers inside.
after_build = operator.methodcaller("_post_build")


def set_heads(layer: Any, **heads: int) -> None:
    """Set the arguments of its constructor that count heads, by name."""
    if isinstance(layer, keras.layers.GroupQueryAttention):
        layer.num_query_heads, layer.num_key_value_heads = operator.itemgetter(
            "num_query_heads", "num_key_value_heads"
        )(heads)
        layer.num_repeats = layer.num_query_heads // layer.num_key_value_heads
    else:
        layer._num_heads = heads["num_heads"]


def rebuild(layer: Any) -> None:
    """Make all weights and layers inside anew, for the heads that the layer has now."""
    tracker = layer._tracker
    tracker.unlock()
    tracked = layer._layers, layer._trainable_variables, layer._non_trainable_variables
    for part in [part for parts in tracked for part in parts]:
        tracker.untrack(part)
    layer.build_from_config(layer.get_build_config())  # (locks the tracker again)
