"""What `test_laws.py` asks each kernel for: rules, changes of the logits, and the check itself."""

import dataclasses

import ml_dtypes
import numpy as np
import oracle
from by_kernel import results
from tiled_contract import LONG, PADDING, SCALE, SORTED_IDS, operands
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.rules.protocol import Bounds

LENGTH, HEADS, BATCH = 23, 4, 3
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


# What these mean, in loops.
oracle.POSITIONAL["test_laws_steps"] = lambda config, i, j: j < (i // 6 + 1) * config["rise"]
oracle.READING["test_laws_near_date"] = lambda config, query, key: (
    abs(int(oracle.value_at(query)) - int(oracle.value_at(key))) <= config["days"]
)
oracle.READING["test_laws_surely_flagged"] = lambda config, query, key: oracle.value_at(key) > 0

DAYS = np.random.default_rng(0).integers(0, 9, (BATCH, LENGTH)).astype("int32")
SURE = np.ones((BATCH, LENGTH), "int32")
SURE[0, :9] = SURE[2, 12:] = 0
RULES = LONG | {
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


AT = 13  # positions in all
IDS = (
    hm.PerHead({1: hm.Window(2, 2)}, hm.SameSegment("ids")),
    {"ids": np.repeat([0, 1, 2], [5, 4, 4]).astype("int32")[None]},
)


RATE = 0.3


def check_dropout(kernel, changes):
    """Drawn for pairs of a query head; the gradient finds it again."""
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
