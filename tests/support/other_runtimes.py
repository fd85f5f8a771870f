"""Run an exported model: `python other_runtimes.py FORMAT MODEL INPUTS.npz ...`

Imports neither Keras nor TensorFlow. The one output goes to INPUTS.npy beside each INPUTS.npz;
of inputs that the runtime refuses there is none, and it is printed why.
"""

import pathlib
import sys
from collections.abc import Callable

import numpy as np


def onnx(model: str) -> Callable:
    import onnxruntime

    session = onnxruntime.InferenceSession(model)
    return lambda inputs: session.run(None, inputs)[0]


def openvino(model: str) -> Callable:
    import openvino

    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # it may choose bfloat16 by itself
    compiled = openvino.Core().compile_model(model, "CPU", exact)
    return lambda inputs: next(iter(compiled(inputs).values()))


def litert(model: str) -> Callable:
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(model).get_signature_runner()
    return lambda inputs: next(iter(run(**inputs).values()))


if __name__ == "__main__":
    _, name, model, *files = sys.argv
    run = {"onnx": onnx, "openvino": openvino, "litert": litert}[name](model)
    for file in map(pathlib.Path, files):
        with np.load(file) as inputs:
            try:
                output = run(dict(inputs))
            except Exception as error:  # each runtime has its own
                print(error, file=sys.stderr)
                continue
        np.save(file.with_suffix(".npy"), output)
