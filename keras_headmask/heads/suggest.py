"""`hm.suggest_rules`: the cheapest rule of each head that keeps most of its attention."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask.heads import sweeps
from keras_headmask.heads.pairs import shares
from keras_headmask.heads.progress import Progress, check_verbose
from keras_headmask.heads.reading import Batch, Reader
from keras_headmask.heads.suggestion import Suggestion
from keras_headmask.rules import evaluation, fields, recipes
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.inputs import SameSentence
from keras_headmask.rules.positions import Full, Keys, Nothing, Window

_WINDOWS = tuple(2**k for k in range(13))  # positions behind the query


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
    save_to: str | os.PathLike[str] | None = None,
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
    context 0, as under any rule. A search that is interrupted, or whose metric raises, keeps what
    it has: in `save_to`, and as the attribute `suggestion` of the exception.

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
        tolerance: How much worse the metric may be than the model's own.
        better: Which metric is better, "higher" or "lower".
        save_to: A JSON file, written after each run of `metric`. If it is there already, what it
            holds is not measured again, but for the metric of the model itself.
        verbose: As in `measure_heads`.

    Returns:
        A `Suggestion`. `hm.apply_head_masks(model, suggestion.rules)` applies it; to a model that
        has rules, with `existing="and"`.

    Raises:
        TypeError: if `model` is not a Keras model, or for an argument of another kind.
        ValueError: if `keep` is not above 0 and up to 1, `better` is not valid, `metric` returns no
            finite number, the file is of another model, or as in `measure_heads`.

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
    if better not in ("higher", "lower"):
        raise ValueError(f'`better` must be "higher" or "lower". Received: {better!r}.')
    check_verbose(verbose)
    tolerance = fields.not_negative(tolerance, "tolerance")
    if metric is not None:
        sweeps.check_metric(metric)
    file = sweeps.file_of(save_to)
    reader = Reader(model, inputs, layers, token_ids, padding, batch_size)
    family = [*_family(sinks, end_ids, special_ids)]
    counted = _Counted(family, {entry.path: number for number, entry in reader.survey.numbered()})
    bar = Progress(reader.count, "batches", verbose)
    for batch in reader.read(end_ids=end_ids, special_ids=special_ids):
        counted.add(batch)
        bar.step()
    found = counted.suggestion(keep, reader.longest)
    if metric is None:
        return found
    digest = sweeps.digest(model, reader.entries, found.rules)
    opening = _Opening(reader, metric, found, file, digest)
    try:
        return opening.until(tolerance, better == "higher", verbose)
    except BaseException as error:
        if opening.values:
            partial = dataclasses.replace(found, metrics=tuple(opening.values))
            sweeps.keep_with(error, "suggestion", partial, file if opening.is_saved else None)
        raise


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


class _Layer:
    """Sums over the texts for one layer: attention kept, and pairs allowed."""

    def __init__(self, heads: int, rules: int):
        self.queries = np.zeros(heads)
        self.kept = np.zeros((heads, rules))
        self.is_causal = True


class _Pairs(NamedTuple):
    """Pairs of one text that a rule allows, and how many of them look back."""

    masks: np.ndarray  # (rules, pairs)
    counts: np.ndarray  # (rules, 2): all, and those not after the query


class _Counted:
    """Adds up batches."""

    def __init__(self, family: list[MaskSpec], numbers: dict[str, int | None]):
        self.family, self.numbers = family, numbers  # by the path of each layer
        self.layers: dict[str, _Layer] = {}
        self.pairs = np.zeros((len(family), 2))

    def add(self, batch: Batch) -> None:
        of_texts: list[_Pairs] = []
        for path, probabilities in batch.layers:
            if not of_texts:
                of_texts = list(self._of_texts(batch))
                self.pairs += sum(text.counts for text in of_texts)
            if path not in self.numbers:  # "path[1]": all runs of a layer obey its one rule
                path = path.rpartition("[")[0]
            layer = self.layers.setdefault(path, _Layer(probabilities.shape[1], len(self.family)))
            for of_text, text, real in zip(probabilities, of_texts, batch.real, strict=True):
                self._add_text(layer, of_text, text, real)

    def _of_texts(self, batch: Batch) -> Iterator[_Pairs]:
        length = batch.real.shape[1]
        inputs = {} if batch.ids is None else {"token_ids": batch.ids}
        masks = []
        for spec in self.family:
            read = {name: inputs[name] for name in spec.inputs}
            mask = ops.convert_to_numpy(evaluation.make_mask(spec, length, length, 1, read))
            masks.append(np.broadcast_to(mask[:, 0], (len(batch.real), length, length)))
        back = np.tri(length, dtype=bool)
        for i, real in enumerate(batch.real):
            of_text = np.stack([mask[i] for mask in masks]) & real & real[:, None]
            counts = np.stack([of_text.sum((1, 2)), (of_text & back).sum((1, 2))], -1)
            yield _Pairs(of_text.reshape(len(masks), -1), counts.astype(float))

    @staticmethod
    def _add_text(layer: _Layer, probabilities: np.ndarray, text: _Pairs, real: Any) -> None:
        p, sees = shares(probabilities, real)
        layer.queries += sees.sum(1)
        layer.kept += p.reshape(len(p), -1) @ text.masks.T.astype(p.dtype)
        layer.is_causal &= not np.triu(p, 1).any()

    def suggestion(self, keep: float, longest: int) -> Suggestion:
        heads = max(len(layer.queries) for layer in self.layers.values())
        rules: dict[str, tuple[MaskSpec, ...]] = {}
        kept, computed = np.full((2, len(self.layers), heads), np.nan)
        causal = tuple(layer.is_causal for layer in self.layers.values())
        for i, (path, layer) in enumerate(self.layers.items()):
            counts = self.pairs[:, int(layer.is_causal)]
            costs = counts / counts[self.family.index(Full())]
            # A head that sees nothing keeps all that it has.
            seen = np.where(layer.queries > 0, layer.queries, 1)[:, None]
            kept_by_rule = np.where(layer.queries[:, None] > 0, layer.kept / seen, 1.0)
            of_heads = []
            for head, share in enumerate(kept_by_rule):
                # (Sums of float32 shares that are 1 may be a little less.)
                able = np.flatnonzero(share >= keep - 1e-5)
                best = min(able, key=lambda rule: (costs[rule], rule))
                of_heads.append(self.family[best])
                kept[i, head], computed[i, head] = min(share[best], 1.0), costs[best]
            rules[path] = tuple(of_heads)
        return Suggestion(rules, self.numbers, keep, kept, computed, longest, causal)


class _Opening:
    """Opens one head after another, and measures each model."""

    def __init__(
        self,
        reader: Reader,
        metric: Callable[[keras.Model], Any],
        found: Suggestion,
        file: Path | None,
        digest: str,
    ):
        self.metric, self.found = metric, found
        self.variant = functools.partial(sweeps.variant, reader.survey, reader.entries)
        self.file, self.digest = file, digest
        self.values: list[float] = self._saved()
        self.is_saved = bool(self.values)  # all of them

    def until(self, tolerance: float, higher: bool, verbose: Any) -> Suggestion:
        """The first suggestion whose metric is at most `tolerance` worse than the model's own."""
        own = sweeps.finite(self.metric(self.variant()), "the model itself")
        if self.values:
            sweeps.check_own(self.file, self.values[0], own)
        else:
            self._keep(own)
        limited = [(i, j) for i, j in np.argwhere(self.found.computed < 1).tolist()]
        order = sorted(limited, key=lambda at: (self.found.kept[at], at))
        bar = Progress(len(order), "models", verbose)
        # (With all of them open it is the model itself.)
        for count in range(len(order)):
            suggestion = self.found.opened(order[:count])
            if count + 1 == len(self.values):
                self._measure(suggestion, f"the model with {count} heads opened")
            value = self.values[count + 1]
            bar.step()
            if (own - value if higher else value - own) <= tolerance:
                return self._result(suggestion, count + 2)
        return self._result(self.found.opened(order), len(order) + 1)

    def _result(self, suggestion: Suggestion, count: int) -> Suggestion:
        return dataclasses.replace(suggestion, metrics=tuple(self.values[:count]))

    def _measure(self, suggestion: Suggestion, said: str) -> None:
        tried = self.variant(suggestion.rules)
        self._keep(sweeps.finite(self.metric(tried), said))

    def _keep(self, value: float) -> None:
        self.values.append(value)
        if self.file is not None:
            self.is_saved = False
            text = json.dumps({"model": self.digest, "metrics": self.values})
            sweeps.write_whole(self.file, text)
            self.is_saved = True

    def _saved(self) -> list[float]:
        if self.file is None or not self.file.is_file():
            return []
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            digest, values = found["model"], [float(x) for x in found["metrics"]]
            if not all(map(math.isfinite, values)):
                raise ValueError(f"the metrics {values} are not all finite")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.file} (`save_to`) is no file of `suggest_rules`: {error!r}. Pass another."
            ) from error
        if digest != self.digest:
            raise ValueError(
                f"{self.file} is of another model, other texts or another `keep`. Pass another "
                "`save_to`, or delete the file."
            )
        return values
