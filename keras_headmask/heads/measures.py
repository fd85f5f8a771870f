"""`hm.measure_heads`: what each head attends to, over many texts."""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask.heads import texts
from keras_headmask.heads.reading import Batch, Reader, allowed_pairs, real_shares
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
_MOST_LINES = 48  # of heads that are printed
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
_UNITS = {"distance": "positions", "entropy": "nats"}


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
        scores: By measure an array `(layers, heads)`: mean shares of attention, `distance` in
            positions, `entropy` in nats. `nan` where a layer has fewer heads, or where no query
            of a head sees anything.
        uniform_baseline: For shares: what a head would have that attends evenly to every token of a
            text.
        upper_bound: For shares: what a head could have at most. It is below 1 where some queries
            have no such key, as a token that stands for the first time has no duplicate.
        texts, tokens: How many were measured.
        padding: What marks it, in words.
        left_out: By measure, why it is not in `scores`.
    """

    layers: tuple[str, ...]
    heads: tuple[int, ...]
    scores: dict[str, np.ndarray]
    uniform_baseline: dict[str, np.ndarray]
    upper_bound: dict[str, np.ndarray]
    texts: int
    tokens: int
    padding: str
    left_out: dict[str, str]

    def roles(self, threshold: float = 0.5) -> Roles:
        """The role of each head, in the words of TransformerLens' `detect_head` and others.

        Roles: previous token, duplicate token, induction, sink (the first token), special token,
        current token, next token; for a head without one of these: local, sentence. A head has the
        role in which it goes farthest from even attention (`uniform_baseline`, 0) to the most
        possible (`upper_bound`, 1), if it goes as far as `threshold`. So no head is local where all
        texts are short.

        Args:
            threshold: A number from 0 to 1.

        Returns:
            By the path of the layer, the role of each head that has one.

        Raises:
            TypeError, ValueError: if `threshold` is not a number from 0 to 1.
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
        yield f"{texts.counted(self.texts)} of {self.tokens:,} tokens; padding: {self.padding}."
        roles, of_heads = self.roles(), []
        for i, (path, heads) in enumerate(zip(self.layers, self.heads, strict=True)):
            names = [roles.get(path, {}).get(head, "") for head in range(heads)]
            cells = [[f"{x[i, head]:.2f}" for x in self.scores.values()] for head in range(heads)]
            of_heads.append([(f"{j}", names[j], *cells[j]) for j in range(heads)])
        rows = layer_rows(self.layers, of_heads)
        count = len(rows)
        if count > _MOST_LINES:
            rows = [row for row in rows if row[2]][:_MOST_LINES]
        yield Table([("layer", "head", "role", *self.scores), *rows], labels=3)
        if count > len(rows):
            yield f"... and {count - len(rows)} more heads: see `scores` and `roles()`."
        yield from (f"No {name}: {why}" for name, why in self.left_out.items())

    def plot(self, measure: str | None = None) -> "Figure":
        """Layers x heads as a matplotlib figure: dark = much.

        Needs matplotlib: `pip install matplotlib`.

        Args:
            measure: One of `scores`; by default each that is a share of attention has a panel.

        Returns:
            A matplotlib figure, with a panel for each measure.

        Raises:
            ImportError: without matplotlib.
            ValueError: if `measure` was not measured.
        """
        if measure is not None and measure not in self.scores:
            why = self.left_out.get(measure, f"measured were {list(self.scores)}.")
            raise ValueError(f"There is no measure {measure!r}: {why}")
        measures = list(self.upper_bound) if measure is None else [measure]
        values = {name: self.scores[name] for name in measures}
        most, unit = 1.0, "share of attention"
        if measure in _UNITS:
            most, unit = float(np.nanmax(self.scores[measure], initial=1e-9)), _UNITS[measure]
        caption = [str(self).split("\n")[0]]
        return plotting.plot_heads(values, unit, caption, most)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON has it, a dict; `nan` is null."""
        report = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("scores", "uniform_baseline", "upper_bound"):
            report[name] = {measure: with_null(x) for measure, x in report[name].items()}
        return report | {"layers": list(self.layers), "heads": list(self.heads)}


def with_null(values: np.ndarray) -> list[list[float | None]]:
    """Rows of JSON, which has no NaN."""
    return [[None if math.isnan(x) else x for x in row] for row in values.tolist()]


def measure_heads(
    model: keras.Model,
    inputs: Any,
    end_ids: Any = None,
    special_ids: Any = None,
    layers: Any = None,
    token_ids: Any = None,
    padding: Any = None,
    batch_size: int = 32,
    verbose: int | str = "auto",
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
    | `distance`  | the mean of abs(i - j), in positions                                       |
    | `entropy`   | its entropy, in nats: 0 for one key                                        |

    All are means over the queries that see something. Padding is neither query nor key: shares are
    of the attention that goes to real tokens. A query without such a key counts as 0 (`upper_bound`
    in the report has how many do not), so measure `duplicate` and `induction` on texts that repeat
    themselves. One batch is held at a time.

    Args:
        model: A model that `apply_head_masks` understands, with or without a rule.
        inputs: What the model is called on: arrays, in a dict or list where it has several inputs.
            Or an iterable of such batches: a generator, a `tf.data.Dataset`. As in `fit`, the first
            of a tuple are the inputs.
        end_ids: The id, or several, of tokens that end a sentence. Without it there is no
            `sentence`.
        special_ids: The id, or several, of special tokens, such as BERT's (101, 102). Without it
            there is no `special`.
        layers: Which layers, as in `apply_head_masks`. By default all self-attention.
        token_ids: The name of the input with the ids, or an array `(texts, length)` of them. By
            default the input named `token_ids`, `input_ids` or `ids`, or the only one of integers
            `(batch, length)`. Without any, measures that read ids are left out.
        padding: The name of the input that is true at real tokens, or an array `(texts, length)`.
            By default an input named `padding_mask` or `attention_mask`, or else the Keras mask
            that reaches the first attention layer. Without any, every position is a token.
        batch_size: Texts that the model runs on at once, if `inputs` are arrays.
        verbose: As in Keras, 0 for silence; "auto", 1 and 2 show progress on standard error: a bar
            in a terminal or notebook, after 3 seconds, and elsewhere a line every 30 seconds.

    Returns:
        A `HeadReport`. It prints as a table, and has `roles()`, `plot()` and `to_json()`.

    Raises:
        TypeError: if `model` is not a Keras model, or for `inputs` or ids of another kind.
        ValueError: if attention is out of reach or not self-attention; if there are no texts, or
            all have fewer than 2 tokens or the same one; if ids or padding are not found or do
            not fit.

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
    looked_for = {"end_ids": end_ids, "special_ids": special_ids}
    reader = Reader(model, inputs, layers, token_ids, padding, batch_size, **looked_for)
    rules = _rules(end_ids, special_ids)
    sums: dict[str, _Sums] = {}  # by the path of the layer
    for batch in reader.read(verbose):
        parts: list[_Text] = []
        for path, probabilities in batch.layers:
            parts = parts or list(_texts_of(batch, rules))
            if path not in sums:
                sums[path] = _Sums(probabilities.shape[1], parts[0].measures)
            for of_text, text in zip(probabilities, parts, strict=True):
                sums[path].add(of_text, text)
    return _report(reader, sums)


def _report(reader: Reader, sums: dict[str, "_Sums"]) -> HeadReport:
    measures = next(iter(sums.values())).measures
    heads = tuple(len(of_layer.queries) for of_layer in sums.values())
    no_ids = "no input holds token ids. Pass `token_ids`, the name of an input or an array."
    why = dict.fromkeys(("duplicate", "induction"), no_ids)
    why["sentence"] = "pass `end_ids`, the ids of the tokens that end a sentence."
    why["special"] = "pass `special_ids`, such as BERT's (101, 102)."

    def means(name: str, columns: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Over queries, `(layers, heads)` by measure; NaN where there is no such head."""
        values = np.full((len(sums), max(heads), len(columns)), np.nan)
        for i, of_layer in enumerate(sums.values()):
            queries = np.where(of_layer.queries > 0, of_layer.queries, np.nan)[:, None]
            values[i, : len(queries)] = getattr(of_layer, name) / queries
        return {measure: values[..., k] for k, measure in enumerate(columns)}

    return HeadReport(
        layers=tuple(sums),
        heads=heads,
        scores=means("measured", (*measures, "distance", "entropy")),
        uniform_baseline=means("baseline", measures),
        upper_bound=means("bound", measures),
        texts=reader.texts,
        tokens=reader.tokens,
        padding=reader.padding,
        left_out={name: text for name, text in why.items() if name not in measures},
    )


