"""The JSON Schema of rules says of a file what `from_config` says."""

import json
from dataclasses import dataclass
from importlib import resources

import jsonschema
import pytest
import strategies
from hypothesis import given
from test_config import BAD, FOREVER

import keras_headmask as hm
from keras_headmask.rules import config as registry

pytestmark = pytest.mark.tensorflow  # the same on every backend

OURS = {
    kind: cls
    for kind, cls in registry.KINDS.items()
    if cls.__module__.startswith("keras_headmask.")
}
SCHEMA = hm.schema(OURS)
FULL = {"kind": "full"}


def accepts(config, schema=SCHEMA):
    return jsonschema.Draft202012Validator(schema).is_valid(config)


def loads(config):
    try:
        hm.MaskSpec.from_config(config)
    except ValueError:
        return False
    return True


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]


def test_the_shipped_file_is_up_to_date():
    """Made anew by: json.dump(keras_headmask.schema(), file, indent=2), and a newline."""
    shipped = resources.files("keras_headmask.rules").joinpath("rule.schema.json").read_text()
    assert shipped == json.dumps(SCHEMA, indent=2) + "\n"


@pytest.mark.parametrize("text", [text for text, _ in FOREVER.values()], ids=FOREVER)
def test_files_in_the_wild(text):
    jsonschema.validate(json.loads(text), SCHEMA)


@strategies.FEW
@given(strategies.any_specs)
def test_every_rule_is_valid(spec):
    jsonschema.validate(spec.get_config(), SCHEMA)


# What no schema of one field can say.
OF_TWO_FIELDS = (
    "No distance lies",
    "greater than `start`",
    "both as a whole",
    "backwards",
    "two rules",
)


@pytest.mark.parametrize(("config", "path", "problem"), BAD)
def test_bad_files(config, path, problem):
    beyond = any(words in problem for words in OF_TWO_FIELDS)
    assert accepts(config) == beyond


GOOD = {kind: json.loads(text) for kind, (text, _) in FOREVER.items()}
PROBES = [None, True, -(2**31), -2, -1, 0, 1, 10**10, 0.5, 1.5, -0.1, "", "x", "0", [], [1], [1.5]]
PROBES += [["x"], [True], [10**10], FULL, [FULL], [FULL, 1], {}, {"0": FULL}, {"0": 1}, {"x": FULL}]


@pytest.mark.parametrize("kind", OURS)
def test_each_field_takes_what_its_constructor_takes(kind):
    """Also that the limits in the schema are those that are checked."""
    fields = SCHEMA["$defs"][kind]["properties"].keys() - {"kind"}
    required = SCHEMA["$defs"][kind]["required"]
    least = {field: GOOD[kind][field] for field in required}
    least |= {"start": 0} if "start" in least else {}  # so that `stop` may be 1
    for config in (least, GOOD[kind]):
        assert accepts(config)
    for field in fields:
        for value in PROBES:
            config = least | {field: value}
            assert accepts(config) == loads(config), config
    for field in required:
        assert not accepts({k: v for k, v in least.items() if k != field})
    assert not accepts(least | {"no_such_field": 1})


@pytest.mark.parametrize("heads", ["0", "1-3", "0,4-7", " 0 , 4 - 7 ", "", "-1", "1-", "a", "0;1"])
def test_numbers_of_heads(heads):
    config = {"kind": "per_head", "heads": {heads: FULL}}
    assert accepts(config) == loads(config)


def test_an_error_speaks_of_the_kind_that_was_written():
    bad = {"kind": "and", "specs": [FULL, {"kind": "window", "befor": 3}]}
    (error,) = jsonschema.Draft202012Validator(SCHEMA).iter_errors(bad)
    assert error.json_path == "$.specs[1]"
    assert "'befor' was unexpected" in error.message


def test_kinds_of_ones_own(monkeypatch):
    monkeypatch.setattr(registry, "KINDS", dict(registry.KINDS))

    @hm.register_spec("schema_test_speaker")
    @dataclass(frozen=True)
    class Speaker(hm.MaskSpec):
        names: tuple[str, ...]
        beside: hm.MaskSpec
        loud: bool = False
        anything: dict | None = None

    config = Speaker(("a",), hm.Full()).get_config()
    schema = hm.schema()
    jsonschema.validate(config, schema)
    assert not accepts(config)  # under the schema of our kinds
    assert not accepts(config | {"names": [1]}, schema)
    assert not accepts(config | {"beside": 1}, schema)
    assert not accepts(config | {"loud": 1}, schema)
    assert accepts(config | {"anything": {"x": 1}}, schema)
    with pytest.raises(ValueError, match="No spec is registered as 'schema_test_shout'"):
        hm.schema(["full", "schema_test_shout"])
