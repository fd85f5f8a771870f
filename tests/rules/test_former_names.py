"""What `tiling` and `sampling` replace: former names warn, and a class that has one is obeyed."""

import dataclasses
import warnings

import numpy as np
import pytest
from test_protocol import LEAVES, NEAR, rules_with

import keras_headmask as hm
from keras_headmask.rules.former_names import FORMER_NAMES
from keras_headmask.rules.protocol import leaves_gaps

pytestmark = pytest.mark.tensorflow  # a spec is the same on each backend


def former(spec, name):
    """The answer to a former name, which warns."""
    new = {field: member for member, fields in FORMER_NAMES.items() for field in fields}[name]
    field = FORMER_NAMES[new][name]
    match = f"{name}` goes in the next release.* spec.{new}.{field}, .*hm.{new.title()}.{field}="
    read = {
        "closes": lambda: [side for side in ("before", "after") if spec.closes(side)],
        "may_leave_gaps": lambda: spec.may_leave_gaps(),
    }
    with pytest.warns(DeprecationWarning, match=match) as warned:
        value = read.get(name, lambda: getattr(spec, name))()
    assert {w.filename for w in warned} == {__file__}
    return value


@pytest.mark.parametrize("leaf", LEAVES, ids=repr)
def test_former_names_answer_as_the_new_ones(leaf):
    for spec in [*rules_with(leaf), hm.PerHead({0: leaf}, NEAR)]:
        for member, fields in FORMER_NAMES.items():
            for name, field in fields.items():
                expected = getattr(getattr(spec, member), field)
                if name == "is_sparse":
                    expected |= spec.tiling.opens is not None
                if name == "closes":
                    expected = list(expected)
                assert former(spec, name) == expected, name


def test_our_own_code_reads_no_former_name():
    rule = hm.PerHead({0: hm.SameSentence(3) | NEAR}, hm.KeyIn("token_ids", 4))
    x = np.zeros((1, 300, 2, 4), "float32")
    ids = np.zeros((1, 300), "int32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        hm.dot_product_attention(x, x, x, mask_spec=rule, mask_inputs={"token_ids": ids})
        hm.lint(rule, num_heads=2)
        hm.explain(rule, queries=300, num_heads=2)


class Near(hm.MaskSpec):
    """Allows what `NEAR` does."""

    def allowed(self, query_positions, key_positions, inputs):
        return NEAR.allowed(query_positions, key_positions, inputs)


def warned_class(base, *names, **members):
    """A class that answers by former names, each of which warns where the class is written."""
    with pytest.warns(DeprecationWarning, match="goes in the next release") as warned:
        made = dataclasses.dataclass(frozen=True)(type("Mine", (base,), members))
    assert [str(w.message).split("`")[1] for w in warned] == [f"Mine.{name}" for name in names]
    assert {w.filename for w in warned} == {__file__}
    return made


def test_what_tiling_asks_of_a_class_with_former_names():
    is_local = warned_class(Near, "is_local", is_local=True)()
    assert is_local.tiling == hm.Tiling(is_local=True)
    assert (is_local & hm.Window(after=0)).tiling.is_local
    # As a property, and by `super()`, at whose end the new member is read.
    later = warned_class(
        hm.Chunk, "is_local", is_local=property(lambda self: not super(hm.Chunk, self).is_local)
    )
    with pytest.warns(DeprecationWarning, match="Mine.is_local"):
        assert later(4).tiling == hm.Tiling(is_local=False)
    flags = warned_class(Near, "opens", opens="key")()
    assert flags.tiling == hm.Tiling(opens="key")
    assert former(flags, "is_sparse")
    assert (flags | NEAR).tiling.is_local
    query = warned_class(hm.KeyFlag, "opens", opens="query")("f")
    assert query.tiling.opens == "query"
    assert query.inputs["f"].sides == {"query"}
    assert (warned_class(Near, "is_sparse", is_sparse=True)() | NEAR).tiling.is_local
    gaps = warned_class(Near, "may_leave_gaps", may_leave_gaps=lambda self, taken_out=(): True)()
    assert gaps.tiling.gaps
    assert leaves_gaps(gaps & NEAR)


def test_what_lint_and_samples_ask_of_a_class_with_former_names():
    both = {"reach": 7, "closes": lambda self, side: side == "after"}
    mine = warned_class(Near, "reach", "closes", **both)()
    assert mine.sampling == hm.Sampling(7, closes=["after"])
    assert (mine & hm.Keys(9, 12)).sampling == hm.Sampling(12, closes=["before", "after"])
    side = hm.Window(3).sampling.open_side
    assert warned_class(Near, "open_side", open_side=side)().sampling.open_side == side
    ids = warned_class(hm.KeyIn, "ids_of_interest", ids_of_interest=(4, 5))("ids", 4)
    assert ids.sampling == hm.Sampling(0, ids=(4, 5))
    given = {"ids": np.array([[4, 5, 6]])}
    assert hm.make_mask(ids, 1, 3, mask_inputs=given)[0, 0, 0].numpy().tolist() == [1, 1, 0]
    segments = warned_class(hm.KeyFlag, "reads_segments", reads_segments=True)("f")
    assert segments.sampling == hm.Sampling(0, segments=True)


def test_of_several_classes_the_nearest_answers():
    old = warned_class(Near, "is_local", is_local=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heir = type("Heir", (old,), {"other": 3})  # inherits, and says nothing itself
        new = type("New", (old,), {"tiling": hm.Tiling(opens="key")})
        suits_both = type("Both", (Near,), {"reach": 4, "sampling": hm.Sampling(9)})
    assert heir().tiling == hm.Tiling(is_local=True)
    assert new().tiling == hm.Tiling(opens="key")
    assert suits_both().sampling == hm.Sampling(9)
    again = warned_class(old, "is_local", is_local=False)
    assert again().tiling == hm.Tiling()
    mixin = type("Mixin", (), {"reach": 5})
    with pytest.warns(DeprecationWarning, match=r"`Mine.reach` goes"):
        mine = type("Mine", (mixin, Near), {})
    assert mine().sampling == hm.Sampling(5)


def test_slots():
    """Such a class is made twice."""
    with pytest.warns(DeprecationWarning, match=r"Slots.is_local"):

        @dataclasses.dataclass(frozen=True, slots=True)
        class Slots(Near):
            is_local = True

    assert Slots().tiling == hm.Tiling(is_local=True)
