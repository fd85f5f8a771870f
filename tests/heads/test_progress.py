"""A bar stands on standard error, after some seconds, if a person looks on."""

import sys

import keras
import numpy as np
import pytest

import keras_headmask as hm
from keras_headmask.heads import progress
from keras_headmask.heads.progress import Progress

pytestmark = pytest.mark.tensorflow  # a bar is the same on each backend
IDS = np.arange(24).reshape(2, 12) % 5


def model():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(5, 4)(ids)
    return keras.Model(ids, keras.layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True))


LONG = {
    "measure_heads": (lambda: hm.measure_heads(model(), IDS, batch_size=1), "2 of 2 batches"),
    "ablate_heads": (lambda: hm.ablate_heads(model(), lambda _: 1.0), "2 of 2 runs"),
    "find_leaks": (lambda: hm.find_leaks(model(), IDS), "13 of 13 changes"),
}


@pytest.mark.parametrize("name", LONG)
def test_what_takes_long_has_a_bar(name, monkeypatch, capsys):
    run, end = LONG[name]
    monkeypatch.setitem(sys.modules, "ipykernel", None)  # a person looks on
    run()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_SECONDS", 0)
    run()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(f"[{'=' * 30}] {end}\n")


def test_programs_get_none(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 0)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    Progress(1, "steps").step()
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    Progress(1, "steps", wanted=False).step()
    assert capsys.readouterr().err == ""


def test_where_the_number_of_steps_is_not_known(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 0)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    bar = Progress(None, "batches")
    bar.step()
    bar.step()
    assert capsys.readouterr().err == "\r1 batches\r2 batches"
