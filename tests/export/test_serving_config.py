"""The files for TensorFlow Serving, read with its own messages."""

import os
import pathlib
import re

import numpy as np
import pytest
import serving_model
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
    wrappers_pb2,
)
from serving_model import WIDTH, publish

import keras_headmask as hm
from keras_headmask.export import tf_serving
from keras_headmask.export.versions import read_signatures

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="session")
def export(tmp_path_factory):
    """A SavedModel, to be copied as versions."""
    folder = tmp_path_factory.mktemp("export") / "version"
    serving_model.export(serving_model.build(), folder)
    return folder


@pytest.fixture
def base(export, tmp_path):
    base = tmp_path / "tiny"
    base.mkdir()
    publish(export, base, 3)
    return base


@pytest.fixture
def unpadded(tmp_path):
    """A version as plain `model.export` writes it: no `serve_padded`."""
    import keras

    base = tmp_path / "plain"
    keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)]).export(
        base / "1", verbose=False
    )
    return base


def read_models(path):
    config = pytest.importorskip(
        "tensorflow_serving.config.model_server_config_pb2",
        reason="pip install --no-deps tensorflow-serving-api",
    )
    return text_format.Parse(path.read_text(), config.ModelServerConfig())


def batching_parameters():
    """The message of TensorFlow Serving's session_bundle_config.proto, which no package brings."""
    assert wrappers_pb2.DESCRIPTOR.name == "google/protobuf/wrappers.proto"
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="batching.proto",
        package="of_test",
        syntax="proto3",
        dependency=[wrappers_pb2.DESCRIPTOR.name],
    )
    message = file.message_type.add(name="BatchingParameters")
    names = ["max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads"]
    for number, name in enumerate(names, start=1):
        message.field.add(
            name=name,
            number=number,
            type=field.TYPE_MESSAGE,
            label=field.LABEL_OPTIONAL,
            type_name=".google.protobuf.Int64Value",
        )
    message.field.add(
        name="allowed_batch_sizes", number=6, type=field.TYPE_INT64, label=field.LABEL_REPEATED
    )
    message.field.add(
        name="pad_variable_length_inputs",
        number=7,
        type=field.TYPE_BOOL,
        label=field.LABEL_OPTIONAL,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    found = pool.FindMessageTypeByName("of_test.BatchingParameters")
    return message_factory.GetMessageClass(found)()


def read_batching(path):
    return text_format.Parse(path.read_text(), batching_parameters())


def test_models_config_is_a_model_server_config(base):
    written = hm.write_serving_config(base)
    (model,) = read_models(written.models).model_config_list.config
    assert (model.name, model.base_path, model.model_platform) == ("tiny", str(base), "tensorflow")
    odd = '/models/"a" \\ü'
    written = hm.write_serving_config(base, name="other", served_path=odd)
    (model,) = read_models(written.models).model_config_list.config
    assert (model.name, model.base_path) == ("other", odd)


def test_batching_is_batching_parameters(base):
    written = hm.write_serving_config(
        base,
        max_batch_size=16,
        allowed_batch_sizes=(1, 4, 16),
        batch_timeout_micros=0,
        num_batch_threads=3,
        max_enqueued_batches=7,
    )
    read = read_batching(written.batching)
    assert read.max_batch_size.value == 16
    assert list(read.allowed_batch_sizes) == [1, 4, 16]
    assert read.HasField("batch_timeout_micros")
    assert read.batch_timeout_micros.value == 0
    assert (read.num_batch_threads.value, read.max_enqueued_batches.value) == (3, 7)
    assert read.pad_variable_length_inputs is False
    assert "ALL requests of that batch" in written.batching.read_text()
    assert "serve_xla" not in written.batching.read_text()


def test_padding_only_with_serve_padded(base, unpadded):
    written = hm.write_serving_config(base, pad_variable_length_inputs=True)
    assert read_batching(written.batching).pad_variable_length_inputs is True
    assert "FIRST\n# element" in written.batching.read_text()
    assert "another RANK than its signature says ENDS THE SERVER" in written.batching.read_text()
    with pytest.raises(ValueError, match="needs a signature `serve_padded` with an input"):
        hm.write_serving_config(unpadded, pad_variable_length_inputs=True)
    assert not list(unpadded.glob("*.*"))  # nothing was written
    # The newest counts, not any.
    unpadded_version = next(unpadded.iterdir())
    publish(unpadded_version, base, 4)
    with pytest.raises(ValueError, match="Version 4 has"):
        hm.write_serving_config(base, pad_variable_length_inputs=True)


def test_padding_needs_lengths_of_one_integer_a_row(tmp_path):
    import keras
    import tensorflow as tf

    for version, shape, dtype in ((1, (None,), "int64"), (2, (None, 1), "int32")):
        archive = keras.export.ExportArchive()
        layer = keras.layers.Dense(1)
        layer.build((None, 1))
        archive.track(layer)
        archive.add_endpoint(
            "serve_padded",
            lambda lengths: layer(tf.reshape(tf.cast(lengths, "float32"), (-1, 1))),  # noqa: B023
            input_signature=[tf.TensorSpec(shape, dtype, "lengths")],
        )
        archive.write_out(str(tmp_path / str(version)), verbose=False)
        with pytest.raises(ValueError, match=r"`lengths`, int32 of shape \(batch,\)"):
            hm.write_serving_config(tmp_path, pad_variable_length_inputs=True)


def test_flags_say_where_the_server_finds_the_files(base, tmp_path):
    written = hm.write_serving_config(base, served_path="/models/tiny/", num_batch_threads=4)
    assert written.flags == (
        "--model_config_file=/models/tiny/models.config",
        "--enable_batching=true",
        "--batching_parameters_file=/models/tiny/batching.txt",
        "--grpc_max_threads=3328",
    )
    variables = [x for x in written.environment.read_text().splitlines() if x[0] != "#"]
    assert variables == ["TF_ENABLE_ONEDNN_OPTS=1"]  # as `docker run --env-file` reads it
    folder = tmp_path / "made" / "for it"
    written = hm.write_serving_config(base, folder=folder)
    assert written.models == folder / "models.config"
    assert written.environment == folder / "server.env"
    assert written.flags[0] == f"--model_config_file={folder}/models.config"


@pytest.mark.parametrize(
    ("rows", "computed", "waiting", "threads"),
    [(8, 2, 200, 1616), (1, 1, 1, 1024), (2**31 - 1, 1, 1, 2**31 - 1)],
)
def test_a_thread_of_grpc_for_each_request_that_batches_may_hold(
    base, rows, computed, waiting, threads
):
    """The server's own 4 x CPUs refuse requests that still fit its batches."""
    written = hm.write_serving_config(
        base, max_batch_size=rows, num_batch_threads=computed, max_enqueued_batches=waiting
    )
    assert f"--grpc_max_threads={threads}" in written.flags


def test_the_commands_of_the_page_have_the_flags_that_it_prints():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    printed, rest = text.split("\n## TensorFlow Serving\n")[1].split("```sh")[:2]
    command, _, rest = rest.partition("```")
    (flags,) = re.findall(r"```text\n(.*?)```", printed, re.DOTALL)
    (args,) = re.findall(r"args:\n((?: +- --.*\n)+)", text)
    for flag in flags.split():
        assert flag in command
        if "model_config" not in flag:
            assert f"- {flag}\n".replace("/models/tiny/", "/mnt/models/") in args


def test_a_warm_up_of_more_rows_than_a_batch_is_refused(base):
    pytest.importorskip("tensorflow_serving", reason="pip install --no-deps tensorflow-serving-api")
    folder = base / "3" / tf_serving.EXTRA
    rows = {rows: {"token_ids": np.zeros((rows, 2), "int32")} for rows in (2, 16)}
    tf_serving.write_records(folder, [("double", rows[16]), ("double", rows[2])])
    assert tf_serving.largest_batch(base / "3") == 16
    with pytest.raises(ValueError, match=r"at least 16: version 3 warms up .* Received: 8"):
        hm.write_serving_config(base, max_batch_size=8)
    assert [path.name for path in base.iterdir()] == ["3"]
    hm.write_serving_config(base, max_batch_size=16)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match="no warm-up records that can be read"):
        hm.write_serving_config(base)


