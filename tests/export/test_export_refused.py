"""What no export can hold, or what answers otherwise, is an error that leaves nothing behind."""

import functools
import os
import shutil
import sys

import keras
import numpy as np
import pytest
from keras import layers

import keras_headmask as hm
from keras_headmask.export import checking, fresh_process, saved_model

tensorflow_only = pytest.mark.tensorflow


def of(name="x", dtype="float32", layer=None, shape=(3,)):
    """A model of one input."""
    x = keras.Input(shape, dtype=dtype, name=name)
    return keras.Model(x, (layer or layers.Dense(2))(x))


def nothing_in(folder):
    return not folder.exists() or not any(folder.iterdir())


def two_outputs():
    x = keras.Input((None, 4), name="x")
    return keras.Model(x, {"even": layers.Dense(2)(x), "odd": layers.Dense(2)(x)})


def nested():
    x = keras.Input((None, 4), name="x")
    return keras.Model(x, {"a": [x * 1.0, x * 2.0]})


def by_number():
    x = keras.Input((3,), name="x")
    return keras.Model(x, {0: layers.Dense(2)(x)})


def of_ids():
    return of("token_ids", "int32", layers.Embedding(30, 8), (None,))


def of_words():
    return of("words", "string", layers.StringLookup(vocabulary=["a"]), (None,))


class Subclassed(keras.Model):
    def call(self, x):
        return x


def ids(given):
    return {"check": {"token_ids": given}}


BASE, SHAPE = "base_path", r"shape \(None, None\)\. Received: int64 of shape \(2,\)"
REFUSED = {
    "no model": (lambda: 3, {}, TypeError, "must be a Keras model"),
    "subclassed": (Subclassed, {}, ValueError, r"`Subclassed` is subclassed .*keras\.Model\(x, mo"),
    "not built": (lambda: keras.Sequential([layers.Dense(2)]), {}, ValueError, "or not built"),
    "nested outputs": (nested, {}, ValueError, r"a flat list, .* Received: list for .* 'a'"),
    "outputs by number": (by_number, {}, ValueError, "text as its keys. .* for the output 0"),
    "a name TensorFlow changes": (lambda: of("a b"), {}, ValueError, "'a b' has a name"),
    "a name Python keeps": (lambda: of("class"), {}, ValueError, "a name that is reserved in Py"),
    "version": (of, {"version": -1}, ValueError, "`version` must be a whole number"),
    "no version of a server": (of, {"version": 2**63}, ValueError, "that a server can hold"),
    "a base on the network": (of, {BASE: "gs://a/b"}, ValueError, "be a local folder"),
    "a base that is a file": (of, {BASE: __file__}, ValueError, "is a file or a SavedModel itself"),
    "a base in a file": (of, {BASE: f"{__file__}/m"}, OSError, "not be written .* nothing was pub"),
    "a check on others": (of_ids, {"check": {"x": 1}}, ValueError, r"\['token_ids'\]\. .* \['x'\]"),
    "a check on floats": (of_ids, ids(np.ones((1, 2))), ValueError, "must be int32 .* float64 of"),
    "a check of another rank": (of_ids, ids([1, 2]), ValueError, SHAPE),
    "a check on numbers": (of_words, {"check": {"words": [[1]]}}, ValueError, "must be string of"),
    "a check of text": (of_words, {}, TypeError, r"'words' holds text.*check=\["),
    "a check on sizes": (of_ids, {"check": [(2, 8)]}, ValueError, r"Received: \(2, 8\)"),
    "no check": (of_ids, {"check": []}, ValueError, "`check` holds no request"),
    "a check of None": (of_ids, {"check": None}, TypeError, "`check` must be True, False, a dict"),
    "a check in words": (of_ids, {"check": "yes"}, TypeError, "Received: 'yes'"),
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
        hm.export_saved_model(of(), tmp_path / "m")
    assert nothing_in(tmp_path / "m")


def calling_python(x):
    import tensorflow as tf

    return tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32), x.shape)


def compiled(x):
    import tensorflow as tf

    return tf.function(lambda a: a + 1.0, jit_compile=True)(x)


@tensorflow_only
@pytest.mark.parametrize(
    ("function", "message"), [(calling_python, "calls Python"), (compiled, "that XLA compiles")]
)
def test_a_graph_that_no_server_runs_is_refused(function, message, tmp_path):
    model = of(layer=layers.Lambda(function, output_shape=(3,)))
    with pytest.raises(RuntimeError, match=message):
        hm.export_saved_model(model, tmp_path / "m", check=False)
    assert nothing_in(tmp_path / "m")


# --- What answers otherwise -----------------------------------------------------------------------


def off(answers):
    answers[1]["odd"][1, 4, 0] += 0.25


def of_another_shape(answers):
    answers[0]["even"] = np.zeros(0)


def without_an_output(answers):
    del answers[0]["odd"]


ALTERED = [
    (
        off,
        r"output 'odd' differs .* up to 0\.(25|2\d|1\d) .* input x float32\[2, 5, 4\]\. Does the",
    ),
    (of_another_shape, r"'even' differs from the model's by up to inf"),
    (without_an_output, r"has the outputs \['even'\] where the model has"),
]


