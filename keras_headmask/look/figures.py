"""Masks and attention as matplotlib figures; the only module that imports matplotlib.

No pyplot: a figure belongs to whoever holds it, needs no display, and goes when it is let go.
"""

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from keras_headmask.look.panels import Panels, head_names, shortened
from keras_headmask.rules.coverage import Coverage

# From light to dark, so that they differ in grey; blue and orange, so that they differ for an eye
# that confuses red and green.
COLOURS = {Coverage.NONE: "#f4f1e8", Coverage.SOME: "#e69f00", Coverage.ALL: "#0b3d6b"}
_ALARM = "#d00000"
_SHADES = "cividis_r"  # even steps of lightness for every eye; the largest probability is darkest

_LABEL = 16  # characters of a token that are shown
_MOST_LINES = 24  # of a caption
_SIZE, _TEXT, _TITLE = 8, 9, 10  # points of labels, of other texts, of titles
# Inches.
_WIDEST = 11  # of a figure, without what stands beside its panels
_PANEL = 9  # of the side of a panel
_CELL = 0.28  # of a position, if there is room
_LINE = 0.12  # between labels, at least
_GAP = 0.2  # between panels
_ROW = 0.17  # of a line of text
_CHARACTER = 0.087  # of a title, on average


Names = tuple[list[str] | None, list[str] | None]


class Picture(Figure):
    """A figure that a notebook shows as it is, with or without `%matplotlib inline`."""

    def png(self, dpi: int = 100) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=dpi)
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def masks_figure(drawn: Panels, caption: Sequence[str]) -> Picture:
    """A panel for each mask of `drawn`."""
    names = _shown(drawn.labels, drawn.tile)
    shape = drawn.panels[0].cells.shape
    figure, axes = _grid(len(drawn.panels), shape, names, drawn.query_offset, caption)
    colours = ListedColormap([COLOURS[coverage] for coverage in Coverage])
    norm = BoundaryNorm([-0.5, 0.5, 1.5, 2.5], colours.N)
    for ax, panel in zip(axes, drawn.panels, strict=True):
        _image(ax, panel.cells, drawn.tile, drawn.query_offset, cmap=colours, norm=norm)
        room = ax.get_position().width * figure.get_figwidth() + _GAP
        if drawn.others in panel.heads:
            title = head_names(panel.heads, drawn.others)
        else:
            title = _title(panel.heads, room) if drawn.num_heads > 1 else "every head"
        ax.set_title(title, fontsize=_TITLE)
    if drawn.tile == (1, 1):
        texts = {Coverage.ALL: "may attend", Coverage.NONE: "hidden"}
    else:
        size = "{} x {}".format(*drawn.tile)
        texts = {
            Coverage.ALL: "may attend",
            Coverage.SOME: "some pairs may",
            Coverage.NONE: f"hidden (tiles of {size} positions)",
        }
    _legend(
        figure, [Patch(facecolor=COLOURS[c], edgecolor="0.4", label=t) for c, t in texts.items()]
    )
    return figure


def _title(heads: Sequence[int], room: float) -> str:
    """The heads of a panel, as many as have room above it; the caption has all of them."""
    more = len(heads) - 1
    names = [head_names(heads), f"head {heads[0]} and {more} more", f"head {heads[0]} + {more}"]
    fitting = (name for name in names if len(name) * _CHARACTER <= room)
    return next(fitting, names[-1])


def attention_figure(
    scores: np.ndarray,
    allowed: np.ndarray,
    outside: np.ndarray,
    heads: Sequence[int],
    tile: tuple[int, int],
    labels: Names,
    caption: Sequence[str],
) -> Picture:
    """Probabilities `(heads, rows, columns)` over what is allowed; what is hidden is hatched.

    A cell that is `outside`, with a probability above 0 on a hidden pair, gets a red cross.
    """
    names = _shown(labels, tile)
    figure, axes = _grid(len(heads), scores.shape[1:], names, 0, caption, beside=0.9)
    # The root spreads the many small probabilities.
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(scores.max(initial=0)), 1e-9))
    shades = colormaps[_SHADES].with_extremes(bad=(0, 0, 0, 0))
    for ax, head, shown, hidden, leak in zip(axes, heads, scores, ~allowed, outside, strict=True):
        ax.patch.set(facecolor="white", edgecolor="0.7", hatch="////", linewidth=0)
        cells = np.ma.array(shown, mask=hidden & ~leak)
        image = _image(ax, cells, tile, 0, cmap=shades, norm=norm)
        rows, columns = np.nonzero(leak)
        if len(rows):
            x, y = (
                place * size + (size - 1) / 2
                for place, size in ((columns, tile[1]), (rows, tile[0]))
            )
            ax.plot(x, y, "x", color=_ALARM, markersize=4, markeredgewidth=1)
        ax.set_title(head_names([head]), fontsize=_TITLE)
    _scale(
        figure, axes, image, "probability" if tile == (1, 1) else "largest probability of a tile"
    )
    handles: list[Any] = [
        Patch(facecolor="white", edgecolor="0.6", hatch="////", label="hidden by the mask")
    ]
    if outside.any():
        handles.append(
            Line2D([], [], color=_ALARM, marker="x", linestyle="", label="attention outside it")
        )
    _legend(figure, handles)
    return figure


