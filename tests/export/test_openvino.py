"""OpenVINO, which shares no code with TensorFlow, reads an exported version and agrees."""

import pytest
from contract import numpy
from export_models import masked, ours, tokens
from tolerance import assert_close

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow
openvino = pytest.importorskip("openvino")


def test_it_reads_the_same_folder_and_agrees(tmp_path):
    """In `dense_scope`: it lacks loops of more than one step, and what finds sizes beside them."""
    core = openvino.Core()
    for i, model in enumerate((ours(tiled=None), masked(with_padding=False))):
        with hm.dense_scope():
            report = hm.export_saved_model(model, tmp_path / str(i), check=False)
        read = core.read_model(str(report.path))
        compiled = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        for shape in [(1, 1), (2, 6), (3, 40), (2, 300)]:
            ids = tokens(*shape)
            wanted = model({"token_ids": ids} if isinstance(model.input, dict) else ids)
            wanted = wanted if isinstance(wanted, dict) else {"output_0": wanted}
            got = compiled({"token_ids": ids})
            for name, value in wanted.items():
                assert_close(got[name], numpy(value), message=str(shape))
