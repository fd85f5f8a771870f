"""Compiled code on PyTorch, forward: FlexAttention over the blocks that a rule leaves open."""

import contextlib

import keras
import numpy as np
import pytest
from contract import numpy
from keras import ops
from tiled_contract import attend, close, operands

import keras_headmask as hm
from keras_headmask.attention.tuning import dense_scope

if keras.backend.backend() != "torch":
    pytest.skip("needs the PyTorch backend", allow_module_level=True)

import torch

from keras_headmask.attention.torch import flex


@pytest.fixture
def taken(monkeypatch):
    """The block masks of each call of FlexAttention."""
    calls = []
    usual = flex.flex_attention

    def counted(*operands, block_mask, **rest):
        calls.append(block_mask.kv_num_blocks.shape)
        return usual(*operands, block_mask=block_mask, **rest)

    monkeypatch.setattr(flex, "flex_attention", counted)
    torch._dynamo.reset()
    return calls


# ---------------------------------------------------------------- which calls take it


def compiled(function, **rest):
    return torch.compile(function, fullgraph=True, **rest)


@torch.no_grad()
@pytest.mark.parametrize("name", ["window", "documents", "padding", "per head", "full"])
def test_compiled_code_is_one_graph(taken, name):
    """Whatever compiles it: here nothing does, and the graph is run as it is."""
    ids, pad = np.arange(300)[None] // 70, np.arange(300)[None] < 290
    two_heads = hm.PerHead({0: hm.Window(9, 9), 2: hm.Window(9, 9)})
    spec, inputs = {
        "window": (hm.Window(9, 9), {}),
        "documents": (hm.SameSegment("ids") & hm.Window(after=0), {"ids": ids}),
        "padding": (hm.SameSentence(1, "ids") | hm.KeyFlag("pad"), {"ids": ids, "pad": pad}),
        "per head": (two_heads & hm.KeyFlag("pad"), {"pad": pad}),
        "full": (hm.Full(), {}),
    }[name]
    inputs = {key: torch.from_numpy(x) for key, x in inputs.items()}
    qkv = [torch.from_numpy(x) for x in operands(1, 300, 300, 4, key_heads=4)]
    wanted = attend(qkv, spec, inputs, tiled=False)
    got = compiled(lambda *x: attend(x, spec, inputs, tiled=None), backend="eager")(*qkv)
    assert len(taken) == (2 if name == "per head" else 1)
    close(got, wanted)


WHOLE = torch.ones(300, 300, dtype=torch.bool)
NEAR = hm.Window(9, 9)
# What `attend` is given beside the operands.
OTHER_CALLS = {
    "not compiled": {},
    "short": {},
    "double": {},
    "gradients": {},
    "dense": {},
    "dropout": {"dropout": 0.5, "seed": 1},
    "soft cap": {"logits_soft_cap": 3.0},
    "whole mask": {"spec": NEAR & hm.MaskInput("m"), "mask_inputs": {"m": WHOLE}},
}


@pytest.mark.parametrize("name", OTHER_CALLS)
@pytest.mark.every_day("not compiled|short|gradients")
def test_other_calls_do_not_take_it(taken, name):
    qkv = [torch.from_numpy(x) for x in operands(1, 300, 300, 2)]
    given = {"spec": NEAR, "mask_inputs": None} | OTHER_CALLS[name]

    def call(*qkv):
        return attend(qkv, given["spec"], given["mask_inputs"], tiled=None, **rest)

    rest = {k: x for k, x in given.items() if k not in ("spec", "mask_inputs")}
    run = call if name == "not compiled" else torch.compile(call, backend="eager")
    if name == "gradients":
        run(*(x.requires_grad_() for x in qkv)).sum().backward()
        assert qkv[0].grad is not None
    with torch.no_grad(), dense_scope() if name == "dense" else contextlib.nullcontext():
        qkv = {"double": [x.double() for x in qkv], "short": [x[:, :200] for x in qkv]}.get(
            name, qkv
        )
        if name != "gradients":
            run(*qkv)
    assert not taken


def test_what_is_held_while_code_is_compiled_counts(taken):
    """A value that a context holds is read anew; code compiled without one is not used then."""
    qkv = [torch.from_numpy(x) for x in operands(1, 300, 300, 2)]
    call = torch.compile(lambda *x: attend(x, hm.Window(9, 9), tiled=None), backend="eager")
    with torch.no_grad():
        call(*qkv)
        assert taken
        taken.clear()
        with dense_scope():
            call(*qkv)
        assert not taken
        call(*qkv)
        assert taken


# ---------------------------------------------------------------- with PyTorch's compiler

needs_compiler = pytest.mark.skipif(not flex._HAS_KERNEL, reason="needs AVX2")


@pytest.mark.long
@needs_compiler
@torch.no_grad()
def test_by_the_compiler_for_lengths_that_vary(taken):
    spec = hm.Window(30, 7) & hm.SameSegment("ids")
    call = compiled(lambda ids, *x: attend(x, spec, {"ids": ids}, tiled=None), dynamic=True)
    for length in (300, 331, 420):
        qkv = [torch.from_numpy(x) for x in operands(1, length, length, 2, size=16, value_size=16)]
        ids = torch.from_numpy(np.arange(length)[None] // 70)
        close(call(ids, *qkv), attend(qkv, spec, {"ids": ids}, tiled=False))
    assert taken


@pytest.mark.long
@needs_compiler
def test_a_model_that_keras_compiles(taken):
    x = np.random.default_rng(0).normal(size=(2, 300, 32)).astype("float32")
    given = keras.Input((300, 32))
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 16, mask_spec=hm.Window(9, 9))
    model = keras.Model(given, layer(given, given))
    wanted = numpy(model(ops.convert_to_tensor(x)))
    model.compile("sgd", "mse", jit_compile=True)
    close(model.predict(x, verbose=0), wanted)
    assert taken
