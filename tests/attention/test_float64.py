"""float64 is float64 throughout, by all logits and by tiles; on JAX with `jax_enable_x64`."""

import contextlib

import changed
import numpy as np
import oracle
import pytest
import strategies
import torch
from contract import gradient, numpy
from hypothesis import given, settings
from keras import ops
from tiled_contract import BACKEND, LONG, SCALE, TRACED, attend, operands, tiles

import keras_headmask as hm
from keras_headmask import _keras
from keras_headmask.attention import observers, one_query

LENGTH, HEADS, BATCH = 23, 16, 1  # (of fewer heads float32 holds all slopes of ALiBi)
_rng = np.random.default_rng(5)
TABLE, BIAS = _rng.normal(size=(6, HEADS)), _rng.normal(size=(BATCH, HEADS, LENGTH, LENGTH))
SINKS = _rng.normal(size=HEADS)
LEARNED = hm.relative_position_bias(HEADS, num_buckets=6, max_distance=9)
CHANGES = {
    "soft cap and sinks": {"soft_cap": 0.8, "sinks": SINKS},
    "alibi": {"position_bias": hm.alibi(HEADS)},
    "learned": {"position_bias": LEARNED, "table": TABLE},
    "bias": {"bias": BIAS},
}


def sixty_four_bits():
    if BACKEND != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(True)


def double(qkv):
    return [x.astype("float64") for x in qkv]


def near(got, wanted, message=""):
    assert got.dtype == "float64", message
    np.testing.assert_allclose(got, wanted, 1e-12, 1e-12, err_msg=message)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_logits(change, tiled):
    spec, inputs = LONG["two dead ends"]
    qkv = double(operands(BATCH, LENGTH, LENGTH, HEADS))
    mask = oracle.mask(spec, BATCH, HEADS, LENGTH, LENGTH, inputs)
    weights = np.cos(np.arange(BATCH * LENGTH * HEADS * 2.0)).reshape(BATCH, LENGTH, HEADS, 2)
    given_changes = CHANGES[change]
    tensors = {k: x for k, x in given_changes.items() if isinstance(x, np.ndarray)}
    constant = {"soft_cap": given_changes.get("soft_cap")}
    if change == "alibi":
        constant["bias"] = torch.from_numpy(changed.alibi(HEADS, LENGTH, LENGTH))
    if change == "learned":
        constant["rows"] = changed.buckets(LEARNED, LENGTH, LENGTH)

    def run(*operands):
        own = dict(zip(tensors, operands[3:], strict=True))
        rest = {k: own[k] for k in ("bias", "sinks") if k in own}
        bias = given_changes.get("position_bias")
        rest["position_bias"] = (bias, own["table"]) if "table" in own else bias
        rest["logits_soft_cap"] = constant["soft_cap"]
        return attend(operands[:3], spec, inputs, tiled=tiled, **rest)

    wanted, gradients = changed.wanted(qkv, mask, SCALE, weights, tensors, constant)
    given = [*qkv, *tensors.values()]
    with sixty_four_bits(), tiles(4, 6, 3):
        near(numpy(run(*given)), wanted)
        of = ops.convert_to_tensor(weights)
        made = gradient(lambda *x: ops.sum(run(*x) * of), *given)
    for name, one in zip(("query", "key", "value", *tensors), made, strict=True):
        near(one, gradients[name], name)


@settings(TRACED, max_examples=3 if BACKEND == "jax" else 12)
@given(strategies.cases())
def test_random_rules(case):
    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = double(operands(batch, queries, keys, heads))
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    weights = np.cos(np.arange(batch * queries * heads * 2.0)).reshape(batch, queries, heads, 2)
    wanted, gradients = changed.wanted(qkv, mask, SCALE, weights)
    with sixty_four_bits(), tiles(2, 3, 2):
        of = ops.convert_to_tensor(weights)

        def run(*operands):
            return attend(operands, spec, inputs, offset)

        near(numpy(run(*qkv)), wanted)
        made = gradient(lambda *x: ops.sum(run(*x) * of), *qkv)
    for name, one in zip(("query", "key", "value"), made, strict=True):
        near(one, gradients[name], name)


def test_float32_operands_where_there_are_64_bits():
    spec, inputs = LONG["documents"]
    qkv = operands(3, LENGTH, LENGTH, 2)
    with sixty_four_bits(), tiles(4, 6, 3):
        made = [
            gradient(lambda *x, t=t: ops.sum(attend(x, spec, inputs, tiled=t) ** 2), *qkv)
            for t in (True, False)
        ]
    for one, other in zip(*made, strict=True):
        assert one.dtype == "float32"
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def test_a_step_of_generation_with_a_soft_cap():
    q, k, v = double(operands(1, 1, 5, 2))
    with sixty_four_bits():
        given = [ops.convert_to_tensor(x) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2))]
        mask = ops.ones((1, 1, 1, 5), "bool")
        got = numpy(one_query.attention(*given, mask, SCALE, soft_cap=0.5))
    constant = {"soft_cap": 0.5}
    near(got, changed.wanted((q, k, v), np.ones((1, 2, 1, 5), bool), SCALE, constant=constant)[0])


@pytest.mark.parametrize("tiled", [True, False])
def test_alibi_of_a_layer(tiled):
    """By Keras' hook, too, where the bias is a whole tensor."""
    x = _rng.normal(size=(1, 9, 3))
    with sixty_four_bits(), tiles(4, 6, 3):
        layer = hm.PerHeadMaskedMultiHeadAttention(
            HEADS, 2, position_bias=hm.alibi(HEADS), tiled=tiled, dtype="float64"
        )
        one = numpy(layer(x, use_causal_mask=True))
        with observers.overriding(layer, _keras.COMPUTE_ATTENTION, hooked):
            other = numpy(layer(x, use_causal_mask=True))
    near(one, other)


def hooked(usual, *args, **kwargs):
    return usual(*args, **kwargs)
