"""Kinds and recipes by name: rules read from JSON, and what an error proposes to write instead.

A config is a dict of JSON values with a permanent `kind` name, never a class path, so that files
outlive renames. Every error carries the path to the bad place, such as `heads.0.specs[1].before`.
"""

import dataclasses
import difflib
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

KINDS: dict[str, Any] = {}  # the class of each
RECIPES: dict[str, str] = {}  # the call of each: {"causal": "hm.recipes.causal()"}
_CALLS: dict[Any, str] = {}  # by class, by recipe, and by the names of ours
_OURS = f"{__name__.partition('.')[0]}."
_LONGEST_PATH = 900  # about a hundred levels; a config that holds itself has no end


def register(kind: str, cls: Any) -> None:
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ValueError(f"A kind is a name such as 'same_speaker'. Received: {kind!r}.")
    known = KINDS.setdefault(kind, cls)
    # A notebook cell run twice defines its class again: the same class by name may be replaced.
    if _full_name(known) != _full_name(cls):
        raise ValueError(
            f"The kind {kind!r} already names {_full_name(known)}; saved rules rely on it. "
            "Choose another name."
        )
    KINDS[kind] = cls
    is_ours = cls.__module__.startswith(_OURS)
    call = ("hm." if is_ours else "") + _call(cls)
    _CALLS.update(dict.fromkeys((cls, kind, cls.__name__) if is_ours else (cls,), call))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_registered(cls: Any) -> bool:
    """Whether `cls`, not only a parent of it, has a kind of its own."""
    known = KINDS.get(getattr(cls, "kind", ""))
    return known is not None and _full_name(known) == _full_name(cls)


def recipe(function: Callable) -> Callable:
    """Decorator: errors propose `function` to users who write its name as a text."""
    name = function.__name__
    RECIPES[name] = _CALLS[name] = _CALLS[function] = f"hm.recipes.{_call(function)}"
    return function


def _call(function: Callable) -> str:
    if function.__name__ == "Window":  # without a bound it would allow everything
        return "Window(before=8, after=8)"
    parameters = inspect.signature(function).parameters.values()
    return f"{function.__name__}({', '.join(p.name for p in parameters if p.default is p.empty)})"


def call_of(value: Any) -> str | None:
    """The call that `value` stands for: a class, a recipe, or the name of one; else `None`."""
    return _CALLS.get(value) if isinstance(value, (type, types.FunctionType, str)) else None


def names_heads(value: Any) -> bool:
    """Whether the keys of a mapping are heads, as `PerHead` takes them, and nothing else."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(
        re.fullmatch("[0-9, -]+", key) if isinstance(key, str) else type(key) in (int, tuple)
        for key in value
    )


def shape_of(value: Any) -> tuple | None:
    """The shape of a tensor or an array of any library; `None` for other values."""
    shape = None if isinstance(value, type) else getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def shown(value: Any) -> str:
    """`value` in an error: a tensor by its shape."""
    shape = shape_of(value)
    return repr(value) if shape is None else f"{type(value).__name__} of shape {shape}"


def hint_for(value: Any, call: str = "SPEC") -> str:
    """How to write `value`, which is not a spec, as one; `call` is the code around it."""

    def hint(text: str, spec: str) -> str:
        return f" {text}: {call.replace('SPEC', spec)}."

    if value is None:
        return hint("The spec that hides nothing is Full()", "hm.Full()")
    if isinstance(value, bool):
        return " Write Full() for True and Nothing() for False."
    if (meant := call_of(value)) is not None:
        return hint("Call it", meant)
    if isinstance(value, str):
        json_hint = " JSON text becomes a spec by `MaskSpec.from_config(json.loads(text))`."
        recipes = f"The recipes are {', '.join(sorted(RECIPES))}"
        return hint(recipes, "hm.recipes.causal()") + json_hint
    if names_heads(value):
        return hint("Wrap rules by head in PerHead", f"hm.PerHead({{{next(iter(value))!r}: ...}})")
    if isinstance(value, Mapping):
        return " A config becomes a spec by `MaskSpec.from_config`."
    if isinstance(value, (list, tuple)) and any(hasattr(part, "allowed") for part in value):
        how = "Combine specs by & or |, or give each head its own by PerHead"
        return hint(how, "hm.PerHead({0: a, 1: b})")
    if isinstance(value, types.FunctionType):
        how = "Make a function the method `allowed` of a class under @hm.register_spec"
        return hint(f"{how}('the_class')", "TheClass()")
    if hasattr(type(value), "get_weights"):  # a model or a layer; Keras is not imported here
        get = " A model gets rules by hm.apply_head_masks(model, spec)"
        return f"{get}; hm.mask_specs(model) has them, and `layer.mask_spec` that of a layer."
    return hint("A mask tensor enters a spec by MaskInput(name)", "hm.MaskInput(name)")


def did_you_mean(name: Any, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def to_json(value: Any) -> Any:
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
    if not isinstance(kind, str) or kind not in KINDS:
        raise bad_place(
            join_path(path, "kind"),
            f"unknown kind {kind!r}.{did_you_mean(kind, KINDS)} A spec of your own must be "
            "imported, so that @register_spec has run, before a rule that holds it is loaded.",
        )
    return KINDS[kind].from_fields(fields, path)


def build_dataclass(cls: Any, fields: dict[str, Any], path: str) -> Any:
    known = {f.name: (f.default, f.default_factory) for f in dataclasses.fields(cls)}
    required = {name for name, of in known.items() if set(of) == {dataclasses.MISSING}}
    check_field_names(fields, path, required, known)
    values = {k: from_json(v, join_path(path, k)) for k, v in fields.items()}
    return located(lambda: cls(**values), path)


def check_field_names(
    fields: dict[str, Any], path: str, required: Collection[str], known: Collection[str]
) -> None:
    if strange := [name for name in fields if name not in known]:
        names = ", ".join(sorted(known)) or "none"
        problem = f"no such field.{did_you_mean(strange[0], known)} Fields here: {names}."
        raise bad_place(join_path(path, str(strange[0])), problem)
    if missing := sorted(set(required) - fields.keys()):
        raise bad_place(path, f"the field `{missing[0]}` is missing.")


def located(make: Callable[[], Any], path: str) -> Any:
    """`make()`, a constructor; an error that it raises gets its place in the config."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        field = getattr(error, "field", None)
        raise bad_place(join_path(path, field) if field else path, str(error)) from error
