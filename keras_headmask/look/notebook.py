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
import numpy as np

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
    """A rule, and a picture of what it says of positions alone.

    With `num_heads` it is the rule of a layer, and what it reads is made up, but no whole mask.
    """
    lines = words.sentences(spec, num_heads)
    groups, others = words.ordered_groups(spec, num_heads)
    drawn = []
    for rule, heads in groups:
        if rule.inputs:
            whose = panels.head_names(heads, others) if len(groups) > 1 else "the rule"
            inputs = ", ".join(f"{name!r}: ..." for name in sorted(rule.inputs))
            lines.append(f"A picture of {whose}: plot(rule, ..., mask_inputs={{{inputs}}})")
        makeable = num_heads is not None and all(x.rank is not None for x in rule.inputs.values())
        if makeable or not rule.inputs:
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
    parts = {leaf for rule, _ in groups for leaf in leaves(rule) if not leaf.inputs}
    fields = [(name, value) for leaf in parts for name, value in vars(leaf).items()]
    numbers = [abs(value) for name, value in fields if isinstance(value, int) and name != "seed"]
    length = min(max(2 * max(numbers, default=0) + 2, _SHORTEST), _LONGEST)
    caption = f"over {length} positions"
    read = sorted({name for rule, _ in groups for name in rule.inputs})
    made_up = {name: _made_up(spec, name, length) for name in read}
    if made_up:
        names = ", ".join(f"`{name}`" for name in made_up)
        caption += f"; {names} {'is' if len(made_up) == 1 else 'are'} made up"
    try:
        from keras_headmask.look import figures
    except ImportError:
        figures = None  # type: ignore[assignment]  # without matplotlib
    called, pictures = "hm.plot" if figures else "hm.draw", []
    for rule, heads in groups:
        inputs = {name: made_up[name] for name in rule.inputs}
        drawn = panels.panels_of(rule, length, num_heads=1, mask_inputs=inputs, called=called)
        pictures.append(panels.Panel(heads, drawn.panels[0].cells))
    whole = drawn._replace(panels=pictures, num_heads=num_heads, others=others)
    if figures is None:
        return _pre([caption, drawing.text_of(whole)])
    data = base64.b64encode(figures.masks_figure(whole, [caption]).png(dpi=80)).decode()
    return f'<img alt="{html.escape(repr(spec))}" src="data:image/png;base64,{data}">'


def _made_up(spec: MaskSpec, name: str, length: int) -> np.ndarray:
    """An input that `spec` reads, such that its rules hide some pairs and allow some.

    Three runs of positions are segments, or sentences by their last token; ids that are looked for
    besides come first; the last quarter is padding.
    """
    positions = np.arange(length)
    run = 5 * length // 12
    if name == "padding_mask":
        return (positions < 3 * length // 4)[None]
    is_last = positions % run == run - 1
    readers = [x for x in leaves(spec) if name in x.inputs and x.sampling.ids]
    if not readers:
        return (is_last if spec.inputs[name].dtype == "bool" else positions // run)[None]
    ends = [leaf.sampling.ids[0] for leaf in readers if not leaf.tiling.opens]
    flagged = dict.fromkeys(leaf.sampling.ids for leaf in readers if leaf.tiling.opens)
    special = [next((i for i in few if i not in ends), few[0]) for few in flagged]
    # Most tokens are of another id: they obey what the rule says of the rest.
    ids = np.full(length, max(i for leaf in readers for i in leaf.sampling.ids) + 1)
    ids[is_last] = np.resize(sorted(set(ends or special)), is_last.sum())
    if ends:
        ids[: len(special)] = special
    return ids[None]


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
