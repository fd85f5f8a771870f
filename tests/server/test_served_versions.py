"""Which version is served, as folders come, go and break."""

import shutil

import numpy as np
import pytest
from serving_model import example, publish
from tolerance import assert_close

from keras_headmask.export.versions import read_signatures, version_folders
from keras_headmask.server.predict_requests import BadRequest
from keras_headmask.server.served_versions import ServedVersions, reason

pytestmark = pytest.mark.tensorflow


def answer(served):
    outputs = served.signatures["serving_default"].call(example())
    return np.abs(outputs["y"]).sum()


def truncate(folder):
    data = next(folder.glob("variables/*.data-*"))
    data.write_bytes(data.read_bytes()[:40])


@pytest.fixture
def base(exports, tmp_path):
    publish(exports[1], tmp_path, 1)
    return tmp_path


def test_the_newest_takes_over_and_the_old_lives_while_it_is_held(base, exports):
    reported = []
    versions = ServedVersions(base, reported.append)
    old = versions.current
    versions.check()
    assert versions.current is old  # nothing new: not loaded again
    publish(exports[2], base, 10)  # newer than 9 by number, older by name
    publish(exports[1], base, 9)
    versions.check()
    assert versions.current.version == 10
    assert reported == ["Serving version 1", "Serving version 10"]
    assert_close(answer(versions.current), 2 * answer(old))
    shutil.rmtree(base / "10")
    versions.check()
    assert versions.current.version == 9
    (base / "9").rename(base / "0009")
    versions.check()
    assert versions.current.version == 9  # as TensorFlow Serving reads it


def test_a_broken_version_is_reported_and_the_old_one_stays(base, exports):
    reported = []
    versions = ServedVersions(base, reported.append)
    publish(exports[2], base, 2)
    truncate(base / "2")
    versions.check()
    assert versions.current.version == 1
    assert versions.failures.keys() == {2}
    assert reported[-1].startswith("Version 2 does not load. ")
    lines = len(reported)
    versions.check()
    assert len(reported) == lines  # not tried again while it stays as it is

    shutil.copytree(exports[2], base / "2", dirs_exist_ok=True)  # a copy that is finished now
    versions.check()
    assert (versions.current.version, versions.failures) == (2, {})
    (base / "3").mkdir()  # a copy that has just begun
    versions.check()
    assert versions.current.version == 2
    assert "saved_model.pb" in versions.failures[3]


def test_where_the_newest_is_broken_from_the_start_the_one_before_serves(base, exports):
    publish(exports[2], base, 2)
    truncate(base / "2")
    assert ServedVersions(base, lambda _: None).current.version == 1
    truncate(base / "1")
    with pytest.raises(ValueError, match=r"No version under .* loads\. 2: .*; 1: "):
        ServedVersions(base, lambda _: None)


def test_reasons_are_found_among_lines_about_the_graph():
    lines = [
        "Graph execution error:",
        "",
        "Detected at node a/b defined at (most recent call last):",
        "<stack traces unavailable>",
        "2 root error(s) found.",
        "  (0) INVALID_ARGUMENT: {{function_node f}} Shapes [2,3] vs. [2,4]",
        "\t [[{{node a/b}}]] [Op:__inference_signature_wrapper_7]",
    ]
    assert reason("\n".join(lines)) == "Shapes [2,3] vs. [2,4]"
    assert reason("\n".join(lines[:4])) == "it gives no reason"


def test_what_the_model_cannot_compute_is_an_error_without_its_graph(tmp_path):
    import tensorflow as tf

    class Table(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, None), "int32", name="ids")])
        def look_up(self, ids):
            return {"y": tf.gather(tf.range(50.0), ids)}

    table = Table()
    tf.saved_model.save(table, str(tmp_path / "1"), signatures=table.look_up)
    signature = ServedVersions(tmp_path, lambda _: None).current.signatures["serving_default"]
    with pytest.raises(BadRequest) as raised:
        signature.call({"ids": np.array([[1, 99999]], "int32")})
    assert str(raised.value).endswith("this request: indices[0,1] = 99999 is not in [0, 50)")


def test_a_base_path_without_versions(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a folder that holds versions"):
        ServedVersions(tmp_path / "none")
    for name in ("v1", ".1", "1.5", "٣", "-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "2").touch()  # no folder
    assert version_folders(tmp_path) == {}
    with pytest.raises(FileNotFoundError, match=r"holds no version\. Export one first"):
        ServedVersions(tmp_path)


def test_each_signature_answers_once_before_it_is_served(tmp_path):
    """What refuses one row of one position is served, and reported."""
    import keras
    import tensorflow as tf

    def strict(words):
        with tf.control_dependencies([tf.debugging.assert_greater(tf.shape(words)[1], 1)]):
            return {"shout": tf.strings.upper(words)}

    archive = keras.export.ExportArchive()
    archive.track(keras.layers.Identity())
    specs = [tf.TensorSpec((None, None), "string", name="words")]
    archive.add_endpoint("strict", strict, input_signature=specs)
    archive.add_endpoint("easy", tf.strings.upper, input_signature=specs)
    archive.write_out(str(tmp_path / "1"), verbose=False)
    reported = []
    served = ServedVersions(tmp_path, reported.append).current
    assert any(
        line.startswith("Version 1, `strict`: not warmed up. The model") for line in reported
    )
    assert not any("`easy`" in line for line in reported)
    answer = served.signatures["strict"].call({"words": np.array([[b"a", b"b"]], object)})
    assert answer["shout"].tolist() == [[b"A", b"B"]]


def test_signatures_are_read_without_loading(base, tmp_path):
    names = {"serving_default", "serve_padded", "double", "slow", "serve"}
    assert read_signatures(base / "1").keys() <= names
    assert read_signatures(base / "1").keys() >= names - {"serve"}
    (tmp_path / "saved_model.pb").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is not a readable SavedModel"):
        read_signatures(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"")  # a SavedModel of nothing
    with pytest.raises(ValueError, match="holds no signature under the tag 'serve'"):
        read_signatures(tmp_path)


def test_watching_goes_on_after_the_base_path_was_away(base, exports, tmp_path):
    import threading

    reported, away, back = [], threading.Event(), threading.Event()

    def report(line):
        reported.append(line)
        if "Cannot look" in line:
            away.set()
        if line == "Serving version 2":
            back.set()

    versions = ServedVersions(base, report)
    versions.watch(0.02)
    try:
        hidden = base.rename(base.with_name(base.name + "-away"))
        assert away.wait(60), reported
        assert versions.current.version == 1
        publish(exports[2], hidden, 2)
        hidden.rename(base)
        assert back.wait(60), reported
    finally:
        versions.close()
