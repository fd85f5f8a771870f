"""Mask specs as plain JSON: the registry of kinds and the checks on what comes in.

A config is a dict of JSON values with a permanent `kind` name, never a class path, so that files
outlive renames. Every error carries the path to the bad place, such as `heads.0.specs[1].before`.
"""

import dataclasses
import difflib
import inspect
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_KINDS: dict[str, type] = {}
_RECIPES: dict[str, str] = {}  # the call of each recipe, by its name
_OURS = f"{__name__.partition('.')[0]}."
_LARGEST = 2**31 - 1
_MOST_HEADS = 100_000
_LONGEST_PATH = 900  # about a hundred levels; a config that holds itself has no end


@dataclasses.dataclass(frozen=True)
class Limits:
    """What JSON Schema says of a field beside its type: `Annotated[int, Limits(minimum=1)]`.

    An editor is told by it; constructors check for themselves.
    """

    keywords: tuple[tuple[str, Any], ...]

    def __init__(self, **keywords: Any):
        object.__setattr__(self, "keywords", tuple(keywords.items()))


WHOLE_NUMBER = Limits(minimum=-_LARGEST, maximum=_LARGEST)
NOT_NEGATIVE = Limits(minimum=0, maximum=_LARGEST)
POSITIVE = Limits(minimum=1, maximum=_LARGEST)
NAME = Limits(minLength=1)


