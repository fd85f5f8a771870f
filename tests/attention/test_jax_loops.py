"""The loops on JAX: what is skipped by data, by every transformation, against other oracles."""

import functools
from unittest import mock

import keras
import numpy as np
import oracle
import pytest
from contract import numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import FEW, LENGTHS, mask_inputs, offsets_of_pairs, shared_specs
from tiled_contract import LONG, SCALE, close, operands, tiles

import keras_headmask as hm

if keras.backend.backend() != "jax":
    pytest.skip("these loops are JAX'", allow_module_level=True)

import jax
import jax.numpy as jnp

from keras_headmask.attention import unrolled
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.jax import loop
from keras_headmask.attention.jax import steps as jax_steps
from keras_headmask.attention.tuning import current_tuning
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


def by_torch(qkv, mask):
    """The same by PyTorch in float64, each key repeated for the heads that share it."""
    torch = pytest.importorskip("torch")
    given = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in qkv]
    sharing = qkv[0].shape[2] // qkv[1].shape[2]
    query, key, value = (
        x.repeat_interleave(n, 2) for x, n in zip(given, (1, sharing, sharing), strict=True)
    )
    allowed = torch.tensor(np.array(mask))
    logits = torch.einsum("bthd,bshd->bhts", query, key) * SCALE
    alive = allowed.any(-1, keepdim=True)
    logits = torch.where(allowed, logits, torch.where(alive, -torch.inf, 0.0))
    shares = torch.where(allowed, logits.softmax(-1), 0.0)
    context = torch.einsum("bhts,bshd->bthd", shares, value)
    context.backward(torch.tensor(weights(context.shape), dtype=torch.float64))
    return [x.detach().numpy() for x in (context, *(x.grad for x in given))]


