"""`hm.suggest_rules`: the cheapest rule of each head that keeps most of its attention."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.heads.measures import with_null
from keras_headmask.heads.progress import Progress
from keras_headmask.heads.reading import Reader, allowed_pairs, real_shares
from keras_headmask.look import plotting
from keras_headmask.look.tables import Printed, Table, layer_rows
from keras_headmask.retrofit.apply import masked_by
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
        numbers: By path, the number by which `apply_head_masks` names the layer, if it has one.
        keep: The share of attention that was to be kept.
        kept: The share that is kept, `(layers, heads)`; NaN where a layer has fewer heads.
        computed: The share that the rule allows of the pairs of tokens, `(layers, heads)`; in a
            causal layer of those pairs that do not look ahead.
        causal: By layer, whether no attention went to a later token.
        metrics: With `metric=`: that of the model itself, then of each model that was tried, with
            one head more open each time.
    """

    specs: dict[str, tuple[MaskSpec, ...]]
    numbers: dict[str, int | None]
    keep: float
    kept: np.ndarray
    computed: np.ndarray
    causal: tuple[bool, ...]
    metrics: tuple[float, ...] = ()

    @property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The rules as plain JSON, by layer: what `apply_head_masks` takes."""
        rules = {}
        for path, specs in self.specs.items():
            number = self.numbers[path]
            name = f"^{re.escape(path)}$" if number is None else str(number)
            rules[name] = _layer_rule(specs).get_config()
        return rules

    def _parts(self) -> Iterator[str | Table]:
        rows = [
            [
                (f"head {head}", str(spec), f"keeps {kept:.2f}, computes {computed:.2f}")
                for head, (spec, kept, computed) in enumerate(zip(*of_layer, strict=False))
            ]
            for of_layer in zip(self.specs.values(), self.kept, self.computed, strict=True)
        ]
        yield Table(layer_rows(list(self.specs), rows))
        if self.metrics:
            own, *tried = self.metrics
            last = f"the last {tried[-1]:.4g}" if tried else "no model was tried"
            yield f"The metric is {own:.4g}; {len(tried)} models were tried, {last}."

    def opened(self, heads: Iterable[tuple[int, int]]) -> "Suggestion":
        """The same with `Full()` for some heads; in a causal layer with `Window(after=0)`.

        Args:
            heads: Pairs of a layer, counted as in `kept`, and a head.

        Raises:
            ValueError: if there is no such head.
        """
        specs = [list(of_layer) for of_layer in self.specs.values()]
        kept, computed = self.kept.copy(), self.computed.copy()
        for layer, head in heads:
            if not (0 <= layer < len(specs) and 0 <= head < len(specs[layer])):
                raise ValueError(f"There is no head {head} of layer {layer}: {[*self.specs]}.")
            specs[layer][head] = Window(after=0) if self.causal[layer] else Full()
            kept[layer, head] = computed[layer, head] = 1.0
        opened = dict(zip(self.specs, map(tuple, specs), strict=True))
        return dataclasses.replace(self, specs=opened, kept=kept, computed=computed)

    def plot(self) -> "Figure":
        """The share of pairs that each head computes, layers x heads: dark = much.

        Needs matplotlib: `pip install matplotlib`.

        Returns:
            A matplotlib figure.

        Raises:
            ImportError: without matplotlib.
        """
        caption = [f"Rules that keep {self.keep:.0%} of the attention of each head"]
        if any(self.causal):
            caption.append("Pairs of causal layers: those that do not look ahead")
        values = {"computed": self.computed}
        return plotting.plot_heads(values, "share of pairs", caption)

    def to_json(self) -> dict[str, Any]:
        """The suggestion as JSON has it; NaN is null.

        Returns:
            A dict of plain values.
        """
        rules = {"keep": self.keep, "rules": self.rules}
        shares = {"kept": with_null(self.kept), "computed": with_null(self.computed)}
        return rules | shares | {"metrics": list(self.metrics)}


def suggest_rules(
    model: keras.Model,
    inputs: Any,
    keep: float = 0.95,
    end_ids: Any = None,
    special_ids: Any = None,
    sinks: int = 1,
    layers: Any = None,
    token_ids: Any = None,
    padding: Any = None,
    batch_size: int = 32,
    metric: Callable[[keras.Model], Any] | None = None,
    tolerance: float = 0.01,
    better: str = "higher",
    verbose: int | str = "auto",
) -> Suggestion:
    """Suggest a rule for each head: the cheapest that keeps `keep` of its attention on these texts.

    The rules to choose from: `Nothing()`; the query itself; the token before it; windows of 1, 2,
    4, ... tokens behind the query, or on both sides; such a window and the first `sinks` tokens;
    the query's own sentence, alone or with special tokens; all that is behind; and `Full()`.

    What a rule costs is the share of the pairs of tokens that it allows, in a causal layer of those
    that do not look ahead. Where two allow as many,
    as a window as long as the texts and `Full()`, the plainer one is taken: texts show nothing
    beyond their length. In a causal layer that is `Window(after=0)`, so that its future stays
    closed in a model without that layer's mask, too.

    Attention kept says what a head looks at, and not what that is worth. With `metric`, a function
    of a model, the masked model is measured, and heads are opened (`Full()`; in a causal layer
    `Window(after=0)`), one more each time, those that lost most attention first, until the metric
    is within `tolerance` of the model's own. That takes up to one run of `metric` for each head. It
    gets copies, compiled as `model` is; in each a query that sees no key, as at padding, has
    context 0, as under any rule.

    Args:
        model: A model that `apply_head_masks` understands, with or without a rule.
        inputs: What the model is called on, or an iterable of batches, as in `measure_heads`.
        keep: The share of a head's attention to keep, above 0 and up to 1: a mean over queries.
        end_ids: The id, or several, of tokens that end a sentence. Without it no rule has
            sentences.
        special_ids: The id, or several, of special tokens, such as BERT's (101, 102), for rules on
            sentences.
        sinks: How many first tokens stay open beside a window, at least 1.
        layers, token_ids, padding, batch_size: As in `measure_heads`.
        metric: A function of a model; returns one finite number, the same each time.
        better: Which metric is better, "higher" or "lower".
        tolerance: How much worse the metric may be than the model's own.
        verbose: As in `measure_heads`.

    Returns:
        A `Suggestion`. `hm.apply_head_masks(model, suggestion.rules)` applies it; to a model that
        has rules, with `existing="and"`.

    Raises:
        TypeError: if `model` is not a Keras model, or for an argument of another kind.
        ValueError: if `keep` is not above 0 and up to 1, `better` is not valid, `metric` returns no
            finite number, or as in `measure_heads`.

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
    fields.whole_number(sinks, "sinks", at_least=1)
    tolerance = fields.not_negative(tolerance, "tolerance")
    if metric is not None and not callable(metric):
        raise TypeError(
            "`metric` must be a function of a model that returns a number, such as `lambda model: "
            f"model.evaluate(x, y)[1]`. Received: {metric!r}."
        )
    if better not in ("higher", "lower"):
        raise ValueError(f'`better` must be "higher" or "lower". Received: {better!r}.')
    looked_for = {"end_ids": end_ids, "special_ids": special_ids}
    reader = Reader(model, inputs, layers, token_ids, padding, batch_size, **looked_for)
    family = list(_family(sinks, end_ids, special_ids))
    suggestion = _cheapest(reader, family, keep, verbose)
    if metric is None:
        return suggestion
    limited = [(i, j) for i, j in np.argwhere(suggestion.computed < 1).tolist()]
    limited.sort(key=lambda head: (suggestion.kept[head], head))
    tried = [_measured(reader, {}, metric, "the model itself")]
    bar = Progress(len(limited), "models", verbose)
    # (With all of them open it is the model itself.)
    for count in range(len(limited)):
        opened = suggestion.opened(limited[:count]).specs.items()
        rules = {path: _layer_rule(specs) for path, specs in opened}
        tried.append(_measured(reader, rules, metric, f"the model with {count} heads opened"))
        bar.step()
        worse = tried[0] - tried[-1] if better == "higher" else tried[-1] - tried[0]
        if worse <= tolerance:
            break
    else:
        count = len(limited)
    return dataclasses.replace(suggestion.opened(limited[:count]), metrics=tuple(tried))


