"""Whether oneDNN is on, why, and how to switch it on."""

import keras
import pytest

from keras_headmask import _keras
from keras_headmask.look import cpu

SET = "Set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."


@pytest.fixture
def state(monkeypatch):
    """What `one_dnn` says of TensorFlow's answer `on`, the variable, and the system."""

    def of(on, value=None, system="Linux"):
        if value is None:
            monkeypatch.delenv(cpu.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(cpu.VARIABLE, value)

        def is_on():
            if on is None:
                raise ImportError
            return on

        monkeypatch.setattr(_keras.tensorflow, "one_dnn_is_on", is_on)
        monkeypatch.setattr(cpu.platform, "system", lambda: system)
        return cpu.one_dnn.__wrapped__()

    return of


DEFAULT = "(TensorFlow's default on this CPU, TF_ENABLE_ONEDNN_OPTS is not set)."


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((True,), f"oneDNN is on {DEFAULT}"),
        ((False,), f"oneDNN is off {DEFAULT} {SET}"),
        ((True, "1"), "oneDNN is on (TF_ENABLE_ONEDNN_OPTS=1)."),
        ((True, "True"), "oneDNN is on (TF_ENABLE_ONEDNN_OPTS=True)."),
        ((False, "0"), f"oneDNN is off (TF_ENABLE_ONEDNN_OPTS=0). {SET}"),
        (
            (False, "1"),
            "oneDNN is off (TF_ENABLE_ONEDNN_OPTS=1, but read too late, or not built in).",
        ),
        ((False, None, "Darwin"), "oneDNN is off (TensorFlow is built without it for macOS)."),
        ((None,), f"oneDNN is unknown (this TensorFlow does not say). {SET}"),
    ],
)
def test_the_state_says_why_and_what_to_do(state, given, words):
    assert str(state(*given)) == words


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="of other backends")
def test_other_backends_have_no_one_dnn_to_switch():
    assert cpu.one_dnn() is None
