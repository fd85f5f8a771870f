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

from keras_headmask.look import drawing
from keras_headmask.look.grid import grid_of
from keras_headmask.retrofit.find import Found
from keras_headmask.rules.base import MaskSpec, leaves, sentences

_SHORTEST, _LONGEST = 12, 4096  # positions of the example that is drawn


def _or_none(show: Callable[..., str | None], *values: Any) -> str | None:
    """A look at a value must not stop a notebook, whatever an unusual spec or model raises."""
    with contextlib.suppress(Exception):
        return show(*values)
    return None


def _rule_html(spec: MaskSpec, num_heads: int | None = None) -> str:
    """A rule in words, and drawn if it asks for positions alone."""
    from keras_headmask.look import plotting

    said = _pre(sentences(spec, num_heads))
    if spec.inputs:
        return said
    numbers = [n for leaf in leaves(spec) for n in vars(leaf).values() if isinstance(n, int)]
    # So long that the largest number is seen.
    length = min(max(2 * max(map(abs, numbers), default=0) + 2, _SHORTEST), _LONGEST)
    drawn = grid_of(spec, length, num_heads=num_heads, called="hm.plot")
    drawn = drawn._replace(caption=[f"over {length} positions"])
    try:
        png = plotting.figure_of(drawn).png(dpi=80)
    except ImportError:  # matplotlib is not installed
        return said + _pre([*drawn.caption, drawing.text_of(drawn)])
    data = base64.b64encode(png).decode()
    return f'{said}<img alt="{html.escape(repr(spec))}" src="data:image/png;base64,{data}">'


def _pre(lines: Iterable[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _model_html(model: keras.Model) -> str | None:
    """The layers under a rule, and their rules; `None` for a model without one."""
    layers: dict[tuple[MaskSpec, int], list[str]] = {}
    survey = Found(model)
    for entry in survey.known:
        if (spec := survey.rules.get(entry.path)) is not None:
            layers.setdefault((spec, entry.num_heads), []).append(entry.path)
    if not layers:
        return None
    parts = [f"<p>{html.escape(f'{type(model).__name__} {model.name!r}, under rules:')}</p>"]
    for (spec, num_heads), paths in layers.items():
        parts += [_pre(paths), _or_none(_rule_html, spec, num_heads) or _pre([repr(spec)])]
    return "\n".join(parts)


def install() -> None:
    """Let every spec and every model under rules show itself."""
    shows: dict[Any, Callable[..., str | None]] = {MaskSpec: _rule_html, keras.Model: _model_html}
    for cls, show in shows.items():
        cls._repr_html_ = lambda value, show=show: _or_none(show, value)
