"""What the attributes and the code of a layer lead to, also where Keras does not look.

Keras tracks layers in attributes, lists and dicts. This finds those in other objects, in partial
and bound functions and in closures, and the functions that a layer's code may call.
"""

import collections
import dis
import functools
import importlib.util
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras

# What a layer holds of these is their own business; the name of a function of theirs is seen.
_LIBRARIES = frozenset(
    {"keras", "tensorflow", "jax", "jaxlib", "torch", "numpy", "keras_headmask", "builtins"}
)
_CONTAINERS = list, tuple, set, frozenset, collections.deque
# Where TensorFlow, JAX and PyTorch keep the function that they compiled.
_COMPILED = "__wrapped__", *_keras.COMPILED_FROM
# Of these, `use_dot_product_attention` in an attribute is a flag.
_OPERATIONS = "dot_product_attention", "DotProductAttention"
_PLAIN = str, bytes, int, float, complex, type(None)
# Of a container with more elements than this, so many are looked at: it is a vocabulary, say.
_LONG, _LOOKED_AT = 10_000, 1_000
# Of a model: its graph, which is walked as such, and what `compile` leaves, which no forward runs.
_OF_MODELS = _keras.LISTS_OF_MODELS | {
    *("loss", "optimizer"),
    *("train_function", "test_function", "predict_function", "generate_function"),
}


class Reached(NamedTuple):
    path: str  # how to come to it: ".parts.attention"
    value: Any
    by_code: bool = False  # through a class or a global, of which a copy has the same


def untracked_layers(model: keras.Model) -> list[tuple[str, keras.Layer]]:
    """Layers that the layers of `model` lead to and Keras does not track, with their paths.

    Layers that only code names are left out if they hold no attention: a copy runs the same ones,
    if any forward runs them at all. So are models around the one that leads to them.
    """
    tracked = list(_keras.layers_of(model))
    seen = {id(layer) for layer in tracked}
    found: list[tuple[str, keras.Layer]] = []
    for layer in tracked:
        for path, value, by_code in reached(layer):
            if not isinstance(value, keras.Layer) or id(value) in seen:
                continue
            inside = list(_keras.layers_of(value))
            if any(x is layer or x is model for x in inside):
                continue  # a layer that called it would call itself
            if by_code and not any(map(_may_attend, inside)):
                continue
            seen.add(id(value))
            found.append((f"{layer.name}{path}", value))
    return found


def _may_attend(layer: keras.Layer) -> bool:
    names = {type(layer).__name__, *names_in_code(layer)}
    return isinstance(layer, keras.layers.MultiHeadAttention) or any(
        "attention" in name.lower() for name in names
    )


def names_in_code(layer: Any) -> set[str]:
    """What the code of a layer refers to, and the names of the functions that it leads to."""
    names: set[str] = set()
    home = _package(type(layer).__module__)
    for _, value, _ in reached(layer):
        if isinstance(value, types.FunctionType) and _may_enter(_home(value), home):
            for read in _reads(value):
                name = read.path.rpartition(".")[2]
                is_flag = isinstance(read.value, _PLAIN) or (
                    read.is_attribute
                    and name not in _OPERATIONS
                    and any(operation in name for operation in _OPERATIONS)
                )
                if not is_flag:
                    names.add(name)
        if callable(value):
            names.add(getattr(value, "__name__", type(value).__name__))
    return names


def reached(layer: Any) -> Iterator[Reached]:
    """All functions, and all objects that may hold some, that `layer` leads to.

    Layers are given and not entered: what they hold is theirs.
    """
    home = _package(type(layer).__module__)
    waiting = [Reached(path, part) for path, part in _parts_of_object(layer)]
    later = [Reached(path, part, True) for path, part in _parts_of_classes(layer)]
    seen: dict[int, Any] = {id(layer): layer}  # holds what it names, so that no id is used twice
    while waiting or later:  # what data leads to comes first, as code may lead there too
        place = (waiting or later).pop()
        path, value, by_code = place
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield place
        (later if by_code else waiting).extend(
            Reached(path + step, part, by_code) for step, part in _parts(value, home)
        )
        later += [Reached(path + step, part, True) for step, part in _parts_of_code(value, home)]


def _parts_of_code(value: Any, home: str) -> Iterator[tuple[str, Any]]:
    """What the code of a function, of a class, or of an object's class leads to."""
    if isinstance(value, types.FunctionType):
        if _may_enter(_home(value), home):
            yield from _globals_of_function(value)
    elif isinstance(value, type):
        if _may_enter(value.__module__, home) and not issubclass(value, keras.Operation):
            yield from ((f".{name}", part) for name, part in vars(value).items())
    elif _is_entered(value, home):
        yield from _parts_of_classes(value)


def _parts(value: Any, home: str) -> Iterator[tuple[str, Any]]:
    """What one object leads to, and the step from it to there."""
    if isinstance(value, keras.Layer):
        return
    if isinstance(value, Mapping):
        items = list(itertools.islice(value.items(), _looked_at(value)))
        yield from ((f"[{key!r}]", part) for key, part in items if not isinstance(part, _PLAIN))
    elif isinstance(value, _CONTAINERS):
        pairs = enumerate(itertools.islice(value, _looked_at(value)))
        yield from ((f"[{i}]", part) for i, part in pairs if not isinstance(part, _PLAIN))
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
    elif isinstance(value, (type, types.ModuleType)):
        return  # code: see `_parts_of_code`; a function names what it takes of a module
    elif isinstance(value, types.SimpleNamespace):
        yield from ((f".{name}", part) for name, part in vars(value).items())
    else:
        if callable(value) and _package(type(value).__module__) in _LIBRARIES:
            for name in _COMPILED:
                yield "", getattr(value, name, None)
        if _is_entered(value, home):
            yield from _parts_of_object(value)


