"""Code that a user compiles by PyTorch: one graph, in inference and in training."""

import keras
import numpy as np
import pytest
from tiled_contract import attend, close, operands

import keras_headmask as hm

if keras.backend.backend() != "torch":
    pytest.skip("needs the PyTorch backend", allow_module_level=True)

import torch
from torch._dynamo.testing import CompileCounterWithBackend

NEAR = hm.Window(9, 9)
BY_HEAD = hm.PerHead({0: NEAR, 1: hm.SameSegment("ids") & hm.Window(9, 0)}, ~hm.Keys(9))


def given(spec, length):
    ids = torch.arange(length)[None].expand(2, -1) // 70
    return {"ids": ids} if spec.inputs else {}


@pytest.fixture
def counter():
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("spec", "trains", "lengths"), [(NEAR, False, (300, 301, 302)), (BY_HEAD, True, (300,))]
)
def test_attention_is_one_graph(counter, spec, trains, lengths):
    """And a second one serves all other lengths."""
    run = torch.compile(
        lambda inputs, *qkv: attend(qkv, spec, inputs, tiled=None), fullgraph=True, backend=counter
    )
    for length in lengths:
        qkv = [torch.from_numpy(x).requires_grad_(trains) for x in operands(2, length, length, 3)]
        inputs = given(spec, length)
        with hm.dense_scope():
            wanted = attend(qkv, spec, inputs, tiled=None)
        got = run(inputs, *qkv)
        close(got.detach(), wanted.detach())
        if trains:
            of_both = [torch.autograd.grad(x.square().sum(), qkv) for x in (got, wanted)]
            for one, other in zip(*of_both, strict=True):
                close(one, other)
    assert counter.frame_count == min(2, len(lengths))


def test_a_layer_that_trains_is_one_graph(counter):
    """Its rule joined with padding inside of the graph."""
    layer = hm.PerHeadMaskedMultiHeadAttention(3, 8, mask_spec=BY_HEAD)
    x = torch.from_numpy(operands(2, 300, 300, 1, size=8)[0][:, :, 0])
    padding = torch.arange(300)[None].expand(2, -1) < 290

    def loss(x):
        inputs = given(layer.mask_spec, 300)
        return layer(x, mask_inputs=inputs, query_mask=padding).square().sum()

    wanted = loss(x)
    weights = [v.value for v in layer.trainable_variables]
    exact = torch.autograd.grad(wanted, weights)
    got = torch.compile(loss, fullgraph=True, backend=counter)(x)
    close(got.detach(), wanted.detach())
    for one, other in zip(torch.autograd.grad(got, weights), exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1
    called = {str(x.target) for x in counter.graphs[0].graph.nodes}
    assert not any("scaled_dot_product" in name for name in called)  # it would get a whole mask
