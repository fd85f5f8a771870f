"""What `hm.testing.check_spec` finds in a kind of one's own, and that all of ours pass it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from keras import ops
from strategies import FEW, cases

import keras_headmask as hm

IDS = np.array([[3, 3, 1, 1, 1, 4, 4, 0, 0], [2, 5, 5, 5, 5, 5, 5, 6, 6]])


@FEW
@given(cases())
def test_every_rule_of_ours_passes(case):
    spec, inputs, _, heads, queries, keys, offset = case
    hm.testing.check_spec(spec, queries, keys, heads, inputs or None, offset)


def kind(name, fields=(), **members):
    """A kind of a user's own; sound but for `members`: it hides what lies ahead."""
    members = {"allowed": lambda self, query, key, inputs: query >= key} | members
    made = dataclasses.make_dataclass(
        name, fields, bases=(hm.MaskSpec,), namespace=members, frozen=True
    )
    return hm.register_spec(f"test_check_{name.lower()}")(made)


def allows(pairs):
    return {"allowed": lambda self, query, key, inputs: pairs(query, key)}


def bounds(possible, certain):
    return {"coverage": lambda self, tiles, inputs: hm.Bounds(possible(tiles), certain(tiles))}


READS = {"inputs": property(lambda self: {"ids": hm.InputType()})}
EQUAL = READS | {
    "allowed": lambda self, query, key, inputs: ~(inputs["ids"].query != inputs["ids"].key)
}
BY_DATA = {
    "coverage": lambda self, tiles, inputs: hm.Bounds(
        inputs["ids"].query.high >= inputs["ids"].key.low,
        ~(inputs["ids"].query.low != inputs["ids"].key.low),
    )
}
OVER_EXAMPLES = {
    "allowed": lambda self, query, key, inputs: (
        ops.max(inputs["ids"].key, axis=0, keepdims=True) == inputs["ids"].query
    )
}
ANY = lambda tiles: tiles.key_first <= tiles.query_last  # noqa: E731
ALL = lambda tiles: tiles.key_last <= tiles.query_first  # noqa: E731
MEMBERS = {  # by name: what is its own, and what is said of it
    "Sound": ({}, None),
    "Bounded": (bounds(ANY, ALL), None),
    "Unsure": (bounds(lambda t: t.key_first <= t.key_first, lambda t: t.key_last < 0), None),
    "Equal": (EQUAL, None),
    "Triangle": (
        allows(lambda query, key: np.tril(np.ones((query.shape[0], key.shape[1]), bool))),
        r"Triangle\(\) fails where attention asks for tiles, .*: `Triangle.allowed` must return",
    ),
    "FirstKey": (
        allows(lambda query, key: (query >= key) & (key != key[0, 0])),
        r"not element-wise: in a tile of . queries and . keys it forbids query (\d+) to see key \1",
    ),
    "OneTile": (
        allows(lambda query, key: ops.reshape(query, (-1, 1)) >= ops.reshape(key, (1, -1))),
        r"OneTile\(\) fails where attention asks for tiles",
    ),
    "Mixes": (READS | OVER_EXAMPLES, r"`Mixes\.allowed` is not element-wise"),
    "SaysAll": (
        bounds(ANY, lambda tiles: tiles.key_first <= tiles.query_first),
        "wrongly says that every pair of 5 queries from 0 and 7 keys from 0 is allowed",
    ),
    "SaysNone": (
        bounds(lambda tiles: tiles.key_first <= tiles.query_first, ALL),
        "`SaysNone.coverage` wrongly says that no pair of 5 queries from 5 and 7 keys from 7",
    ),
    "SaysAllByData": (EQUAL | BY_DATA, "`SaysAllByData.coverage` wrongly says"),
    "Raises": ({"coverage": lambda self, tiles, spans: None}, r"Raises\(\) fails where .*None"),
    "Drops": (
        {"get_config": lambda self: {"kind": self.kind}, "fields": [("n", int, 1)]},
        r"Drops.*, saved as JSON and loaded, comes back as Drops\(n=1\), which must be equal",
    ),
    "NoJson": (
        {"get_config": lambda self: {"kind": self.kind, "n": {1, 2}}, "fields": [("n", int, 1)]},
        "NoJson.* fails .* or its JSON: .*set",
    ),
    "Hashes": ({"__hash__": lambda self: id(self)}, r"comes back as Hashes\(\), .*an equal hash"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_broken_law_is_named(name):
    members, message = MEMBERS[name]
    fields = members.get("fields", ())
    own = {k: v for k, v in members.items() if k != "fields"}
    spec = kind(name, fields, **own)(*(2 for _ in fields))
    arguments = {"mask_inputs": {"ids": IDS}} if spec.inputs else {"queries": 12}
    if message is None:
        hm.testing.check_spec(spec, **arguments)
        return
    with pytest.raises(AssertionError, match=message):
        hm.testing.check_spec(spec, **arguments)


def test_what_it_needs():
    with pytest.raises(ValueError, match=r"\['ids'\] missing.*check_spec\(spec, mask_inputs"):
        hm.testing.check_spec(hm.SameSegment("ids"))
    with pytest.raises(ValueError, match="which the mask spec does not read"):
        hm.testing.check_spec(hm.Full(), mask_inputs={"ids": IDS})
    with pytest.raises(TypeError, match=r"hm\.testing\.check_spec\(hm\.Full\(\)\)"):
        hm.testing.check_spec(hm.Full)
    with pytest.raises(AssertionError, match=r"must be examples.* a mask of \(0, 1, 9, 9\)"):
        hm.testing.check_spec(hm.SameSegment("ids"), mask_inputs={"ids": IDS[:0]})
    with pytest.raises(AssertionError, match="must be examples, queries and keys"):
        hm.testing.check_spec(hm.Full(), queries=0)
    with pytest.raises(ValueError, match="names head 3, but there are 2 heads"):
        hm.testing.check_spec(hm.PerHead({3: hm.Full()}), num_heads=2)


def test_a_part_of_a_rule_is_tried_at_lengths_at_which_it_matters():
    broken = kind("Late", **allows(lambda query, key: (key - key[0, 0]) < 50))
    with pytest.raises(AssertionError, match=r"`Late\.allowed` is not element-wise"):
        hm.testing.check_spec(hm.PerHead({1: broken() | hm.Window(1, 1)}))