def register(kind: str, cls: type) -> None:
    """Give `cls` the permanent name `kind`. A name is given once."""
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ValueError(f"A kind is a name such as 'same_speaker'. Received: {kind!r}.")
    known = _KINDS.get(kind)
    # A notebook cell run twice defines its class again: the same class by name may be replaced.
    if known is not None and (known.__module__, known.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise ValueError(
            f"The kind {kind!r} already names {known.__module__}.{known.__qualname__}; saved rules "
            "rely on it. Choose another name."
        )
    _KINDS[kind] = cls


def is_registered(cls: type) -> bool:
    """Whether `cls`, not only a parent of it, has a kind of its own."""
    known = _KINDS.get(cls.kind)
    return known is not None and (known.__module__, known.__qualname__) == (
        cls.__module__,
        cls.__qualname__,
    )


def recipe(function: Callable) -> Callable:
    """Decorator: let errors name `function` to who writes its name as a text."""
    _RECIPES[function.__name__] = f"hm.recipes.{_call_of(function)}"
    return function


def known_recipes() -> dict[str, str]:
    """The call of each recipe, by name: `{"causal": "hm.recipes.causal()"}`."""
    return dict(_RECIPES)


def names_of_recipes() -> str:
    """Every recipe by name, for an error."""
    return f"The recipes are {', '.join(sorted(_RECIPES))}"


def call_of(value: Any) -> str | None:
    """The call that `value` stands for: a class, a recipe, or the name of one; else `None`."""
    if isinstance(value, str):
        if value in _RECIPES:
            return _RECIPES[value]
        named = {kind: cls for kind, cls in _KINDS.items() if cls.__module__.startswith(_OURS)}
        found = [cls for kind, cls in named.items() if value in (kind, cls.__name__)]
        return f"hm.{_call_of(found[0])}" if found else None
    if isinstance(value, type):
        ours = value.__module__.startswith(_OURS)
        return ("hm." if ours else "") + _call_of(value) if value in _KINDS.values() else None
    return _RECIPES.get(value.__name__) if isinstance(value, types.FunctionType) else None


def _call_of(function: Callable) -> str:
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    return f"{function.__name__}({', '.join(required)})"


def names_heads(value: Any) -> bool:
    """Whether the keys of a mapping are heads, as `PerHead` takes them, and nothing else."""

    def is_head(key: Any) -> bool:
        if isinstance(key, str):
            return bool(key) and set(key) <= set("0123456789-, ")
        return isinstance(key, (int, tuple)) and not isinstance(key, bool)

    return isinstance(value, Mapping) and bool(value) and all(map(is_head, value))


def known_kinds() -> dict[str, type]:
    """Every registered kind and its class, by name."""
    return dict(sorted(_KINDS.items()))


def fail(error: type[Exception], field: str, message: str) -> NoReturn:
    """Raise `error`, remembering the field so that a JSON error can name its path."""
    exception = error(message)
    exception.field = field
    raise exception


def whole_number(
    value: Any, field: str, at_least: int | None = None, any_size: bool = False
) -> int:
    """`value` as an int; of 32 bits unless `any_size`, since it meets int32 positions and ids.

    bool is refused, since True == 1 would make two specs equal.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        fail(TypeError, field, f"`{field}` must be a whole number. Received: {value!r}.")
    try:
        number = operator.index(value)
    except TypeError:  # an array of several
        fail(TypeError, field, f"`{field}` must be a whole number. Received: {value!r}.")
    if at_least is not None and number < at_least:
        fail(ValueError, field, f"`{field}` must be at least {at_least}. Received: {number}.")
    if abs(number) > _LARGEST and not any_size:
        fail(
            ValueError,
            field,
            f"`{field}` must lie between -{_LARGEST} and {_LARGEST} (32 bits). Received: {number}.",
        )
    return number


def fraction(value: Any, field: str) -> float:
    """`value` as a float from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail(TypeError, field, f"`{field}` must be a number from 0 to 1. Received: {value!r}.")
    if not (math.isfinite(value) and 0 <= value <= 1):
        fail(ValueError, field, f"`{field}` must lie between 0 and 1. Received: {value!r}.")
    return float(value)


def input_name(value: Any, field: str = "input") -> str:
    """`value` as the name of a mask input."""
    if not isinstance(value, str) or not value:
        fail(
            TypeError,
            field,
            f"`{field}` is the name under which the tensor is handed in, such as 'sentence_ids'. "
            f"Received: {value!r}.",
        )
    return value


def id_tuple(value: Any, field: str) -> tuple[int, ...]:
    """One id, or several, as a sorted tuple without repeats."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # NumPy's
    if hasattr(type(value), "__index__"):
        value = (value,)
    if isinstance(value, (str, bytes, dict)) or not hasattr(type(value), "__iter__"):
        fail(TypeError, field, f"`{field}` must be token ids, such as (102,). Received: {value!r}.")
    ids = tuple(sorted({whole_number(v, field) for v in value}))
    if not ids:
        fail(ValueError, field, f"`{field}` must hold at least one token id. Received none.")
    return ids


def to_json(value: Any) -> Any:
    """A field's value as plain JSON."""
    if hasattr(value, "get_config"):
        return value.get_config()
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"A spec's fields must be JSON values, tuples of them, or specs. Received: {value!r}. "
        "Override `get_config` and `from_fields` for anything else."
    )


def from_json(value: Any, path: str) -> Any:
    """The inverse of `to_json`: dicts become specs, lists become tuples (fields must hash)."""
    if isinstance(value, Mapping):
        return build(value, path)
    if isinstance(value, (list, tuple)):
        return tuple(from_json(v, f"{path}[{i}]") for i, v in enumerate(value))
    return value


def bad_place(path: str, problem: str) -> ValueError:
    """The error of every config that cannot be read."""
    return ValueError(f"Bad mask spec at `{path or '(top)'}`: {problem}")


