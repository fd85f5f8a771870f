"""Checks of the fields of a spec, called by constructors."""

import dataclasses
import functools
import math
import numbers
import operator
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """In the `Annotated` type of a field: a function of the value and the name of the field.

    The function raises for a bad value, and returns the value to store.
    """

    function: Callable[[Any, str], Any]


def _check_in(annotation: Any) -> Check | None:
    return next((x for x in getattr(annotation, "__metadata__", ()) if isinstance(x, Check)), None)


def _types_of(cls: Any) -> dict[str, Any]:
    """The annotations of a dataclass, those that are text evaluated, too."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:  # text that names what is not there, in a class made inside a function, say
        return {field.name: field.type for field in dataclasses.fields(cls)}


# By class, (field, check, whether None passes). (`torch.compile` reads a dict, and no
# `functools.cache`.)
_checks: dict[type, list[tuple[str, Callable[[Any, str], Any], bool]]] = {}


def check_fields(spec: Any) -> None:
    """Check each field of a spec under construction that has a `Check`, or a `Check` or None."""
    if type(spec) not in _checks:
        _checks[type(spec)] = _checks_of(type(spec))
    for name, check, is_option in _checks[type(spec)]:
        value = getattr(spec, name)
        if value is not None or not is_option:
            object.__setattr__(spec, name, check(value, name))


def _checks_of(cls: Any) -> list[tuple[str, Callable[[Any, str], Any], bool]]:
    types = _types_of(cls)
    checks = []
    for field in dataclasses.fields(cls):
        annotation = types[field.name]
        options = [(annotation, False), *((x, True) for x in typing.get_args(annotation))]
        for option, is_option in options:
            if check := _check_in(option):
                checks.append((field.name, check.function, is_option))
    return checks


def fail(error: type[Exception], field: str, message: str) -> NoReturn:
    """Raise `error`, remembering the field so that a JSON error can name its path."""
    exception: Any = error(message)
    exception.field = field
    raise exception


def whole_number(
    value: Any, field: str, at_least: int | None = None, any_size: bool = False
) -> int:
    """`value` as an int; of 32 bits unless `any_size`, since it meets int32 positions and ids.

    bool is refused, since True == 1 would make two specs equal.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        fail(TypeError, field, f"`{field}` must be a whole number. Received: {value!r}.")
    if at_least is not None and number < at_least:
        fail(ValueError, field, f"`{field}` must be at least {at_least}. Received: {number}.")
    if abs(number) > _LARGEST and not any_size:
        limits = f"between -{_LARGEST} and {_LARGEST} (32 bits)"
        fail(ValueError, field, f"`{field}` must lie {limits}. Received: {number}.")
    return number


def not_negative(value: Any, field: str, most: float = math.inf) -> float:
    """`value` as a finite number from 0 to `most`."""
    is_open = most == math.inf
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        to = "on" if is_open else f"to {most}"
        fail(TypeError, field, f"`{field}` must be a number from 0 {to}. Received: {value!r}.")
    if not 0 <= float(value) <= most or math.isinf(value):
        limits = "be finite and from 0 on" if is_open else f"lie between 0 and {most}"
        fail(ValueError, field, f"`{field}` must {limits}. Received: {value!r}.")
    return float(value)


fraction = functools.partial(not_negative, most=1)


def input_name(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        what = "the name under which the tensor is passed, such as 'sentence_ids'"
        received = f"{value!r}."
        shape = None if isinstance(value, type) else getattr(value, "shape", None)
        if shape is not None:
            received = f"{type(value).__name__} of shape {tuple(shape)}. Give a name here, "
            received += "and pass the tensor in the call: mask_inputs={'sentence_ids': tensor}."
        fail(TypeError, field, f"`{field}` is {what}. Received: {received}")
    return value


def id_tuple(value: Any, field: str) -> tuple[int, ...]:
    """One id, or several, as a sorted tuple without repeats."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # NumPy's
    if hasattr(type(value), "__index__"):
        value = (value,)
    if isinstance(value, (str, bytes, dict)) or not hasattr(type(value), "__iter__"):
        fail(TypeError, field, f"`{field}` must be ids, such as (102,). Received: {value!r}.")
    ids = tuple(sorted({whole_number(v, field) for v in value}))
    if not ids:
        fail(ValueError, field, f"`{field}` must hold at least one id. Received none.")
    return ids


def _whole(**limits: Any) -> Check:
    return Check(functools.partial(whole_number, **limits))


Whole = Annotated[int, _whole()]
NotNegative = Annotated[int, _whole(at_least=0)]
Positive = Annotated[int, _whole(at_least=1)]
Name = Annotated[str, Check(input_name)]
Ids = Annotated[int | Sequence[int], Check(id_tuple)]  # kept as a tuple
