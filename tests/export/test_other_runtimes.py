"""A model with rules answers in other runtimes as in Keras, and what they cannot run is an error.

The table in docs/export.md says what works. A runtime reads its file in a process of its own, since
what it cannot run may end the process.
"""

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
