"""Masks and attention as matplotlib figures; the only module that imports matplotlib.

No pyplot: a figure belongs to its caller, needs no display, and is freed with the last reference.
"""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from keras_headmask.look.panels import Panel, Panels, head_names
from keras_headmask.rules.coverage import Coverage

# From light to dark, so that they differ in grey; blue and orange, so that they differ for an eye
# that confuses red and green.
COLOURS = {Coverage.NONE: "#f4f1e8", Coverage.SOME: "#e69f00", Coverage.ALL: "#0b3d6b"}
_ALARM = "#d00000"
# Attention has the colours of the rule: the smallest probability is the lightest.
_SHADES = LinearSegmentedColormap.from_list(
    "attention", [COLOURS[Coverage.NONE], COLOURS[Coverage.ALL]]
).with_extremes(bad=(0, 0, 0, 0))

_MOST_LINES = 24  # of a caption
_SIZE, _TEXT, _TITLE = 8, 9, 10  # points of labels, of other texts, of titles
# Inches.
_WIDEST = 11  # of a figure, without what stands beside its panels
_PANEL = 9  # of the side of a panel
_CELL = 0.28  # of a position, if there is space
_LINE = 0.12  # between labels, at least
_GAP = 0.2  # between panels
_ROW = 0.17  # of a line of text
_CHARACTER = 0.087  # of a title, on average
_HINTED = 1.1  # Text may be so many times as wide where pixels are few.


class Picture(Figure):
    """A figure that a notebook shows as it is, with or without `%matplotlib inline`."""

    def png(self, dpi: int = 100) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=dpi)
        return file.getvalue()

    _repr_png_ = png


def masks_figure(drawn: Panels, caption: Sequence[str]) -> Picture:
    """A panel for each mask of `drawn`."""
    figure, axes = _grid(drawn, caption)
    colours = ListedColormap([COLOURS[coverage] for coverage in Coverage])
    norm = BoundaryNorm([-0.5, 0.5, 1.5, 2.5], colours.N)
    longest = (axes[0].get_position().width * figure.get_figwidth() + _GAP) / _CHARACTER
    for ax, (heads, cells) in zip(axes, drawn.panels, strict=True):
        _image(ax, cells, drawn, cmap=colours, norm=norm)
        titles = ["every head" if drawn.num_heads == 1 else head_names(heads, drawn.others)]
        if len(heads) > 1:  # the caption has all of them
            first, more = heads[0], len(heads) - 1
            titles += [f"head {first} and {more} more", f"head {first} + {more}"]
        title = next((title for title in titles if len(title) <= longest), titles[-1])
        ax.set_title(title, fontsize=_TITLE)
    texts = {Coverage.ALL: "may attend", Coverage.NONE: "hidden"}
    if drawn.tile != (1, 1):
        hidden = "hidden (tiles of {} x {} positions)".format(*drawn.tile)
        texts = {Coverage.ALL: "may attend", Coverage.SOME: "some pairs may", Coverage.NONE: hidden}
    _legend(figure, [Patch(fc=COLOURS[x], ec="0.4", label=text) for x, text in texts.items()])
    return figure


def attention_figure(
    drawn: Panels, allowed: np.ndarray, outside: np.ndarray, caption: Sequence[str]
) -> Picture:
    """Probabilities, a panel for each head, over what is allowed; what is hidden is hatched.

    A cell that is `outside`, with a probability above 0 on a hidden pair, gets a red cross.
    """
    figure, axes = _grid(drawn, caption, beside=0.9)
    most = max(float(panel.cells.max(initial=1e-9)) for panel in drawn.panels)
    norm = PowerNorm(0.5, vmin=0, vmax=most)  # the root spreads the many small probabilities
    crosses: list[Artist] = []
    for ax, panel, hidden, leak in zip(axes, drawn.panels, ~allowed, outside, strict=True):
        _hatch(ax)
        cells = np.ma.array(panel.cells, mask=hidden & ~leak)
        image = _image(ax, cells, drawn, cmap=_SHADES, norm=norm)
        if leak.any():
            y, x = (np.argwhere(leak) * drawn.tile + np.subtract(drawn.tile, 1) / 2).T
            crosses += ax.plot(x, y, "x", color=_ALARM, ms=4, mew=1, label="attention outside it")
        ax.set_title(head_names(panel.heads), fontsize=_TITLE)
    shown_is = "probability" if drawn.tile == (1, 1) else "largest probability of a tile"
    _scale(figure, axes, image, shown_is)
    hatched = Patch(fc="white", ec="0.6", hatch="////", label="hidden by the mask")
    _legend(figure, [*([] if allowed.all() else [hatched]), *crosses[:1]])
    return figure


