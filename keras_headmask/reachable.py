"""What the attributes and the code of a layer lead to, also where Keras does not look.

Keras tracks layers in attributes, lists and dicts. This finds those in other objects, in partial
and bound functions and in closures, and the functions that a layer's code may call.
"""

import collections
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras

# What a layer holds of these is their own business; the name of a function of theirs is seen.
_LIBRARIES = frozenset(
    {"keras", "tensorflow", "jax", "jaxlib", "torch", "numpy", "keras_headmask", "builtins"}
)
_CONTAINERS = list, tuple, set, frozenset, collections.deque
# Where TensorFlow, JAX and PyTorch keep the function that they compiled.
_COMPILED = "__wrapped__", "_python_function", "_torchdynamo_orig_callable"
# Of a model: its graph, which is walked as such, and what `compile` leaves, which no forward runs.
_OF_MODELS = frozenset(
    {"_operations", "_operations_by_depth", "_layers", "loss", "optimizer", "train_function"}
    | {"test_function", "predict_function", "generate_function"}
)


class Reached(NamedTuple):
    path: str  # how to come to it: ".parts.attention"
    value: Any


def untracked_layers(model: keras.Model) -> list[tuple[str, keras.Layer]]:
    """Layers that the layers of `model` lead to and Keras does not track, with their paths."""
    tracked = list(model._flatten_layers())
    seen = {id(layer) for layer in tracked}
    found: list[tuple[str, keras.Layer]] = []
    for layer in tracked:
        for path, value in reached(layer):
            if isinstance(value, keras.Layer) and id(value) not in seen:
                seen.add(id(value))
                found.append((f"{layer.name}{path}", value))
    return found


def names_in_code(layer: Any) -> set[str]:
    """What the code of a layer refers to, and the names of the functions that it leads to."""
    names: set[str] = set()
    home = _package(type(layer).__module__)
    for _, value in reached(layer):
        if isinstance(value, types.FunctionType) and _may_enter(_home(value), home):
            for code in _codes(value.__code__):
                names.update(code.co_names)
        if callable(value):
            names.add(getattr(value, "__name__", type(value).__name__))
    return names


def reached(layer: Any) -> Iterator[Reached]:
    """All functions, and all objects that may hold some, that `layer` leads to.

    Layers are given and not entered: what they hold is theirs.
    """
    home = _package(type(layer).__module__)
    waiting = [Reached(*x) for x in _parts_of_object(layer)]
    seen: dict[int, Any] = {id(layer): layer}  # holds what it names, so that no id is used twice
    while waiting:
        place = waiting.pop()
        path, value = place
        if value is None or isinstance(value, (str, bytes, int, float, bool)) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield place
        waiting += [Reached(path + step, part) for step, part in _parts(value, home)]


def _parts(value: Any, home: str) -> Iterator[tuple[str, Any]]:
    """What one object leads to, and the step from it to there."""
    if isinstance(value, keras.Layer):
        return
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{i}]", part) for i, part in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", part) for key, part in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield "", value.__func__
    elif isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__
    elif isinstance(value, property):
        yield "", value.fget
    elif isinstance(value, (functools.cached_property, functools.partialmethod)):
        yield "", value.func
    elif isinstance(value, types.FunctionType):
        yield "", getattr(value, "__wrapped__", None)
        if _may_enter(_home(value), home):
            yield from _parts_of_function(value)
    elif isinstance(value, type):
        if _may_enter(value.__module__, home) and not issubclass(value, keras.Operation):
            yield from ((f".{name}", part) for name, part in vars(value).items())
    elif isinstance(value, types.ModuleType):
        return  # a function names what it takes of one
    elif isinstance(value, types.SimpleNamespace):
        yield from ((f".{name}", part) for name, part in vars(value).items())
    else:
        if callable(value) and _package(type(value).__module__) in _LIBRARIES:
            for name in _COMPILED:
                yield "", getattr(value, name, None)
        if _may_enter(type(value).__module__, home):
            yield from _parts_of_object(value)


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and what the classes hold that it is made from, up to Keras' own."""
    held = getattr(value, "__dict__", {})
    skipped = _OF_MODELS if isinstance(value, keras.Model) else frozenset()
    if isinstance(value, keras.Layer):
        skipped |= {"_modules"}  # PyTorch's list of what Keras tracks
    if isinstance(value, keras.Sequential):
        skipped |= {"_functional"}  # a model made of the layers that Keras tracks
    for name, part in list(held.items()):
        if name not in skipped and not name.startswith("_self_"):  # TensorFlow's own notes
            yield f".{name}", part
    for part in type(value).__mro__:
        package = _package(part.__module__)
        if package == "keras_headmask":
            continue  # a masked model's class stands before the stock one
        if package in _LIBRARIES:
            break
        for name, attribute in vars(part).items():
            if isinstance(attribute, types.MemberDescriptorType):  # of `__slots__`
                attribute = getattr(value, name, None)
            yield f".{name}", attribute


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, has as a default, or names among the globals."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" -> {name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (("(default)", part) for part in defaults)
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in sorted(names & function.__globals__.keys()):
        part = function.__globals__[name]
        if isinstance(part, types.ModuleType):
            yield from ((f" -> {name}.{k}", vars(part).get(k)) for k in sorted(names))
        else:
            yield f" -> {name}", part


def _home(function: types.FunctionType) -> str | None:
    """The module whose code it is, also where `functools.wraps` gave it another name."""
    return function.__globals__.get("__name__")


def _may_enter(module: str | None, home: str) -> bool:
    """Whether code is the user's, or of the layer's own package, not of another that it uses."""
    package = _package(module)
    if package in _LIBRARIES or package in sys.stdlib_module_names:
        return package == "__main__"
    if package == home:
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _package(module: str | None) -> str:
    return (module or "").split(".")[0]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of functions and lambdas inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
