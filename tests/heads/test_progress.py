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
    "suggest_rules": (
        lambda: hm.suggest_rules(model(), IDS, 0.5, batch_size=1, metric=lambda _: 1.0),
        "1 of 2 models",
    ),
    "find_leaks": (lambda: hm.find_leaks(model(), IDS), "11 of 11 changes"),
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
    assert printed.err.rstrip().endswith(end)
    assert f"[{'=' * 30}]" in printed.err


def test_logs_get_a_line_now_and_then(monkeypatch, capsys):
    """Where nobody looks on, at most one in 30 seconds; programs read standard output."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    now = [0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = Progress(4, "steps")
    for now[0] in (20, 40, 60, 145):
        bar.step()
    assert capsys.readouterr().err == "2 of 4 steps\n4 of 4 steps\n"


@pytest.mark.parametrize("function", [hm.measure_heads, hm.suggest_rules])
def test_verbose_is_as_keras_has_it(function, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", None)  # a person looks on
    monkeypatch.setattr(progress, "_SECONDS", 0)
    function(model(), IDS, verbose=0)
    assert capsys.readouterr().err == ""
    function(model(), IDS, verbose=1)
    assert "[" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r'`verbose` must be "auto", 0, 1 or 2. Received: \'yes\''):
        function(model(), IDS, verbose="yes")


def test_where_the_number_of_steps_is_not_known(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 0)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    bar = Progress(None, "batches")
    bar.step()
    bar.step()
    assert capsys.readouterr().err == "\r1 batches\r2 batches"