def join_path(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def build(config: Any, path: str = "") -> Any:
    """Make the spec that `config` describes; `path` says where in a larger config it stands."""
    if len(path) > _LONGEST_PATH:
        raise bad_place(path[:60] + "...", "rules nested this deeply are not read.")
    if not isinstance(config, Mapping):
        raise bad_place(path, f"expected an object with a `kind`. Received: {config!r}.")
    fields = dict(config)
    if "kind" not in fields:
        hint = ""
        if names_heads(config):
            hint = ' Rules by head are a PerHead: {"kind": "per_head", "heads": {"0": ...}}.'
        raise bad_place(path, f"the field `kind` is missing. Received: {config!r}.{hint}")
    kind = fields.pop("kind")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise bad_place(
            join_path(path, "kind"),
            f"unknown kind {kind!r}.{_did_you_mean(kind, _KINDS)} A spec of your own must be "
            "imported, so that @register_spec has run, before a rule that holds it is loaded.",
        )
    return cls.from_fields(fields, path)


def number_of_heads(value: Any) -> int:
    """`value` as a number of heads that can be gone through one by one."""
    number = whole_number(value, "num_heads", at_least=1, any_size=True)
    if number > _MOST_HEADS:
        fail(
            ValueError,
            "num_heads",
            f"`num_heads` must be at most {_MOST_HEADS}. Received: {number}. Pass the number of "
            "heads of the attention layer.",
        )
    return number


def build_dataclass(cls: type, fields: dict, path: str) -> Any:
    """Make `cls` from fields read as JSON."""
    check_field_names(
        fields,
        path,
        required={f.name for f in dataclasses.fields(cls) if _required(f)},
        known={f.name for f in dataclasses.fields(cls)},
    )
    values = {k: from_json(v, join_path(path, k)) for k, v in fields.items()}
    return located(lambda: cls(**values), path)


def check_field_names(fields: dict, path: str, required: set[str], known: set[str]) -> None:
    for name in fields:
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise bad_place(
                join_path(path, str(name)),
                f"no such field.{_did_you_mean(name, known)} Fields here: {names}.",
            )
    if missing := sorted(required - fields.keys()):
        raise bad_place(path, f"the field `{missing[0]}` is missing.")


def located(make: Callable[[], Any], path: str) -> Any:
    """Run a constructor; an error it raises is told with its place in the config."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        field = getattr(error, "field", None)
        raise bad_place(join_path(path, field) if field else path, str(error)) from error


RULE = {"$ref": "#/$defs/rule"}
_JSON_TYPES = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}


def json_fields(cls: type) -> dict[str, dict[str, Any]]:
    """The JSON Schema of each field of a dataclass, by its annotations."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # of a class made inside a function: nothing is known
        hints = {}
    schemas = {}
    for field in dataclasses.fields(cls):
        schema = _json_schema_of(hints.get(field.name, Any))
        if field.default is not dataclasses.MISSING:
            schema = schema | {"default": to_json(field.default)}
        elif field.default_factory is not dataclasses.MISSING:
            schema = schema | {"default": to_json(field.default_factory())}
        schemas[field.name] = schema
    return schemas


def _json_schema_of(annotation: Any) -> dict[str, Any]:
    """What JSON Schema says of values with this annotation; `{}`, anything, where it is unusual."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        schema = _json_schema_of(arguments[0])
        limits = {k: v for a in arguments[1:] if isinstance(a, Limits) for k, v in a.keywords}
        return _limited(schema, limits)
    if origin in (typing.Union, types.UnionType):
        schemas = [_json_schema_of(argument) for argument in arguments]
        return {} if {} in schemas else {"anyOf": schemas}
    if origin in (tuple, list) and len(set(arguments) - {...}) == 1:
        items = _json_schema_of(arguments[0])
        return {"type": "array"} | ({"items": items} if items else {})
    if isinstance(annotation, type) and hasattr(annotation, "from_fields"):
        return RULE
    return _JSON_TYPES.get(annotation, {}) if isinstance(annotation, type) else {}


def _limited(schema: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """`schema` with more keywords, on the alternatives whose type they speak of."""
    if "anyOf" in schema:
        return {"anyOf": [_limited(part, limits) for part in schema["anyOf"]]}
    if "minItems" in limits and schema.get("type") != "array":
        return schema
    return schema | limits


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _did_you_mean(name: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
