"""What no export can hold is an error at once, and leaves nothing behind."""

import functools
import os
import shutil
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
from export_models import (
    Subclassed,
    nothing_in,
    ours,
    over,
    tokens,
)
from keras import layers

import keras_headmask as hm
from keras_headmask.export import saved_model

tensorflow_only = pytest.mark.tensorflow


def with_a_layer(function):
    class Odd(layers.Layer):
        def call(self, x):
            return function(x)

        def compute_output_shape(self, shape):
            return shape

    return over(Odd())


def calling_python(x):
    import tensorflow as tf

    y = tf.numpy_function(lambda a: a, [x], tf.float32)
    return tf.ensure_shape(y, x.shape)


def compiled(x):
    import tensorflow as tf

    return tf.function(lambda a: a + 1.0, jit_compile=True)(x)


@tensorflow_only
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (calling_python, "calls Python"),
        (compiled, "parts that XLA compiles"),
    ],
)
def test_a_graph_that_no_server_runs_is_refused(function, message, tmp_path):
    with pytest.raises(RuntimeError, match=message):
        hm.export_saved_model(with_a_layer(function), tmp_path / "m", check=False)
    assert nothing_in(tmp_path / "m")


def two_names():
    x = keras.Input((None, 4), name="x")
    return keras.Model(x, {"a": [x * 1.0, x * 2.0]})


REFUSED = {
    "no model": (lambda: 3, {}, TypeError, "must be a Keras model"),
    "subclassed": (Subclassed, {}, ValueError, r"`Subclassed` is subclassed .*keras\.Model\(x, mo"),
    "not built": (lambda: keras.Sequential([layers.Dense(2)]), {}, ValueError, "or not built"),
    "nested outputs": (two_names, {}, ValueError, r"a flat list, .* Received: list for .* 'a'"),
    "outputs by number": (
        lambda: keras.Model(x := keras.Input((3,), name="x"), {0: layers.Dense(2)(x)}),
        {},
        ValueError,
        "text as its keys. Received: KerasTensor for the output 0",
    ),
    "a name TensorFlow changes": (
        lambda: keras.Model(x := keras.Input((3,), name="a b"), layers.Dense(2)(x)),
        {},
        ValueError,
        "'a b' has a name",
    ),
    "a name Python keeps": (
        lambda: keras.Model(x := keras.Input((3,), name="class"), layers.Dense(2)(x)),
        {},
        ValueError,
        "'class' has a name that is reserved in Python",
    ),
    "version": (ours, {"version": -1}, ValueError, "`version` must be a whole number"),
    "no version of a server": (ours, {"version": 2**63}, ValueError, "that a server can hold"),
    "a base on the network": (ours, {"base_path": "gs://a/b"}, ValueError, "be a local folder"),
    "a check on other inputs": (
        ours,
        {"check": [{"ids": tokens(1, 2)}]},
        ValueError,
        r"for the inputs \['token_ids'\]\. Received: \['ids'\]",
    ),
    "a check on floats": (
        ours,
        {"check": {"token_ids": np.ones((1, 2))}},
        ValueError,
        r"'token_ids' of `check` must be int32 .* Received: float64 of shape \(1, 2\)",
    ),
    "a check of another rank": (
        ours,
        {"check": {"token_ids": [1, 2]}},
        ValueError,
        r"must be int32 of shape \(None, None\)\. Received: int64 of shape \(2,\)",
    ),
    "a check of text": (
        lambda: keras.Model(
            x := keras.Input((None,), dtype="string", name="words"),
            layers.StringLookup(vocabulary=["a"])(x),
        ),
        {},
        TypeError,
        r"'words' holds text.*check=\[",
    ),
    "a check on sizes": (ours, {"check": [(2, 8)]}, ValueError, r"Received: \(2, 8\)"),
    "no check": (ours, {"check": []}, ValueError, "`check` holds no request"),
    "a check of None": (ours, {"check": None}, TypeError, "`check` must be True, False, a dict"),
    "a check in words": (ours, {"check": "yes"}, TypeError, "Received: 'yes'"),
}


built = functools.cache(lambda make: make())


@tensorflow_only
@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_written(case, tmp_path):
    make, arguments, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        hm.export_saved_model(built(make), **{"base_path": tmp_path / "m"} | arguments)
    assert nothing_in(tmp_path / "m")


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="of the other backends")
def test_other_backends_are_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match=r"KERAS_BACKEND=tensorflow"):
        hm.export_saved_model(ours(), tmp_path / "m")
    assert nothing_in(tmp_path / "m")


@tensorflow_only
def test_a_base_that_is_a_version_or_a_file_is_refused(tmp_path):
    version = hm.export_saved_model(over(), tmp_path, check=False).path
    for base in version, version / "saved_model.pb":
        with pytest.raises(ValueError, match=r"which is a file or a SavedModel itself"):
            hm.export_saved_model(over(), base, check=False)


# --- Where the disk or the process fails ---------------------------------------------------------


@tensorflow_only
def test_a_full_disk(tmp_path):
    """By a limit on the size of files, which needs no rights."""
    resource = pytest.importorskip("resource")
    model = ours()
    hm.export_saved_model(model, tmp_path / "first", check=False)  # imports all, and writes .pyc
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written .* nothing was published"):
            hm.export_saved_model(model, tmp_path / "m", check=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert nothing_in(tmp_path / "m")


@tensorflow_only
def test_a_folder_that_may_not_be_written(tmp_path):
    """As root, who may write anywhere, by being nobody for a while."""
    base = tmp_path / "m"
    base.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents[:-1]):
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o555)  # or nobody would not see `base`
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    model = ours()
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(OSError, match=r"could not be written .* nothing was published"):
            hm.export_saved_model(model, base, check=False)
    finally:
        if root:
            os.seteuid(0)
    assert nothing_in(base)


@tensorflow_only
def test_two_writers_never_share_a_version(tmp_path, monkeypatch):
    """Another writer takes the number between the look and the rename."""
    rename, model = os.rename, over()

    def late(source, target):
        if not target.exists():
            shutil.copytree(source, target)
            (target / "theirs").touch()
        rename(source, target)

    monkeypatch.setattr(saved_model.os, "rename", late)
    with pytest.raises(FileExistsError, match="Version 7 exists"):
        hm.export_saved_model(model, tmp_path, version=7, check=False)
    monkeypatch.setattr(
        saved_model.os,
        "rename",
        lambda *pair: late(*pair) if pair[1].name == "8" else rename(*pair),
    )
    assert hm.export_saved_model(model, tmp_path, check=False).version == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "8", "9"]
    assert [(tmp_path / name / "theirs").exists() for name in "789"] == [True, True, False]


@tensorflow_only
def test_names_are_read_as_servers_read_them(tmp_path):
    (tmp_path / "0003").mkdir()
    (tmp_path / "models.config").touch()
    assert hm.export_saved_model(over(), tmp_path, check=False).version == 4


@tensorflow_only
@pytest.mark.long  # (a process of its own)
def test_a_writer_killed_leaves_nothing_that_a_server_sees(tmp_path):
    program = """
import os, signal, sys
import keras
import keras_headmask as hm
from keras_headmask.export import saved_model

saved_model.checking.run_fresh = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
x = keras.Input((3,), name="x")
hm.export_saved_model(keras.Model(x, keras.layers.Dense(2)(x)), sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".being-written-")
    assert hm.export_saved_model(over(), tmp_path, check=False).version == 1
