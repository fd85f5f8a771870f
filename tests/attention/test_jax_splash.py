"""JAX' kernel for TPUs: the masks that it is given are ours, and so is what it computes of them.

No TPU is needed: masks are asked as the kernel asks them, and Pallas interprets the kernel itself.
"""

import functools
import sys

import keras
import numpy as np
import oracle
import pytest
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from strategies import FEW, LENGTHS, MANY, any_specs, id_sets, per_head_of, positional_specs
from strategies import mask_inputs as drawn_inputs
from tiled_contract import close, operands
from tolerance import assert_close

import keras_headmask as hm

if keras.backend.backend() != "jax":
    pytest.skip("the kernel is JAX'", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax import export

from keras_headmask.attention import attend, on_jax
from keras_headmask.rules import evaluation

splash_jax = pytest.importorskip("keras_headmask.attention.splash_jax")
splash_masks = pytest.importorskip("keras_headmask.attention.splash_masks")
SCALE = 0.7
HEADS = 3


# --- Masks ---------------------------------------------------------------------------------------


def in_blocks(mask, rows, columns):
    """The whole of a splash mask, asked block by block."""
    queries, keys = mask.shape[-2:]
    return np.block(
        [
            [
                mask[slice(i, min(i + rows, queries)), slice(j, min(j + columns, keys))]
                for j in range(0, keys, columns)
            ]
            for i in range(0, queries, rows)
        ]
    )


offsets = st.integers(-3, 4)


@MANY
@given(positional_specs, st.integers(0, HEADS - 1), st.sampled_from(LENGTHS), offsets)
def test_a_mask_is_the_rule_block_by_block(spec, head, lengths, offset):
    rule = spec.for_head(head)
    wanted = oracle.mask(rule, 1, 1, *lengths, query_offset=offset)[0, 0]
    for mask in (splash_masks.mask_of(rule, *lengths, offset), of_rule(rule, lengths, offset)):
        np.testing.assert_array_equal(in_blocks(mask, 2, 3), wanted)
        np.testing.assert_array_equal(in_blocks(mask, *lengths), wanted)


def of_rule(rule, lengths, offset=0):
    return splash_masks.RuleMask(rule, lengths, offset)


@st.composite
def long_rules(draw):
    """Of positions; windows about as wide as blocks of 128."""
    sides = sorted([draw(st.integers(-300, 300)), draw(st.integers(-300, 300))])
    wide = hm.Window(draw(st.sampled_from([None, -sides[0]])), sides[1])
    small = draw(positional_specs).for_head(0)
    return draw(st.sampled_from([wide, wide & small, wide | small, ~wide, small]))


@FEW
@given(long_rules(), st.sampled_from([(256, 384), (384, 128)]), st.sampled_from([0, 128, -50]))
def test_a_mask_longer_than_a_block(rule, lengths, offset):
    ours = hm.make_mask(rule, *lengths, query_offset=offset)
    wanted = np.broadcast_to(numpy(ours)[0, 0], lengths)
    mask = of_rule(rule, lengths, offset)
    for given_mask in (mask, splash_masks.mask_of(rule, *lengths, offset)):
        np.testing.assert_array_equal(in_blocks(given_mask, 128, 128), wanted)
    np.testing.assert_array_equal(mask.rows_alive(), wanted.any(1))
    padded = np.pad(wanted, [(0, 0), (600, 600)])
    at = np.arange(lengths[0])
    np.testing.assert_array_equal(mask.diagonal(), padded[at, at + 600 + offset])


FAR = 2**31 - 1
OWN_CLASSES = {
    "FullMask": [hm.Full(), hm.Window() | hm.Full(), hm.Window(7), hm.Window(FAR, FAR)],
    "CausalMask": [hm.Window(after=0), hm.Window(FAR, 0), hm.Window(7, 2) & hm.Window(after=0)],
    "LocalMask": [hm.Window(2, 1), hm.Window(after=-1), hm.Window(3), hm.Window(-FAR, FAR)],
    "RuleMask": [hm.Window(4, 0, step=2), hm.Keys(0, 2) | hm.Window(1, 1), ~hm.Window(3, 0)],
}


@pytest.mark.parametrize("name", OWN_CLASSES)
@pytest.mark.parametrize("offset", [0, 3])
def test_the_kernel_computes_windows_by_itself(name, offset):
    for rule in OWN_CLASSES[name]:
        mask = splash_masks.mask_of(rule, 5, 8, offset)
        if offset == 0:
            assert type(mask).__name__ == name, rule
        wanted = oracle.mask(rule, 1, 1, 5, 8, query_offset=offset)[0, 0]
        np.testing.assert_array_equal(in_blocks(mask, 5, 8), wanted)


# --- Ids -----------------------------------------------------------------------------------------

conjuncts = st.lists(
    st.one_of(
        positional_specs,
        st.just(hm.SameSegment("ids")),
        st.builds(hm.SameSentence, id_sets, st.just("ids")),
        st.builds(hm.KeyFlag, st.sampled_from(["flags", "ids"])),
        st.just(~hm.QueryFlag("flags")),
        st.builds(lambda few: hm.KeyIn("ids", few) | ~hm.KeyFlag("flags"), id_sets),
        st.builds(hm.QueryIn, st.just("ids"), id_sets),
    ),
    min_size=1,
    max_size=4,
).map(lambda parts: per_head_of({1: parts[0]}, all_of(parts)))


def all_of(parts):
    joined = parts[0]
    for part in parts[1:]:
        joined = joined & part
    return joined


def lowered(spec, inputs, queries, keys, offset=0):
    bound = evaluation.bind(spec, inputs, queries, keys, offset)
    return splash_jax.lowered(spec, bound, HEADS, queries, keys, offset)


def said(groups, batch):
    """What masks and segment ids say together, `(B, H, T, S)`; rows of dead heads are left out."""
    heads = sorted(head for group in groups for head in group.heads)
    assert heads == list(range(HEADS))
    lengths = groups[0].mask.shape[1:]
    result = np.zeros((batch, HEADS, *lengths), bool)
    for group in groups:
        meet = np.array(True)
        if group.segments is not None:
            own, other = map(numpy, group.segments)
            meet = own[:, :, None] == other[:, None]
        for mask, head in zip(group.mask.masks, group.heads, strict=True):
            result[:, head] = in_blocks(mask, *lengths) & meet
    return result


@st.composite
def examples(draw, specs):
    spec, lengths = draw(specs), draw(st.sampled_from(LENGTHS))
    return spec, draw(drawn_inputs(spec, 2, *lengths)), *lengths, draw(offsets)


@MANY
@given(examples(conjuncts | any_specs))
def test_whatever_is_lowered_is_the_rule(example):
    spec, inputs, queries, keys, offset = example
    groups = lowered(spec, inputs, queries, keys, offset)
    if groups is None:
        return
    wanted = oracle.mask(spec, 2, HEADS, queries, keys, inputs, offset)
    positional = [splash_jax.divided(spec.for_head(head)).positional for head in range(HEADS)]
    alive = [of_rule(rule, (queries, keys), offset).rows_alive().any() for rule in positional]
    np.testing.assert_array_equal(said(groups, 2)[:, alive], wanted[:, alive])
    assert not wanted[:, np.logical_not(alive)].any()


LOWERED = {
    "positions": hm.PerHead({0: hm.Full()}, hm.recipes.streaming(1, 2)),
    "documents": hm.SameSegment("ids") & hm.Window(after=0),
    "sentences": hm.SameSentence(1, "ids") & ~hm.Window(1, 1),
    "padding": hm.KeyFlag("flags") & hm.QueryFlag("flags"),
    "ids and padding": hm.SameSegment("ids") & hm.KeyFlag("flags") & ~hm.KeyIn("ids", 2),
    "a head that sees nothing": hm.PerHead({1: hm.Nothing()}, hm.KeyFlag("flags")),
}
NOT_LOWERED = {
    "ids or positions": hm.SameSegment("ids") | hm.Window(1, 1),
    "other documents": ~hm.SameSegment("ids"),
    "two ids": hm.SameSegment("ids") & hm.SameSentence(1, "ids"),
    "flags of both sides": hm.KeyFlag("flags") | hm.QueryFlag("flags"),
    "flags or positions": hm.KeyFlag("flags") | hm.Window(1, 1),
    "a whole mask": hm.MaskInput("whole"),
    "one head of three": hm.PerHead({2: hm.MaskInput("whole")}, hm.Full()),
}


@pytest.mark.parametrize("name", [*LOWERED, *NOT_LOWERED])
def test_which_rules_the_kernel_takes(name):
    spec = (LOWERED | NOT_LOWERED)[name]
    given = {"ids": np.zeros((2, 5), "int32"), "flags": np.ones((2, 5), bool)}
    given["whole"] = np.ones((5, 5), bool)
    groups = lowered(spec, {name: given[name] for name in spec.inputs}, 5, 5)
    assert (groups is not None) == (name in LOWERED)


@pytest.mark.parametrize("has_two_rules", [False, True])
def test_many_masks_of_long_sequences_would_not_fit_its_small_memory(has_two_rules):
    spec = hm.PerHead({0: hm.Window(9, 0)} if has_two_rules else {}, hm.Window(after=0))
    length, heads = 2**16, 64
    bound = evaluation.bind(spec, None, length, length)
    groups = splash_jax.lowered(spec, bound, heads, length, length)
    assert (groups is None) == has_two_rules


# --- The kernel, interpreted ---------------------------------------------------------------------

_rng = np.random.default_rng(5)
LENGTH = 384  # three blocks
PACKED = np.sort(_rng.integers(-1, 4, (2, LENGTH))).astype("int32")
SHORT = np.arange(LENGTH)[None] < np.array([[LENGTH], [130]])
WHOLE = (LENGTH, LENGTH, 0)
STEP = (128, LENGTH, 256)  # queries, keys, offset
CASES = {  # the rule, its inputs, lengths and offset
    "causal": (hm.Window(after=0), {}, WHOLE),
    "window": (hm.Window(40, 3), {}, WHOLE),
    "rules by head": (
        hm.PerHead({0: hm.Window(130, 0), 2: hm.Full()}, hm.recipes.streaming(4, 50)),
        {},
        WHOLE,
    ),
    "a step": (hm.PerHead({1: hm.Window(100, 0)}, hm.Window(after=0)), {}, STEP),
    "a step of one rule": (hm.Window(100, 0), {}, STEP),
    "dead rows": (
        hm.PerHead({0: hm.Queries(3, 140), 1: hm.Nothing()}, hm.Window(-200, 300)),
        {},
        WHOLE,
    ),
    "a block of dead rows": (hm.Queries(3, 140) & hm.Window(5, 5), {}, WHOLE),
    "nothing": (hm.Nothing(), {}, (128, 128, 0)),
    "documents": (hm.SameSegment("ids") & hm.Window(after=0), {"ids": PACKED}, WHOLE),
    "documents and padding, by head": (
        hm.PerHead({1: hm.SameSegment("ids")}, hm.Window(30, 30)) & hm.KeyFlag("flags"),
        {"ids": PACKED, "flags": SHORT},
        WHOLE,
    ),
    "a step of documents": (hm.SameSegment("ids") & hm.Window(70, 0), {"ids": PACKED}, STEP),
    "earlier tokens of a document": (
        hm.SameSegment("ids") & hm.Window(after=-1),
        {"ids": PACKED},
        WHOLE,
    ),
    "a step whose document is out of sight": (
        hm.SameSegment("ids") & hm.Window(70, 0),
        {"ids": (np.zeros((2, 128), "int32"), np.repeat([[0, 5]], [128, 256], 1).repeat(2, 0))},
        STEP,
    ),
    "two sequences": (
        hm.SameSegment("ids") & hm.Keys(5),
        {"ids": (PACKED[:, 100:228], PACKED)},
        (128, LENGTH, 0),
    ),
}


def by_kernel(name):
    spec, inputs, (queries, keys, offset) = CASES[name]

    def attend(*qkv):
        bound = evaluation.bind(spec, inputs, queries, keys, offset)
        return splash_jax.attend(spec, bound, offset, SCALE, *qkv, interpret=True)

    return attend


def by_definition(name):
    spec, inputs, (_, _, offset) = CASES[name]
    rest = {"mask_spec": spec, "mask_inputs": inputs or None, "query_offset": offset}
    return functools.partial(hm.dot_product_attention, scale=SCALE, tiled=False, **rest)


def with_gradients(attend):
    """Its context, and the gradients of a sum of it that every entry has its own part in."""

    @jax.jit
    def run(*qkv):
        context, pull = jax.vjp(attend, *qkv)
        weights = jnp.cos(jnp.arange(context.size, dtype="float32"))
        return context, *pull(weights.reshape(context.shape))

    return lambda *qkv: [numpy(x) for x in run(*qkv)]


def operands_of(name, key_heads=HEADS):
    _, _, (queries, keys, _) = CASES[name]
    return operands(2, queries, keys, HEADS, size=16, value_size=8, key_heads=key_heads)


@pytest.mark.parametrize("name", CASES)
def test_context_and_gradients_are_those_of_the_definition(name):
    qkv = operands_of(name)
    made = with_gradients(by_kernel(name))(*qkv)
    wanted = with_gradients(by_definition(name))(*qkv)
    for what, one, other in zip(("context", *"qkv"), made, wanted, strict=True):
        close(one, other, what)
    spec, inputs, (queries, keys, offset) = CASES[name]
    mask = hm.make_mask(spec, queries, keys, HEADS, inputs or None, offset)
    mask = np.broadcast_to(numpy(mask), (2, HEADS, queries, keys))
    for of_rows in made[:2]:
        assert (of_rows[~mask.any(-1).transpose(0, 2, 1)] == 0).all()
    for of_keys in made[2:]:
        assert (of_keys[~mask.any(2).transpose(0, 2, 1)] == 0).all()


@pytest.mark.parametrize("name", ["rules by head", "documents"])
def test_heads_that_share_keys(name):
    qkv = operands_of(name, 1)
    made = with_gradients(by_kernel(name))(*qkv)
    wanted = with_gradients(by_definition(name))(*qkv)
    for what, one, other in zip(("context", *"qkv"), made, wanted, strict=True):
        close(one, other, what)


def test_heads_that_share_keys_share_ids():
    name = "documents and padding, by head"
    assert by_kernel(name)(*operands_of(name, 1)) is None


@pytest.mark.parametrize("name", ["window", "documents and padding, by head", "dead rows"])
def test_what_is_not_finite_harms_who_may_see_it_and_no_other(name):
    ours, definition = with_gradients(by_kernel(name)), jax.jit(by_definition(name))
    for place, bad in ((0, np.nan), (0, np.inf), (1, np.nan), (1, -np.inf), (2, np.nan)):
        qkv = [x.copy() for x in operands_of(name)]
        qkv[place][1, 120, :, 3] = bad
        got, wanted = ours(*qkv), numpy(definition(*qkv))
        sees_it = np.isnan(wanted).any(-1)
        assert sees_it.any()
        np.testing.assert_array_equal(np.isnan(got[0]).any(-1), sees_it)
        close(got[0][~sees_it], wanted[~sees_it])
        assert all(np.isfinite(x).all() for x in got[1:])


def test_half_precision():
    qkv = [jnp.asarray(x, "bfloat16") for x in operands_of("rules by head")]
    got = jax.jit(by_kernel("rules by head"))(*qkv)
    assert got.dtype == jnp.bfloat16
    assert_close(numpy(got), numpy(by_definition("rules by head")(*qkv)), "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["causal", "rules by head", "documents and padding, by head"])
def test_jax_lowers_it_for_a_tpu(name, dtype):
    """As far as that goes without one: three kernels of each call, for each group of heads."""
    spec, inputs, (queries, keys, offset) = CASES[name]

    def run(*qkv):
        bound = evaluation.bind(spec, inputs, queries, keys, offset)
        attend = functools.partial(splash_jax.attend, spec, bound, offset, SCALE)
        context, pull = jax.vjp(attend, *qkv)
        return context, *pull(context)

    qkv = [jnp.asarray(x, dtype) for x in operands_of(name)]
    made = export.export(jax.jit(run), platforms=["tpu"])(*qkv).mlir_module()
    groups = 2 if name.startswith("documents") else 1
    assert made.count("tpu_custom_call") == 3 * groups


# --- Where it is used ----------------------------------------------------------------------------


def used(monkeypatch, backend="tpu", devices=1, dtype="float32", shape=(1, 256, 2, 8), **rest):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(splash_jax, "attend", lambda *given, **rest: "asked")
    for other in ("_dense", "_tiled"):
        monkeypatch.setattr(attend, other, lambda request: (request.query, None))
    x = jnp.ones(shape, dtype)
    called = {"mask_spec": hm.Window(9, 0)} | rest
    return isinstance(hm.dot_product_attention(x, x, x, **called), str)


def test_it_is_asked_on_one_tpu_alone(monkeypatch):
    assert used(monkeypatch)
    assert used(monkeypatch, dtype="bfloat16")
    assert not used(monkeypatch, backend="cpu")
    assert not used(monkeypatch, backend="gpu")
    assert not used(monkeypatch, devices=2)


def test_it_is_asked_what_it_takes(monkeypatch):
    assert not used(monkeypatch, dtype="float16")
    assert not used(monkeypatch, shape=(1, 260, 2, 8))
    assert not used(monkeypatch, shape=(1, 128, 2, 8))  # so few pairs
    assert not used(monkeypatch, tiled=False)
    assert not used(monkeypatch, tiled=True)
    assert not used(monkeypatch, mask_spec=None)
    assert not used(monkeypatch, logits_soft_cap=5.0)
    assert not used(monkeypatch, dropout=0.5, seed=0)
    assert not used(monkeypatch, query_offset=jnp.asarray(0))
    with hm.dense_scope():
        assert not used(monkeypatch)


def test_without_the_kernel_attention_is_computed_as_elsewhere(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_headmask.attention.splash_jax", None)
    monkeypatch.delattr("keras_headmask.attention.splash_jax")
    monkeypatch.setattr(on_jax, "_is_one", lambda kind: kind == "tpu")
    x = jnp.ones((1, 256, 2, 8))
    assert hm.dot_product_attention(x, x, x, mask_spec=hm.Window(9, 0)).shape == x.shape
