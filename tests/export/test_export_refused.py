"""What no export can hold is an error at once, and leaves nothing behind."""

import functools
import os
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from export_models import (
    SIGNATURE,
    Subclassed,
    nothing_in,
    ours,
    over,
    tokens,
)
from keras import layers

import keras_headmask as hm
from keras_headmask.export import checking

tensorflow_only = pytest.mark.tensorflow


def with_a_layer(function):
    class Odd(layers.Layer):
        def call(self, x):
            return function(x)

        def compute_output_shape(self, shape):
            return shape

    return over(Odd())


def of_fixed_length():
    ids = keras.Input((8,), dtype="int32")
    return keras.Model(ids, layers.Embedding(9, 2)(ids))


def calling_python(x):
    import tensorflow as tf

    y = tf.numpy_function(lambda a: a, [x], tf.float32)
    return tf.ensure_shape(y, x.shape)


def compiled(x):
    import tensorflow as tf

    return tf.function(lambda a: a + 1.0, jit_compile=True)(x)


def pinned(x):
    import tensorflow as tf

    with tf.device("/CPU:0"):
        return x + 1.0


@tensorflow_only
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (calling_python, "calls Python"),
        (compiled, "compiled by XLA .*_XlaMustCompile"),
        (pinned, "pins '.*' to the CPU"),
    ],
)
def test_a_graph_that_no_server_runs_is_refused(function, message, tmp_path):
    with pytest.raises(RuntimeError, match=message):
        hm.export_saved_model(with_a_layer(function), tmp_path / "m", check=False)
    assert nothing_in(tmp_path / "m")


@tensorflow_only
def test_python_in_a_graph_is_an_error_before_anything_runs_it(tmp_path):
    with pytest.raises(RuntimeError, match=r"calls Python .* Write tf\.py_function"):
        hm.export_saved_model(with_a_layer(calling_python), tmp_path / "m", check=[(1, 3)])
    assert nothing_in(tmp_path / "m")


@tensorflow_only
@pytest.mark.long
def test_ops_that_tensorflow_lacks_are_refused_without_running_them(tmp_path):
    text = pytest.importorskip("tensorflow_text")

    class Fold(layers.Layer):
        def call(self, x):
            return text.case_fold_utf8(x)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, "string")

    words = keras.Input((None,), dtype="string", name="words")
    model = keras.Model(words, layers.StringLookup(vocabulary=["a"])(Fold()(words)))
    with pytest.raises(RuntimeError, match="has the ops CaseFoldUTF8, which TensorFlow itself"):
        hm.export_saved_model(model, tmp_path / "m", check=False)
    assert nothing_in(tmp_path / "m")


def two_names():
    x = keras.Input((None, 4), name="x")
    return keras.Model(x, {"a": [x * 1.0, x * 2.0]})


REFUSED = {
    "no model": (lambda: 3, {}, TypeError, "must be a Keras model"),
    "subclassed": (Subclassed, {}, ValueError, r"without a graph .*'token_ids', 'segments'"),
    "a list of specs": (
        Subclassed,
        {"input_signature": list(SIGNATURE.values())},
        TypeError,
        "`input_signature` must be a dict",
    ),
    "a spec without shape": (
        Subclassed,
        {"input_signature": {"token_ids": keras.InputSpec(ndim=2)}},
        ValueError,
        "must have a shape with a batch axis",
    ),
    "half its arguments": (
        Subclassed,
        {"input_signature": {"token_ids": SIGNATURE["token_ids"], "other": SIGNATURE["segments"]}},
        ValueError,
        "some that the call lacks",
    ),
    "other inputs": (
        ours,
        {"input_signature": {"other": SIGNATURE["segments"]}},
        ValueError,
        "must name the model's inputs",
    ),
    "not built": (lambda: keras.Sequential([layers.Dense(2)]), {}, ValueError, "no inputs yet"),
    "nested outputs": (two_names, {}, ValueError, "'a' holds several tensors"),
    "a name TensorFlow changes": (
        lambda: keras.Model(x := keras.Input((3,), name="a b"), layers.Dense(2)(x)),
        {},
        ValueError,
        "'a b' has a name",
    ),
    "precision": (ours, {"precision": "float8"}, ValueError, "`precision` must be one of"),
    "buckets": (ours, {"xla_buckets": [(0, 3)]}, ValueError, "`xla_buckets` must hold pairs"),
    "a bucket of another length": (
        of_fixed_length,
        {"xla_buckets": [(2, 8), (2, 16)], "check": False},
        ValueError,
        r"asks for the length 16, and the sizes of the inputs are fixed: \[8\]",
    ),
    "a check of another length": (
        of_fixed_length,
        {"check": [(2, 16)]},
        ValueError,
        r"asks for the length 16, and the sizes of the inputs are fixed: \[8\]",
    ),
    "version": (ours, {"version": -1}, ValueError, "`version` must be a whole number"),
    "scores of none": (
        lambda: over(layers.Dense(2)),
        {"scores": True},
        ValueError,
        "has no attention layer",
    ),
    "a check on other inputs": (
        ours,
        {"check": [{"ids": tokens(1, 2)}]},
        ValueError,
        r"must have the inputs \['token_ids'\]",
    ),
    "a check on floats": (
        ours,
        {"check": [{"token_ids": np.ones((1, 2))}]},
        ValueError,
        "'token_ids' must be int32",
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
    "a check on nothing": (ours, {"check": ["x"]}, TypeError, "or a pair"),
    "no check": (ours, {"check": []}, ValueError, "`check` holds no request"),
    "a check of None": (ours, {"check": None}, TypeError, "`check` must be a list, or True or"),
    "a check at length 0": (ours, {"check": [(2, 0)]}, TypeError, r"pair .*, from 1\. .*\(2, 0\)"),
    "a check at half a length": (ours, {"check": [(2, 3.5)]}, TypeError, "or a pair"),
    "warm-up of None": (ours, {"warmup": None}, TypeError, "`warmup` must be a list. Received: No"),
    "warm-up of nothing": (ours, {"warmup": [(0, 3)]}, TypeError, r"from 1\. Received: \(0, 3\)"),
    "buckets of None": (ours, {"xla_buckets": None}, TypeError, "`xla_buckets` must be a list"),
    "buckets of True": (ours, {"xla_buckets": [(True, 4)]}, ValueError, "must hold pairs"),
    "padded in words": (ours, {"padded": "no"}, TypeError, "`padded` must be True or False"),
    "a name Python keeps": (
        lambda: keras.Model(x := keras.Input((3,), name="class"), layers.Dense(2)(x)),
        {},
        ValueError,
        "'class' has a name that is reserved in Python",
    ),
    "outputs by number": (
        lambda: keras.Model(x := keras.Input((3,), name="x"), {0: layers.Dense(2)(x)}),
        {},
        ValueError,
        "must be text, the outputs' names. Received: 0",
    ),
}


built = functools.cache(lambda make: make())


@tensorflow_only
@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_written(case, tmp_path):
    make, arguments, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        hm.export_saved_model(built(make), tmp_path / "m", **arguments)
    assert nothing_in(tmp_path / "m")


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="of the other backends")
def test_other_backends_are_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match=r"KERAS_BACKEND=tensorflow"):
        hm.export_saved_model(ours(), tmp_path / "m")
    assert nothing_in(tmp_path / "m")


