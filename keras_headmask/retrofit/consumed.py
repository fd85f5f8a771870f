"""A model moved to another object: what it was can no longer be used, and says so."""

from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import looking


def moved(model: keras.Model) -> keras.Model:
    """The same model as another object; `model` keeps nothing but an error that says so."""
    cls = type(model)
    new, own = empty(cls)
    parts = looking.attributes(model).items()
    vars(new).update({k: v for k, v in parts if k not in own})
    vars(model).clear()
    object.__setattr__(model, "__class__", type(cls.__name__, (_UsedUp, cls), {}))
    return new


def empty(cls: type) -> tuple[keras.Model, set[str]]:
    """A model without parts, and the names of the attributes that belong to the object itself."""
    new = cls.__new__(cls)
    return new, {name for name, value in vars(new).items() if callable(value)}  # Keras' wrappers


class _UsedUp:
    """What is left of a model after `apply_head_masks(model, ..., copy=False)`."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        # An error here would leave a call of the model around open: Keras would take all later
        # calls for parts of it.
        if name == _keras.CLEAR_LOSSES:
            return lambda: None
        raise RuntimeError(_USED_UP)

    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError(_USED_UP)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_USED_UP)

    def __repr__(self) -> str:
        return "<a model that was used up by apply_head_masks(model, ..., copy=False)>"


_USED_UP = (
    "This model was used up by `apply_head_masks(model, ..., copy=False)`: its weights live on in "
    "the model that was returned. Use that one, or `unmasked()` of it; or mask a copy, by "
    "`copy=True`."
)
