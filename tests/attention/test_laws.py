"""What every kernel of the backend keeps, each called by itself: its context and its gradients.

The oracles are loops for the mask and a formula in float64. `support/by_kernel.py` lists the
kernels; one that is added is held to all of this. What a kernel refuses is skipped, with its
sentence.
"""

import contextlib
import dataclasses

import keras
import ml_dtypes
import numpy as np
import oracle
import pytest
from by_kernel import (
    KERNELS,
    each,
    each_kernel,
    for_examples,
    penalties,
    results,
    skipping,
)
from contract import numpy
from hypothesis import settings
from hypothesis import strategies as st
from strategies import FEW, MANY, cases
from tiled_contract import SCALE, attend, operands
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.scopes import tuned
from keras_headmask.rules.protocol import Bounds

BACKEND = keras.backend.backend()
if BACKEND == "jax":
    import jax

LENGTH, HEADS, BATCH = 23, 4, 3

# ---------------------------------------------------------------- rules


@hm.register_spec("test_laws_near_date")
@dataclasses.dataclass(frozen=True)
class NearDate(hm.MaskSpec):
    """Reads data, and says nothing of tiles."""

    days: int

    @property
    def inputs(self):
        return {"token_ids": hm.InputType()}

    def allowed(self, query_positions, key_positions, inputs):
        query, key = inputs["token_ids"]
        return (key - query <= self.days) & (query - key <= self.days)


@hm.register_spec("test_laws_surely_flagged")
@dataclasses.dataclass(frozen=True)
class SurelyFlagged(hm.MaskSpec):
    """Of its tiles, data show which are certain, and positions which are possible."""

    @property
    def inputs(self):
        return {"token_ids": hm.InputType(sides=frozenset({"key"}))}

    def allowed(self, query_positions, key_positions, inputs):
        return inputs["token_ids"].key > 0

    def coverage(self, tiles, inputs):
        return Bounds(tiles.key_first <= tiles.key_first, inputs["token_ids"].key.low > 0)


