"""Grids as matplotlib figures; the only module that imports matplotlib.

No pyplot: a figure belongs to its caller, needs no display, and is freed with the last reference.
"""

import io
import math
import textwrap
from typing import Any

import numpy as np
from matplotlib.axis import Axis, XAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from keras_headmask.look.grid import Grid
from keras_headmask.rules.algebra import Coverage

# From light to dark, so that they differ in grey; blue and orange, so that they differ for an eye
# that confuses red and green. Numbers have the colours of the rule: the smallest is the lightest.
COLOURS = {Coverage.NONE: "#f4f1e8", Coverage.SOME: "#e69f00", Coverage.ALL: "#0b3d6b"}
_SHADES = LinearSegmentedColormap.from_list("", [COLOURS[Coverage.NONE], COLOURS[Coverage.ALL]])
_ALARM = "#d00000"
_HATCHED: dict[str, Any] = {"fc": "white", "ec": "0.7", "hatch": "////", "lw": 0}

_MOST_LINES = 24  # of a caption
_SIZE, _TEXT, _TITLE = 8, 9, 10  # points of labels, of other texts, of titles
# Inches: of all panels beside each other, of a position, between labels, of a line and a letter.
_WIDEST, _CELL, _LABEL, _LINE, _LETTER = 11, 0.28, 0.12, 0.17, 0.08


class Picture(Figure):
    """A figure that a notebook shows as it is, with or without `%matplotlib inline`."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def figure_of(grid: Grid) -> Picture:
    """A picture of a grid; hidden cells are hatched, crossed ones get a red cross."""
    figure = _laid_out(grid)
    style: dict[str, Any] = {"cmap": _SHADES, "norm": PowerNorm(grid.gamma, 0, grid.most)}
    handles: dict[Any, Any] = {x: Patch(fc=COLOURS[x], ec="0.4") for x in Coverage}
    if not grid.scale:
        style = {"cmap": ListedColormap([*COLOURS.values()]), "norm": Normalize(0, 2)}
    for ax, panel in zip(figure.axes, grid.panels, strict=True):
        (rows, columns), tile = panel.cells.shape, grid.tile
        cells = np.ma.array(panel.cells, mask=panel.hidden & ~np.asarray(panel.crossed))
        if np.ma.is_masked(cells):  # shows the ground
            ax.patch.set(**_HATCHED)
            handles["hidden"] = Patch(**_HATCHED)
        place = (-0.5, columns * tile - 0.5, rows * tile - 0.5, -0.5)
        image = ax.imshow(cells, extent=place, aspect="auto", interpolation="nearest", **style)
        if max(rows, columns) <= 40:  # lines between them
            ax.set_xticks(np.arange(columns + 1) * tile - 0.5, minor=True)
            ax.set_yticks(np.arange(rows + 1) * tile - 0.5, minor=True)
            ax.grid(which="minor", color="white", linewidth=0.6)
            ax.tick_params(which="minor", length=0)
        if np.any(panel.crossed):
            y, x = (np.argwhere(panel.crossed) * tile + (tile - 1) / 2).T
            (handles["crossed"],) = ax.plot(x, y, "x", color=_ALARM, ms=4, mew=1)
    if grid.scale:
        scale = figure.colorbar(image, ax=figure.axes, aspect=40, pad=0.02)
        scale.ax.tick_params(labelsize=_SIZE)
        scale.set_label(grid.scale, fontsize=_TEXT)
    if named := [(handles[key], text) for key, text in grid.legend.items() if key in handles]:
        at: Any = {"loc": "outside lower left", "ncols": 3, "frameon": False, "fontsize": _TEXT}
        figure.legend(*zip(*named, strict=True), **at)
    engine: Any = figure.get_layout_engine()
    for _ in range(2):  # and once more as it is drawn: the layout converges
        engine.execute(figure)
    return figure


def _laid_out(grid: Grid) -> Picture:
    """A figure with axes about as large as their cells and labels need."""
    count, (rows, columns) = len(grid.panels), grid.panels[0].cells.shape
    if not rows * columns:
        raise ValueError("A picture needs at least one query and one key.")
    across = count if count <= 3 else min(4, math.ceil(math.sqrt(count)))
    if count <= 4 and len(grid.columns or ()) * _LABEL * across > _WIDEST:
        across = 1  # few and large: beneath each other
    down, cell = math.ceil(count / across), min(_CELL, _WIDEST / across / max(rows, columns))
    wide, high = max(1.2, cell * columns), max(0.7, cell * rows)
    left, below = (0.6 + _LETTER * max(map(len, x or ["12"])) for x in (grid.rows, grid.columns))
    width = max(5.0, left + across * (wide + 0.2) + (1.0 if grid.scale else 0.0))
    letters = int(width / _LETTER)
    lines = [x for said in grid.caption for x in textwrap.wrap(said, letters)]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"... ({len(lines) - _MOST_LINES + 1} more lines)"]
    height = _LINE * len(lines) + down * (high + 0.4) + below + 0.3
    figure = Picture(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    title = figure.suptitle("\n".join(lines), x=0.1 / width, ha="left", fontsize=_TEXT)
    title.set(parse_math=False, linespacing=1.3)
    for i, panel in enumerate(grid.panels):
        ax = figure.add_subplot(down, across, i + 1)
        ax.set_box_aspect(high / wide)
        is_first, is_last = i % across == 0, i + across >= count
        ax.tick_params(labelsize=_SIZE, labelleft=is_first, labelbottom=is_last)
        ax.set_ylabel(grid.axes[0] if is_first else "", fontsize=_TEXT)
        ax.set_xlabel(grid.axes[1] if is_last else "", fontsize=_TEXT)
        name = textwrap.shorten(panel.title, int(wide / _LETTER), placeholder=" ...")
        ax.set_title(name, fontsize=_TITLE)
        _name(ax.yaxis, grid.rows, high)
        _name(ax.xaxis, grid.columns, wide)
    return figure


def _name(axis: Axis, names: list[str] | None, space: float) -> None:
    """Tokens, or numbers of positions; as many as can be read. Keys stand on end if they must."""
    if names is None:
        most = min(9, int(space / 0.4))
        axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1))
        return
    step, cell = math.ceil(len(names) * _LABEL / space - 0.01), space / len(names)
    on_end = isinstance(axis, XAxis) and (1 + max(map(len, names))) * _LETTER > cell
    axis.set_ticks(range(0, len(names), step), names[::step])
    for text in axis.get_ticklabels():
        text.set(parse_math=False, rotation=90 if on_end else 0)