@tensorflow_only
@pytest.mark.parametrize(("altered", "message"), ALTERED)
def test_what_answers_otherwise_is_not_published(altered, message, tmp_path, monkeypatch):
    """It stands on the same file system, under a name that servers pass over."""
    rng, model = np.random.default_rng(0), two_outputs()
    given = [{"x": rng.normal(size=(2, n, 4))} for n in (3, 5)]

    def run(folder, requests):
        (hidden,) = tmp_path.iterdir()
        assert hidden.name[0] == "."
        assert folder.parent == hidden
        assert (folder / "saved_model.pb").is_file()
        answers = [{k: v.numpy() for k, v in model(x["x"]).items()} for x in requests]
        altered(answers)
        return answers

    monkeypatch.setattr(checking, "run_fresh", run)
    with pytest.raises(RuntimeError, match=f"not published: .*{message}"):
        hm.export_saved_model(model, tmp_path, check=given)
    assert nothing_in(tmp_path)


@tensorflow_only
def test_an_export_that_does_not_run_there_is_not_published(tmp_path, monkeypatch):
    """Here by a script that fails; so do ops that a library brought into this process."""
    broken = tmp_path / "script.py"
    broken.write_text("raise ValueError('no such op')")
    monkeypatch.setattr(fresh_process, "__file__", str(broken))
    with pytest.raises(RuntimeError, match=r"could not run it\. ValueError: no such op"):
        hm.export_saved_model(two_outputs(), tmp_path / "m")
    assert nothing_in(tmp_path / "m")


@tensorflow_only
def test_the_fresh_process_cannot_import_this_package(monkeypatch):
    import tensorflow as tf

    def load(folder):
        import keras_headmask  # noqa: F401

    monkeypatch.setitem(sys.modules, "keras_headmask", hm)  # as it is put back afterwards
    monkeypatch.setattr(tf.saved_model, "load", load)
    with pytest.raises(ImportError, match="keras_headmask"):
        fresh_process.main("a folder", "requests", "answers")


ONE, LOGITS = np.array([1.0, np.nan, np.inf]), np.array([-1e9, 0.5, 40.0], "float32")
WORDS = np.array([b"a", b"bc"])
DISTANCES = [  # got, wanted, how far at least and at most
    (ONE, ONE, 0, 0),
    (np.array([1.5, np.nan, np.inf]), ONE, 0.5, 0.5),
    (ONE[:2], ONE, np.inf, np.inf),
    (np.array([1.0, 0.0, np.inf]), ONE, np.inf, np.inf),
    (np.array([1.0, np.nan, -np.inf]), ONE, np.inf, np.inf),
    (fresh_process.plain(WORDS.astype(object)), WORDS, 0, 0),
    (np.array([b"a", b"b"]), WORDS, np.inf, np.inf),
    (np.array([1 - 1j]), np.array([1 + 1j]), 1.414, 1.415),
    # Large outputs do not hide what is wrong with small ones.
    (LOGITS + np.array([0, 0.4, 0], "float32"), LOGITS, 0.0099, 0.0101),
    (np.array([-1e9, 0.5, -1e9]), LOGITS, 1, np.inf),  # masked at other places
    (np.array([0.5, 0.5, 40]), LOGITS, 1, np.inf),
    (np.array([30001]), np.array([30000]), 1, 1),  # another id
]


def test_distances_see_shapes_and_what_is_not_finite():
    for got, wanted, least, most in DISTANCES:
        assert least <= checking.distance(got, wanted) <= most, (got, wanted)


# --- Versions ------------------------------------------------------------------------------------


@tensorflow_only
def test_names_are_read_as_servers_read_them_and_a_version_is_final(tmp_path):
    model = of()
    for name in ("0003", ".being-written-by-a-run-that-was-killed"):
        (tmp_path / name).mkdir()
    (tmp_path / "models.config").touch()
    report = hm.export_saved_model(model, tmp_path, check=False)
    assert report.version == 4
    assert report.differences is None
    assert "not checked" in str(report)
    before = {p: p.read_bytes() for p in report.path.rglob("*") if p.is_file()}
    with pytest.raises(FileExistsError, match="Version 4 exists"):
        hm.export_saved_model(model, tmp_path, version=4, check=False)
    assert {p: p.read_bytes() for p in report.path.rglob("*") if p.is_file()} == before
    with pytest.raises(ValueError, match="is a file or a SavedModel itself"):
        hm.export_saved_model(model, report.path, check=False)


@tensorflow_only
def test_two_writers_never_share_a_version(tmp_path, monkeypatch):
    """Another writer takes the number between the look and the rename."""
    rename, model = os.rename, of()

    def late(source, target):
        if target.name in "78" and not target.exists():
            shutil.copytree(source, target)
            (target / "theirs").touch()
        rename(source, target)

    monkeypatch.setattr(saved_model.os, "rename", late)
    with pytest.raises(FileExistsError, match="Version 7 exists"):
        hm.export_saved_model(model, tmp_path, version=7, check=False)
    assert hm.export_saved_model(model, tmp_path, check=False).version == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "8", "9"]
    assert [(tmp_path / name / "theirs").exists() for name in "789"] == [True, True, False]