def test_xla_signatures_bring_their_flags(tmp_path):
    import keras
    import tensorflow as tf

    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    archive = keras.export.ExportArchive()
    archive.track(layer)
    archive.add_endpoint(
        "serve_xla_1x2", layer.__call__, input_signature=[tf.TensorSpec((1, 2), name="x")]
    )
    archive.write_out(str(tmp_path / "1"), verbose=False)
    written = hm.write_serving_config(tmp_path)
    flags = written.flags
    assert "The serve_xla signatures are of one shape" in written.batching.read_text()
    assert read_batching(written.batching).max_batch_size.value == 32
    assert {"--xla_cpu_compilation_enabled=true", "--xla_gpu_compilation_enabled=true"} < set(flags)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a/b"}, "`name` must be made of letters"),
        ({"name": ""}, "`name` must be made of letters"),
        ({"served_path": "models"}, "`served_path` must be an absolute path"),
        ({"served_path": "/a\nb"}, "`served_path` must be an absolute path"),
        ({"max_batch_size": 0}, "`max_batch_size` must be an integer of at least 1"),
        ({"max_batch_size": 8.0}, "`max_batch_size` must be an integer"),
        ({"batch_timeout_micros": -1}, "`batch_timeout_micros` must be an integer of at least 0"),
        ({"num_batch_threads": True}, "`num_batch_threads` must be an integer"),
        ({"max_batch_size": 2**70}, "of at least 1 and at most 2147483647"),
        ({"batch_timeout_micros": 10**30}, "of at least 0 and at most 2147483647"),
        ({"pad_variable_length_inputs": "false"}, "must be True or False. Received: 'false'"),
        ({"allowed_batch_sizes": [4, 2, 32]}, "must be integers of at least 1 that rise"),
        ({"allowed_batch_sizes": [4, 16]}, "must equal `max_batch_size`"),
    ],
)
def test_bad_values_are_errors_and_nothing_is_written(base, arguments, message):
    with pytest.raises(ValueError, match=message):
        hm.write_serving_config(base, **arguments)
    assert [path.name for path in base.iterdir()] == ["3"]


def test_a_base_without_versions(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no version"):
        hm.write_serving_config(tmp_path)


def test_a_write_that_fails_leaves_what_was_there(base, monkeypatch):
    before = hm.write_serving_config(base).models.read_text()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        hm.write_serving_config(base, name="other")
    names = sorted(path.name for path in base.iterdir())
    assert names == ["3", "batching.txt", "models.config", "server.env"]
    assert (base / "models.config").read_text() == before


def test_signatures_are_read_without_loading(export, tmp_path):
    names = {"serving_default", "serve_padded", "double", "serve"}
    assert read_signatures(export).keys() <= names
    assert read_signatures(export).keys() >= names - {"serve"}
    (tmp_path / "saved_model.pb").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is not a readable SavedModel"):
        read_signatures(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"")  # a SavedModel of nothing
    with pytest.raises(ValueError, match="holds no signature under the tag 'serve'"):
        read_signatures(tmp_path)