def heads_figure(
    values: Mapping[str, np.ndarray],
    shown_is: str,
    caption: Sequence[str],
    most: float = 1.0,
) -> Picture:
    """A panel for each of `values`, `(layers, heads)`, under its name; NaN is hatched.

    From 0, light, to `most`, dark.
    """
    cells = {name: np.ma.masked_invalid(x) for name, x in values.items()}
    heads_panels = [Panel((0,), x) for x in cells.values()]
    drawn = Panels(heads_panels, 1, (1, 1), (None, None), query_offset=0)
    figure, axes = _grid(drawn, caption, beside=0.9)
    for ax, (title, of_panel) in zip(axes, cells.items(), strict=True):
        _hatch(ax)
        image = _image(ax, of_panel, drawn, cmap=_SHADES, vmin=0, vmax=most)
        ax.set_title(title, fontsize=_TITLE)
        for axis, name in ((ax.yaxis, "layers"), (ax.xaxis, "heads")):
            if axis.label.get_text():
                axis.label.set_text(name)
    _scale(figure, axes, image, shown_is)
    return figure


def _scale(figure: Picture, axes: Sequence[Axes], image: AxesImage, shown_is: str) -> None:
    """A legend of the shades, beside the panels."""
    width, place = figure.get_figwidth(), axes[0].get_position()
    right = max(ax.get_position().x1 for ax in axes) + 0.15 / width
    scale = figure.add_axes((right, place.y0, 0.13 / width, place.height))
    figure.colorbar(image, cax=scale).ax.tick_params(labelsize=_SIZE)
    scale.set_ylabel(shown_is, fontsize=_TEXT)


def leaks_figure(
    drawn: Panels,
    allowed: np.ndarray,
    leaks: np.ndarray,
    names: tuple[str, str],
    caption: Sequence[str],
) -> Picture:
    """How much outputs change with inputs; what must not matter is hatched, leaks are crossed."""
    figure, (ax,) = _grid(drawn, caption)
    _hatch(ax)
    cells = np.ma.array(np.zeros(allowed.shape[1:]), mask=~allowed[0])
    _image(ax, cells, drawn, cmap=ListedColormap([COLOURS[Coverage.ALL]]).with_extremes(bad="none"))
    handles: list[Artist] = [
        Patch(fc=COLOURS[Coverage.ALL], label="may matter"),
        Patch(fc="white", ec="0.6", hatch="////", label="must not matter"),
    ]
    if leaks.any():
        y, x = (np.argwhere(leaks[0]) * drawn.tile + np.subtract(drawn.tile, 1) / 2).T
        handles += ax.plot(x, y, "x", color=_ALARM, ms=4, mew=1, label="leaks")
    ax.set_ylabel(f"positions of the output '{names[1]}'", fontsize=_TEXT)
    ax.set_xlabel(f"positions of the input '{names[0]}'", fontsize=_TEXT)
    _legend(figure, handles)
    return figure