def _is_entered(value: Any, home: str) -> bool:
    """Whether a value is an object of the user's own classes."""
    return not isinstance(
        value, (keras.Layer, Mapping, *_CONTAINERS, type, types.ModuleType)
    ) and _may_enter(type(value).__module__, home)


def _looked_at(container: Any) -> int:
    """How many elements are looked at: of a long table only the first, as it holds data."""
    return _LOOKED_AT if len(container) > _LONG else _LONG


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds."""
    held = getattr(value, "__dict__", {})
    skipped = _OF_MODELS if isinstance(value, keras.Model) else frozenset()
    if isinstance(value, keras.Layer):
        skipped |= _keras.LISTS_OF_LAYERS
    if isinstance(value, keras.Sequential):
        skipped |= _keras.LISTS_OF_SEQUENTIALS
    for name, part in list(held.items()):
        if name not in skipped and not name.startswith(_keras.NOTES_OF_TENSORFLOW):
            yield f".{name}", part
    for part in _own_classes(value):
        for name, attribute in vars(part).items():
            if isinstance(attribute, types.MemberDescriptorType):  # of `__slots__`
                yield f".{name}", getattr(value, name, None)


def _parts_of_classes(value: Any) -> Iterator[tuple[str, Any]]:
    for part in _own_classes(value):
        yield from ((f".{name}", attribute) for name, attribute in vars(part).items())


def _own_classes(value: Any) -> Iterator[type]:
    """The classes that an object is made from, up to Keras' own."""
    for part in type(value).__mro__:
        package = _package(part.__module__)
        if package == "keras_headmask":
            continue  # a masked model's class stands before the stock one
        if package in _LIBRARIES:
            break
        yield part


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, or has as a default."""
    yield from ((f" -> {name}", part) for name, part in _closed_over(function))
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (("(default)", part) for part in defaults)


def _globals_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for read in _reads(function):
        if read.value is not _UNKNOWN and not _is_module(read.value):
            yield f" -> {read.path}", read.value


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue


class _Read(NamedTuple):
    """A name that code reads, and its value if it is a global, of a module, or imported."""

    path: str  # as it stands in the code: "keras.ops.softmax"
    value: Any
    is_attribute: bool = False  # of an object that is no module, and not called there


def _reads(function: types.FunctionType) -> Iterator[_Read]:
    """What a function reads by name, in functions inside it too.

    Attributes of modules are followed, and modules that the function itself imports.
    """
    scope = function.__globals__
    local = {name: part for name, part in _closed_over(function) if _is_module(part)}
    for code in _codes(function.__code__):
        path, value = "", _UNKNOWN  # what the last step left on the stack
        origin, source, dotted = "", _UNKNOWN, False  # of an import
        earlier: tuple[Any, ...] = (None, None)
        for step, argument in _steps(code):
            held, value = value, _UNKNOWN
            # Some Pythons load or store two names in one step.
            first, last = (argument[0], argument[-1]) if _is_pair(argument) else [argument] * 2
            if step in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                path, value = argument, scope.get(argument, local.get(argument, _UNKNOWN))
                yield _Read(path, value)
            elif step.startswith("LOAD_") and ("ATTR" in step or "METHOD" in step):
                path, value = f"{path}.{argument}", _of_module(held, argument)
                yield _Read(path, value, step == "LOAD_ATTR" and not _is_module(held))
            elif step == "IMPORT_NAME":
                level, names = earlier
                dotted = not names  # `import a.b` gives a
                origin = path = _package(argument) if dotted else argument
                source = value = _imported(origin, level, scope)
            elif step == "IMPORT_FROM":
                path, value = f"{origin}.{argument}", _of_module(source, argument)
                yield _Read(path, value)
                if dotted:  # `import a.b as c` walks from a to b
                    origin, source = path, value
            else:
                if step.startswith(("STORE_FAST", "STORE_DEREF", "STORE_NAME")):
                    local.pop(first, None)
                    if _is_module(held):
                        local[first] = held
                if step.startswith(("LOAD_FAST", "LOAD_DEREF")) or "_LOAD_FAST" in step:
                    path, value = last, local.get(last, _UNKNOWN)
            earlier = (earlier[1], argument)


def _is_pair(argument: Any) -> bool:
    return isinstance(argument, tuple) and len(argument) == 2


_UNKNOWN = object()


@functools.lru_cache(maxsize=4096)
def _steps(code: types.CodeType) -> list[tuple[str, Any]]:
    """The instructions of a code object, those that call a method by one name in all Pythons."""
    return [
        (
            "LOAD_METHOD"
            if x.opname == "LOAD_ATTR" and sys.version_info >= (3, 12) and (x.arg or 0) & 1
            else x.opname,
            x.argval,
        )
        for x in dis.get_instructions(code)
        if x.opname not in ("EXTENDED_ARG", "PUSH_NULL", "SWAP", "POP_TOP")
    ]


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


def _of_module(module: Any, name: str) -> Any:
    """What a module holds, without running the code by which some load parts of themselves."""
    if not _is_module(module):
        return _UNKNOWN
    inner = sys.modules.get(f"{module.__name__}.{name}", _UNKNOWN)
    return vars(module).get(name, inner)


def _imported(name: str, level: int, scope: dict[str, Any]) -> Any:
    try:
        name = importlib.util.resolve_name("." * level + name, scope.get("__package__"))
    except ImportError:
        return _UNKNOWN
    return sys.modules.get(name, _UNKNOWN)


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
