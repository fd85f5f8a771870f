"""Which attention layers a selector names."""

import re
from collections.abc import Mapping
from typing import Any

from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.find import Found
from keras_headmask.rules.base import MaskSpec, check_spec

_NUMBERS = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*", re.ASCII)

_NONE = (
    "Attention layers: none. If the model makes them when it is built or first called, call it "
    "once on data before. Attention that `call` makes anew each time is out of reach: make it in "
    "`__init__` or `build`, and assign it to an attribute."
)


def specs_by_layer(
    mask_spec: MaskSpec | Mapping[Any, Any], layers: Any, found: Found, ignore: Any = None
) -> dict[int, MaskSpec]:
    """The spec of each selected layer, by its number among `found.known`.

    `ignore`: see `apply_head_masks`; `None` if nothing in the model can attend unseen.
    """
    hidden = None
    if ignore is not None:
        ignored = _patterns(ignore)
        entries = (*found.unknown, *found.unseen)
        hidden = [x for x in entries if not any(regex.search(x.path) for regex in ignored)]
    is_config = isinstance(mask_spec, Mapping) and "kind" in mask_spec
    if isinstance(mask_spec, Mapping) and not is_config:
        if layers is not None:
            raise ValueError(
                "`layers` and a mapping from layers to specs say the same twice: give one of them. "
                f"Received: layers={layers!r}."
            )
        if not mask_spec:
            raise ValueError("`mask_spec` is an empty mapping: it names no layer.")
        pairs = list(mask_spec.items())
        for selector, _ in pairs:
            _refuse_number(selector)
    else:
        pairs = [(layers, mask_spec)]
    chosen: dict[int, MaskSpec] = {}
    for selector, spec in pairs:
        if isinstance(spec, Mapping):
            spec = MaskSpec.from_config(spec)
        check_spec(spec, "mask_spec", "hm.apply_head_masks(model, SPEC)")
        for number in select(found, selector, hidden):
            if number in chosen:
                raise ValueError(
                    f"The layer {found.known[number]} has two rules, the second from "
                    f"{selector!r}. Name each layer once, or combine the rules with &."
                )
            chosen[number] = spec
    return dict(sorted(chosen.items()))


def _refuse_number(key: Any) -> None:
    """Raise for a key of a mapping that `PerHead` would read as a head."""
    parts = key if isinstance(key, (tuple, list, range)) else (key,)
    numbers = tuple(int(part) for part in parts if _is_number(part))
    if numbers:
        text = ",".join(map(str, numbers))
        if isinstance(key, range) and key.step == 1 and len(key) > 1:
            text = f"{key.start}-{key.stop - 1}"
        heads = numbers if len(numbers) > 1 else numbers[0]
        raise ValueError(
            f"The key {key!r} may mean a layer or a head. For layers write it as a text: "
            f'`{{"{text}": ...}}`. For heads of all layers: `PerHead({{{heads}: ...}})`.'
        )


def selected(found: Found, selector: Any) -> list[AttentionLayer]:
    """The attention layers that `selector` names: see `apply_head_masks`."""
    return [found.known[number] for number in select(found, selector)]


def select(found: Found, selector: Any, hidden: list[AttentionLayer] | None = None) -> list[int]:
    """The numbers among `found.known` of the layers that `selector` names.

    `hidden`: what may attend without a rule, which `None` and regexes must not name. By default
    attention of unknown classes, as no rule is meant.
    """
    of_self = [i for i, entry in enumerate(found.known) if entry.kind == "self"]
    if selector is None:
        _refuse(found, hidden)
        _check_all_clear(found)
        if not of_self:
            more = (
                f"Attention layers: {_names(found)}. Cross-attention is masked only when `layers` "
                "names it."
            )
            raise ValueError(
                "The model holds no self-attention layer (keras.layers.MultiHeadAttention, a "
                f"subclass, or that of a KerasHub decoder). {more if found.known else _NONE}"
            )
        return of_self
    if isinstance(selector, str) and not selector:
        raise ValueError("`layers` is an empty text: it names no layer. None names all.")
    if isinstance(selector, (tuple, list, range)) or getattr(selector, "ndim", False):
        numbers: set[int] = set()
        numbers.update(*(select(found, part, hidden) for part in selector))
        if not numbers:
            raise ValueError(f"{selector!r} names no layer.")
        return sorted(numbers)
    if isinstance(selector, str) and not _NUMBERS.fullmatch(selector):
        return _matching(found, selector, hidden)
    _check_all_clear(found)
    return [of_self[n] for n in _numbers(selector, len(of_self))]