@hm.register_spec("test_laws_steps")
@dataclasses.dataclass(frozen=True)
class Steps(hm.MaskSpec):
    """Six queries each see `rise` keys more than those before; tiles of six are certain."""

    rise: int

    def allowed(self, query_positions, key_positions, inputs):
        return key_positions < (query_positions // 6 + 1) * self.rise

    def coverage(self, tiles, inputs):
        first, last = (self.rise * (x // 6 + 1) for x in tiles[:2])
        return Bounds(tiles.key_first < last, tiles.key_last < first)


@hm.register_spec("test_laws_thirds")
@dataclasses.dataclass(frozen=True)
class Thirds(hm.MaskSpec):
    """Says one thing of all tiles, in plain booleans."""

    def allowed(self, query_positions, key_positions, inputs):
        return ~(key_positions % 3 != query_positions % 3)

    def coverage(self, tiles, inputs):
        return Bounds(True, False)


# What these mean, in loops.
oracle.POSITIONAL["test_laws_thirds"] = lambda config, i, j: i % 3 == j % 3
oracle.POSITIONAL["test_laws_steps"] = lambda config, i, j: j < (i // 6 + 1) * config["rise"]
oracle.READING["test_laws_near_date"] = lambda config, query, key: (
    abs(int(oracle.value_at(query)) - int(oracle.value_at(key))) <= config["days"]
)
oracle.READING["test_laws_surely_flagged"] = lambda config, query, key: oracle.value_at(key) > 0

# What they read, of lengths that make several tiles and blocks, ragged ones, gaps between runs.
DAYS = np.random.default_rng(0).integers(0, 9, (BATCH, LENGTH)).astype("int32")
SURE = np.ones((BATCH, LENGTH), "int32")
SURE[0, :9] = SURE[2, 12:] = 0
_RNG = np.random.default_rng(3)
SORTED_IDS = np.sort(_RNG.integers(0, 5, (3, 23))).astype("int32")
UNSORTED_IDS = _RNG.integers(-1, 4, (3, 23)).astype("int32")
# The first example lacks what others have: a plan made of it alone for all is seen.
PADDING = np.arange(23)[None] < np.array([9, 23, 1])[:, None]
FLAGS = np.stack([np.isin(np.arange(23), at) for at in ([0, 11, 12], [], [4, 18])])
RULES = {
    "window": (hm.Window(3, 2), {}),
    "window ahead": (hm.Window(-2, 7), {}),
    "causal": (hm.recipes.causal(), {}),
    "dilated": (hm.Window(8, 8, step=4), {}),
    "streaming": (hm.recipes.streaming(sinks=2, window=4), {}),
    "blocks": (hm.Chunk(2, 1, 1) | hm.Queries(0, 2) | hm.Keys(0, 2), {}),
    "not a window": (~hm.Window(4, 4), {}),
    "not a plain answer": (~Thirds(), {}),
    "far keys": (hm.Keys(0, 2) | hm.Keys(10, 12) | hm.Keys(20), {}),
    "two dead ends": (hm.Queries(5, 17) & hm.Window(2, 2), {}),
    "full": (hm.Full(), {}),
    "nothing": (hm.Nothing(), {}),
    "full, flags beside it": (hm.Full() | hm.KeyFlag("flags"), {"flags": FLAGS}),
    "documents": (hm.SameSegment("ids") & hm.Window(after=0), {"ids": SORTED_IDS}),
    "unsorted": (hm.SameSegment("ids"), {"ids": UNSORTED_IDS}),
    "not unsorted": (~hm.SameSegment("ids"), {"ids": UNSORTED_IDS}),
    "sentences": (hm.SameSentence(1, "ids"), {"ids": UNSORTED_IDS}),
    "padding": (hm.KeyFlag("pad") & hm.Window(4, 4), {"pad": PADDING}),
    "padded queries": (hm.KeyFlag("pad") & hm.QueryFlag("pad"), {"pad": PADDING}),
    "longformer": (hm.recipes.longformer(2, "is_global"), {"is_global": FLAGS}),
    "too many flags": (hm.recipes.longformer(2, "is_global"), {"is_global": PADDING}),
    "flags and padding": (
        (hm.Window(2, 2) | hm.KeyFlag("is_global") | hm.QueryIn("ids", 1)) & hm.KeyFlag("pad"),
        {"is_global": FLAGS, "ids": UNSORTED_IDS // 2, "pad": PADDING},
    ),
    "flags both ways": (
        (hm.Window(2, 2) | hm.KeyFlag("is_global")) & (~hm.KeyFlag("is_global") | hm.Window(4, 0)),
        {"is_global": FLAGS},
    ),
    "ids and a sink": (hm.SameSegment("ids") | hm.Keys(0, 1), {"ids": UNSORTED_IDS}),
    "ids and padding": (
        hm.SameSegment("ids") & hm.KeyFlag("pad"),
        {"ids": SORTED_IDS, "pad": PADDING},
    ),
    "a whole mask": (hm.MaskInput("m"), {"m": _RNG.random((3, 4, 23, 23)) < 0.3}),
    "a whole mask of one example": (hm.MaskInput("m"), {"m": _RNG.random((1, 4, 23, 23)) < 0.3}),
    "one row of keys": (
        hm.MaskInput("m") & hm.SameSegment("ids"),
        {"m": _RNG.random((3, 1, 1, 23)) < 0.7, "ids": SORTED_IDS},
    ),
    "one column of queries": (
        hm.MaskInput("m") & hm.SameSegment("ids"),
        {"m": _RNG.random((3, 4, 23, 1)) < 0.5, "ids": SORTED_IDS},
    ),
    "whole heads, or documents": (
        hm.MaskInput("m") | hm.SameSegment("ids"),
        {"m": np.array([0, 1, 1, 0])[None, :, None, None] > 0, "ids": UNSORTED_IDS},
    ),
    "heads in any order": (
        hm.PerHead({0: hm.Window(1, 1), 1: hm.MaskInput("m"), 2: hm.Window(1, 1), 3: hm.Chunk(5)}),
        {"m": _RNG.random((1, 4, 23, 23)) < 0.3},
    ),
    "two head groups that read": (
        hm.PerHead({0: hm.Window(2, 1), 2: hm.Window(2, 1), 3: hm.SameSegment("ids")}),
        {"ids": SORTED_IDS},
    ),
    "groups with dead ends": (
        hm.PerHead({0: hm.Nothing(), 1: hm.Window(-9, 12)}, hm.Queries(4, 6) & hm.KeyFlag("pad")),
        {"pad": PADDING},
    ),
    "a leaf that says nothing of tiles": (
        hm.PerHead({1: NearDate(2)}, NearDate(3) & hm.Window(4, 4) | ~NearDate(6)),
        {"token_ids": DAYS},
    ),
    "certain tiles of unequal width": (
        hm.PerHead({0: Steps(3), 2: ~Steps(6)}, default=Steps(6) | hm.Keys(20, 21)),
        {},
    ),
    "certain in some examples": (
        hm.PerHead({0: SurelyFlagged()}, default=hm.Full()) & hm.Window(after=12),
        {"token_ids": SURE},
    ),
}

READING = RULES["two head groups that read"]
ONE_GROUP = hm.SameSegment("ids") & hm.Window(2, 1), {"ids": SORTED_IDS}
LOCAL = hm.PerHead({1: hm.Window(3, 0)}, hm.Window(3, 0) & hm.KeyFlag("f")) & hm.Queries(2)
SEEN = {"f": np.ones((BATCH, LENGTH), bool)}  # (some kernels are for rules that read data alone)
BY_HEAD = hm.PerHead({1: hm.Window(2, 1)}, ~hm.Window(2, 1) & ~hm.KeyIn("ids", 1))
EDGES = {
    "one pair": (1, 1, 0),
    "one query": (1, 13, 9),
    "one key": (13, 1, -3),
    "whole tiles": (4, 6, 0),
    "ragged tiles": (5, 7, 5),
    "more keys": (8, 13, 5),
    "more queries": (13, 7, -3),
}
EMPTY = {"no example": (0, 4, 4), "no query": (2, 0, 4), "no key": (2, 4, 0)}


# ---------------------------------------------------------------- changes of the logits

_rng = np.random.default_rng(5)


def normal(*shape):
    return _rng.normal(size=shape).astype("float32")


CHANGES = {
    "soft cap": {"soft_cap": 0.8},
    "sinks": {"sinks": normal(HEADS)},
    "cap and sinks": {"soft_cap": 0.8, "sinks": normal(HEADS)},
    "bias": {"bias": normal(BATCH, HEADS, LENGTH, LENGTH)},
    "bias of keys": {"bias": normal(BATCH, 1, 1, LENGTH)},
    "one number": {"bias": normal(1)[0], "sinks": normal(HEADS)},
    "all": {"soft_cap": 0.8, "bias": normal(LENGTH, LENGTH), "sinks": normal(HEADS)},
}
SOME_CHANGES = {"none": {}, "cap and sinks": CHANGES["cap and sinks"]}

# ---------------------------------------------------------------- the check


def reading(kernel):
    """A rule that reads, in three head groups or, of a kernel that traces each, in one."""
    return ONE_GROUP if kernel.is_traced else READING


def weights(batch, queries, heads, size=2):
    """An upstream gradient in which every entry has its own say."""
    count = batch * queries * heads * size
    return np.cos(np.arange(count, dtype="float32")).reshape(batch, queries, heads, size)


def rounded(array, dtype):
    """What `array` is in `dtype`, as float32."""
    return array.astype(dtype if dtype == "float16" else ml_dtypes.bfloat16).astype("float32")


def mask_of(qkv, spec, inputs, offset=0):
    (batch, queries, heads, _), keys = qkv[0].shape, qkv[1].shape[1]
    return oracle.mask(spec, batch, heads, queries, keys, inputs, offset)


def close_to_all(got, exact, message="", **how):
    """The context and its gradients; `exact` may have more of these."""
    for what, one in {"context": got[0], **got[1]}.items():
        wanted = exact[0] if what == "context" else exact[1][what]
        assert one.shape == wanted.shape, what
        assert_close(one, wanted, message=f"{message} {what}", **{"depth": 3} | how)


def check(kernel, qkv, spec, inputs=None, offset=0, changes=None, with_gradients=True):
    """The context and the gradients are those of the formula, and rows that see nothing are 0."""
    mask = mask_of(qkv, spec, inputs, offset)
    upstream = weights(*qkv[0].shape[:3], qkv[2].shape[3])
    asked = upstream if with_gradients else None
    with kernel.setting():
        got, gradients = results(kernel, qkv, spec, inputs, offset, asked, changes)
    close_to_all(
        (got, gradients), oracle.with_gradients(qkv, mask, SCALE, upstream, **changes or {})
    )
    dead = ~mask.any(-1).transpose(0, 2, 1)
    assert (got[dead] == 0).all(), "rows that see nothing are exactly 0"
    if gradients:
        assert (gradients["query"][dead] == 0).all(), "and so are their gradients"
    if not mask.any():
        assert all((x == 0).all() for x in gradients.values()), "nothing learns from nothing"


UPSTREAM = weights(BATCH, LENGTH, HEADS)

# ---------------------------------------------------------------- any rule, any lengths, any heads


def random_rules(kernel, many):
    """Of a kernel that traces each example anew, a few."""
    if kernel.is_traced:
        many = settings(many, max_examples=12 if many is MANY else 2)

    # (Local tile, wide tile, block: all lengths are ragged in some of them.)
    tile_sizes = st.sampled_from([(4, 6, 2), (4, 6, 3), (2, 3, 2), (1, 5, 1)])

    @for_examples(many, cases(), tile_sizes, st.sampled_from([1, 2, 3, 4]), st.integers(0, 1000))
    def _(case, tile_sizes, sharing, seed):
        spec, inputs, batch, heads, queries, keys, offset = case
        key_heads = heads // sharing if heads % sharing == 0 else heads
        qkv = operands(batch, queries, keys, heads, seed, key_heads=key_heads)
        local, wide, block = tile_sizes
        step = (1, 30, 100, 2**20)[seed % 4]
        with tuned(local_tile=local, wide_tile=wide, block=block, most_logits_of_a_step=step):
            check(kernel, qkv, spec, inputs, offset)


@each_kernel
def test_any_rule_equals_the_definition(kernel):
    random_rules(kernel, FEW)


@pytest.mark.long
@each_kernel
def test_many_rules_equal_the_definition(kernel):
    random_rules(kernel, MANY)


# What a graph of unknown lengths takes: axes of whole masks that turn out to be 1 are among it.
TRACED = ["flags and padding", "certain tiles of unequal width"]
TRACED += ["one row of keys", "one column of queries", "whole heads, or documents"]


@each(RULES, TRACED, ["heads in any order"])
@skipping
def test_longer_sequences(kernel, name):
    """Gaps, dead ends, flags on both axes, whole masks; two query heads share keys."""
    spec, inputs = RULES[name]
    check(kernel, operands(BATCH, LENGTH, LENGTH, HEADS, key_heads=2), spec, inputs)


@each(EDGES, ["more keys"])
@skipping
def test_lengths_that_fit_no_tile_and_an_offset(kernel, name):
    queries, keys, offset = EDGES[name]
    ids = tuple(np.arange(2 * n).reshape(2, n) % 5 for n in (queries, keys))
    if 0 < offset <= keys - queries:  # one tensor serves both sides
        ids = ids[1]
    check(kernel, operands(2, queries, keys, 3), BY_HEAD, {"ids": ids}, offset)


@each(EMPTY, EMPTY)
@skipping
def test_what_is_empty(kernel, name):
    batch, queries, keys = EMPTY[name]
    flagged = hm.Window(1, 1) | hm.KeyIn("ids", 1) | hm.QueryIn("ids", 1)
    spec = hm.PerHead({1: hm.Window(1, 1), 2: flagged}, hm.KeyIn("ids", 1))
    ids = {"ids": tuple(np.zeros((batch, n), "int32") for n in (queries, keys))}
    qkv = operands(batch, queries, keys, 3)
    with kernel.setting():
        got, gradients = results(kernel, qkv, spec, ids, 0, weights(batch, queries, 3))
    np.testing.assert_array_equal(got, np.zeros((batch, queries, 3, 2)))
    for gradient, x in zip(gradients.values(), qkv, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))


@each_kernel
def test_any_distribution_of_rules_over_heads_that_share_keys(kernel):
    rules = (hm.Window(1, 1), hm.Window(after=0) & hm.KeyFlag("f"), hm.Chunk(3) | hm.Keys(0, 1))
    flags = {"f": np.arange(18).reshape(2, 9) % 4 > 0}
    owners = st.lists(st.integers(0, 2), min_size=6, max_size=6)
    some = settings(FEW, max_examples=2 if kernel.is_traced else 8)

    @for_examples(some, owners, st.sampled_from([1, 2, 3]))
    def _(rule_of_head, key_heads):
        spec = hm.PerHead({head: rules[rule] for head, rule in enumerate(rule_of_head)})
        inputs = flags if spec.inputs else {}
        qkv = operands(2, 9, 9, 6, key_heads=key_heads)
        check(kernel, qkv, spec, inputs, with_gradients=False)


# ---------------------------------------------------------------- caps, a bias, sinks


@each(CHANGES, ["cap and sinks", "all"], ["cap and sinks"])
@skipping
def test_what_changes_logits(kernel, name):
    check(kernel, operands(BATCH, LENGTH, LENGTH, HEADS), *reading(kernel), changes=CHANGES[name])


@each(["two dead ends", "full", "far keys", "longformer", "heads in any order"])
@skipping
def test_changes_under_any_rule_with_an_offset_and_shared_keys(kernel, name):
    spec, inputs = RULES[name]
    inputs = {k: x if x.ndim == 4 else (x, x) for k, x in inputs.items()}
    changes = CHANGES["cap and sinks"]
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS, key_heads=2)
    check(kernel, qkv, spec, inputs, 0 if name == "far keys" else 9, changes)


@each_kernel
@skipping
def test_no_change_opens_a_hidden_key(kernel):
    """To the bit, whatever a bias holds there; and it has no gradient."""
    qkv, shift = operands(BATCH, LENGTH, LENGTH, HEADS), -1e12
    hidden = ~oracle.mask(LOCAL, BATCH, HEADS, LENGTH, LENGTH, SEEN)[0, 0]
    plain = np.full((LENGTH, LENGTH), shift, "float32")
    changes = {"soft_cap": 2.0, "sinks": CHANGES["sinks"]["sinks"] + np.float32(shift)}

    def run(odd):
        bias = np.where(hidden, np.float32(odd), plain)
        return results(kernel, qkv, LOCAL, SEEN, 0, UPSTREAM, changes | {"bias": bias})

    with kernel.setting():
        wanted, _ = run(shift)
        assert (wanted[:, :2] == 0).all()
        assert np.abs(wanted[:, 2:]).min() > 0
        for odd in (np.inf,) if kernel.is_traced else (np.inf, -np.inf, np.nan, 1e30, -3e38):
            got, gradients = run(odd)
            np.testing.assert_array_equal(got, wanted)
            assert (gradients["bias"][hidden] == 0).all()
            assert all(np.isfinite(x).all() for x in gradients.values())


@each_kernel
@skipping
def test_a_bias_of_minus_inf_hides_as_the_mask_does(kernel):
    """And a row in which one of both hides each key is 0."""
    allowed = np.random.default_rng(0).random((1, HEADS, LENGTH, LENGTH)) < 0.5
    allowed[:, :, 7] = allowed[..., 5] = False  # fully masked rows, and a key that nobody sees
    qkv, sinks = operands(BATCH, LENGTH, LENGTH, HEADS), CHANGES["sinks"]
    mask = mask_of(qkv, LOCAL, SEEN) & allowed
    bias = {"bias": np.where(allowed, 0.0, -np.inf).astype("float32")}
    with kernel.setting():
        got, made = results(kernel, qkv, LOCAL, SEEN, 0, UPSTREAM, sinks | bias)
    del made["bias"]
    close_to_all((got, made), oracle.with_gradients(qkv, mask, SCALE, UPSTREAM, **sinks))
    assert (got[:, 7] == 0).all()


@each_kernel
@skipping
def test_gradients_of_the_least_soft_cap_are_finite(kernel):
    qkv, cap = operands(BATCH, LENGTH, LENGTH, HEADS), float(np.finfo("float32").tiny)
    with kernel.setting():
        made = results(kernel, qkv, LOCAL, SEEN, 0, UPSTREAM, {"soft_cap": cap})
    assert all(np.isfinite(x).all() for x in (made[0], *made[1].values()))


# ---------------------------------------------------------------- dtypes and large numbers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each(SOME_CHANGES, ["cap and sinks"])
@skipping
def test_the_result_has_the_dtype_of_the_value(kernel, dtype, name):
    """And rows that see nothing are 0, whose gradients are 0 and no others NaN."""
    dead_ends = RULES["groups with dead ends"]
    spec, inputs = RULES["padding"] if kernel.is_traced else dead_ends
    changes = SOME_CHANGES[name]
    qkv = [rounded(x, dtype) for x in operands(BATCH, LENGTH, LENGTH, HEADS, key_heads=2)]
    mask = mask_of(qkv, spec, inputs)
    dead = ~mask.any(-1).transpose(0, 2, 1)
    with kernel.setting():
        got, made = results(kernel, qkv, spec, inputs, 0, UPSTREAM, changes, dtype=dtype)
    assert_close(got, oracle.attention(*qkv, mask, SCALE, **changes)[0], dtype, 3)
    assert (got[dead] == 0).all()
    assert all(np.isfinite(x).all() for x in made.values())
    assert (made["query"][dead] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each(["none", "cap and sinks", "bias"])
@skipping
def test_float64_is_float64_throughout(kernel, name, dtype):
    """And float32 stays float32 where there are 64 bits."""
    changes = {} if name == "none" else CHANGES[name]
    changes = {k: np.asarray(x, dtype) if np.ndim(x) else x for k, x in changes.items()}
    qkv = [x.astype(dtype) for x in operands(BATCH, LENGTH, LENGTH, HEADS)]
    exact = oracle.with_gradients(qkv, mask_of(qkv, *READING), SCALE, UPSTREAM, **changes)
    sixty_four_bits = jax.enable_x64(True) if BACKEND == "jax" else contextlib.nullcontext()
    with sixty_four_bits, kernel.setting():
        got = results(kernel, qkv, *READING, 0, UPSTREAM.astype(dtype), changes)
    assert {x.dtype.name for x in (got[0], *got[1].values())} == {dtype}
    close_to_all(got, exact, dtype=dtype, depth=16)


@pytest.mark.parametrize("size", [30.0, 1000.0])
@each_kernel
@skipping
def test_large_logits(kernel, size):
    q, k, v = operands(BATCH, LENGTH, LENGTH, HEADS)
    qkv = (q * np.float32(size), k, v)
    with kernel.setting():
        got = results(kernel, qkv, *READING, 0, UPSTREAM)
    exact = oracle.with_gradients(qkv, mask_of(qkv, *READING), SCALE, UPSTREAM)
    # The largest logits round to 1e-7 of themselves, which is what the results then carry.
    close_to_all(got, exact, depth=6 * size)


# ---------------------------------------------------------------- dropout


RATE = 0.3


@each(SOME_CHANGES, ["cap and sinks"])
@skipping
def test_dropout_is_drawn_for_pairs_and_found_again_by_the_gradient(kernel, name):
    """For pairs of a query head."""
    changes = SOME_CHANGES[name]
    spec, inputs = reading(kernel)
    query, key, value = operands(BATCH, LENGTH, LENGTH, HEADS, key_heads=2)
    mask = mask_of((query, key), spec, inputs)
    upstream = weights(BATCH, LENGTH, HEADS)
    # Of values that are unit vectors, the context is the probabilities.
    units = np.broadcast_to(
        np.eye(LENGTH, dtype="float32")[None, :, None], (BATCH, LENGTH, 2, LENGTH)
    )

    def run(value, seed, upstream=None):
        qkv = query, key, value
        return results(kernel, qkv, spec, inputs, 0, upstream, changes, dropout=RATE, seed=seed)

    with kernel.setting():
        drawn = run(units, 3)[0].transpose(0, 2, 1, 3)
        got = run(value, 3, upstream)
        is_known = kernel.manner == "known"  # (else it is traced anew)
        other = run(units, 4)[0].transpose(0, 2, 1, 3) if is_known else None
    kept = drawn > 0
    assert not (kept & ~mask).any(), "nothing is opened"
    assert other is None or (kept != (other > 0)).any(), "another seed drops others"
    _, exact = oracle.attention(query, key, value, mask, SCALE, **changes)
    assert_close(drawn, np.where(kept, exact / (1 - RATE), 0), depth=3)
    deviation = np.sqrt(RATE * (1 - RATE) * mask.sum())
    assert abs(kept.sum() - (1 - RATE) * mask.sum()) < 5 * deviation
    more = changes | {"factors": kept / (1 - RATE)}
    close_to_all(got, oracle.with_gradients((query, key, value), mask, SCALE, upstream, **more))


def test_a_fair_draw():
    """By example, head, query and key, and of neighbours, in many tiles and two head groups."""
    query, key, _ = operands(2, 300, 300, 3, size=8)
    units = np.broadcast_to(np.eye(300, dtype="float32")[None, :, None], (2, 300, 3, 300)).copy()
    rule = hm.PerHead({1: hm.Window(50, 30)}, hm.Window(40, 40))
    with tuned(local_tile=50, most_logits_of_a_step=2**14):
        plain, dropped = (
            numpy(attend((query, key, units), rule, **more)).transpose(0, 2, 1, 3)
            for more in ({}, {"dropout": RATE, "seed": 1})
        )
    allowed = plain > 0
    kept = dropped > 0
    assert not (kept & ~allowed).any(), "nothing is opened"
    assert_close(dropped[kept], plain[kept] / (1 - RATE))
    spread = np.sqrt(RATE * (1 - RATE))
    assert abs(kept[allowed].mean() - (1 - RATE)) < 5 * spread / np.sqrt(allowed.sum())
    for axis in range(4):  # no example, head, query or key is favoured: deviations are normal
        others = tuple({0, 1, 2, 3} - {axis})
        count = allowed.sum(others)
        deviation = (kept.sum(others) - (1 - RATE) * count) / (spread * np.sqrt(count))
        assert np.abs(deviation).max() < 5
        assert len(deviation) < 100 or 0.8 < deviation.std() < 1.2
        # Neighbours, and the last with the first, have nothing in common.
        other = np.roll(allowed, 1, axis)
        pairs = allowed & other
        common = np.corrcoef(kept[pairs], np.roll(kept, 1, axis)[pairs])[0, 1]
        assert abs(common) < 5 / np.sqrt(pairs.sum())


# ---------------------------------------------------------------- gradients of gradients


@pytest.mark.parametrize("name", SOME_CHANGES)
@each_kernel
@skipping
def test_gradients_of_gradients(kernel, name):
    """A penalty on gradients."""
    if kernel.is_fused and BACKEND == "torch":
        pytest.skip("PyTorch's attention has no gradient of its gradient: an error there")
    length, changes = 9, SOME_CHANGES[name]
    spec, ids = READING[0], {"ids": UNSORTED_IDS[:1, :length]}
    qkv = operands(1, length, length, HEADS, key_heads=2)
    with kernel.setting():
        made = penalties(kernel, qkv, spec, ids, changes)
    exact = oracle.penalties(qkv, mask_of(qkv, spec, ids), SCALE, **changes)
    for what, one in made.items():
        assert_close(one, exact[what], depth=256, message=what)


# ---------------------------------------------------------------- hidden is hidden

AT = 13  # positions in all
IDS = (
    hm.PerHead({1: hm.Window(2, 2)}, hm.SameSegment("ids")),
    {"ids": np.repeat([0, 1, 2], [5, 4, 4]).astype("int32")[None]},
)


@pytest.mark.parametrize("size", [2**17, 1e30])
@each_kernel
@skipping
def test_allowed_logits_far_below_hide_as_well(kernel, size):
    """Found as a bug: beside logits of -6e9 the hidden ones, at -1e9, took all probability."""
    spec, inputs = IDS
    q, k, v = operands(1, AT, AT, HEADS)
    first = (np.arange(3) == 0).astype("float32")
    qkv = np.full_like(q, -(2**16)) * first, np.full_like(k, size) * first, v
    upstream = weights(1, AT, HEADS)
    wanted, exact = oracle.with_gradients(qkv, mask_of(qkv, spec, inputs), SCALE, upstream)
    with kernel.setting():
        got, made = results(kernel, qkv, spec, inputs, 0, upstream)
    np.testing.assert_allclose(got, wanted, 1e-4, 1e-5)
    for what, one in made.items():
        # (Of queries and keys it is a sum of large entries that is 0.)
        rounding = {"query": 4e-6 * size, "key": 0.5, "value": 1e-5}[what]
        np.testing.assert_allclose(one, exact[what], 1e-4, rounding, err_msg=what)


@each_kernel
@skipping
def test_a_hidden_key_has_no_probability_whatever_its_logit_is(kernel):
    """To the bit: a change of a hidden key and its value changes nothing."""
    (q, k, v), (spec, inputs) = operands(1, AT, AT, HEADS), IDS
    hidden = ~mask_of((q, k), spec, inputs)[0, :, 0].any(0)  # from the first query
    made = []
    for size in (1.0, 1e10, -1e10, 1e35):
        key, value = k.copy(), v.copy()
        key[:, hidden] *= np.float32(size)
        value[:, hidden] += np.float32(size)
        with kernel.setting():
            made.append(results(kernel, (q, key, value), spec, inputs)[0][:, 0])
    for got in made[1:]:
        np.testing.assert_array_equal(got, made[0])


# ---------------------------------------------------------------- the suite itself


@pytest.mark.parametrize("name", sorted({x.compute.__name__ for x in KERNELS}))
def test_no_kernel_escapes(name):
    """Each computes a plain request here, and its gradient."""
    kernel = next(x for x in KERNELS if x.compute.__name__ == name and x.manner != "XLA")
    with kernel.setting():
        qkv = operands(BATCH, LENGTH, LENGTH, HEADS)
        _, gradients = results(kernel, qkv, *READING, 0, UPSTREAM)
    assert gradients
