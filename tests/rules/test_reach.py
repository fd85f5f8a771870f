"""How far back a rule looks: no allowed key lies outside of it, and it is tight."""

import dataclasses

import numpy as np
import pytest
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY, cases, shared_specs

import keras_headmask as hm
from keras_headmask import Keys, Queries, Reach, SameSentence, Window
from keras_headmask.rules import reaching
from keras_headmask.rules.algebra import And, Or

CAUSAL, NOTHING, UNBOUNDED = Window(after=0), Reach(before=-1), Reach()


def inside(reach, queries, keys, offset):
    """Which pairs lie in `reach`, as `(queries, keys)`."""
    distance = np.arange(queries)[:, None] + offset - np.arange(keys)
    result = distance <= (np.inf if reach.before is None else reach.before)
    for start, stop in reach.fixed:
        result[:, start:stop] = True
    return result


@MANY
@given(cases())
def test_no_allowed_key_lies_outside(case):
    spec, inputs, _, heads, queries, keys, offset = case
    mask = numpy(hm.make_mask(spec, queries, keys, heads, inputs or None, offset))
    mask = np.broadcast_to(mask, (mask.shape[0], heads, queries, keys))
    behind = np.arange(keys) <= np.arange(queries)[:, None] + offset
    whole = inside(hm.reach(spec, heads), queries, keys, offset)
    assert not (mask & behind & ~whole).any()
    for head in range(heads):
        rule = spec.for_head(head)
        for hidden, pairs in ((False, mask[:, head]), (True, ~mask[:, head])):
            own = inside(rule.looks_back(hidden), queries, keys, offset)
            assert not (pairs & behind & ~own).any(), (rule, hidden)
        assert hm.reach(rule) == rule.looks_back() == (~rule).looks_back(hidden=True)


@MANY
@given(st.lists(shared_specs, min_size=2, max_size=4), st.randoms())
def test_equal_rules_look_back_equally(parts, random):
    """Written in another order, or turned inside out."""
    shuffled = random.sample(parts, len(parts))
    for join, dual in ((And, Or), (Or, And)):
        expected = hm.reach(join.of(parts))
        assert hm.reach(join.of(shuffled)) == expected
        assert hm.reach(~dual.of([~part for part in parts])) == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (hm.Full(), UNBOUNDED),
        (~hm.Full(), NOTHING),
        (hm.Nothing(), NOTHING),
        (~hm.Nothing(), UNBOUNDED),
        (CAUSAL, UNBOUNDED),
        (~CAUSAL, NOTHING),
        (Window(7, 0), Reach(7)),
        (Window(7, 7), Reach(7)),
        (Window(before=0), Reach(0)),
        (Window(7, 0, step=3), Reach(6)),
        (Window(before=7, after=-5), Reach(7)),
        (Window(before=-2), NOTHING),
        (~Window(7, 0), UNBOUNDED),
        (~Window(after=-3), Reach(2)),
        (~Window(after=-3, step=2), UNBOUNDED),
        (Keys(2, 4), Reach(-1, ((2, 4),))),
        (Keys(5), UNBOUNDED),
        (~Keys(4), Reach(-1, ((0, 4),))),
        (~Keys(2, 4), UNBOUNDED),
        (~Keys(0), NOTHING),
        (Queries(2, 4), Reach(3)),
        (Queries(5), UNBOUNDED),
        (~Queries(4), Reach(3)),
        (hm.Chunk(4), Reach(3)),
        (hm.Chunk(4, before=2), Reach(11)),
        (hm.Chunk(4, after=2), Reach(3)),
        (~hm.Chunk(4), UNBOUNDED),
        (SameSentence(9), UNBOUNDED),
        (hm.KeyFlag("x"), UNBOUNDED),
        (hm.MaskInput("m"), UNBOUNDED),
        ((Window(before=7) | Keys(0, 4)) & CAUSAL, Reach(7, ((0, 4),))),
        (SameSentence(9) & Window(7, 0), Reach(7)),
        (SameSentence(9) | Window(7, 0), UNBOUNDED),
        (Window(7, 0) & Window(3, 0), Reach(3)),
        (Window(7, 0) | Window(3, 0), Reach(7)),
        (Keys(0, 4) | Keys(8, 9), Reach(-1, ((0, 4), (8, 9)))),
        (Keys(0, 4) & Keys(2, 9), Reach(-1, ((2, 4),))),
        ((Keys(0, 2) | Keys(4, 6)) & (Keys(1, 5) | Keys(9, 12)), Reach(-1, ((1, 2), (4, 5)))),
        (Keys(0, 4) & Window(7, 0), Reach(-1, ((0, 4),))),  # 4 keys, not 8
        (Keys(0, 40) & Window(7, 0), Reach(7)),  # 8 keys, not 40
        ((Window(7, 0) | Keys(0, 40)) & Window(20, 0), Reach(20)),
        ((Window(7, 0) | Keys(0, 4)) & (Window(7, 0) | Keys(2, 9)), Reach(7, ((2, 4),))),
        ((Window(3, 0) | Keys(0, 4)) & (Window(7, 0) | Keys(8, 9)), Reach(3, ((0, 4),))),
        (~(Window(before=3) | Keys(4)), Reach(-1, ((0, 4),))),
        (hm.recipes.streaming(4, 256), Reach(255, ((0, 4),))),
        (hm.recipes.streaming(0, 256), Reach(255)),
        (hm.recipes.causal(), UNBOUNDED),
        (hm.recipes.sparse_transformer(8), UNBOUNDED),
        (hm.recipes.longformer(2, "x"), UNBOUNDED),
        (hm.recipes.longformer(2, "x") & Window(9, 0), Reach(9)),
    ],
    ids=repr,
)
def test_as_tight_as_it_says(spec, expected):
    assert hm.reach(spec) == expected


