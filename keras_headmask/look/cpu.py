"""Whether TensorFlow computes by oneDNN on this CPU, and how to switch it on.

TensorFlow decides when it is imported. By itself it switches oneDNN on only where the CPU has
newer instructions, AVX-512 with VNNI for one; elsewhere its products may take longer.
"""

import dataclasses
import functools
import os
import platform

import keras

from keras_headmask import _keras

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
_HOW = f"Set {VARIABLE}=1 before TensorFlow is imported."


@dataclasses.dataclass(frozen=True)
class OneDNN:
    """`on` is `None` where this release of TensorFlow does not say."""

    on: bool | None
    why: str
    advice: str = ""  # how to switch it on, where that is possible

    def __str__(self) -> str:
        state = {True: "on", False: "off", None: "unknown"}[self.on]
        return " ".join([f"oneDNN is {state} ({self.why}).", *filter(None, [self.advice])])


@functools.cache
def one_dnn() -> OneDNN | None:
    """The state of this process; `None` where Keras has another backend than TensorFlow."""
    if keras.backend.backend() != "tensorflow":
        return None
    try:
        on = _keras.tensorflow.one_dnn_is_on()
    except (ImportError, AttributeError):
        return OneDNN(None, "this TensorFlow does not say", _HOW)
    why, advice = f"TensorFlow's default on this CPU, {VARIABLE} is not set", _HOW
    if (setting := os.environ.get(VARIABLE)) is not None:
        why = f"{VARIABLE}={setting}"
        if on != (setting.lower() in ("1", "true")):
            why, advice = f"{why}, but read too late, or not built in", ""
    elif not on and platform.system() == "Darwin":
        why, advice = "TensorFlow is built without it for macOS", ""
    return OneDNN(on, why, "" if on else advice)
