"""Tiles equal the definition: any rule, any lengths, any backend, forward and gradient."""

import dataclasses

import keras
import numpy as np
import oracle
import pytest
from contract import gradient, numpy
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from largest import largest_in_jax, largest_in_torch
from strategies import FEW, MANY, cases
from tiled_contract import (
    BACKEND,
    LONG,
    SCALE,
    SIZES,
    attend,
    both_gradients,
    close,
    operands,
    seeds,
    sizes,
    tiles,
    weighted,
)
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import blocks, dense, unrolled
from keras_headmask.attention.head_groups import Part
from keras_headmask.rules import evaluation

# ---------------------------------------------------------------- the law


def check_forward(case, tile_sizes, seed):
    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = operands(batch, queries, keys, heads, seed)
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    with tiles(*tile_sizes):
        got = numpy(attend(qkv, spec, inputs, offset))
    close(got, oracle.attention(*qkv, mask, SCALE)[0], "the definition in loops")
    close(got, attend(qkv, spec, inputs, offset, tiled=False), "dense")
    assert (got.transpose(0, 2, 1, 3)[~mask.any(-1)] == 0).all(), "dead rows are exactly 0"


@MANY
@given(cases(), sizes, seeds)
def test_any_rule_equals_the_definition(case, tile_sizes, seed):
    check_forward(case, tile_sizes, seed)


@FEW
@given(cases(), sizes, seeds)
def test_any_rule_has_the_gradients_of_the_definition(case, tile_sizes, seed):
    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = operands(batch, queries, keys, heads, seed)
    dead = ~oracle.mask(spec, batch, heads, queries, keys, inputs, offset).any(-1)
    with tiles(*tile_sizes):
        for name, got, wanted in both_gradients(qkv, spec, inputs, offset):
            close(got, wanted, f"gradient of {name}")
            if name == "q":
                assert (got.transpose(0, 2, 1, 3)[dead] == 0).all()


@FEW
@given(cases(), seeds, st.booleans())
def test_the_python_loop_equals_the_definition_on_every_backend(case, seed, of_one_rule):
    """Called by itself, since TensorFlow has a loop of its own.

    Of heads with one rule, or of all heads together, as where they are spread over devices.
    """
    spec, inputs, batch, heads, queries, keys, offset = case
    rule = spec.for_head(1) if of_one_rule else spec
    qkv = operands(batch, queries, keys, heads, seed)
    heads_of_rule = tuple(range(heads))
    inputs = {name: inputs[name] for name in rule.inputs}
    bound = evaluation.bind(rule, inputs, queries, keys, offset)
    mask = evaluation.mask_of_all_heads(rule, bound, heads)
    with tiles(block=2, wide=4) as tuning:
        part = Part(rule, heads_of_rule, bound, SCALE, tuning)
    plan = blocks.plan_of(part, queries, keys, offset)
    got = unrolled.compute(part, plan, *map(ops.convert_to_tensor, qkv))
    wanted, _ = dense.attention(*map(ops.convert_to_tensor, qkv), mask, SCALE)
    close(got, wanted)
    assert 0 <= plan.share(keys) <= 1


@pytest.mark.parametrize("name", LONG)
def test_longer_sequences_forward_and_gradient(name):
    spec, inputs = LONG[name]
    qkv = operands(3, 23, 23, 4)
    mask = np.broadcast_to(
        numpy(hm.make_mask(spec, 23, 23, num_heads=4, mask_inputs=inputs or None)), (3, 4, 23, 23)
    )
    for tile_sizes in SIZES[1:2]:
        with tiles(*tile_sizes):
            got = numpy(attend(qkv, spec, inputs))
            close(got, oracle.attention(*qkv, mask, SCALE)[0], name)
            dead = ~mask.any(-1)
            assert (got.transpose(0, 2, 1, 3)[dead] == 0).all()
            for which, grad, wanted in both_gradients(qkv, spec, inputs):
                close(grad, wanted, f"{name}: gradient of {which}")


@FEW
@given(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 1))
def test_any_permutation_of_heads_between_rules(rule_of_head, last):
    rules = (hm.Window(1, 1), hm.Window(after=0), hm.Chunk(3) | hm.Keys(0, 1))
    spec = hm.PerHead({head: rules[rule] for head, rule in enumerate(rule_of_head)}, rules[last])
    check_forward((spec, {}, 2, 5, 7, 7, 0), SIZES[0], 1)


@pytest.mark.parametrize("queries", [1, 4, 5, 8, 12, 13])
@pytest.mark.parametrize("keys", [1, 6, 7, 13])
def test_any_length(queries, keys):
    spec = hm.PerHead({0: hm.Window(2, 1), 1: ~hm.Window(2, 1)}, hm.recipes.streaming(1, 2))
    for offset in (0, 5, -3):
        check_forward((spec, {}, 1, 3, queries, keys, offset), SIZES[0], 0)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (0, 0)])
def test_no_query(queries, keys):
    for spec in (hm.Window(1, 1), hm.Full()):
        got = attend(operands(2, queries, keys, 2), spec)
        assert tuple(got.shape) == (2, queries, 2, 2)


def test_no_example_and_no_key():
    for spec in (hm.Window(1, 1), hm.Full()):
        assert tuple(attend(operands(0, 5, 5, 2), spec).shape) == (0, 5, 2, 2)
        qkv = operands(2, 5, 0, 2)
        close(attend(qkv, spec), attend(qkv, spec, tiled=False))


# ---------------------------------------------------------------- hidden is hidden


