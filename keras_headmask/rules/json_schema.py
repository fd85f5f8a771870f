"""A JSON Schema of rules, so that an editor completes and checks a rule's file."""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any

from keras_headmask.rules import config
from keras_headmask.rules.fields import RULE, limits_of, types_of

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def schema(kinds: Iterable[str] | None = None) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of rules: what `MaskSpec.from_config` reads.

    It is made of the registered kinds, those of your own too, and the types of their fields. The
    package ships the schema of its own kinds as `rule.schema.json`. What concerns two fields at
    once (`stop` after `start`, a head named twice) is checked by `from_config` alone.

    Args:
        kinds: The kinds that a rule may be made of; by default all that are registered.

    Returns:
        The schema, as plain JSON values.

    Raises:
        ValueError: for a kind that is not registered.

    >>> window = schema()["$defs"]["window"]
    >>> sorted(window["properties"]), window["required"]
    (['after', 'before', 'kind', 'step'], ['kind'])
    """
    kinds = sorted(config.KINDS if kinds is None else set(kinds))
    if missing := [kind for kind in kinds if kind not in config.KINDS]:
        raise ValueError(
            f"No spec is registered as {missing[0]!r}; a spec of your own must be imported first. "
            f"Registered: {', '.join(sorted(config.KINDS))}."
        )
    rule = {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": kinds}},
        # Rather than `oneOf`: an error then speaks of the kind that was written.
        "allOf": [
            {
                "if": {"required": ["kind"], "properties": {"kind": {"const": kind}}},
                "then": {"$ref": f"#/$defs/{kind}"},
            }
            for kind in kinds
        ],
    }
    of_kinds = {}
    for kind in kinds:
        cls = config.KINDS[kind]
        fields = cls.json_fields()
        required = [name for name, field in fields.items() if "default" not in field]
        of_kinds[kind] = {
            "description": (cls.__doc__ or kind).strip().split("\n")[0],
            "type": "object",
            "properties": {"kind": {"const": kind}, **fields},
            "required": ["kind", *required],
            "additionalProperties": False,
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A rule of keras_headmask",
        "description": "Which keys each query of an attention head may attend to.",
        **RULE,
        "$defs": {"rule": rule, **of_kinds},
    }


def of_fields(cls: Any) -> dict[str, dict[str, Any]]:
    types, schemas = types_of(cls), {}
    for field in dataclasses.fields(cls):
        schemas[field.name] = _of_type(types[field.name])
        default, factory = field.default, field.default_factory
        if factory is not dataclasses.MISSING:
            default = factory()
        if default is not dataclasses.MISSING:
            schemas[field.name] |= {"default": config.to_json(default)}
    return schemas


def _of_type(annotation: Any) -> dict[str, Any]:
    """What JSON Schema says of values with this annotation; `{}`, anything, where it is unusual."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = limits_of(annotation)
        return dict(limits.schema) if limits else _of_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        schemas = [_of_type(argument) for argument in arguments]
        return {} if {} in schemas else {"anyOf": schemas}
    if origin in (tuple, list) and len(set(arguments) - {...}) == 1:
        items = _of_type(arguments[0])
        return {"type": "array"} | ({"items": items} if items else {})
    if hasattr(annotation, "from_fields"):
        return dict(RULE)
    return {"type": _TYPES[annotation]} if annotation in _TYPES else {}
