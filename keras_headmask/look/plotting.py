"""Rules, attention and numbers of heads as figures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask.look import grid
from keras_headmask.rules.algebra import head_numbers
from keras_headmask.rules.base import MaskSpec, sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(
    spec: MaskSpec,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    tokens: Any = None,
) -> "Figure":
    """The mask that `spec` makes as a matplotlib figure: dark = may attend, light = hidden.

    Needs matplotlib: `pip install matplotlib`. Panels are those of `draw`; the rule stands above.
    From 129 positions on a cell is a tile: of a dark one every pair may attend, of an orange one
    some. `figure.savefig("rule.png")` saves it; pyplot does not hold it.

    Args:
        spec, queries, keys, num_heads, mask_inputs, tokens: As in `draw`.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: As `draw`; and without queries or keys.

    >>> from keras_headmask import PerHead, Window
    >>> [ax.get_title() for ax in plot(PerHead({0: Window(1, 1)}), 4, num_heads=12).axes]
    ['head 0', 'heads 1-11']
    """
    sizes = queries, keys, num_heads
    return figure_of(grid.grid_of(spec, *sizes, mask_inputs, tokens, called="hm.plot"))


def plot_attention(
    model: keras.Model,
    inputs: Any,
    layer: Any = 0,
    heads: int | str | Sequence[int] | None = None,
    tokens: Any = None,
) -> "Figure":
    """The attention of a layer of `model`: dark = much, light = little, hatched = hidden.

    Needs matplotlib: `pip install matplotlib`. The model is run once, with `training=False`. What
    is hidden is evaluated anew from the rules and the masks that reach the layer: a probability
    above 0 on a hidden pair would get a red cross, and the caption counts them. From 129 positions
    on, a cell is the largest probability of a tile. Of a batch the first example is drawn.

    Args:
        model: Any that holds attention, under `apply_head_masks` or not.
        inputs: What the model is called on.
        layer: A number, counted over self-attention in forward order, or a regex on its path.
        heads: Which heads, in this order: 3, `"0-3"`, `(0, 4)`. All by default.
        tokens: A label for each position.

    Returns:
        A matplotlib figure, with a panel for each head.

    Raises:
        ImportError: without matplotlib.
        TypeError: if `model` is not a Keras model.
        ValueError: if `layer` does not name one layer, or `heads` or `tokens` do not fit.

    >>> from keras_headmask import PerHeadMaskedMultiHeadAttention, Window
    >>> x = keras.Input((6, 8))
    >>> attention = PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=Window(after=0))
    >>> figure = plot_attention(keras.Model(x, attention(x)), np.random.rand(1, 6, 8), heads=0)
    >>> "attention outside the mask: 0 pairs" in " ".join(figure.get_suptitle().split())
    True
    """
    from keras_headmask.retrofit.find import Found
    from keras_headmask.retrofit.observe import observe  # needs all of retrofit/

    seen = observe(Found(model), inputs, layer)
    _, count, queries, keys = seen.probabilities.shape
    chosen = list(range(count))
    if heads is not None:
        numbers = tuple(heads) if isinstance(heads, (list, range, set)) else heads
        chosen = list(dict.fromkeys(head_numbers(numbers)))
        if not chosen or max(chosen) >= count:
            raise ValueError(
                f"`heads` must name heads of the layer, 0 to {count - 1}. Received: {heads!r}."
            )
    elif seen.spec is not None:
        free = [seen.spec.for_head(head).kind == "full" for head in chosen]
        chosen.sort(key=free.__getitem__)  # heads that see everything last
    tile = grid.tile_of(queries, keys, grid.IN_PICTURES)
    names = grid.labels_of(grid.texts_of(tokens), queries, keys, tile)
    probabilities, allowed = (x[0][chosen] for x in (seen.probabilities, seen.allowed))
    outside = ~allowed & (probabilities > 0)
    caption = [] if seen.spec is None else sentences(seen.spec, count)
    caption.append(seen.entry.path)
    if seen.spec is not None or not allowed.all():
        pairs = f"{outside.sum()} pair{'' if outside.sum() == 1 else 's'}"
        caption[-1] += f"; attention outside the mask: {pairs}"
    allowed, outside = (grid.reduced(np.logical_or, x, tile) for x in (allowed, outside))
    cells = grid.reduced(np.maximum, probabilities, tile)
    titles = [f"head {head}" for head in chosen]
    drawn = grid.Grid(
        list(map(grid.Panel, titles, cells, ~allowed, outside)),
        caption,
        *names,
        tile,
        legend={"hidden": "hidden by the mask", "crossed": "attention outside it"},
        scale="probability" if tile == 1 else "largest probability of a tile",
        most=max(float(cells.max(initial=0)), 1e-9),
        gamma=0.5,  # the root spreads the many small probabilities
    )
    return figure_of(drawn)


def plot_heads(values: Mapping[str, np.ndarray], scale: str, caption: Sequence[str]) -> "Figure":
    """A panel for each of `values`, `(layers, heads)`, under its name; NaN is hatched."""
    panels = [grid.Panel(name, x, np.isnan(x)) for name, x in values.items()]
    axes = ("layers", "heads")
    return figure_of(grid.Grid(panels, caption, axes=axes, scale=scale))


def figure_of(drawn: grid.Grid) -> Any:
    """`look.figures`, which alone imports matplotlib, draws a grid."""
    try:
        from keras_headmask.look import figures
    except ImportError as error:
        raise ImportError("Pictures need it: pip install matplotlib. (`draw` does not.)") from error
    return figures.figure_of(drawn)
