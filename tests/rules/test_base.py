"""The algebra: equality, immutability, printing, heads, inputs, and rules of one's own."""

import dataclasses
import json
import operator

import keras
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import given
from keras import ops

import keras_headmask as hm

NAMES = {name: getattr(hm, name) for name in hm.__all__}

A, B, C = hm.Window(after=0), hm.SameSegment("ids"), hm.KeyIn("ids", (1, 2))


@strategies.FEW
@given(strategies.specs(), strategies.specs(), strategies.specs())
def test_joins_compare_as_sets(a, b, c):
    for join in (lambda x, y: x & y, lambda x, y: x | y):
        same = [join(join(a, b), c), join(a, join(b, c)), join(join(c, a), b), join(join(a, b), a)]
        assert same[0] == same[1] == same[2]
        assert hash(same[0]) == hash(same[1]) == hash(same[2])
        assert same[3] == join(a, b)
        assert join(a, a) == a


@strategies.MANY
@given(strategies.specs())
def test_printing_reads_back(spec):
    assert eval(repr(spec), dict(NAMES)) == spec


@strategies.FEW
@given(strategies.specs())
def test_complement_of_the_complement(spec):
    assert ~~spec == spec
    assert ~spec != spec


def test_different_rules_are_unequal():
    different = [A, B, C, A & B, A | B, ~A, ~(A & B), ~A & ~B, (A & B) | C, A & (B | C)]
    different += [hm.Window(before=0), hm.Window(after=0, step=2), hm.Keys(0), hm.Queries(0)]
    different += [kind("x") for kind in (hm.KeyFlag, hm.QueryFlag, hm.SameSegment, hm.MaskInput)]
    different += [hm.Full(), hm.Nothing(), hm.PerHead({0: A}), hm.PerHead({1: A})]
    different += [hm.PerHead({0: A}, default=B), hm.PerHead({}, default=A)]
    different += [hm.PerHead({0: A, 1: hm.Full()})]  # names head 1, which must then exist
    assert len(set(different)) == len(different)
    for i, one in enumerate(different):
        assert [other == one for other in different].index(True) == i
    assert A != "Window(after=0)"


@pytest.mark.parametrize("spec", [A, A & B, ~B, hm.PerHead({0: A})], ids=repr)
def test_no_truth_value(spec):
    with pytest.raises(TypeError, match=r"no truth value. Combine specs with & \| ~.*`is None`"):
        bool(spec)


@pytest.mark.parametrize("join", [operator.and_, operator.or_], ids=["&", "|"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "unsupported operand type"),
        (1, "unsupported operand type"),
        (True, r"joins mask specs. Received: True. Write Full\(\) for True"),
        (hm.Keys, r"joins mask specs.*Call it: \.\.\. [&|] hm.Keys\(start\)\.$"),
    ],
)
def test_only_specs_are_joined(join, other, message):
    with pytest.raises(TypeError, match=message):
        join(A, other)
    with pytest.raises(TypeError, match=message.partition(r"\.\.\. ")[0]):
        join(other, A)


@pytest.mark.parametrize("join", [operator.and_, operator.or_], ids=["&", "|"])
def test_a_tensor_is_refused_as_a_whole(join):
    """NumPy would join the spec with each number of the array."""
    array = np.eye(3, dtype=bool)
    way_out = r"of shape \(3, 3\).*: {} [&|] {}\.$"
    tensor = ops.convert_to_tensor(array)
    for mask in (array, tensor):
        with pytest.raises(TypeError, match=way_out.format(r"\.\.\.", r"hm\.MaskInput\(name\)")):
            join(A, mask)
    for mask in (array,) if keras.backend.backend() == "tensorflow" else (array, tensor):
        with pytest.raises(TypeError, match=way_out.format(r"hm\.MaskInput\(name\)", r"\.\.\.")):
            join(mask, A)


# --- PerHead ---


@pytest.mark.parametrize(
    ("key", "heads"),
    [
        (np.int64(3), [3]),
        ("3", [3]),
        ("1-3", [1, 2, 3]),
        (" 4 - 5 , 1 ", [1, 4, 5]),
        ((4, 0), [0, 4]),
        ((1, "3-4"), [1, 3, 4]),
    ],
)
def test_head_keys(key, heads):
    spec = hm.PerHead({key: A}, default=B)
    assert spec == hm.PerHead(dict.fromkeys(heads, A), default=B)
    assert [h for h in range(9) if spec.for_head(h) == A] == heads
    assert all(spec.for_head(h) == B for h in range(9) if h not in heads)