@pytest.mark.parametrize("size", [1.0, 1e4, 1e12, 1e30])
def test_hidden_keys_do_not_influence_the_output(tiny, size):
    """To the bit, whatever they hold."""
    hidden = [2, 7, 8, 11]
    spec = hm.PerHead({0: hm.Window(2, 2)}, hm.Window(after=0)) & ~hm.KeyIn("ids", -5)
    ids = np.zeros((2, 13), "int32")
    ids[:, hidden] = -5
    q, k, v = operands(2, 13, 13, 3)
    other_k, other_v = k.copy(), v.copy()
    other_k[:, hidden] = np.random.default_rng(9).normal(size=(2, 4, 3, 3)) * size
    other_v[:, hidden] = size
    got, other = (numpy(attend(x, spec, {"ids": ids})) for x in ((q, k, v), (q, other_k, other_v)))
    np.testing.assert_array_equal(got, other)
    for name, grad, wanted in both_gradients((q, other_k, other_v), spec, {"ids": ids}):
        close(grad, wanted, f"gradient of {name}")
        if name != "q":
            assert (grad[:, hidden] == 0).all()


def test_dead_rows_are_0_with_finite_gradients_of_0(tiny):
    spec = hm.PerHead({0: hm.Nothing(), 1: hm.Window(-9, 12)}, hm.Queries(4, 6))
    qkv = operands(2, 13, 13, 3)
    got = numpy(attend(qkv, spec))
    assert (got[:, :, 0] == 0).all()
    assert (got[:, 4:, 1] == 0).all()
    assert (np.delete(got, [4, 5], axis=1)[:, :, 2] == 0).all()
    assert (got[:, 4:6, 2] != 0).all()
    for name, grad, wanted in both_gradients(qkv, spec):
        close(grad, wanted, name)
        assert np.isfinite(grad).all()
        assert (grad[:, :, 0] == 0).all()


def test_a_rule_that_allows_nothing_has_gradients_of_0(tiny):
    for _, grad, _ in both_gradients(operands(1, 5, 5, 2), hm.Nothing()):
        assert (grad == 0).all()


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_large_scores(tiny, size):
    q, k, v = operands(1, 13, 13, 2)
    spec = hm.recipes.streaming(1, 3)
    close(attend((q * size, k, v), spec), attend((q * size, k, v), spec, tiled=False))
    for name, grad, wanted in both_gradients((q * size, k, v), spec):
        # The largest scores round to 1e-7 of themselves, which is what the gradients then carry.
        assert_close(grad, wanted, message=name, depth=6 * size)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_are_the_values(tiny, dtype):
    if dtype == "float64" and BACKEND == "jax":
        pytest.skip("JAX holds 32 bits")
    qkv = [ops.cast(x, dtype) for x in operands(2, 9, 9, 3)]
    spec = hm.Window(2, 1) | hm.Keys(0, 1)
    got, wanted = attend(qkv, spec), attend(qkv, spec, tiled=False)
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    assert_close(numpy(got), numpy(wanted), dtype)


def test_an_explicit_mask_is_cut_too(tiny):
    rng = np.random.default_rng(0)
    qkv = operands(2, 9, 11, 3)
    spec = hm.PerHead({1: hm.Window(2, 2)}, hm.Keys(1))
    for shape in ((9, 11), (2, 9, 11), (2, 3, 9, 11), (1, 3, 9, 11), (2, 1, 1, 11), (2, 3, 9, 1)):
        mask = rng.random(shape) < 0.6
        for rule in (spec, None):
            got = attend(qkv, rule, mask=mask)
            close(got, attend(qkv, rule, mask=mask, tiled=False), str(shape))


# ---------------------------------------------------------------- a rule of a user's own


@hm.register_spec("test_tiled_nearer_date")
@dataclasses.dataclass(frozen=True)
class NearDate(hm.MaskSpec):
    """Reads data, and says nothing of tiles."""

    days: int

    @property
    def inputs(self):
        return {"day": hm.InputType()}

    def allowed(self, query_positions, key_positions, inputs):
        query, key = inputs["day"]
        return (key - query <= self.days) & (query - key <= self.days)


def test_a_rule_that_says_nothing_of_tiles(tiny):
    days = np.random.default_rng(0).integers(0, 9, (2, 13)).astype("int32")
    qkv = operands(2, 13, 13, 3)
    spec = hm.PerHead({1: NearDate(2)}, NearDate(3) & hm.Window(4, 4) | ~NearDate(6))
    close(attend(qkv, spec, {"day": days}), attend(qkv, spec, {"day": days}, tiled=False))
    for name, grad, wanted in both_gradients(qkv, spec, {"day": days}):
        close(grad, wanted, name)


# ---------------------------------------------------------------- memory, off TensorFlow


@pytest.mark.skipif(BACKEND == "tensorflow", reason="its graphs are looked through elsewhere")
def test_nothing_of_size_queries_x_keys_is_made_off_tensorflow():
    length = 1024
    qkv = operands(1, length, length, 2)
    spec = hm.PerHead({0: hm.Window(64, 64)}, hm.recipes.streaming(4, 64))

    def forward_and_gradient(tiled):
        def loss(*x):
            return weighted(hm.dot_product_attention(*x, mask_spec=spec, tiled=tiled))

        if BACKEND == "jax":
            import jax

            return largest_in_jax(jax.grad(loss, argnums=(0, 1, 2)), *qkv)
        return largest_in_torch(lambda *x: gradient(loss, *x), *qkv)

    assert forward_and_gradient(tiled=False) >= length * length
    assert forward_and_gradient(tiled=True) < length * length / 4
