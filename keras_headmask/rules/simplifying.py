"""Equal rules in fewer parts, for `describe` alone: what a rule computes stays as it is written."""

import dataclasses
from typing import Any

from keras_headmask.rules import config


def simplified(spec: Any) -> Any:
    """A rule that allows the same pairs as `spec`, which holds no `PerHead`, whatever the data."""
    names = {cls: kind for kind, cls in config.KINDS.items() if kind in ("and", "or", "not")}
    kind = names.get(type(spec))
    if kind is None:
        return spec
    again = spec.with_children([simplified(part) for part in spec.children])
    if kind == "not":
        return again if again.constant is None else _full(again.constant)
    if type(again) is not type(spec):  # all parts are equal
        return again
    # Equal rules may have their parts in any order, and must be simplified alike.
    parts = sorted(again.children, key=repr)
    return _simplified_and(parts) if kind == "and" else _simplified_or(parts)


def _full(is_full: bool) -> Any:
    return config.KINDS["full" if is_full else "nothing"]()


def _joined(kind: str, parts: list[Any]) -> Any:
    return config.KINDS[kind].of(parts) if parts else _full(kind == "and")


def _simplified_or(parts: list[Any]) -> Any:
    if any(part.constant is True for part in parts):
        return _full(True)
    parts = [part for part in parts if part.constant is not False]
    held = {part for part in parts for other in parts if other != part and _within(part, other)}
    return _joined("or", [part for part in parts if part not in held])


def _simplified_and(parts: list[Any]) -> Any:
    if any(part.constant is False for part in parts):
        return _full(False)
    parts = [part for part in parts if part.constant is not True]
    held = {part for part in parts for other in parts if other != part and _within(other, part)}
    parts = [part for part in parts if _is_window(part) or part not in held]
    windows = [part for part in parts if _is_window(part)]
    others = [part for part in parts if not _is_window(part)]
    if not windows:
        return _joined("and", parts)
    window = windows[0]
    for other in windows[1:]:
        if (window := _both(window, other)) is None:  # of two steps: they stay as they are
            return _joined("and", parts)
        if window.constant is False:
            return window
    # window & (a | b) is window & ((window & a) | b), and less if `a` is a window.
    kept, needed = [], True
    for other in others:
        if type(other) is not config.KINDS["or"] or other.constant is not None:
            kept.append(other)
            continue
        inner = [_both(window, part) if _is_window(part) else None for part in other.children]
        if window in inner:  # `other` allows all of the window
            continue
        pairs = zip(other.children, inner, strict=True)
        kept.append(_simplified_or([part if met is None else met for part, met in pairs]))
        needed = needed and None in inner
    return _joined("and", [window] * needed + kept)


def _is_window(spec: Any) -> bool:
    return type(spec) is config.KINDS["window"]  # a subclass may mean anything


def _both(one: Any, two: Any) -> Any:
    """`one & two` as one window, or `Nothing()`. `None` if their steps differ."""
    steps = {one.step, two.step} - {1}
    if len(steps) > 1:
        return None
    before = min((w.before for w in (one, two) if w.before is not None), default=None)
    after = min((w.after for w in (one, two) if w.after is not None), default=None)
    try:
        return dataclasses.replace(one, before=before, after=after, step=max(steps, default=1))
    except ValueError:  # it holds no distance
        return _full(False)


def _within(part: Any, other: Any) -> bool:
    """Whether all that `part` allows is seen to be allowed by `other`, too."""
    if _is_window(part) and _is_window(other):
        return _both(part, other) == part
    return _parts(other, "and") <= _parts(part, "and") or _parts(part, "or") <= _parts(other, "or")


def _parts(spec: Any, kind: str) -> frozenset:
    return frozenset(spec.children if type(spec) is config.KINDS[kind] else (spec,))