def _measured(
    reader: Reader, rules: Mapping[str, MaskSpec], metric: Callable[[Any], Any], name: str
) -> float:
    """The metric of a new copy under `rules`, by path, compiled as the model is.

    In one copy whose rule changes, functions that a metric compiled before would go on without
    the change. Each layer gets a rule, if only one that hides nothing: for a query that sees no
    key, as at padding, stock Keras takes the mean of all values, and attention under a rule 0.
    """
    specs = {x.path: rules.get(x.path, Keys(0)) & Keys(0) for x in reader.entries}
    by_regex = {f"^{re.escape(path)}$": spec for path, spec in specs.items()}
    copy = masked_by(reader.survey, by_regex, existing="and")
    _keras.compile_alike(reader.survey.model, copy)
    value = metric(copy)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"`metric` must return one finite number. Received for {name}: {repr(value)[:80]}. Of "
            "a list or dict, as `model.evaluate` returns, pick one; skip or clip batches of inf "
            "and NaN."
        )
    return number


def _family(sinks: int, end_ids: Any, special_ids: Any) -> Iterator[MaskSpec]:
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
    yield from (Keys(0, sinks) | window for window in windows)


def _layer_rule(specs: tuple[MaskSpec, ...]) -> MaskSpec:
    """The rule of a layer: each head obeys its own of `specs`."""
    heads: dict[MaskSpec, list[int]] = {}
    for head, spec in enumerate(specs):
        heads.setdefault(spec, []).append(head)
    if len(heads) == 1:
        return specs[0]
    return PerHead({tuple(numbers): spec for spec, numbers in heads.items()})