def _grid(
    count: int,
    shape: tuple[int, int],
    names: Names,
    query_offset: int,
    caption: Sequence[str],
    beside: float = 0.0,
) -> tuple[Picture, list[Axes]]:
    """A figure with `count` axes, as large as their cells and labels ask for.

    Everything has its place in inches, so that nothing overlaps and nothing has to be drawn twice
    to find out. `beside` is kept free on the right.
    """
    rows, columns = shape
    left, below = 0.5 + _widest(names[0]), 0.5 + _widest(names[1])
    across = count if count <= 3 else min(4, math.ceil(math.sqrt(count)))
    room = (_WIDEST - (across - 1) * _GAP) / across
    named = [side for side, side_names in zip(shape, names, strict=True) if side_names is not None]
    if count <= 4 and max(named, default=0) * _LINE > room:  # few and large: beneath each other
        across, room = 1, _WIDEST
    cell = min(_CELL, min(room, _PANEL) / max(rows, columns))
    wide, high = max(1.0, cell * columns), max(0.7, cell * rows)
    down = math.ceil(count / across)
    width = max(5.0, left + across * wide + (across - 1) * _GAP + 0.25 + beside)
    text = _wrapped(caption, width - 0.2)
    head = 0.15 + _ROW * len(text)
    height = head + down * (high + 0.35) + below + 0.2
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
        _name(ax.yaxis, names[0], high, query_offset, rotation=0)
        _name(ax.xaxis, names[1], wide, 0, rotation=90)
        axes.append(ax)
    return figure, axes


def _name(axis: Axis, names: list[str] | None, room: float, first: int, rotation: int) -> None:
    """Tokens, or numbers of positions; as many as can be read."""
    if names is None:
        axis.set_major_locator(
            MaxNLocator(max(1, min(9, int(room / 0.4))), integer=True, min_n_ticks=1)
        )
        return
    step = math.ceil(len(names) * _LINE / room - 0.01)
    axis.set_ticks(np.arange(0, len(names), step) + first, names[::step])
    for text in axis.get_ticklabels():
        text.set(parse_math=False, rotation=rotation)


def _shown(labels: Names, tile: tuple[int, int]) -> Names:
    """The labels of single positions, shortened."""
    query, key = (
        None if names is None or size > 1 else [shortened(name, _LABEL) for name in names]
        for names, size in zip(labels, tile, strict=True)
    )
    return query, key


def _widest(names: list[str] | None) -> float:
    """Inches of the longest label."""
    return max((_inches(name, _SIZE) for name in names), default=0) if names else 0.3


def _inches(text: str, points: float) -> float:
    width, _, _ = text_to_path.get_text_width_height_descent(
        text, FontProperties(size=points), ismath=False
    )
    return width / 72


def _wrapped(caption: Sequence[str], room: float) -> list[str]:
    longest = max(caption, key=len)
    # (A letter of a rule's text is about as wide as one of the caption's longest line.)
    letters = int(room / max(_inches(longest, _TEXT), 0.01) * len(longest) * 0.95)
    lines = [
        line
        for text in caption
        for line in textwrap.wrap(text, max(20, letters), subsequent_indent="    ")
    ]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"... ({len(lines) - _MOST_LINES + 1} more lines)"]
    return lines


def _image(
    ax: Axes, cells: np.ndarray, tile: tuple[int, int], query_offset: int, **colours: Any
) -> AxesImage:
    """Cells at the positions they stand for, with lines between them while they are few."""
    rows, columns = cells.shape
    top = query_offset - 0.5
    extent = (-0.5, columns * tile[1] - 0.5, top + rows * tile[0], top)
    # Tiles may be oblong in positions: the axes decide.
    image = ax.imshow(cells, extent=extent, aspect="auto", interpolation="nearest", **colours)
    if max(rows, columns) <= 40:
        ax.set_xticks(np.arange(columns + 1) * tile[1] - 0.5, minor=True)
        ax.set_yticks(np.arange(rows + 1) * tile[0] + top, minor=True)
        ax.grid(which="minor", color="white", linewidth=0.6)
        ax.tick_params(which="minor", length=0)
    return image


def _scale(figure: Figure, axes: Sequence[Axes], image: AxesImage, text: str) -> None:
    """The scale of probabilities, to the right of the first row."""
    width, _ = figure.get_size_inches()
    place = axes[0].get_position()
    right = max(ax.get_position().x1 for ax in axes)
    bar = figure.colorbar(
        image, cax=figure.add_axes((right + 0.15 / width, place.y0, 0.13 / width, place.height))
    )
    bar.ax.tick_params(labelsize=_SIZE)
    bar.set_label(text, fontsize=_TEXT)


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(
        handles=handles, loc="lower left", ncols=len(handles), fontsize=_TEXT, frameon=False
    )