NAMED = r"Heads are named 3, '1-3' \(inclusive\), '0,4-7' or \(4, 7\). Received: "


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ({0: A, "0-1": B}, ValueError, "Head 0 has two rules; name it once"),
        ({"\u0663": A}, ValueError, NAMED),  # a digit, though not an ASCII one
        ({"3-1": A}, ValueError, "The range '3-1' of heads runs backwards"),
        *(({key: A}, ValueError, f"{NAMED}'{key}'") for key in ("", "1-", "-1", "1-2-3", "1,,2")),
        ({-1: A}, ValueError, "Heads are counted from 0. Received: head -1"),
        *(({key: A}, TypeError, f"{NAMED}{key}") for key in (True, 1.0, None)),
        ([A], TypeError, "`heads` must map head numbers to specs"),
        ({0: True}, TypeError, r"`heads.0` must be a mask spec. Received: True.*Write Full\(\)"),
        ({0: np.ones((2, 2))}, TypeError, r"A mask tensor enters a spec by MaskInput\(name\)"),
    ],
)
def test_heads_refused(heads, error, message):
    with pytest.raises(error, match=message):
        hm.PerHead(heads)
    with pytest.raises(TypeError, match=r"`default` must be a mask spec. Received: 'full'"):
        hm.PerHead({0: A}, default="full")
    with pytest.raises(TypeError, match=r"`spec` must be a mask spec. Received: 3"):
        type(~A)(3)


def test_nested_heads_are_resolved_at_the_same_head():
    inner = hm.PerHead({0: A, 1: B}, default=C)
    assert hm.PerHead({(1, 2): inner | A}).for_head(2) == C | A
    override = hm.PerHead({0: A, 1: C}, default=hm.PerHead({0: B}))  # nothing is lost in silence
    assert override.for_head(2) == hm.Full()
    assert hm.PerHead({1: inner}).for_head(1) == B
    assert hm.PerHead({0: B}, default=inner).for_head(1) == B
    assert hm.PerHead({0: B}, default=inner).for_head(2) == C
    assert (inner & hm.Full()).for_head(0) == A & hm.Full()
    assert (~inner | A).for_head(1) == ~B | A
    assert (inner & A).for_head(0) == A  # a repeat, at this head


@pytest.mark.parametrize("inner", [hm.PerHead({1: A}), hm.PerHead({1: A}) & B, ~hm.PerHead({1: A})])
def test_a_nested_rule_that_can_never_apply_is_refused(inner):
    way_out = r"for head 0,.*names only head 1.*in hm\.PerHead\(\{0: Window\(after=0\)\}\)"
    with pytest.raises(ValueError, match=f"must name a head that it is given to.*{way_out}"):
        hm.PerHead({0: inner})
    with pytest.raises(ValueError, match="for heads 0 and 2,"):
        hm.PerHead({(0, 2): inner})
    config = {"kind": "per_head", "heads": {"0": inner.get_config()}}
    with pytest.raises(ValueError, match=r"Bad mask spec at `heads\.0`: .*names only head 1"):
        hm.MaskSpec.from_config(config)
    hm.PerHead({0: inner, 1: inner})  # head 1 obeys it


@pytest.mark.parametrize(
    "spec",
    [
        hm.PerHead({3: A}),
        hm.PerHead({3: hm.Full()}),  # equal to the default, and still wrong
        ~(hm.PerHead({3: A}) | B) & C,
    ],
    ids=repr,
)
def test_a_head_that_does_not_exist(spec):
    inputs = {name: np.zeros((1, 2), "int32") for name in spec.inputs}
    message = "names head 3, but there are 3 heads, numbered 0 to 2"
    with pytest.raises(ValueError, match=message):
        hm.make_mask(spec, 2, 2, num_heads=3, mask_inputs=inputs)
    hm.make_mask(spec, 2, 2, num_heads=4, mask_inputs=inputs)


# --- inputs ---


def test_inputs_of_a_joined_rule():
    spec = hm.PerHead({0: hm.KeyFlag("a") & B}, default=~hm.QueryIn("q", 1) | hm.MaskInput("m"))
    found = {name: (kind.rank, set(kind.sides)) for name, kind in spec.inputs.items()}
    both = {"query", "key"}
    assert found == {"a": (2, {"key"}), "ids": (2, both), "q": (2, {"query"}), "m": (None, both)}
    both = hm.KeyFlag("x") & hm.QueryFlag("x")
    assert both.inputs["x"] == hm.InputType(2, "bool", frozenset({"query", "key"}))
    assert (both | hm.KeyIn("x", 1)).inputs["x"].dtype == "int32"


@pytest.mark.parametrize(
    "make",
    [
        lambda: hm.MaskInput("x") & hm.KeyFlag("x"),
        lambda: hm.SameSegment("x") | ~hm.MaskInput("x"),
        lambda: hm.PerHead({0: hm.MaskInput("x")}, default=hm.QueryIn("x", 1)),
        lambda: hm.PerHead({0: hm.MaskInput("x"), 1: hm.KeyFlag("x")}),
    ],
)
def test_one_name_read_in_two_ways(make):
    message = "'x' is read both as a whole mask and as one value per position.*two names"
    with pytest.raises(ValueError, match=message):
        make()


# --- rules of one's own ---


@hm.register_spec("test_specs_same_rest")
@dataclasses.dataclass(frozen=True)
class SameRest(hm.MaskSpec):
    """Positions of the same remainder."""

    modulus: int

    def allowed(self, query_positions, key_positions, inputs):
        return ~((key_positions - query_positions) % self.modulus != 0)