def _refuse(found: Found, hidden: list[AttentionLayer] | None, named: str = "") -> None:
    """Raise if there is something `hidden`, see `select`; `named` says what named it."""
    regex = re.compile(named)
    entries = found.unknown if hidden is None else hidden
    entries = [entry for entry in entries if regex.search(entry.path)]
    if not entries:
        return
    some = ", ".join(map(str, entries[:5]))
    some += f", ... ({len(entries)})" if len(entries) > 5 else ""
    some += f", which {named!r} names," if named else ""
    if hidden is None:
        message = f"The attention layer {some} is of a class whose masks are out of reach."
    else:
        message = (
            f"{some} may attend without the rule. A rule reaches the attention classes of Keras "
            "and KerasHub that are known, not other code. Name in `ignore`, by regexes on paths, "
            f"what may do so, or does not attend: ignore={[x.path for x in entries[:5]]}."
        )
    if found.known and not named:
        message += f" To leave it as it is, name the others in `layers`: {_names(found)}."
    raise ValueError(message)


def _patterns(ignore: Any) -> list[re.Pattern[str]]:
    """`ignore` of `apply_head_masks` as regexes."""
    texts = [ignore] if isinstance(ignore, str) else ignore
    if not isinstance(texts, (list, tuple)) or not all(isinstance(x, str) for x in texts):
        raise TypeError(
            f"`ignore` must be a regex on layer paths or a list of them. Received: {ignore!r}."
        )
    return [_regex(text, "ignore") for text in texts]


def _regex(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`{argument}` is not a regex: {pattern!r} ({error}).") from error


def _check_all_clear(found: Found) -> None:
    """Raise if a layer may be self- or cross-attention: numbers count self-attention only."""
    if unclear := [entry for entry in found.known if entry.kind == "unclear"]:
        raise ValueError(
            f"{unclear[0].why_unclear} Name the layers by regexes on their paths in `layers`: "
            f"{_names(found)}."
        )


def _is_number(x: Any) -> bool:
    is_integer = hasattr(type(x), "__index__") and getattr(x, "shape", ()) == ()
    return is_integer and not isinstance(x, bool)


def _numbers(selector: Any, count: int) -> list[int]:
    """3, "3", "1-3" or "0,2-3" as numbers below `count`."""
    if not (isinstance(selector, str) or _is_number(selector)):
        raise TypeError(
            "Layers are named by None (all self-attention), a number, an inclusive range '0-3', a "
            f"regex on layer paths, or a tuple or list of those. Received: {selector!r}."
        )
    numbers: list[int] = []
    for part in str(selector).split(","):
        first, dash, last = part.strip().partition("-")
        if not dash or not first:  # one number, a negative one perhaps
            first = last = part
        if int(first) > int(last):
            raise ValueError(f"The range {part.strip()!r} of layers runs backwards.")
        numbers.extend(range(int(first), int(last) + 1))
    beyond = [n for n in numbers if not 0 <= n < count]
    if beyond:
        raise ValueError(
            f"There is no self-attention layer {beyond[0]}: the model has {count}, numbered from 0 "
            f"in forward order. Received: {selector!r}."
        )
    return numbers


def _matching(found: Found, pattern: str, hidden: list[AttentionLayer] | None) -> list[int]:
    regex = _regex(pattern, "layers")
    _refuse(found, hidden, pattern)
    numbers = [i for i, entry in enumerate(found.known) if regex.search(entry.path)]
    if not numbers:
        paths = f"Paths: {_names(found)}." if found.known else _NONE
        raise ValueError(f"No attention layer's path matches {pattern!r}. {paths}")
    return numbers


def _names(found: Found) -> str:
    paths = [repr(entry.path) for entry in found.known]
    return ", ".join(paths if len(paths) <= 8 else [*paths[:7], f"... ({len(paths)} layers)"])
