"""The loops on JAX: what is skipped by data, by every transformation, and which calls take them."""

import dataclasses
import functools
from unittest import mock

import keras
import numpy as np
import oracle
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import (
    FEW,
    LENGTHS,
    mask_inputs,
    offsets_of_pairs,
    positional_leaves,
    shared_specs,
    specs,
)
from tiled_contract import LONG, SCALE, close, operands, tiles

import keras_headmask as hm

if keras.backend.backend() != "jax":
    pytest.skip("these loops are JAX'", allow_module_level=True)

import jax
import jax.numpy as jnp

from keras_headmask.attention import gathered
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.jax import block_loop, key_blocks
from keras_headmask.attention.tuning import current_tuning, tuned
from keras_headmask.rules import evaluation


def weights(shape):
    return np.cos(np.arange(np.prod(shape), dtype="float32")).reshape(shape)


def attention(spec, inputs, tiled=True, **rest):
    """A function of queries, keys and values."""

    def attend(*qkv):
        given = {"mask_spec": spec, "mask_inputs": inputs or None, "scale": SCALE} | rest
        return hm.dot_product_attention(*qkv, tiled=tiled, **given)

    return attend


def with_gradients(attend):
    """Its context, and the gradients of a sum of it that every entry has its own part in."""

    def run(*qkv):
        context, pull = jax.vjp(attend, *qkv)
        return context, *pull(jnp.asarray(weights(context.shape)))

    return run


# --- Any rule ------------------------------------------------------------------------------------

# Shapes are few, and the heads obey one rule: most of the time JAX compiles.
EXAMPLES, HEADS = 2, 2


@st.composite
def cases_of_one_rule(draw):
    spec, lengths = draw(shared_specs), draw(st.sampled_from(LENGTHS))
    offset = draw(offsets_of_pairs(spec))
    return spec, draw(mask_inputs(spec, EXAMPLES, *lengths, HEADS)), *lengths, offset


def looked_at(spec, inputs, queries, keys, offset):
    """How often the loops meet each pair and find it allowed, `(B, H, T, S)`."""
    bound = evaluation.bind(spec, inputs, queries, keys, offset)
    part = Part(spec, tuple(range(HEADS)), bound, SCALE, current_tuning())
    operands = (np.zeros((EXAMPLES, length, HEADS, 1)) for length in (queries, keys))
    with mock.patch.object(key_blocks, "_one_run", return_value=None):
        steps = key_blocks.Steps.of(*key_blocks.planned(part, offset), *operands)
    # Tensors that hold the example and the position, up to whole tiles and blocks.
    of_queries, of_keys = (
        jnp.asarray(np.stack(np.broadcast_arrays(*np.ogrid[:EXAMPLES, :1, :length]), -1)[..., ::2])
        for length in (queries + -queries % steps.tile, keys + -keys % steps.size)
    )
    seen = np.zeros((EXAMPLES, HEADS, of_queries.shape[2], of_keys.shape[2]), int)
    for number in range(steps.number):
        step = steps.step(number)
        rows = np.asarray(step.rows(of_queries))[:, 0]
        for place in range(int(step.count)):
            visit = step.block(place)
            columns = np.asarray(visit.cut(of_keys))[:, 0]
            assert (rows[:, :1, 0] == columns[:, :1, 0]).all(), "keys are of the same example"
            shape = len(rows), HEADS, rows.shape[1], columns.shape[1]
            allowed = True if visit.allowed is None else np.asarray(visit.allowed)
            for i, of_example in enumerate(np.broadcast_to(allowed, shape)):
                pairs = np.ix_([rows[i, 0, 0]], range(HEADS), rows[i, :, 1], columns[i, :, 1])
                seen[pairs] += of_example[None]
    return seen[:, :, :queries, :keys]


@settings(FEW, max_examples=60)
@given(cases_of_one_rule())
def test_each_pair_that_any_rule_allows_is_met_once(case):
    """Nothing is compiled, so there are many examples."""
    spec, inputs, queries, keys, offset = case
    mask = oracle.mask(spec, EXAMPLES, HEADS, queries, keys, inputs, offset)
    with tiles(local=2, wide=3, block=2):
        np.testing.assert_array_equal(looked_at(*case), mask)


def places(heads, length):
    """`(B, L, heads, 3)`: the number of the example, the head and the position, from 1."""
    return jnp.asarray(np.stack(np.indices((EXAMPLES, length, heads)), -1) + 1)