def _cheapest(reader: Reader, family: list[MaskSpec], keep: float, verbose: Any) -> Suggestion:
    """For each head the cheapest rule of `family` that keeps `keep` of its attention."""
    layers, pairs = _counted(reader, family, verbose)
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
    numbers = {entry.path: number for number, entry in reader.survey.numbered()}
    causal = tuple(layer.is_causal for layer in layers.values())
    return Suggestion(specs, numbers, keep, kept, computed, causal)


def _counted(
    reader: Reader, family: list[MaskSpec], verbose: Any
) -> tuple[dict[str, "_Layer"], np.ndarray]:
    """Over the texts: attention that each rule keeps, by layer, and pairs that it allows.

    Pairs are counted twice: all, and those that do not look ahead.
    """
    layers: dict[str, _Layer] = {}
    pairs, paths = np.zeros((len(family), 2)), {entry.path for entry in reader.entries}
    for batch in reader.read(verbose):
        masks: list[np.ndarray] = []  # of each text, (rules, T, T)
        for path, probabilities in batch.layers:
            masks = masks or list(allowed_pairs(family, batch))
            if path not in paths:  # "path[1]": all runs of a layer obey its one rule
                path = path.rpartition("[")[0]
            layer = layers.setdefault(path, _Layer(probabilities.shape[1], len(family)))
            for of_text, allowed, real in zip(probabilities, masks, batch.real, strict=True):
                shares, sees = real_shares(of_text, real)
                layer.queries += sees.sum(1)
                by_rule = allowed.reshape(len(family), -1).T.astype(shares.dtype)
                layer.kept += shares.reshape(len(shares), -1) @ by_rule
                layer.is_causal &= not np.triu(shares, 1).any()
        for allowed in masks:
            pairs += np.stack([allowed.sum((1, 2)), np.tril(allowed).sum((1, 2))], -1)
    return layers, pairs


class _Layer:
    """Sums over the queries of one layer."""

    def __init__(self, heads: int, rules: int):
        self.queries = np.zeros(heads)
        self.kept = np.zeros((heads, rules))
        self.is_causal = True
