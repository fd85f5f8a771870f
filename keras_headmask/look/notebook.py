"""Specs and models under rules show themselves in a notebook.

`install` puts the methods on their classes, since drawing stands above both. IPython falls back to
`repr` where they return `None`.
"""

import base64
import contextlib
import html
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_headmask.look import drawing, panels
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules import words
from keras_headmask.rules.base import MaskSpec, leaves

_SHORTEST, _LONGEST = 12, 4096  # positions of the example that is drawn
_MOST_RULES = 4  # of a model that are drawn
_MOST_GROUPS = 16  # of heads with one rule, of a spec


def _or_none(show: Callable[..., str | None], *values: Any) -> str | None:
    """A look at a value must not stop a notebook, whatever an unusual spec or model raises."""
    with contextlib.suppress(Exception):
        return show(*values)
    return None


def _rule_html(spec: MaskSpec, num_heads: int | None = None) -> str:
    """A rule, and a picture of what it says of positions alone."""
    lines = words.sentences(spec, num_heads)
    groups, others = words.ordered_groups(spec, num_heads)
    drawn = []
    for rule, heads in groups:
        if rule.inputs:
            whose = panels.head_names(heads, others) if len(groups) > 1 else "the rule"
            inputs = ", ".join(f"{name!r}: ..." for name in sorted(rule.inputs))
            lines.append(f"A picture of {whose}: plot(rule, ..., mask_inputs={{{inputs}}})")
        else:
            drawn.append((rule, heads))
    text = _pre(lines)
    if len(drawn) < len(groups) and all(words.sees_everything(rule) for rule, _ in drawn):
        return text  # a full square shows nothing of the heads that are restricted
    if more := drawn[_MOST_GROUPS:]:
        first = panels.head_names(more[0][1], others)
        text += f"<p>Not drawn: {len(more)} more rules, the first that of {first}.</p>"
    if len(groups) == 1:
        others = None
    return text + _picture(spec, drawn[:_MOST_GROUPS], num_heads or len(groups), others)


def _pre(lines: Iterable[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _picture(
    spec: MaskSpec,
    groups: list[tuple[MaskSpec, tuple[int, ...]]],
    num_heads: int,
    others: int | None,
) -> str:
    """The rules of `groups`, at a length at which their largest number is seen."""
    parts = {leaf for rule, _ in groups for leaf in leaves(rule)}
    fields = [(name, value) for leaf in parts for name, value in vars(leaf).items()]
    numbers = [abs(value) for name, value in fields if isinstance(value, int) and name != "seed"]
    length = min(max(2 * max(numbers, default=0) + 2, _SHORTEST), _LONGEST)
    caption = f"over {length} positions"
    try:
        from keras_headmask.look import figures
    except ImportError:
        figures = None  # type: ignore[assignment]  # without matplotlib
    called, pictures = "hm.plot" if figures else "hm.draw", []
    for rule, heads in groups:
        drawn = panels.panels_of(rule, length, num_heads=1, called=called)
        pictures.append(panels.Panel(heads, drawn.panels[0].cells))
    whole = drawn._replace(panels=pictures, num_heads=num_heads, others=others)
    if figures is None:
        return _pre([caption, drawing.text_of(whole)])
    data = base64.b64encode(figures.masks_figure(whole, [caption]).png(dpi=80)).decode()
    return f'<img alt="{html.escape(repr(spec))}" src="data:image/png;base64,{data}">'


def _model_html(model: keras.Model) -> str | None:
    """The layers under a rule, and their rules; `None` for a model without one."""
    layers: dict[tuple[MaskSpec, int], list[str]] = {}
    survey = Survey(model)
    for entry in survey.known:
        if (spec := survey.rules.get(entry.path)) is not None:
            layers.setdefault((spec, entry.num_heads), []).append(entry.path)
    if not layers:
        return None
    parts = [f"<p>{html.escape(f'{type(model).__name__} {model.name!r}, under rules:')}</p>"]
    for number, ((spec, num_heads), paths) in enumerate(layers.items()):
        parts.append(_pre(paths if len(paths) < 9 else [*paths[:7], "...", paths[-1]]))
        shown = _or_none(_rule_html, spec, num_heads) if number < _MOST_RULES else None
        parts.append(shown or _pre([repr(spec)]))
    return "\n".join(parts)


def install() -> None:
    """Let every spec and every model under rules show itself."""
    shows: dict[Any, Callable[..., str | None]] = {MaskSpec: _rule_html, keras.Model: _model_html}
    for cls, show in shows.items():
        cls._repr_html_ = lambda value, show=show: _or_none(show, value)
