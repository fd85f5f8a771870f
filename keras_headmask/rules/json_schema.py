"""A JSON Schema of rules, so that an editor completes and checks a rule's file."""

from collections.abc import Iterable
from typing import Any

from keras_headmask.rules import config


def schema(kinds: Iterable[str] | None = None) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of rules: what `MaskSpec.from_config` reads.

    It is made of the registered kinds, those of your own too, and the types of their fields. The
    package ships the schema of its own kinds as `rule.schema.json`. What concerns two fields at
    once (`stop` after `start`, a head named twice) is checked by `from_config` alone.

    Args:
        kinds: The kinds that a rule may be made of; by default all that are registered.

    Raises:
        ValueError: for a kind that is not registered.

    >>> window = schema()["$defs"]["window"]
    >>> sorted(window["properties"]), window["required"]
    (['after', 'before', 'kind', 'step'], ['kind'])
    """
    known = config.known_kinds()
    kinds = list(known) if kinds is None else sorted(set(kinds))
    if missing := [kind for kind in kinds if kind not in known]:
        raise ValueError(
            f"No spec is registered as {missing[0]!r}; a spec of your own must be imported first. "
            f"Registered: {', '.join(known)}."
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
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A rule of keras_headmask",
        "description": "Which keys each query of an attention head may attend to.",
        **config.RULE,
        "$defs": {"rule": rule, **{kind: _kind(kind, known[kind]) for kind in kinds}},
    }


def _kind(kind: str, cls: type) -> dict[str, Any]:
    fields = cls.json_fields()
    return {
        "description": (cls.__doc__ or kind).strip().split("\n")[0],
        "type": "object",
        "properties": {"kind": {"const": kind}, **fields},
        "required": ["kind", *(name for name, field in fields.items() if "default" not in field)],
        "additionalProperties": False,
    }
