"""`hm.measure_heads`: what each head attends to, over many texts."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask.heads.reading import allowed_pairs, read
from keras_headmask.look import plotting
from keras_headmask.look.tables import Printed, Table
from keras_headmask.rules.base import MaskSpec, not_negative
from keras_headmask.rules.leaves import KeyIn, SameSentence, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The field's words. A head that keeps to the previous token also keeps to what is near, so a role
# of the second table is only for heads that have none of the first.
_NARROW = {
    "self": "current token",
    "previous": "previous token",
    "next": "next token",
    "first": "sink",
    "duplicate": "duplicate token",
    "induction": "induction",
    "special": "special token",
}
_WIDE = {"sentence": "sentence", "local": "local"}


class Roles(Printed, dict[str, dict[int, str]]):
    """The role of each head that has one: `roles["path of the layer"][3]`. It prints as a table."""

    def _parts(self) -> Iterator[str | Table]:
        yield Table((path, f"head {i}", x) for path, of in self.items() for i, x in of.items())
        if not self:
            yield "No head has a role."


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeadReport(Printed):
    """Measures of each head's attention, averaged over many texts.

    Attributes:
        layers: The paths of the layers, in the order in which they run.
        heads: The number of heads of each layer.
        scores: By measure an array `(layers, heads)` of mean shares of attention. `nan` where a
            layer has fewer heads, or where no query of a head sees anything.
        uniform_baseline: What a head would have that attends evenly to every token of a text.
        upper_bound: What a head could have at most. It is below 1 where some queries have no such
            key, as a token that stands for the first time has no duplicate.
        texts, tokens: How many were measured.
        padding: What marks it, in words.
    """

    layers: tuple[str, ...]
    heads: tuple[int, ...]
    scores: dict[str, np.ndarray]
    uniform_baseline: dict[str, np.ndarray]
    upper_bound: dict[str, np.ndarray]
    texts: int
    tokens: int
    padding: str

    def roles(self, threshold: float = 0.5) -> Roles:
        """The role of each head, in the words of TransformerLens' `detect_head` and others.

        A head has the role in which it goes farthest from even attention (`uniform_baseline`, 0)
        to the most possible (`upper_bound`, 1), if it goes as far as `threshold`; local or sentence
        only without another role. So no head is local where all texts are short.

        Args:
            threshold: A number from 0 to 1.
        """
        threshold, gains = not_negative(threshold, "threshold", most=1), {}
        for measure, score in self.scores.items():
            even, most = self.uniform_baseline[measure], self.upper_bound[measure]
            # None where all heads have the same. (Rounded: attention is computed in float32.)
            gain = (score - even) / np.where(most - even > 1e-9, most - even, np.nan)
            gains[measure] = np.nan_to_num(gain.round(5), nan=-np.inf)
        by_layer = Roles()
        for i, path in enumerate(self.layers):
            for head in range(self.heads[i]):
                for roles in (_WIDE, _NARROW):  # the latter wins
                    found = (
                        (gains[x][i, head], -n, role)  # of equal gains, the first
                        for n, (x, role) in enumerate(roles.items())
                        if x in gains
                    )
                    gain, _, role = max(found)
                    if gain >= threshold:
                        by_layer.setdefault(path, {})[head] = role
        return by_layer

    def _parts(self) -> Iterator[str | Table]:
        texts = f"{self.texts:,} text{'s' * (self.texts != 1)}"
        yield f"{texts} of {self.tokens:,} tokens; padding: {self.padding}."
        roles, table = self.roles(), Table([("layer", "head", "role", *self.scores)])
        for i, (path, heads) in enumerate(zip(self.layers, self.heads, strict=True)):
            for head in range(heads):
                cells = [f"{x[i, head]:.2f}" for x in self.scores.values()]
                table.append((path, f"{head}", roles.get(path, {}).get(head, ""), *cells))
        yield table

    def plot(self, measure: str | None = None) -> "Figure":
        """The measures, layers x heads, as a matplotlib figure: dark = much.

        Args:
            measure: One of `scores`; by default each has a panel.

        Returns:
            A matplotlib figure.

        Raises:
            ValueError: if `measure` was not measured.
        """
        if measure is not None and measure not in self.scores:
            raise ValueError(f"There is no measure {measure!r}: measured were {list(self.scores)}.")
        values = {k: x for k, x in self.scores.items() if measure in (None, k)}
        caption = [str(self).split("\n")[0]]
        return plotting.plot_heads(values, "share of attention", caption)


def measure_heads(
    model: keras.Model,
    inputs: Any,
    end_ids: Any = None,
    special_ids: Any = None,
    layers: Any = None,
    batch_size: int = 32,
) -> HeadReport:
    """Measure what each head of self-attention attends to: shares of attention, over many texts.

    | measure     | the attention of query i goes to                                           |
    |-------------|----------------------------------------------------------------------------|
    | `self`      | key i                                                                      |
    | `previous`  | key i - 1                                                                  |
    | `next`      | key i + 1                                                                  |
    | `first`     | the first token of the text                                                |
    | `duplicate` | earlier keys with the same token                                           |
    | `induction` | what followed those: keys j <= i where token j - 1 is token i              |
    | `special`   | tokens whose id is in `special_ids`                                        |
    | `sentence`  | its own sentence, as `SameSentence(end_ids)` counts them                   |
    | `local`     | keys at most 8 positions away                                              |

    All are means over the queries that see something. Padding is neither query nor key. A query
    without such a key counts as 0 (`upper_bound` says how many do not), so measure `duplicate` and
    `induction` on texts that repeat themselves.

    Args:
        model: A model that `apply_head_masks` understands, with or without a rule.
        inputs: What the model is called on: arrays, in a dict or list where it has several inputs.
            Token ids are the input named `token_ids`, `input_ids` or `ids`, or the only one of
            integers `(batch, length)`; without any, measures that read ids are left out. Tokens
            are real where an input named `padding_mask` or `attention_mask` is true, or else the
            Keras mask that reaches the first attention layer; without any, all are.
        end_ids: The id, or several, of tokens that end a sentence, for `sentence`.
        special_ids: The id, or several, of special tokens, such as BERT's (101, 102).
        layers: Which layers, as in `apply_head_masks`. By default all self-attention.
        batch_size: Texts that the model runs on at once.

    Returns:
        A `HeadReport`. It prints as a table, and has `roles()` and `plot()`.

    Raises:
        TypeError, ValueError: if attention is out of reach or not self-attention; if there are no
            texts, floats for ids, or several inputs that may be ids or padding.

    Measures: Clark et al. 2019, "What Does BERT Look At?"; Olsson et al. 2022, "In-context Learning
    and Induction Heads"; `detect_head` of TransformerLens, whose shares are these.

    >>> import keras_headmask as hm
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(50, 8)(ids)
    >>> model = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> rule = hm.PerHead({0: hm.Window(1, 0) & ~hm.Window(0, 0)})
    >>> texts = np.random.default_rng(0).integers(1, 50, (4, 24))
    >>> report = measure_heads(hm.apply_head_masks(model, rule), texts)
    >>> report.scores["previous"][0, 0]
    np.float64(1.0)
    >>> print(report.roles())
    attention  head 0  previous token
    """
    kinds = functools.partial(_pairs, end_ids, special_ids)
    found = read(model, inputs, layers, batch_size, kinds, end_ids=end_ids, special_ids=special_ids)
    heads = tuple(len(layer.queries) for layer in found.layers.values())
    means = np.full((3, len(found.kinds), len(heads), max(heads)), np.nan)
    for i, layer in enumerate(found.layers.values()):
        queries = np.where(layer.queries > 0, layer.queries, np.nan)
        means[:, :, i, : heads[i]] = layer.sums / queries
    scores, baseline, bound = (dict(zip(found.kinds, x, strict=True)) for x in means)
    return HeadReport(tuple(found.layers), heads, scores, baseline, bound, *found[3:])


def _pairs(
    end_ids: Any, special_ids: Any, ids: np.ndarray | None, real: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    """The pairs of tokens of each text that each measure counts."""
    rules: dict[str, MaskSpec] = {"self": Window(0, 0)}
    rules |= {"previous": Window(1, -1), "next": Window(-1, 1), "local": Window(8, 8)}
    if end_ids is not None:
        rules["sentence"] = SameSentence(end_ids)
    if special_ids is not None:
        rules["special"] = KeyIn("token_ids", special_ids)
    for i, pairs in enumerate(allowed_pairs(rules, ids, real)):
        pairs["first"] = np.zeros_like(pairs["self"])
        pairs["first"][:, real[i].argmax()] = True
        if ids is not None:
            same = (ids[i][:, None] == ids[i]) & real[i]
            pairs["duplicate"] = np.tril(same, -1)
            pairs["induction"] = np.tril(np.pad(same, ((0, 0), (1, 0)))[:, :-1])
        yield {name: pairs[name] for name in (*_NARROW, *_WIDE) if name in pairs}