class _Text:
    """The pairs of one text that each measure counts, of real tokens alone."""

    def __init__(self, real: np.ndarray, pairs: dict[str, np.ndarray]):
        self.real, self.measures = real, tuple(pairs)
        self.pairs = np.stack(list(pairs.values())) & real[:, None] & real
        self.bound = self.pairs.any(-1).T.astype("float64")  # (queries, measures)
        self.baseline = self.pairs.sum(-1).T / max(1, real.sum())

    def weights(self) -> np.ndarray:
        """The measures of each pair, `(pairs, measures + 1)`: 0 or 1, and the distance.

        It is computed for each layer: of a whole batch it would be larger than its probabilities.
        """
        i, j = np.ogrid[: len(self.real), : len(self.real)]
        weights = np.stack([*self.pairs, abs(i - j)], dtype="float64", casting="unsafe")
        return weights.reshape(len(weights), -1).T


class _Sums:
    """Sums over queries, for each head of a layer, in float64."""

    def __init__(self, heads: int, measures: tuple[str, ...]):
        self.measures, self.queries = measures, np.zeros(heads)
        self.measured = np.zeros((heads, len(measures) + 2))  # with distance and entropy
        self.bound, self.baseline = np.zeros((2, heads, len(measures)))

    def add(self, probabilities: np.ndarray, text: _Text) -> None:
        """The probabilities of one text, `(heads, queries, keys)`."""
        shares, sees = real_shares(probabilities.astype("float64"), text.real)
        logarithms = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
        entropy = -np.einsum("hts,hts->h", shares, logarithms)
        self.measured += np.c_[shares.reshape(len(shares), -1) @ text.weights(), entropy]
        self.queries += sees.sum(1)
        self.bound += sees @ text.bound
        self.baseline += sees @ text.baseline