# Positions and data, ranges of all examples and of each, a rule of a head's own, whole masks.
CASES = ["streaming", "padded queries", "flags and padding", "ids and a sink", "heads in any order"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_context_and_gradients_are_those_of_pytorch(name, key_heads):
    if key_heads == 2 and name not in CASES[2:4]:
        pytest.skip("sharing does not depend on the rule")
    spec, inputs = LONG[name]
    qkv = operands(3, 23, 23, 4, key_heads=key_heads)
    mask = oracle.mask(spec, 3, 4, 23, 23, inputs)
    with tiles():
        made = jax.jit(with_gradients(attention(spec, inputs)))(*qkv)
    for what, got, wanted in zip(("context", *"qkv"), made, by_torch(qkv, mask), strict=True):
        close(got, wanted, what)
    dead = ~mask.any(-1).transpose(0, 2, 1)
    assert (numpy(made[0])[dead] == 0).all()
    assert (numpy(made[1])[dead] == 0).all()


def test_other_lengths_an_offset_and_one_key():
    spec = hm.SameSegment("ids") | hm.Window(2, 0)
    rng = np.random.default_rng(1)
    for queries, keys, offset in ((7, 12, 5), (5, 1, 0), (1, 9, 8)):
        pair = tuple(rng.integers(0, 3, (2, n)).astype("int32") for n in (queries, keys))
        qkv = operands(2, queries, keys, 2)
        mask = oracle.mask(spec, 2, 2, queries, keys, {"ids": pair}, offset)
        with tiles():
            attend = attention(spec, {"ids": pair}, query_offset=offset)
            got = jax.jit(attend)(*qkv)
        close(got, oracle.attention(*qkv, mask, SCALE)[0], f"{queries}, {keys}")


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
    steps = jax_steps.Steps.of(*jax_steps.planned(part, offset), *operands)
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


@settings(FEW, max_examples=12)
@given(cases_of_one_rule())
def test_any_rule_has_the_context_and_gradients_of_pytorch(case):
    spec, inputs, queries, keys, offset = case
    qkv = operands(EXAMPLES, queries, keys, HEADS)
    mask = oracle.mask(spec, EXAMPLES, HEADS, queries, keys, inputs, offset)
    with tiles(local=2, wide=3, block=2):
        made = with_gradients(attention(spec, inputs, query_offset=offset))(*qkv)
    for what, got, wanted in zip(("context", *"qkv"), made, by_torch(qkv, mask), strict=True):
        close(got, wanted, what)
    dead = ~mask.any(-1).transpose(0, 2, 1)
    assert all((numpy(x)[dead] == 0).all() for x in made[:2])


# --- Transformations -----------------------------------------------------------------------------

SPEC, INPUTS = LONG["documents"]


def penalty(attend):
    """A sum of squares of gradients."""
    first = jax.grad(lambda *qkv: jnp.sum(attend(*qkv) ** 3), argnums=(0, 1, 2))
    return jax.grad(lambda *qkv: sum(jnp.sum(x**2) for x in first(*qkv)), argnums=(0, 1, 2))


def vmapped(attend):
    """Each example by itself."""
    return jax.vmap(lambda *qkv: attend(*(x[None] for x in qkv))[0])


ROUTES = {
    "eager": lambda attend: attend,
    "eager gradients": with_gradients,
    "remat": lambda attend: jax.jit(with_gradients(jax.checkpoint(attend))),
    "vmap": lambda attend: jax.jit(with_gradients(vmapped(attend))),
    "gradients of gradients": lambda attend: jax.jit(penalty(attend)),
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


def test_gradients_of_gradients_know_what_changes_logits():
    """Heads 1 and 2 are computed together, and have slopes of their own."""
    spec = hm.PerHead({0: hm.Window(2, 2)}, hm.Window(after=0))
    bias = np.random.default_rng(0).normal(size=(1, 3, 11, 11)).astype("float32")
    given = *operands(2, 11, 11, 3), bias, np.array([0.3, -1, 2], "float32")

    def attend(query, key, value, bias, sinks, tiled):
        rest = {"position_bias": hm.alibi(3), "logits_soft_cap": 2.0}
        run = attention(spec, {}, tiled, bias=bias, sinks=sinks, **rest)
        return run(query, key, value)

    def both(tiled):
        first = jax.grad(lambda *x: jnp.sum(attend(*x, tiled) ** 3), argnums=range(5))
        squares = jax.grad(lambda *x: sum(jnp.sum(y**2) for y in first(*x)), argnums=range(5))
        return jax.jit(lambda *x: (first(*x), squares(*x)))(*map(jnp.asarray, given))

    with tiles():
        got = jax.tree.leaves(both(tiled=True))
    for one, other in zip(got, jax.tree.leaves(both(tiled=False)), strict=True):
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


def test_what_a_bias_of_minus_inf_hides_does_not_matter():
    bias = np.zeros((1, 1, 1, 11), "float32")
    bias[..., 4] = -np.inf
    run = jax.jit(with_gradients(attention(hm.Window(3, 3), {}, bias=bias)))
    calm = operands(1, 11, 11, 2)
    with tiles():
        wanted = run(*calm)
        for place in (1, 2):
            qkv = [x.copy() for x in calm]
            qkv[place][0, 4] = np.nan
            for got, of in zip(run(*qkv), wanted, strict=True):
                np.testing.assert_array_equal(got, of)


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


def test_what_another_document_holds_does_not_matter():
    """Forward and backward, to the bit."""
    ids = np.repeat([0, 1, 2], [9, 7, 7]).astype("int32")[None]
    calm = operands(1, 23, 23, 2)
    run = jax.jit(with_gradients(attention(hm.SameSegment("ids"), {"ids": ids})))
    with tiles():
        wanted = run(*calm)
        for place, bad in ((1, np.nan), (1, np.inf), (2, np.nan), (2, -np.inf), (2, 3e38)):
            qkv = [x.copy() for x in calm]
            qkv[place][0, 11] = bad
            for got, of in zip(run(*qkv), wanted, strict=True):
                for part in (slice(0, 9), slice(16, 23)):
                    np.testing.assert_array_equal(got[:, part], of[:, part])
            if not abs(bad) < np.inf:
                assert np.isnan(run(*qkv)[0][:, 9:16]).all(), "hidden from who may see it"


# --- What is skipped -----------------------------------------------------------------------------


def visits(spec, inputs, run, *qkv):
    """How often masks of blocks are made while `run` runs, with blocks of 2 x 2."""
    made, allowed_tile = [], jax_steps.allowed_tile

    def counted(*given):
        jax.debug.callback(lambda: made.append(1))
        return allowed_tile(*given)

    jax.clear_caches()
    with tiles(2, 2, 2), mock.patch.object(jax_steps, "allowed_tile", counted):
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
        for module in (loop, unrolled)
    ]
    with both[0], both[1], tiles():
        try:
            attention(hm.Window(2, 2), {}, **rest)(*operands(1, 23, 23, 2))
        except RuntimeError as error:
            return str(error).rpartition(".")[2]
    return "dense"


def test_a_cpu_alone_has_them_and_dropout_has_not():
    assert used() == "loop"
    assert used(dropout=0.5, seed=0) == "unrolled"
    assert used(logits_soft_cap=5.0, bias=np.ones((23, 23), "float32")) == "loop"
    with mock.patch.object(jax, "device_count", return_value=2):
        assert used() == "unrolled"
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        assert used() == "unrolled"
    assert used(tiled=None) == "dense"  # so few pairs
