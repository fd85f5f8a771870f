"""Whether oneDNN is on is told, and a hint is logged once where it is off."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from keras_headmask import _keras
from keras_headmask.attention import cpu

ROOT = Path(__file__).parents[2]
SET = "Set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."
HINT = "INFO:keras_headmask:Attention runs without oneDNN"
CALLS = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import numpy as np
import keras_headmask as hm
from keras_headmask.attention.cpu import one_dnn
from keras_headmask.attention.tuning import forward_only

x = np.ones((1, 4, 2, 3), "float32")

def attend(**given):
    print(".")
    hm.dot_product_attention(x, x, x, **given)

attend()
with forward_only():
    attend(mask_spec=hm.Window(1, 1))
for _ in range(3):
    attend(mask_spec=hm.Window(1, 1))
print(one_dnn())
"""


def said(value):
    """What a fresh process prints, `.` for each call; and what it knows of oneDNN."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), KERAS_BACKEND=keras.backend.backend())
    environment.pop(cpu.VARIABLE, None)
    if value is not None:
        environment[cpu.VARIABLE] = value
    command = [sys.executable, "-c", CALLS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *lines, state = done.stdout.splitlines()
    return [x for x in lines if x == "." or "keras_headmask:" in x], state


def test_a_hint_is_logged_once_where_a_rule_runs_without_one_dnn():
    lines, state = said(None)
    if not state.startswith("oneDNN is off"):  # on, or not TensorFlow
        assert lines == ["."] * 5
        return
    # No rule: nothing to say. An export: the model runs elsewhere. Then once.
    assert [x[: len(HINT)] for x in lines] == [".", ".", ".", HINT, ".", "."]
    assert lines[3].endswith(SET)


@pytest.mark.long
@pytest.mark.tensorflow
def test_who_switched_it_off_gets_no_hint():
    lines, state = said("0")
    assert lines == ["."] * 5
    assert state.startswith("oneDNN is off (TF_ENABLE_ONEDNN_OPTS=0).")


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

        monkeypatch.setattr(_keras, "one_dnn_is_on", is_on)
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


@pytest.mark.tensorflow
def test_no_hint_where_there_is_a_gpu(monkeypatch, caplog):
    import tensorflow as tf

    off = cpu.OneDNN(False, "so", "Set it.")
    monkeypatch.setattr(cpu, "one_dnn", lambda: off)
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    devices = [tf.config.PhysicalDevice("", kind) for kind in ("CPU", "GPU")]
    for visible, logs in ((devices, 0), (devices[:1], 1)):
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda visible=visible: visible)
        with caplog.at_level("INFO", "keras_headmask"):
            cpu._hint.__wrapped__()
        assert len(caplog.records) == logs