def _rules(end_ids: Any, special_ids: Any) -> dict[str, MaskSpec]:
    """The measures that are a rule's share of attention."""
    itself = Window(0, 0)
    rules: dict[str, MaskSpec] = {
        "self": itself,
        "previous": Window(1, 0) & ~itself,
        "next": Window(0, 1) & ~itself,
        "local": Window(8, 8),
    }
    if end_ids is not None:
        rules["sentence"] = SameSentence(end_ids)
    if special_ids is not None:
        rules["special"] = KeyIn("token_ids", special_ids)
    return rules


def _texts_of(batch: Batch, rules: dict[str, MaskSpec]) -> Iterator[_Text]:
    for i, allowed in enumerate(allowed_pairs(list(rules.values()), batch)):
        real, pairs = batch.real[i], dict(zip(rules, allowed, strict=True))
        pairs["first"] = np.broadcast_to(np.arange(len(real)) == real.argmax(), allowed[0].shape)
        if batch.ids is not None:
            same = (batch.ids[i][:, None] == batch.ids[i]) & real
            pairs["duplicate"] = np.tril(same, -1)
            pairs["induction"] = np.tril(np.pad(same, ((0, 0), (1, 0)))[:, :-1])
        yield _Text(real, {name: pairs[name] for name in _SHARES if name in pairs})
