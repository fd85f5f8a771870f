"""A trial of attention code that is not Keras' own, before it gets a rule."""

from typing import Any

from keras_headmask import _keras
from keras_headmask.attention import observers, trial
from keras_headmask.retrofit.families import adapted
from keras_headmask.retrofit.finding import AttentionLayer
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.heads import head_groups, restricts


def check_obeys(entry: AttentionLayer, spec: MaskSpec) -> None:
    """Raise if the class of a layer was seen not to obey the mask of a rule."""
    adapter = adapted(entry.layer)
    if not adapter.has_own_code or not restricts(spec, adapter.num_heads):
        return
    # Another object, as code may keep what it likes on its own.
    stand_in = observers.standing_in(entry.layer, {_keras.FLASH: False})
    method = getattr(type(entry.layer), adapter.hook).__get__(stand_in)

    def compute(query: Any, key: Any, value: Any, mask: Any, training: bool) -> Any:
        copy = type(adapter)(stand_in)
        return copy.called(method, copy.arguments(query, key, value, mask, training=training))[0]

    size = adapter.head_dim
    trial.check_obeys(
        compute,
        adapter.num_heads,
        (size, getattr(entry.layer, "value_dim", size)),
        entry.layer.compute_dtype,
        len(head_groups(spec, adapter.num_heads)) > 1,
        f"The attention layer {entry} with its own `{adapter.hook}`",
        ", or leave the layer out by `layers=`",
    )
