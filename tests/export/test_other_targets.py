"""What `model.export` of Keras makes of a model with rules, run by the runtimes themselves.

The table in docs/export.md says what works. A runtime reads its file in a process of its own, since
what it cannot run may end the process.
"""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from tolerance import assert_close

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow

RULE = hm.PerHead({0: hm.SameSentence(9)}, hm.Window(3, 3)) & hm.KeyFlag("padding_mask")
SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "litert": ".tflite"}
NEEDS = {
    "onnx": ["onnxruntime", "tf2onnx"],
    "openvino": ["openvino", "scipy"],
    "litert": ["ai_edge_litert"],
}
LENGTHS = pytest.mark.parametrize(
    "length", [None, pytest.param(300, marks=pytest.mark.long)], ids=["any length", "300"]
)


@pytest.fixture(params=SUFFIX)
def target(request):
    for module in NEEDS[request.param]:
        pytest.importorskip(module, reason=f"`pip install -e .[targets]`: {module}")
    return request.param


def layer_model(length):
    inputs = {
        name: keras.Input((length,), dtype="int32", name=name)
        for name in ("token_ids", "padding_mask")
    }
    x = keras.layers.Embedding(20, 16)(inputs["token_ids"])
    context = hm.PerHeadMaskedMultiHeadAttention(2, 8, mask_spec=RULE)(x, mask_inputs=inputs)
    return keras.Model(inputs, {"context": context})


def masked_model(length):
    token_ids = keras.Input((length,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(20, 16)(token_ids)
    for _ in range(2):
        x = keras.layers.MultiHeadAttention(2, 8)(x, x)
    stock = keras.Model({"token_ids": token_ids}, {"context": x})
    return hm.apply_head_masks(stock, RULE, add_inputs=True)


def data(batch, length):
    token_ids = np.random.default_rng(length).integers(1, 20, (batch, length)).astype("int32")
    padding_mask = np.ones((batch, length), "int32")
    padding_mask[0, length * 3 // 4 :] = 0
    return {"token_ids": token_ids, "padding_mask": padding_mask}


def run(target, model, folder, batches):
    """The outputs of the runtime, `None` for refused inputs, and what it said when it ended."""
    file = folder / f"model{SUFFIX[target]}"
    model.export(str(file), format=target, verbose=False)
    names = [folder / f"{i}.npz" for i in range(len(batches))]
    for name, inputs in zip(names, batches, strict=True):
        np.savez(name, **inputs)
    reader = pathlib.Path(__file__).parents[1] / "support" / "other_runtimes.py"
    command = [sys.executable, reader, target, file, *names]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ended.returncode:
        return None, ended.stderr
    outputs = [name.with_suffix(".npy") for name in names]
    return [np.load(x) if x.exists() else None for x in outputs], ended.stderr


@pytest.mark.parametrize("model_of", [layer_model, masked_model])
@LENGTHS
@pytest.mark.every_day("(onnx|litert).*masked_model")  # (`test_openvino.py` has one, too)
def test_other_runtimes_obey_the_rule(target, length, model_of, tmp_path):
    model = model_of(length)
    dtypes = {tensor.name: tensor.dtype for tensor in model.inputs}
    batches = [
        {name: x.astype(dtypes[name]) for name, x in data(batch, length or t).items()}
        for batch, t in ((2, 13), (1, 1), (3, 300))
    ]
    expected = [keras.ops.convert_to_numpy(model(x)["context"]) for x in batches]
    wrong = batches[0] | {"padding_mask": batches[0]["padding_mask"][:1]}  # of one example
    got, said = run(target, model, tmp_path, [*batches, wrong])
    assert got is not None, said
    assert got.pop() is None
    assert target == "litert" or "mask_input_of_another_shape" in said  # it does not name the place
    for of_runtime, of_keras in zip(got, expected, strict=True):
        assert of_runtime is not None, said
        assert_close(of_runtime, of_keras)