@settings(FEW, max_examples=60)
@given(specs(positional_leaves, per_head=False), st.sampled_from(LENGTHS), st.sampled_from([1, 2]))
def test_runs_of_keys_meet_each_pair_of_rows_that_share_a_head_once(spec, lengths, sharing):
    (queries, keys), offset = lengths, max(0, lengths[1] - lengths[0])
    heads = 2 * sharing
    less = mock.patch.object(key_blocks, "_LEAST_SEEN", 0.3)
    with tiles(local=2, wide=3, block=2), tuned(most_logits_of_a_step=48), less:
        nothing = evaluation.bind(spec, None, queries, keys, offset)
        part = Part(spec, tuple(range(heads)), nothing, SCALE, current_tuning(), sharing=sharing)
        of_program = key_blocks.planned(part, offset)
        runs = key_blocks.Steps.of(*of_program, places(heads, queries), places(2, keys))
    assume(runs.counts is None)
    of_queries, of_keys = runs.prepared(places(heads, queries), places(2, keys))
    seen = np.zeros((EXAMPLES, heads, queries + 1, keys), int)
    for number in range(runs.number):
        step = runs.step(number)
        visit = step.block(0)
        rows, columns = (np.asarray(x)[0] for x in (step.rows(of_queries), visit.cut(of_keys)))
        shape = len(rows), rows.shape[1], columns.shape[1]
        allowed = True if visit.allowed is None else np.asarray(visit.allowed)[0]
        allowed = np.broadcast_to(allowed, shape)
        for head, (own, of_pairs) in enumerate(zip(rows, allowed, strict=True)):
            of_key = columns[head // sharing]
            real = own[own[:, 0] > 0]
            assert (real[:, :1] == of_key[:1, 0]).all(), "keys are of the same example"
            assert ((real[:, 2] - 1) // sharing == of_key[0, 2] - 1).all(), "and of the head's own"
            for row, of_row in zip(own, of_pairs, strict=True):
                at = row - 1 if row[0] else (0, queries, 0)
                seen[at[0], at[2], at[1], of_key[:, 1] - 1] += of_row
    mask = oracle.mask(spec, EXAMPLES, heads, queries, keys, {}, offset)
    np.testing.assert_array_equal(seen[:, :, :queries], mask)


@hm.register_spec("test_jax_loops_by_head")
@dataclasses.dataclass(frozen=True)
class FartherByHead(hm.MaskSpec):
    """Its mask has an axis of heads, as `allowed` may have."""

    def allowed(self, query_positions, key_positions, inputs):
        distance = keras.ops.abs(key_positions - query_positions)
        reach = keras.ops.reshape(keras.ops.arange(1, 4), (1, 3, 1, 1))
        return distance[None, None] <= reach


def test_a_mask_by_head_of_a_leaf_of_ones_own_holds_for_each_head():
    qkv = operands(2, 23, 23, 3)
    with tiles():
        got = jax.jit(with_gradients(attention(FartherByHead(), {})))(*qkv)
    wanted = jax.jit(with_gradients(attention(FartherByHead(), {}, tiled=False)))(*qkv)
    for one, other in zip(got, wanted, strict=True):
        close(one, other)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (hm.Window(2, 2), 8),  # 3 rows of one tile, 2 keys on each side, in blocks of 2
        (hm.Chunk(6), 6),
        (hm.Window(after=0), None),  # the longest run is twice as long as the others
        (hm.recipes.streaming(sinks=2, window=2), None),  # two runs, far apart
        (hm.PerHead({0: hm.Window(2, 2)}), None),
        (hm.Nothing(), None),
    ],
    ids=repr,
)
def test_which_rules_have_one_run_for_each_tile(spec, size):
    with tiles(local=3, wide=3, block=2):
        bound = evaluation.bind(spec, None, 24, 24, 0)
        part = Part(spec, (0, 1), bound, SCALE, current_tuning())
        steps = key_blocks.Steps.of(*key_blocks.planned(part, 0), places(2, 24), places(2, 24))
    assert (steps.size if steps.counts is None else None) == size


# --- Transformations -----------------------------------------------------------------------------

SPEC, INPUTS = LONG["documents"]


def vmapped(attend):
    """Each example by itself."""
    return jax.vmap(lambda *qkv: attend(*(x[None] for x in qkv))[0])