@hm.register_spec("test_specs_earlier_date")
@dataclasses.dataclass(frozen=True, repr=False)
class EarlierDate(hm.MaskSpec):
    """Keys dated at least `days` before the query."""

    input: str
    days: int = 1

    @property
    def inputs(self):
        return {self.input: hm.InputType()}

    def prepare(self, inputs):
        return {name: hm.Sides(query - self.days, key) for name, (query, key) in inputs.items()}

    def allowed(self, query_positions, key_positions, inputs):
        query, key = inputs[self.input]
        return key <= query


def test_a_rule_of_ones_own_joins_the_language():
    spec = hm.PerHead({0: SameRest(2) & ~EarlierDate("day", days=2)}, default=SameRest(3))
    config = json.loads(json.dumps(spec.get_config()))
    assert config["heads"]["0"]["specs"][0] == {"kind": "test_specs_same_rest", "modulus": 2}
    loaded = hm.MaskSpec.from_config(config)
    assert loaded == spec
    assert eval(repr(spec), NAMES | {"SameRest": SameRest, "EarlierDate": EarlierDate}) == spec
    assert EarlierDate("day").counts  # by default: it prepares
    assert not SameRest(2).counts
    day = np.array([[0, 2, 5, 9]])
    mask = ops.convert_to_numpy(hm.make_mask(loaded, 4, 4, num_heads=2, mask_inputs={"day": day}))
    assert oracle.picture(mask[0, 0]) == "1010 0101 0010 0001"
    assert oracle.picture(mask[0, 1]) == "1001 0100 0010 1001"


def own(*fields, kind="test_specs_own", eq=True, frozen=True):
    """A kind of a user's own."""
    made = dataclasses.make_dataclass("Own", fields, bases=(hm.MaskSpec,), frozen=frozen, eq=eq)
    return hm.register_spec(kind)(made)


HEIR = type("Heir", (hm.Full,), {})  # it inherits the marks of a dataclass
LOOSE = ("length", int, dataclasses.field(default=1, compare=False))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: own(("coverage", int)), TypeError, "`coverage` would hide.*Rename it in Own"),
        (lambda: own(LOOSE), TypeError, r"compare=False on \['length'\].*Leave `compare` out"),
        (lambda: own(eq=False), TypeError, "Own has eq=False and no `__eq__`"),
        (lambda: hm.register_spec("x")(int), TypeError, "must be a frozen dataclass"),
        (lambda: hm.register_spec("x")(HEIR), TypeError, "must be a frozen dataclass"),
        (lambda: own(kind="same speaker"), ValueError, "A kind is a name such as .*'same speaker'"),
        (lambda: own(kind=3), ValueError, "A kind is a name such as .* Received: 3"),
        (lambda: own(kind="window"), ValueError, "'window' already names .*; saved rules rely on"),
        (lambda: own(kind="test_specs_earlier_date"), ValueError, "_date' already names"),
    ],
)
def test_registering_what_is_no_kind(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_same_class_defined_again_takes_its_place():
    """A notebook cell run twice."""

    def cell(number):
        @hm.register_spec("test_specs_cell")
        @dataclasses.dataclass(frozen=True)
        class Cell(hm.MaskSpec):
            run = number

        return Cell

    first, second = cell(1), cell(2)
    assert first is not second
    assert type(hm.MaskSpec.from_config({"kind": "test_specs_cell"})) is second


def _returning(result):
    """A rule whose `allowed` is wrong."""

    @dataclasses.dataclass(frozen=True)
    class Wrong(hm.MaskSpec):
        def allowed(self, query_positions, key_positions, inputs):
            return result(query_positions, key_positions)

    return Wrong()


RETURNED = "`Wrong.allowed` must return a boolean tensor. Received: "
OF_SHAPE = "`Wrong.allowed` must return .*of 2 queries and 3 keys. Received: shape "


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda q, k: True, TypeError, f"{RETURNED}True"),
        (lambda q, k: k - q, TypeError, f"{RETURNED}dtype int"),
        (lambda q, k: (q <= k)[None], ValueError, rf"{OF_SHAPE}\(1, 2, 3\)"),  # examples, or heads?
        (lambda q, k: np.True_, ValueError, rf"{OF_SHAPE}\(\)"),
        (lambda q, k: (q <= k)[:, :-1], ValueError, rf"{OF_SHAPE}\(2, 2\)"),
        (
            lambda q, k: ops.repeat((q <= k)[None, None], 2, 1),
            ValueError,
            rf"{OF_SHAPE}\(1, 2, 2, 3\)",
        ),
    ],
)
def test_a_rule_of_ones_own_that_is_wrong(result, error, message):
    for joined in (lambda spec: spec, lambda spec: spec & hm.Window(1, 1)):
        with pytest.raises(error, match=message):
            hm.make_mask(joined(_returning(result)), 2, 3)
    with pytest.raises(TypeError, match="MaskSpec must define `allowed`"):
        hm.make_mask(hm.MaskSpec(), 2, 2)
