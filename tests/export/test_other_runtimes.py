"""A model with rules answers in other runtimes as in Keras, and what they cannot run is an error.

The table in docs/export.md says what works. A runtime reads its file in a process of its own, since
what it cannot run may end the process. The loader that TensorFlow Serving uses is C++: `loader.cc`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contract import numpy
from export_models import both, inputs_of_both
from tolerance import assert_close

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow
# By the arguments of `export`: the file, and what else must be installed. "version": of ours.
FORMATS = {
    "onnx": ("model.onnx", "onnxruntime", "tf2onnx"),
    "openvino": ("model.xml", "openvino", "scipy"),
    "litert": ("model.tflite", "ai_edge_litert"),
    "version": ("1", "openvino"),
}
# Its arguments: a format, its file, and files of inputs; the one output, or an error, goes beside.
READER = """
import sys
import numpy as np
_, name, model, *files = sys.argv
if name == "onnx":
    import onnxruntime
    session = onnxruntime.InferenceSession(model)
    run = lambda inputs: session.run(["sequence"], inputs)[0]
elif name == "litert":
    from ai_edge_litert.interpreter import Interpreter
    runner = Interpreter(model).get_signature_runner()
    run = lambda inputs: runner(**inputs)["sequence"]
else:
    import openvino
    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # it may choose bfloat16 by itself
    compiled = openvino.Core().compile_model(model, "CPU", exact)
    run = lambda inputs: compiled(inputs)["sequence"]
for file in files:
    with np.load(file) as inputs:
        try:
            np.save(file + ".npy", run(dict(inputs)))
        except Exception as error:  # each runtime has its own
            print(error, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "length", [None, pytest.param(300, marks=pytest.mark.long)], ids=["any length", "300"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_other_runtimes_obey_the_rule(name, length, tmp_path):
    file, *needed = FORMATS[name]
    for module in needed:
        pytest.importorskip(module, reason=f"`pip install -e .[test-all]`: {module}")
    model = both(tiled=None, length=length)
    if name == "version":  # without loops, which OpenVINO lacks
        with hm.dense_scope():
            hm.export_saved_model(model, tmp_path, check=False)
    else:
        model.export(str(tmp_path / file), format=name, verbose=False)
    asked = [inputs_of_both(b, length or t) for b, t in ((2, 13), (1, 1), (3, 300))]
    wrong = asked[0] | {"padding_mask": asked[0]["padding_mask"][:1]}  # of one example
    files = [tmp_path / f"{i}.npz" for i in range(4)]
    for path, inputs in zip(files, [*asked, wrong], strict=True):
        np.savez(path, **inputs)
    command = [sys.executable, "-c", READER, name, tmp_path / file, *files]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    *answers, refused = [Path(f"{path}.npy") for path in files]
    for path, inputs in zip(answers, asked, strict=True):
        assert_close(np.load(path), numpy(model(inputs)["sequence"]), depth=3)
    assert not refused.exists()
    assert name == "litert" or "mask_input_of_another_shape" in ended.stderr


# --- C++ ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """The program, built against the wheel of TensorFlow."""
    import tensorflow as tf

    libraries = Path(tf.sysconfig.get_lib())
    if not shutil.which("g++") or not (libraries / "libtensorflow_cc.so.2").exists():
        pytest.skip("needs g++ and libtensorflow_cc.so.2")
    program = tmp_path_factory.mktemp("loader") / "loader"
    flags = [*tf.sysconfig.get_compile_flags(), "-O1", "-std=c++17", "-DNDEBUG", "-w"]
    # (Sessions are registered by a library of which nothing is called by name.)
    linked = ["-Wl,--no-as-needed", "-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"]
    linked += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    source = Path(__file__).with_name("loader.cc")
    run("g++", *flags, source, "-o", program, *linked)
    return program


def run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])


def ask(loader, version, place, requests):
    """For each pair of a signature and inputs, the answers by name, or the text of the error."""
    import tensorflow as tf
    from tensorflow.core.framework.tensor_pb2 import TensorProto

    folders = [place / str(i) for i in range(len(requests))]
    for folder, (signature, inputs) in zip(folders, requests, strict=True):
        folder.mkdir(parents=True)
        (folder / "signature").write_text(signature)
        for name, x in inputs.items():
            (folder / f"{name}.pb").write_bytes(tf.make_tensor_proto(x).SerializeToString())
    run(loader, version, place)
    for folder in folders:
        if (folder / "error").exists():
            yield (folder / "error").read_text()
            continue
        files = {file.stem: file.read_bytes() for file in folder.glob("*.out")}
        yield {name: tf.make_ndarray(TensorProto.FromString(x)) for name, x in files.items()}


@pytest.mark.long  # it compiles C++
def test_the_loader_of_servers_answers_as_python_and_refuses_what_is_wrong(loader, tmp_path):
    model = both(tiled=None)
    version = hm.export_saved_model(model, tmp_path / "m", check=False).path
    asked = [inputs_of_both(*shape) for shape in ((1, 1), (2, 6), (5, 17), (1, 129), (2, 300))]
    good, ids = asked[1], asked[1]["token_ids"]
    bad = [
        good | {"token_ids": ids.astype("float32")},
        good | {"token_ids": ids[0]},
        good | {"token_ids": ids[..., None]},
        {"token_ids": ids},  # an input missing
    ]
    requests = [("serving_default", inputs) for inputs in (*asked, *bad)]
    requests.append(("no such signature", good))
    answers = list(ask(loader, version, tmp_path / "asked", requests))
    for inputs, got in zip(asked, answers, strict=False):
        for name, wanted in model(inputs).items():
            assert_close(got[name], numpy(wanted), message=name, depth=3)
    for error in answers[len(asked) :]:
        assert error.startswith("INVALID_ARGUMENT\n"), error

    (data,) = (version / "variables").glob("variables.data-*")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(RuntimeError, match=r"(?i)truncated|out_of_range|data_loss"):
        list(ask(loader, version, tmp_path / "again", requests[:1]))