ROUTES = {
    "eager": lambda attend: attend,
    "eager gradients": with_gradients,
    "remat": lambda attend: jax.jit(with_gradients(jax.checkpoint(attend))),
    "vmap": lambda attend: jax.jit(with_gradients(vmapped(attend))),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_transformation_gives_what_the_definition_gives(route):
    inputs = {"ids": INPUTS["ids"][:1]}  # of one example, since `vmap` has no others
    qkv = [x[:2] for x in operands(3, 23, 23, 2)]
    attend = functools.partial(attention, SPEC, inputs)
    if route != "vmap":
        qkv = [x[:1] for x in qkv]
    with tiles():
        got = ROUTES[route](attend())(*qkv)
    wanted = jax.jit(ROUTES[route](attend(tiled=False)))(*qkv)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        allowed = 1e-5 * max(1, float(jnp.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=0, atol=allowed)


def test_a_large_bias_of_the_last_row_is_not_that_of_rows_that_fill_up_its_tile():
    qkv = operands(1, 5, 5, 1)
    bias = np.full((5, 5), 200, "float32")
    with tiles():
        made = with_gradients(attention(hm.Window(2, 2), {}, bias=bias))(*qkv)
        wanted = with_gradients(attention(hm.Window(2, 2), {}))(*qkv)
    for one, other in zip(made, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_what_is_traced_may_differ_between_calls_of_one_program():
    """Mask inputs and the scale; what is skipped follows them."""
    qkv = operands(2, 23, 23, 2)
    ids = np.random.default_rng(0).integers(0, 2, (2, 2, 23)).astype("int32")
    compiled = {}
    with tiles():
        for tiled in (True, False):

            @jax.jit
            def run(ids, scale, *qkv, tiled=tiled):
                return attention(SPEC, {"ids": ids}, tiled, scale=scale)(*qkv)

            compiled[tiled] = [
                run(jnp.sort(x), s, *qkv) for x, s in zip(ids, (0.7, 2.0), strict=True)
            ]
    for got, wanted in zip(compiled[True], compiled[False], strict=True):
        close(got, wanted)


# --- What is skipped -----------------------------------------------------------------------------


def visits(spec, inputs, run, *qkv):
    """How often masks of blocks are made while `run` runs, with blocks of 2 x 2."""
    made, allowed_tile = [], key_blocks.allowed_tile

    def counted(*given):
        jax.debug.callback(lambda: made.append(1))
        return allowed_tile(*given)

    jax.clear_caches()
    with tiles(2, 2, 2), mock.patch.object(key_blocks, "allowed_tile", counted):
        jax.block_until_ready(jax.jit(run(attention(spec, inputs)))(*qkv))
    jax.effects_barrier()
    jax.clear_caches()
    return len(made)


@pytest.mark.parametrize("run", [lambda attend: attend, with_gradients], ids=["forward", "both"])
def test_blocks_that_hold_nothing_are_not_looked_at(run):
    """Each pass looks at the blocks of 2 x 2 in which some pair may be allowed, and at no other."""
    lengths = ((4, 2, 6), (12, 0, 0))
    ids = np.stack([np.repeat([5, 3, 7], x) for x in lengths]).astype("int32")
    spec, inputs = hm.SameSegment("ids") & hm.Window(after=0), {"ids": ids}
    mask = oracle.mask(spec, 2, 1, 12, 12, inputs)[:, 0]
    blocks = mask.reshape(2, 6, 2, 6, 2).any((2, 4)).sum()
    assert blocks == (3 + 1 + 6) + 21
    qkv = operands(2, 12, 12, 1)
    passes = 1 if run is not with_gradients else 2
    assert visits(spec, inputs, run, *qkv) == passes * blocks
    # Of gaps, too: positions alone, so all examples in one step.
    sinks = hm.recipes.streaming(sinks=2, window=2)
    seen = oracle.mask(sinks, 1, 1, 12, 12).reshape(6, 2, 6, 2).any((1, 3)).sum()
    assert visits(sinks, {}, run, *qkv) == passes * seen < passes * 21


# --- Where they are used -------------------------------------------------------------------------


def used(**rest):
    """Which loop computes a rule on positions of 23 tokens."""
    both = [
        mock.patch.object(module, "compute", side_effect=RuntimeError(module.__name__))
        for module in (block_loop, gathered)
    ]
    with both[0], both[1], tiles():
        try:
            attention(hm.Window(2, 2), {}, **rest)(*operands(1, 23, 23, 2))
        except RuntimeError as error:
            return str(error).rpartition(".")[2]
    return "dense"


def test_a_cpu_alone_has_them_and_dropout_has_not():
    assert used() == "block_loop"
    assert used(dropout=0.5, seed=0) == "gathered"
    assert used(logits_soft_cap=5.0, bias=np.ones((23, 23), "float32")) == "block_loop"
    with mock.patch.object(jax, "device_count", return_value=2):
        assert used() == "gathered"
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        assert used() == "gathered"
    assert used(tiled=None) == "dense"  # so few pairs