def _grid(drawn: Panels, caption: Sequence[str], beside: float = 0.0) -> tuple[Picture, list[Axes]]:
    """A figure with axes as large as their cells and labels need; `beside` stays free.

    Everything has its place in inches, so that nothing overlaps and nothing is drawn twice.
    """
    count, names = len(drawn.panels), drawn.labels
    rows, columns = drawn.panels[0].cells.shape
    left, below = (
        0.5 + (max(_inches(name, _SIZE) for name in side) if side else 0.3) for side in names
    )
    across = count if count <= 3 else min(4, math.ceil(math.sqrt(count)))
    space = (_WIDEST - (across - 1) * _GAP) / across
    most = max((len(side) for side in names if side is not None), default=0)
    if count <= 4 and most * _LINE > space:  # few and large: beneath each other
        across, space = 1, _WIDEST
    cell = min(_CELL, min(space, _PANEL) / max(rows, columns))
    wide, high = max(1.0, cell * columns), max(0.7, cell * rows)
    width = max(5.0, left + across * wide + (across - 1) * _GAP + 0.25 + beside)
    text = _wrapped(caption, width - 0.2)
    head = 0.15 + _ROW * len(text)
    height = head + math.ceil(count / across) * (high + 0.35) + below + 0.2
    figure = Picture(figsize=(width, height))
    FigureCanvasAgg(figure)
    title = figure.suptitle(
        "\n".join(text), x=0.1 / width, y=1 - 0.08 / height, ha="left", va="top", fontsize=_TEXT
    )
    title.set(parse_math=False, linespacing=1.3)
    axes = []
    for i in range(count):
        row, column = divmod(i, across)
        x = left + column * (wide + _GAP)
        y = height - head - (row + 1) * (high + 0.35)
        ax = figure.add_axes((x / width, y / height, wide / width, high / height))
        is_first, is_last = column == 0, i + across >= count
        ax.tick_params(labelsize=_SIZE, labelleft=is_first, labelbottom=is_last)
        ax.set_ylabel("queries" if is_first else "", fontsize=_TEXT)
        ax.set_xlabel("keys" if is_last else "", fontsize=_TEXT)
        _name(ax.yaxis, names[0], high, drawn.query_offset, rotation=0)
        _name(ax.xaxis, names[1], wide, 0, rotation=90)
        axes.append(ax)
    return figure, axes


def _name(axis: Axis, names: list[str] | None, space: float, first: int, rotation: int) -> None:
    """Tokens, or numbers of positions; as many as can be read."""
    if names is None:
        most = max(1, min(9, int(space / 0.4)))
        axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1))
        return
    step = math.ceil(len(names) * _LINE / space - 0.01)
    axis.set_ticks(np.arange(0, len(names), step) + first, names[::step])
    for text in axis.get_ticklabels():
        text.set(parse_math=False, rotation=rotation)


def _inches(text: str, points: float) -> float:
    font = FontProperties(size=points)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def _wrapped(caption: Sequence[str], space: float) -> list[str]:
    lines = [line for text in caption for line in _folded(text, space / _HINTED)]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"... ({len(lines) - _MOST_LINES + 1} more lines)"]
    return lines


def _folded(text: str, space: float) -> list[str]:
    letters = len(text) + 1
    while True:
        lines = textwrap.wrap(text, letters, subsequent_indent="    ")
        widest = max((_inches(line, _TEXT) for line in lines), default=0)
        if widest <= space or letters <= 20:
            return lines
        letters = max(20, min(letters - 1, int(letters * space / widest)))


def _image(ax: Axes, cells: np.ndarray, drawn: Panels, **colours: Any) -> AxesImage:
    """Cells at the positions they stand for, with lines between them while they are few."""
    (rows, columns), tile, top = cells.shape, drawn.tile, drawn.query_offset - 0.5
    extent = (-0.5, columns * tile[1] - 0.5, top + rows * tile[0], top)
    # Tiles may be oblong in positions: the axes decide.
    image = ax.imshow(cells, extent=extent, aspect="auto", interpolation="nearest", **colours)
    if max(rows, columns) <= 40:
        ax.set_xticks(np.arange(columns + 1) * tile[1] - 0.5, minor=True)
        ax.set_yticks(np.arange(rows + 1) * tile[0] + top, minor=True)
        ax.grid(which="minor", color="white", linewidth=0.6)
        ax.tick_params(which="minor", length=0)
    return image


def _legend(figure: Figure, handles: Sequence[Artist]) -> None:
    if handles:
        count = len(handles)
        figure.legend(handles=handles, loc="lower left", ncols=count, fontsize=_TEXT, frameon=False)


def _hatch(ax: Axes) -> None:
    """Hatch the ground, which shows where cells are masked."""
    ax.patch.set(facecolor="white", edgecolor="0.7", hatch="////", linewidth=0)