@tensorflow_only
def test_warm_up_without_its_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving.apis", None)
    with pytest.raises(ImportError, match="pip install --no-deps tensorflow-serving-api"):
        hm.export_saved_model(ours(), tmp_path / "m", warmup=[(1, 2)])
    assert nothing_in(tmp_path / "m")


@tensorflow_only
def test_a_version_that_exists_stays_as_it_is(tmp_path):
    model = over()
    report = hm.export_saved_model(model, tmp_path, version=5, check=False)
    before = {p: p.read_bytes() for p in report.path.rglob("*") if p.is_file()}
    with pytest.raises(FileExistsError, match="Version 5 exists"):
        hm.export_saved_model(model, tmp_path, version=5, check=False)
    assert {p: p.read_bytes() for p in report.path.rglob("*") if p.is_file()} == before
    assert hm.export_saved_model(model, tmp_path, check=False).version == 6


# --- Where the disk or the process fails ---------------------------------------------------------


@tensorflow_only
def test_a_full_disk(tmp_path):
    """By a limit on the size of files, which needs no rights."""
    resource = pytest.importorskip("resource")
    model = ours()
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
def test_what_the_error_for_a_subclassed_model_advises_works(tmp_path):
    with pytest.raises(ValueError, match="is a subclassed model") as raised:
        hm.export_saved_model(Subclassed(), tmp_path)
    (advised,) = re.findall(r"keras\.InputSpec\(s.*\"\)", str(raised.value))
    spec = eval(advised)
    assert (spec.shape, spec.dtype) == ((None, None, 32), "float32")


@tensorflow_only
def test_a_warm_up_that_a_server_that_batches_would_refuse_is_a_warning(tmp_path):
    pytest.importorskip("tensorflow_serving.apis")

    def export(rows):
        hm.export_saved_model(over(), tmp_path, check=False, padded=False, warmup=[(rows, 2)])

    with pytest.warns(UserWarning, match=r"a request of 33 rows\. .* batches up to 32 rows"):
        export(33)
    hm.write_serving_config(tmp_path, max_batch_size=34)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export(34)
    with pytest.warns(UserWarning, match=r"35 rows\. .* up to 34 rows .* max_batch_size=35"):
        export(35)


@tensorflow_only
def test_the_check_passes_no_secret_to_its_processes(monkeypatch, tmp_path):
    """What it runs is a model's graph, which may stem from somebody else."""
    secrets = [
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "HF_TOKEN",
        "DATABASE_URL",
        "TF_TOKEN_app_terraform_io",
        "TF_VAR_db",
        "tf_api_key",
        "PYTHON_PASSWORD",
    ]
    wanted = ["TF_ENABLE_ONEDNN_OPTS", "OMP_NUM_THREADS", "LC_ALL", "PYTHONPATH"]
    for name in (*secrets, *wanted):
        monkeypatch.setenv(name, "1")
    given = []

    def run(*_, env, **__):
        given.append(env)
        return subprocess.CompletedProcess([], 1, stdout="", stderr="ended")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"a fresh process could not run it\. ended"):
        checking.run_fresh(tmp_path, [])
    checking.custom_ops({"OpOfSomeLibrary"})
    assert len(given) == 2
    for env in given:
        assert not env.keys() & set(secrets)
        assert env.keys() >= {*wanted, "PATH"}
        assert env["CUDA_VISIBLE_DEVICES"] == "-1"
