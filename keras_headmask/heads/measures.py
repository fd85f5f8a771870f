"""`hm.measure_heads`: what each head attends to, over many texts."""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask.heads.reading import Batch, allowed_pairs, read, real_shares
from keras_headmask.look import plotting
from keras_headmask.look.tables import Printed, Table, layer_rows
from keras_headmask.rules import fields
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.inputs import KeyIn, SameSentence
from keras_headmask.rules.positions import Window
from keras_headmask.rules.words import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARES = (
    *("self", "previous", "next", "first", "duplicate", "induction"),
    *("sentence", "special", "local"),
)
# The field's words. A head that keeps to the previous token also keeps to what is near, so a role
# of the second table is only for heads that have none of the first.
_NARROW = {
    "previous": "previous token",
    "duplicate": "duplicate token",
    "induction": "induction",
    "first": "sink",
    "special": "special token",
    "self": "current token",
    "next": "next token",
}
_WIDE = {"sentence": "sentence", "local": "local"}


class Roles(dict[str, dict[int, str]]):
    """The role of each head that has one: `roles["path of the layer"][3]`. It prints as a table."""

    def __str__(self) -> str:
        rows = [
            (path, f"head {head}", role) for path, of in self.items() for head, role in of.items()
        ]
        return "\n".join(aligned(rows)) if rows else "No head has a role."


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
        threshold = fields.fraction(threshold, "threshold")
        by_layer = Roles()
        for i, (path, heads) in enumerate(zip(self.layers, self.heads, strict=True)):
            roles = ((head, self._role((i, head), threshold)) for head in range(heads))
            if named := {head: role for head, role in roles if role}:
                by_layer[path] = named
        return by_layer

    def _role(self, at: tuple[int, int], threshold: float) -> str:
        for names in (_NARROW, _WIDE):
            gains = {role: self._gain(measure, at) for measure, role in names.items()}
            role = max(gains, key=lambda role: gains[role])  # of equals, the first
            if gains[role] >= threshold:
                return role
        return ""

    def _gain(self, measure: str, at: tuple[int, int]) -> float:
        """0 for even attention, 1 for the most possible; -inf where all heads have the same."""
        if measure not in self.scores:
            return -math.inf
        score, even = self.scores[measure][at], self.uniform_baseline[measure][at]
        most = self.upper_bound[measure][at]
        # (Rounded, as attention is computed in float32.)
        return round((score - even) / (most - even), 5) if most - even > 1e-9 else -math.inf

    def _parts(self) -> Iterator[str | Table]:
        texts = f"{self.texts:,} text{'s' * (self.texts != 1)}"
        yield f"{texts} of {self.tokens:,} tokens; padding: {self.padding}."
        roles, of_heads = self.roles(), []
        for i, (path, heads) in enumerate(zip(self.layers, self.heads, strict=True)):
            names = [roles.get(path, {}).get(head, "") for head in range(heads)]
            cells = [[f"{x[i, head]:.2f}" for x in self.scores.values()] for head in range(heads)]
            of_heads.append([(f"{j}", names[j], *cells[j]) for j in range(heads)])
        rows = layer_rows(self.layers, of_heads)
        yield Table([("layer", "head", "role", *self.scores), *rows], labels=3)

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
    | `sentence`  | its own sentence, as `SameSentence(end_ids)` counts them                   |
    | `special`   | tokens whose id is in `special_ids`                                        |
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
    rules = _rules(end_ids, special_ids)
    sums: dict[str, _Sums] = {}  # by the path of the layer
    texts = tokens = 0
    for batch in read(model, inputs, layers, batch_size, end_ids=end_ids, special_ids=special_ids):
        pairs: list[dict[str, np.ndarray]] = []  # of each text, by measure
        for path, probabilities in batch.layers:
            pairs = pairs or list(_pairs(batch, rules))
            layer = sums.setdefault(path, _Sums(probabilities.shape[1], len(pairs[0])))
            for of_text, counted, real in zip(probabilities, pairs, batch.real, strict=True):
                layer.add(of_text, np.stack(list(counted.values())), real)
        texts, tokens = texts + len(batch.real), tokens + int(batch.real.sum())
    heads = tuple(len(layer.queries) for layer in sums.values())
    means = np.full((3, len(pairs[0]), len(sums), max(heads)), np.nan)
    for i, layer in enumerate(sums.values()):
        queries = np.where(layer.queries > 0, layer.queries, np.nan)
        means[:, :, i, : len(queries)] = layer.sums / queries
    scores, baseline, bound = (dict(zip(pairs[0], x, strict=True)) for x in means)
    return HeadReport(tuple(sums), heads, scores, baseline, bound, texts, tokens, batch.padding)


class _Sums:
    """Sums over queries by head, in float64: what is measured, of even attention, at most."""

    def __init__(self, heads: int, measures: int):
        self.queries, self.sums = np.zeros(heads), np.zeros((3, measures, heads))

    def add(self, probabilities: np.ndarray, pairs: np.ndarray, real: np.ndarray) -> None:
        """Of one text: probabilities `(heads, T, T)`, and pairs `(measures, T, T)` that count."""
        shares, sees = real_shares(probabilities.astype("float64"), real)
        size = real.size**2
        measured = pairs.reshape(-1, size).astype("float64") @ shares.reshape(-1, size).T
        even = (pairs.sum(-1) / max(1, real.sum())) @ sees.T
        self.sums += np.stack([measured, even, pairs.any(-1).astype("float64") @ sees.T])
        self.queries += sees.sum(1)


def _rules(end_ids: Any, special_ids: Any) -> dict[str, MaskSpec]:
    """The measures that are a rule's share of attention."""
    rules: dict[str, MaskSpec] = {"self": Window(0, 0), "local": Window(8, 8)}
    rules |= {"previous": Window(1, -1), "next": Window(-1, 1)}
    if end_ids is not None:
        rules["sentence"] = SameSentence(end_ids)
    if special_ids is not None:
        rules["special"] = KeyIn("token_ids", special_ids)
    return rules


def _pairs(batch: Batch, rules: dict[str, MaskSpec]) -> Iterator[dict[str, np.ndarray]]:
    """The pairs of real tokens of each text that each measure counts."""
    for i, allowed in enumerate(allowed_pairs(list(rules.values()), batch)):
        real, pairs = batch.real[i], dict(zip(rules, allowed, strict=True))
        pairs["first"] = np.broadcast_to(np.arange(len(real)) == real.argmax(), allowed[0].shape)
        if batch.ids is not None:
            same = (batch.ids[i][:, None] == batch.ids[i]) & real
            pairs["duplicate"] = np.tril(same, -1)
            pairs["induction"] = np.tril(np.pad(same, ((0, 0), (1, 0)))[:, :-1])
        yield {name: pairs[name] & real & real[:, None] for name in _SHARES if name in pairs}
