"""`hm.suggest_rules`: the cheapest rule of each head that keeps most of its attention."""

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask.heads.reading import allowed_pairs, read, real_shares
from keras_headmask.look import plotting
from keras_headmask.look.tables import Printed, Table, layer_rows
from keras_headmask.rules import fields, recipes
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.inputs import SameSentence
from keras_headmask.rules.per_head import PerHead
from keras_headmask.rules.positions import Full, Keys, Nothing, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WINDOWS = tuple(2**k for k in range(13))  # positions behind the query


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Suggestion(Printed):
    """A rule for each head, with what it keeps and computes on the texts.

    Attributes:
        specs: By the path of the layer, the rule of each head.
        keep: The share of attention that was to be kept.
        kept: The share that is kept, `(layers, heads)`; NaN where a layer has fewer heads.
        computed: The share of the pairs of tokens that is allowed; in a causal layer of those that
            do not look ahead.
        causal: By layer, whether no attention went to a later token.
    """

    specs: dict[str, tuple[MaskSpec, ...]]
    keep: float
    kept: np.ndarray
    computed: np.ndarray
    causal: tuple[bool, ...]

    @property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The rules as plain JSON, by a regex on the path: what `apply_head_masks` takes."""
        return {
            f"^{re.escape(path)}$": _layer_rule(specs).get_config()
            for path, specs in self.specs.items()
        }

    def _parts(self) -> Iterator[str | Table]:
        rows = [
            [
                (f"head {head}", str(spec), f"keeps {kept:.2f}, computes {computed:.2f}")
                for head, (spec, kept, computed) in enumerate(zip(*of_layer, strict=False))
            ]
            for of_layer in zip(self.specs.values(), self.kept, self.computed, strict=True)
        ]
        yield Table(layer_rows(list(self.specs), rows))

    def plot(self) -> "Figure":
        """The share of pairs that each head computes, layers x heads: dark = much."""
        caption = [f"Rules that keep {self.keep:.0%} of the attention of each head"]
        values = {"computed": self.computed}
        return plotting.plot_heads(values, "share of pairs", caption)


def suggest_rules(
    model: keras.Model,
    inputs: Any,
    keep: float = 0.95,
    end_ids: Any = None,
    special_ids: Any = None,
    layers: Any = None,
    batch_size: int = 32,
) -> Suggestion:
    """Suggest a rule for each head: the cheapest that keeps `keep` of its attention on these texts.

    The rules to choose from: `Nothing()`; the query itself; the token before it; windows of 1, 2,
    4, ... tokens behind the query, or on both sides; such a window and the first token; the query's
    own sentence, alone or with special tokens; all that is behind; and `Full()`.

    What a rule costs is the share of the pairs of tokens that it allows, in a causal layer of those
    that do not look ahead. Where two allow as many, the plainer one is taken: texts show nothing
    beyond their length. Attention kept says what a head looks at, and not what that is worth:
    measure a model under the rules before you use it.

    Args:
        model, inputs, layers, batch_size: As in `measure_heads`.
        keep: The share of a head's attention to keep, above 0 and up to 1: a mean over queries.
        end_ids: The id, or several, of tokens that end a sentence, for rules on sentences.
        special_ids: The id, or several, of special tokens, such as BERT's (101, 102), for these.

    Returns:
        A `Suggestion`. `hm.apply_head_masks(model, suggestion.rules)` applies it; to a model that
        has rules, with `existing="and"`.

    Raises:
        TypeError, ValueError: if `keep` is not above 0 and up to 1, or as in `measure_heads`.

    The rules are those of DuoAttention (Xiao et al. 2024) and MoA (Fu et al. 2024), and sentences.

    >>> import keras_headmask as hm
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(50, 8)(ids)
    >>> model = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> masked = hm.apply_head_masks(model, hm.PerHead({0: hm.Window(2, 2)}))
    >>> texts = np.random.default_rng(0).integers(1, 50, (4, 24))
    >>> print(suggest_rules(masked, texts))
    attention  head 0  Window(before=2, after=2)  keeps 1.00, computes 0.20
    attention  head 1  Full()                     keeps 1.00, computes 1.00
    """
    keep = fields.fraction(keep, "keep")
    if keep == 0:
        raise ValueError("`keep` must be above 0: `Nothing()` keeps nothing. Received: 0.")
    family = list(_family(end_ids, special_ids))
    sums: dict[str, _Layer] = {}
    pairs = np.zeros((len(family), 2))  # that each rule allows: all, and those not ahead
    for batch in read(model, inputs, layers, batch_size, end_ids=end_ids, special_ids=special_ids):
        masks: list[np.ndarray] = []  # of each text, (rules, T, T)
        for run, probabilities in batch.layers:
            masks = masks or list(allowed_pairs(family, batch))
            path = re.sub(r"\[\d+\]$", "", run)  # all runs of a layer obey its one rule
            layer = sums.setdefault(path, _Layer(probabilities.shape[1], len(family)))
            for of_text, allowed, real in zip(probabilities, masks, batch.real, strict=True):
                layer.add(of_text, allowed, real)
        for allowed in masks:
            pairs += np.stack([allowed.sum((1, 2)), np.tril(allowed).sum((1, 2))], -1)
    return _cheapest(sums, pairs, family, keep)


def _family(end_ids: Any, special_ids: Any) -> Iterator[MaskSpec]:
    """The rules to choose from; of those that cost as much, the first is taken."""
    itself = Window(0, 0)
    # (In a causal layer the last two cost as much, and the first of them is safe elsewhere, too.)
    yield from (Nothing(), itself, Window(1, 0) & ~itself, Window(after=0), Full())
    if end_ids is not None:
        yield SameSentence(end_ids)
        if special_ids is not None:
            yield recipes.sentences(end_ids, special_ids)
    windows = [*(Window(n, 0) for n in _WINDOWS), *(Window(n, n) for n in _WINDOWS)]
    yield from windows
    yield from (Keys(0, 1) | window for window in windows)


def _layer_rule(specs: tuple[MaskSpec, ...]) -> MaskSpec:
    """The rule of a layer: each head obeys its own of `specs`."""
    heads: dict[MaskSpec, list[int]] = {}
    for head, spec in enumerate(specs):
        heads.setdefault(spec, []).append(head)
    if len(heads) == 1:
        return specs[0]
    return PerHead({tuple(numbers): spec for spec, numbers in heads.items()})


def _cheapest(
    layers: dict[str, "_Layer"], pairs: np.ndarray, family: list[MaskSpec], keep: float
) -> Suggestion:
    """For each head the cheapest rule of `family` that keeps `keep` of its attention."""
    heads = max(len(layer.queries) for layer in layers.values())
    specs: dict[str, tuple[MaskSpec, ...]] = {}
    kept, computed = np.full((2, len(layers), heads), np.nan)
    for i, (path, layer) in enumerate(layers.items()):
        counts = pairs[:, int(layer.is_causal)]
        costs = counts / counts[family.index(Full())]
        chosen = []
        for head, queries in enumerate(layer.queries):
            # A head that sees nothing keeps all that it has.
            shares = layer.kept[head] / queries if queries else np.ones(len(costs))
            # (Sums of float32 shares that are 1 may be a little less.)
            able = np.flatnonzero(shares >= keep - 1e-5)
            best = min(able, key=lambda rule: (costs[rule], rule))
            chosen.append(family[best])
            kept[i, head], computed[i, head] = min(shares[best], 1.0), costs[best]
        specs[path] = tuple(chosen)
    causal = tuple(layer.is_causal for layer in layers.values())
    return Suggestion(specs, keep, kept, computed, causal)


class _Layer:
    """Sums over the queries of one layer."""

    def __init__(self, heads: int, rules: int):
        self.queries = np.zeros(heads)
        self.kept = np.zeros((heads, rules))
        self.is_causal = True

    def add(self, probabilities: np.ndarray, allowed: np.ndarray, real: np.ndarray) -> None:
        """The probabilities of one text, and what each rule allows of it."""
        shares, sees = real_shares(probabilities, real)
        self.queries += sees.sum(1)
        by_rule = allowed.reshape(len(allowed), -1).T.astype(shares.dtype)
        self.kept += shares.reshape(len(shares), -1) @ by_rule
        self.is_causal &= not np.triu(shares, 1).any()
