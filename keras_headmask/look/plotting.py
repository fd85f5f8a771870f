"""Rules and attention as figures."""

import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask.look import panels
from keras_headmask.rules import words
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.per_head import head_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(
    spec: MaskSpec,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: int = 0,
    example: int = 0,
    tokens: Any = None,
    tile_size: int | None = None,
) -> "Figure":
    """The mask that `spec` makes as a matplotlib figure: dark = may attend, light = hidden.

    Needs matplotlib: `pip install matplotlib`. One panel for heads with equal masks, under their
    numbers, heads that see everything last; queries downward, keys to the right; the rule stands
    above. Sequences of more than 128 positions are drawn as tiles, without tokens: of a dark tile
    every pair may attend, of an orange one some. A notebook shows the figure;
    `figure.savefig("rule.png")` saves it. Pyplot does not hold it, so nothing needs to be closed.

    Args:
        spec: A `MaskSpec`.
        queries, keys, num_heads, mask_inputs, query_offset, example, tokens, tile_size: As in
            `draw`.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: As `draw` does; and where there is no query or no key.

    >>> from keras_headmask import PerHead, SameSentence
    >>> tokens = "yes . no .".split()
    >>> figure = plot(
    ...     PerHead({0: SameSentence(9)}),
    ...     num_heads=12,
    ...     mask_inputs={"token_ids": [[5, 9, 4, 9]]},
    ...     tokens=tokens,
    ... )
    >>> [ax.get_title() for ax in figure.axes]
    ['head 0', 'heads 1-11']
    """
    figures_module()  # an error before work is done for it
    sizes = queries, keys, num_heads, mask_inputs, query_offset, example, tokens, tile_size
    return masks_figure(spec, panels.panels_of(spec, *sizes, called="hm.plot"))


def masks_figure(spec: MaskSpec, drawn: panels.Panels) -> "Figure":
    """A picture of what is drawn of `spec`."""
    if not drawn.panels[0].cells.size:
        raise ValueError("A picture needs at least one query and one key.")
    return figures_module().masks_figure(drawn, words.sentences(spec, drawn.num_heads))


def plot_attention(
    model: keras.Model,
    inputs: Any,
    layer: Any = 0,
    heads: int | str | Sequence[int] | None = None,
    example: int = 0,
    tokens: Any = None,
    tile_size: int | None = None,
    call: int = 0,
) -> "Figure":
    """The attention of a layer of `model`: dark = much, light = little, hatched = hidden.

    Needs matplotlib: `pip install matplotlib`. The model is run once, with
    `training=False`, and stays as it is. What is hidden is evaluated anew from the rules and from
    the masks that reach the layer, so a probability above 0 on a hidden pair would show: it gets
    a red cross, and the caption counts them. (Where no rule holds, Keras may take a fused
    kernel that returns no probabilities; they are then those of its own dense computation.)

    Args:
        model: A model under `apply_head_masks`, or any other that holds `MultiHeadAttention` or
            `PerHeadMaskedMultiHeadAttention`, whose layers obey Keras' masks and rules of their
            own.
        inputs: What the model is called on: tensors or arrays, in a dict or list where it has
            several inputs.
        layer: A number, counted over self-attention in forward order, or a regex on the layer's
            path, as in `apply_head_masks`.
        heads: Which heads, in this order: 3, `"0-3"`, `(0, 4)`. All by default, heads that see
            everything last.
        example: Which example of the batch to draw.
        tokens: A label for each position, or a pair of lists `(query_tokens, key_tokens)`.
        tile_size: Positions to a side of a tile, of which the largest probability is shown; 1 draws
            every position. By default a power of 2 from 129 positions on.
        call: Which call of the layer, if the model calls it more than once.

    Returns:
        A matplotlib figure, with a panel for each head.

    Raises:
        ImportError: without matplotlib.
        TypeError: if `model` is not a Keras model.
        ValueError: if `layer` does not name one layer, or `heads`, `example`, `tokens` or `call`
            do not fit.

    >>> from keras_headmask import PerHeadMaskedMultiHeadAttention, Window
    >>> x = keras.Input((6, 8))
    >>> attention = PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=Window(after=0))
    >>> model = keras.Model(x, attention(x))
    >>> figure = plot_attention(model, np.random.rand(1, 6, 8), heads=0)
    >>> "attention outside the mask: 0 pairs" in " ".join(figure.get_suptitle().split())
    True
    """
    from keras_headmask.retrofit.observe import observe  # needs all of retrofit/
    from keras_headmask.retrofit.survey import Survey

    figures = figures_module()
    seen = observe(Survey(model), inputs, layer, call)
    batch, count, queries, keys = seen.probabilities.shape
    panels.check_example(example, batch)
    if heads is None:
        chosen, spec = list(range(count)), seen.spec
        if spec is not None:
            chosen.sort(key=lambda head: words.sees_everything(spec.for_head(head)))
    else:
        numbers = tuple(heads) if isinstance(heads, (list, range, set)) else heads
        chosen = list(dict.fromkeys(head_numbers(numbers)))
        if not chosen or max(chosen) >= count:
            raise ValueError(
                f"`heads` must name heads of the layer, 0 to {count - 1}. Received: {heads!r}."
            )
    tile = panels.tile_of(queries, keys, tile_size, "hm.plot")
    labels = panels.labels_of(tokens, queries, keys, tile)
    probabilities, allowed = (x[example][chosen] for x in (seen.probabilities, seen.allowed))
    outside = ~allowed & (probabilities > 0)
    pairs = f"{outside.sum()} pair{'' if outside.sum() == 1 else 's'}"
    caption = [] if seen.spec is None else words.sentences(seen.spec, count)
    shown_is = f"{seen.entry.path}, example {example}"
    if seen.spec is not None or not allowed.all():
        shown_is += f"; attention outside the mask: {pairs}"
    caption.append(shown_is)
    allowed, outside = (panels.reduced(np.logical_or, x, tile) for x in (allowed, outside))
    probabilities = panels.reduced(np.maximum, probabilities, tile)
    of_heads = zip(chosen, probabilities, strict=True)
    of_each_head = [panels.Panel((head,), cells) for head, cells in of_heads]
    drawn = panels.Panels(of_each_head, count, tile, labels, query_offset=0)
    return figures.attention_figure(drawn, allowed, outside, caption)


def figures_module() -> types.ModuleType:
    """`look.figures`, which alone imports matplotlib."""
    try:
        from keras_headmask.look import figures
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install matplotlib. (`draw` gives text and "
            "needs nothing.)"
        ) from error
    return figures