STREAMING = hm.recipes.streaming(4, 256)


def test_of_heads():
    spec = hm.PerHead({"0-2": STREAMING, 3: Window(500, 0)}) & CAUSAL
    assert hm.reach(spec) == hm.reach(spec, num_heads=5) == UNBOUNDED  # the heads without a rule
    assert hm.reach(spec, num_heads=4) == Reach(500, ((0, 4),))
    assert hm.reach(spec.for_head(1)) == Reach(255, ((0, 4),))
    assert hm.reach(~hm.PerHead({0: Keys(2)}, default=Keys(1))) == Reach(-1, ((0, 2),))
    # The member itself answers for every head.
    per_head = hm.PerHead({0: Keys(2)}, default=Keys(1))
    assert per_head.looks_back(hidden=True) == Reach(-1, ((0, 2),))
    with pytest.raises(ValueError, match="names head 3, but there are 3 heads"):
        hm.reach(spec, num_heads=3)


def test_of_no_spec():
    with pytest.raises(TypeError, match=r"must be a mask spec.*hm.reach\(hm.recipes.causal\(\)\)"):
        hm.reach("causal")


@hm.register_spec("test_reach_every_other")
@dataclasses.dataclass(frozen=True)
class EveryOther(hm.MaskSpec):
    """Says nothing of how far it looks back."""

    def allowed(self, query_positions, key_positions, inputs):
        return ~(key_positions % 2 != 0)


@hm.register_spec("test_reach_previous")
@dataclasses.dataclass(frozen=True)
class Previous(EveryOther):
    """The last `count` keys."""

    count: int

    def allowed(self, query_positions, key_positions, inputs):
        distance = query_positions - key_positions
        return (distance >= 0) & (distance < self.count)

    def looks_back(self, hidden=False):
        return Reach() if hidden else Reach(before=self.count - 1)


@hm.register_spec("test_reach_always")
@dataclasses.dataclass(frozen=True)
class Always(EveryOther):
    constant = True


def test_of_specs_of_ones_own():
    assert hm.reach(EveryOther()) == hm.reach(~EveryOther()) == UNBOUNDED
    assert hm.reach(Previous(3)) == hm.reach(EveryOther() & Previous(3)) == Reach(2)
    assert hm.reach(~Previous(3)) == UNBOUNDED
    assert (hm.reach(Always()), hm.reach(~Always())) == (UNBOUNDED, NOTHING)


# --- the value ---


def test_a_reach_is_a_value():
    assert Reach(3, ((4, 6), (0, 2), (2, 4), (9, 9), (1, 3))) == Reach(3, ((0, 6),))
    assert hash(Reach(3, ((2, 4), (0, 1)))) == hash(Reach(np.int64(3), ((0, 1), (2, 4))))
    assert Reach(None, ((0, 4),)) == UNBOUNDED
    assert repr(Reach(np.int64(3), ((0, 4),))) == "Reach(before=3, fixed=((0, 4),))"
    assert [r.most_keys for r in (UNBOUNDED, NOTHING, Reach(3, ((0, 4), (6, 7))))] == [None, 0, 9]
    assert [r.is_bounded for r in (UNBOUNDED, NOTHING)] == [False, True]
    assert reaching.union([Reach(3), Reach(-1, ((0, 4),))]) == Reach(3, ((0, 4),))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"before": -2}, ValueError, "`before` must be at least -1. Received: -2"),
        ({"before": 1.5}, TypeError, "`before` must be a whole number. Received: 1.5"),
        ({"before": True}, TypeError, "`before` must be a whole number. Received: True"),
        ({"before": 1, "fixed": (0, 4)}, TypeError, r"pairs \(start, stop\). Received: 0"),
        ({"before": 1, "fixed": ((0, 4, 5),)}, TypeError, r"pairs .*Received: \(0, 4, 5\)"),
        ({"before": 1, "fixed": ((-1, 4),)}, ValueError, "`start` must be at least 0"),
        ({"before": 1, "fixed": ((4, 3),)}, ValueError, "`stop` must be at least 4. Received: 3"),
        ({"fixed": ((0, None),)}, TypeError, "`stop` must be a whole number. Received: None"),
    ],
)
def test_refused(fields, error, message):
    with pytest.raises(error, match=message):
        Reach(**fields)
