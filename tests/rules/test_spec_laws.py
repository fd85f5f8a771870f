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
    return hm.register_spec(f"test_laws_{name.lower()}")(made)


def tile_of(query, key):
    return query.shape[0], key.shape[1]


def bounds(possible, certain):
    return lambda self, tiles, inputs: hm.Bounds(possible(tiles), certain(tiles))


READS = {"inputs": property(lambda self: {"ids": hm.InputType()})}
EQUAL = READS | {
    "allowed": lambda self, query, key, inputs: ~(inputs["ids"].query != inputs["ids"].key)
}
ANY = lambda tiles: tiles.key_first <= tiles.query_last  # noqa: E731
ALL = lambda tiles: tiles.key_last <= tiles.query_first  # noqa: E731
SOUND = {
    "Sound": {},
    "Bounded": {"coverage": bounds(ANY, ALL)},
    "Unsure": {"coverage": bounds(lambda t: t.key_first <= t.key_first, lambda t: t.key_last < 0)},
    "Equal": EQUAL,
}
# (name, members, what is said)
BROKEN = [
    (
        "Triangle",
        {"allowed": lambda self, query, key, inputs: np.tril(np.ones(tile_of(query, key), bool))},
        "not element-wise: for queries 0 to 2 and keys 4 to 7 alone it allows query 0 to see key 4",
    ),
    (
        "FirstKey",
        {"allowed": lambda self, query, key, inputs: (query >= key) & (key != key[0, 0])},
        "`FirstKey.allowed` is not element-wise.* alone it forbids query 4 to see key 4, but not",
    ),
    (
        "OneSize",
        {"allowed": lambda self, query, key, inputs: np.ones((12, 12), bool)},
        "`OneSize.allowed` fails for queries 0 to 2 and keys 0 to 3 alone: .*shape .12, 12.",
    ),
    (
        "OneTile",
        {
            "allowed": lambda self, query, key, inputs: (
                ops.reshape(query, (-1, 1)) >= ops.reshape(key, (1, -1))
            )
        },
        "`OneTile.allowed` .*for 3 tiles at once",
    ),
    (
        "SaysAll",
        {"coverage": bounds(ANY, lambda tiles: tiles.key_first <= tiles.query_first)},
        "says that every pair of queries 0 to 4 and keys 0 to 6 is allowed, but one is not",
    ),
    (
        "SaysNone",
        {"coverage": bounds(lambda tiles: tiles.key_first <= tiles.query_first, ALL)},
        "`SaysNone.coverage` says that no pair of queries .* is allowed, but one is",
    ),
    (
        "SaysAllByData",
        EQUAL
        | {
            "coverage": lambda self, tiles, inputs: hm.Bounds(
                inputs["ids"].query.high >= inputs["ids"].key.low,
                ~(inputs["ids"].query.low != inputs["ids"].key.low),
            )
        },
        "`SaysAllByData.coverage` says that",
    ),
    ("Constant", {"constant": True}, "`Constant.constant` is True, but the mask is not so"),
    (
        "Opens",
        {"tiling": hm.Tiling(opens="key")},
        "`Opens.tiling` has opens='key', but a key is open to some and not to all",
    ),
    (
        "Drops",
        {"get_config": lambda self: {"kind": self.kind}, "fields": [("n", int, 1)]},
        r"Drops.*, saved as JSON and loaded, comes back as Drops\(n=1\)\. `get_config` must hold",
    ),
    (
        "NoJson",
        {"get_config": lambda self: {"kind": self.kind, "n": {1, 2}}, "fields": [("n", int, 1)]},
        "NoJson.*, saved as JSON and loaded, does not come back: .*set",
    ),
    (
        "Mixes",
        {
            **READS,
            "allowed": lambda self, query, key, inputs: (
                ops.max(inputs["ids"].key, axis=0, keepdims=True) == inputs["ids"].query
            ),
        },
        r"`Mixes\.allowed` is not element-wise: for example \d alone it \w+ query \d to see",
    ),
    (
        "Raises",
        {"coverage": lambda self, tiles, spans: None},
        r"`Raises\.coverage` fails: .* It must return two arrays of booleans",
    ),
    (
        "Hashes",
        {"__hash__": lambda self: id(self)},
        "comes back equal, but with another hash",
    ),
]


def checked(name, members):
    fields = members.pop("fields", ())
    spec = kind(name, fields, **members)(*(2 for _ in fields))
    length = IDS.shape[1] if spec.inputs else 12
    hm.testing.check_spec(spec, length, mask_inputs={"ids": IDS} if spec.inputs else None)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_kind_passes(name):
    checked(name, dict(SOUND[name]))


@pytest.mark.parametrize(("name", "members", "message"), BROKEN, ids=[x[0] for x in BROKEN])
def test_a_broken_law_is_named(name, members, message):
    with pytest.raises(AssertionError, match=message):
        checked(name, dict(members))


def test_what_it_needs():
    with pytest.raises(ValueError, match=r"\['ids'\] missing.*check_spec\(spec, mask_inputs"):
        hm.testing.check_spec(hm.SameSegment("ids"))
    with pytest.raises(ValueError, match="which the mask spec does not read"):
        hm.testing.check_spec(hm.Full(), mask_inputs={"ids": IDS})
    with pytest.raises(TypeError, match=r"hm\.testing\.check_spec\(hm\.Full\(\)\)"):
        hm.testing.check_spec(hm.Full)
    with pytest.raises(ValueError, match=r"must hold examples\. Received: none in \['ids'\]"):
        hm.testing.check_spec(hm.SameSegment("ids"), mask_inputs={"ids": IDS[:0]})
    with pytest.raises(ValueError, match="`queries` must be at least 1"):
        hm.testing.check_spec(hm.Full(), queries=0)
    with pytest.raises(ValueError, match="names head 3, but there are 2 heads"):
        hm.testing.check_spec(hm.PerHead({3: hm.Full()}), num_heads=2)


def test_a_part_of_a_rule_is_tried_at_lengths_at_which_it_matters():
    broken = kind("Late", allowed=lambda self, query, key, inputs: (key - key[0, 0]) < 50)
    with pytest.raises(AssertionError, match=r"`Late\.allowed` is not element-wise"):
        hm.testing.check_spec(hm.PerHead({1: broken() | hm.Window(1, 1)}))
