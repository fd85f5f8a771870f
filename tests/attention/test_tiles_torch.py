"""Tiles by PyTorch's own attention: which calls take them, and what they give."""

import keras
import numpy as np
import oracle
import pytest
from contract import gradient, numpy
from keras import ops
from largest import largest_in_torch
from laws import weights
from tiled_contract import (
    SCALE,
    attend,
    close,
    operands,
    tiles,
    weighted,
)

import keras_headmask as hm

if keras.backend.backend() != "torch":
    pytest.skip("needs the PyTorch backend", allow_module_level=True)

import torch

from keras_headmask.attention import gathered
from keras_headmask.attention.torch import tiles as sdpa_tiles


@pytest.fixture
def taken(monkeypatch):
    """The queries and keys of each call of PyTorch's attention."""
    calls = []
    usual = sdpa_tiles.scaled_dot_product_attention

    def counted(query, key, value, **rest):
        calls.append((query.shape[2], key.shape[2]))
        return usual(query, key, value, **rest)

    monkeypatch.setattr(sdpa_tiles, "scaled_dot_product_attention", counted)
    return calls


# ---------------------------------------------------------------- which calls take them


def test_exported_code_is_as_before(taken):
    class Model(torch.nn.Module):
        def forward(self, *qkv):
            return attend(qkv, hm.Window(9, 9), tiled=None)

    qkv = tuple(torch.from_numpy(x) for x in operands(1, 300, 300, 2))
    exported = torch.export.export(Model(), qkv, strict=False).module()
    assert not taken
    close(exported(*qkv), Model()(*qkv))


@pytest.mark.parametrize("tiled", [None, True, False])
def test_vmap(tiled):
    qkv = [torch.from_numpy(x)[:, None] for x in operands(2, 300, 300, 2)]
    spec = hm.Window(9, 9)
    got = torch.func.vmap(lambda *x: attend(x, spec, tiled=tiled))(*qkv)
    close(got[:, 0], attend([x[:, 0] for x in qkv], spec, tiled=False))


@pytest.mark.parametrize("cap", [None, 1e4])
@pytest.mark.parametrize("is_mapped", [False, True], ids=["grad", "vmap"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_hidden_changes_no_gradient_by_torch_func(bad, is_mapped, cap):
    """A key, a value, and a query that sees nothing."""
    qkv = operands(3, 11, 11, 2)
    qkv[0][0, 10], qkv[1][1, 6], qkv[2][2, 6] = bad, bad, bad
    spec = hm.Window(3, 3) & ~hm.Keys(6, 7) & hm.Queries(0, 10)
    mask = oracle.mask(spec, 3, 2, 11, 11, {})
    upstream = np.repeat(weights(1, 11, 2), 3, axis=0)
    _, exact = oracle.with_gradients(*qkv, mask, SCALE, upstream)

    def loss(*qkv):
        qkv = [x.reshape(-1, *x.shape[-3:]) for x in qkv]
        context = attend(qkv, spec, logits_soft_cap=cap)
        return (context * torch.from_numpy(upstream[:1])).sum()

    pulled = torch.func.grad(loss, argnums=(0, 1, 2))
    with tiles():
        given = tuple(map(torch.from_numpy, qkv))
        made = torch.func.vmap(pulled)(*given) if is_mapped else pulled(*given)
        of_key = torch.func.grad(loss, argnums=1)(*given)
    for got, name in zip((*made, of_key), (*exact, "key"), strict=True):
        close(got, exact[name], name)


def test_shapes_alone_are_inferred_without_values(taken):
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(2, 2))
    x = keras.Input((300, 8))
    model = keras.Model(x, layer(x, x))
    assert not taken
    assert tuple(model(np.ones((1, 300, 8), "float32")).shape) == (1, 300, 8)
    assert taken


# ---------------------------------------------------------------- what they give


def dense64(qkv, *rest):
    return attend([ops.cast(ops.convert_to_tensor(x), "float64") for x in qkv], *rest, tiled=False)


def test_errors_are_no_larger_than_those_of_the_dense_implementation():
    rng = np.random.default_rng(0)
    qkv = [rng.normal(size=(1, 600, 4, 16)).astype("float32") * 3 for _ in range(3)]
    spec = hm.Window(99, 50)
    exact = numpy(dense64(qkv, spec))
    errors = [np.abs(numpy(attend(qkv, spec, tiled=t)) - exact).max() for t in (True, False)]
    assert errors[0] <= 2 * errors[1]


def test_an_upstream_gradient_may_be_large():
    q, k, v = operands(1, 23, 23, 2, size=8, value_size=8)
    v[:, 20:] = 1e14
    spec = hm.Keys(0, 20)
    kept = torch.from_numpy(np.full((1, 23, 2, 8), 1e30, "float32"))

    def loss(*x, tiled=True):
        return (attend(x, spec, tiled=tiled) * kept).sum()

    with tiles():
        made = gradient(loss, q, k, v)
    for one in made:
        assert np.isfinite(one).all()
    assert (made[1][:, 20:] == 0).all()
    assert (made[2][:, 20:] == 0).all()


def test_what_is_kept_for_the_gradient_is_the_operands_alone():
    """Whatever the mask inputs are, nothing grows with queries x keys."""
    length = 1024
    qkv = operands(1, length, length, 2, size=8, value_size=8)
    ids = (np.arange(length)[None] // 100).astype("int32")

    def step(*x):
        return gradient(lambda *x: weighted(attend(x, hm.SameSegment("ids"), {"ids": ids})), *x)

    assert largest_in_torch(step, *qkv) < length * length / 8
    given = [torch.from_numpy(x).requires_grad_() for x in qkv]
    context = attend(given, hm.SameSegment("ids"), {"ids": ids})
    held = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: held.append(x.numel()) or x, lambda x: x
    ):
        context = attend(given, hm.SameSegment("ids"), {"ids": ids})
    assert context.requires_grad
    assert sum(held) == sum(x.size for x in qkv)


def test_the_loop_of_keras_operations_is_only_for_what_is_large(monkeypatch):
    called = []
    usual = gathered.compute
    monkeypatch.setattr(gathered, "compute", lambda *x: called.append(x) or usual(*x))
    q, k, v = operands(1, 23, 23, 2)
    spec = hm.Keys(0, 20)
    with tiles():
        attend((q, k, v), spec)
        k[:, 21] = np.inf
        attend((q, k, v), spec)
        assert not called, "no query sees it"
        k[:, 11] = np.inf
        attend((q, k, v), spec)
    assert called


@pytest.mark.parametrize("name", ["sinks", "logits_soft_cap", "bias"])
def test_gradients_under_autocast(name):
    """As those of all logits, to the precision of bfloat16."""
    more = {"sinks": torch.zeros(2), "logits_soft_cap": 5.0, "bias": torch.ones(1, 1, 23, 23)}[name]
    made = []
    for tiled in (True, False):
        qkv = [torch.from_numpy(x).requires_grad_() for x in operands(1, 23, 23, 2)]
        with tiles(), torch.autocast("cpu", torch.bfloat16):
            context = attend(qkv, hm.Window(2, 2), tiled=tiled, **{name: more})
        made.append(torch.autograd.grad(context.float().square().sum(), qkv))
    for tiled, dense in zip(*made, strict=True):
        torch.testing.assert_close(tiled, dense, rtol=0.1, atol=0.1)
