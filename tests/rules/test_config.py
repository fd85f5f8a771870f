"""Rules as JSON: both ways, for good, and the errors of bad files."""

import json
import re

import pytest
import strategies
from hypothesis import given

import keras_headmask as hm
from keras_headmask.rules import config as registry

pytestmark = pytest.mark.tensorflow  # one backend is enough

load = hm.MaskSpec.from_config


@strategies.MANY
@given(strategies.specs())
def test_json_both_ways(spec):
    text = json.dumps(spec.get_config(), allow_nan=False)
    loaded = load(json.loads(text))
    assert loaded == spec
    assert hash(loaded) == hash(spec)
    assert json.dumps(loaded.get_config()) == text


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (hm.Window(), {"kind": "window"}),
        (hm.Window(after=0), {"kind": "window", "after": 0}),  # 0 is no default here
        (hm.Window(step=1), {"kind": "window"}),
        (hm.Chunk(2, before=0, after=1), {"kind": "chunk", "size": 2, "after": 1}),
        (hm.Keys(0), {"kind": "keys", "start": 0}),
        (hm.SameSentence(9), {"kind": "same_sentence", "end_ids": [9]}),
        (hm.SameSentence(9, "x"), {"kind": "same_sentence", "end_ids": [9], "input": "x"}),
    ],
    ids=repr,
)
def test_defaults_are_left_out(spec, config):
    assert spec.get_config() == config
    assert load(config) == spec


def test_what_may_be_left_out_or_shortened_in_a_file():
    assert load({"kind": "per_head", "heads": {}}) == hm.PerHead({})
    assert load({"kind": "same_sentence", "end_ids": 9}) == hm.SameSentence(9)
    assert load({"kind": "and", "specs": [{"kind": "keys", "start": 1}]}) == hm.Keys(1)
    nested = {"kind": "or", "specs": [{"kind": "full"}, {"kind": "nothing"}]}
    flat = load({"kind": "or", "specs": [nested, {"kind": "keys", "start": 1}]})
    assert flat == hm.Full() | hm.Nothing() | hm.Keys(1)
    assert len(flat.children) == 3


def heads(config):
    return {"kind": "per_head", "heads": config}


def both(*configs):
    return {"kind": "and", "specs": list(configs)}


FULL = {"kind": "full"}
WHOLE = "must be a whole number. Received: "

# (config, path, problem)
BAD = [
    ([FULL], "(top)", r"expected an object with a `kind`. Received: \[{'kind': 'full'}\]"),
    ("full", "(top)", "expected an object with a `kind`. Received: 'full'"),
    ({}, "(top)", "the field `kind` is missing. Received: {}"),
    ({"kind": "windw"}, "kind", "unknown kind 'windw'. Did you mean 'window'?"),
    ({"kind": "chunk"}, "(top)", "the field `size` is missing"),
    ({"kind": "per_head"}, "(top)", "the field `heads` is missing"),
    ({"kind": "full", "size": 1}, "size", "no such field. Fields here: none"),
    (
        {"kind": "window", "befor": 1},
        "befor",
        "no such field. Did you mean 'before'? Fields here: after, before, step",
    ),
    ({"kind": "per_head", "heads": {}, "defualt": FULL}, "defualt", "Did you mean 'default'?"),
    ({"kind": "window", "after": True}, "after", f"`after` {WHOLE}True"),
    ({"kind": "window", "before": 1, "after": -2}, "after", "No distance lies from -1 to -2"),
    ({"kind": "keys", "start": 3, "stop": 3}, "stop", "`stop` must be greater than `start`"),
    ({"kind": "key_flag", "input": 3}, "input", "is the name under which the tensor"),
    ({"kind": "key_in", "input": "x", "ids": [FULL]}, "ids", f"`ids` {WHOLE}Full"),
    ({"kind": "and", "specs": []}, "specs", r"expected a list of specs. Received: \[\]"),
    ({"kind": "or", "specs": FULL}, "specs", "expected a list of specs. Received: {'kind'"),
    (both(FULL, 3), "specs[1]", "must be a mask spec. Received: 3"),
    (both(FULL, {"kind": "wndow"}), "specs[1].kind", "Did you mean 'window'?"),
    (
        both({"kind": "key_flag", "input": "x"}, {"kind": "mask_input", "input": "x"}),
        "(top)",
        "'x' is read both as a whole mask",
    ),
    (heads([FULL]), "heads", "expected an object, head to spec"),
    (heads({"a": FULL}), "heads.a", "Heads are named 3,"),
    (heads({"0": FULL, "0-1": FULL}), "heads.0-1", "Head 0 has two rules"),
    ({"kind": "per_head", "heads": {}, "default": 1}, "default", "expected an object with a"),
    (
        heads({"0": both(FULL, {"kind": "window", "before": "x"})}),
        "heads.0.specs[1].before",
        f"`before` {WHOLE}'x'",
    ),
    (
        heads({"2-3": {"kind": "not", "spec": both(FULL, {"kind": "chunk", "sise": 1})}}),
        "heads.2-3.spec.specs[1].sise",
        "no such field. Did you mean 'size'?",
    ),
]


@pytest.mark.parametrize(("config", "path", "problem"), BAD)
def test_the_error_of_a_bad_config_names_the_place(config, path, problem):
    message = f"^{re.escape(f'Bad mask spec at `{path}`: ')}.*{problem.replace('?', '[?]')}"
    with pytest.raises(ValueError, match=message):
        load(config)


def test_a_config_that_holds_itself_is_refused():
    endless = {"kind": "not"}
    endless["spec"] = endless
    with pytest.raises(ValueError, match="rules nested this deeply are not read"):
        hm.MaskSpec.from_config(endless)


def test_a_field_that_is_no_json():
    with pytest.raises(TypeError, match="fields must be JSON values, tuples of them, or specs"):
        registry.to_json({1, 2})
