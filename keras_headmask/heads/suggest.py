"""`hm.suggest_rules`: the cheapest rule of each head that keeps most of its attention."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask.heads.progress import Progress
from keras_headmask.heads.reading import Batch, Reader
from keras_headmask.heads.suggestion import Suggestion
from keras_headmask.retrofit.find import numbered
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
    progress: bool = True,
) -> Suggestion:
    """Suggest a rule for each head: the cheapest that keeps `keep` of its attention on these texts.

    The rules to choose from: `Nothing()`; the query itself; the token before it; windows of 1, 2,
    4, ... tokens behind the query, or on both sides; such a window and the first `sinks` tokens;
    the query's own sentence, alone or with special tokens; and `Full()`. What a rule costs is the
    share of the pairs of tokens that it allows. Where two allow as many, as a window as long as the
    texts and `Full()`, the plainer one is taken: texts show nothing beyond their length.

    Attention kept says what a head looks at, and not what that is worth: measure the masked model.

    Args:
        model: A model that `apply_head_masks` understands, with or without a rule.
        inputs: What the model is called on, or an iterable of batches, as in `measure_heads`.
        keep: The share of a head's attention to keep, above 0 and up to 1: a mean over queries.
        end_ids: The id, or several, of tokens that end a sentence. Without it no rule has
            sentences.
        special_ids: The id, or several, of special tokens, such as BERT's (101, 102), for rules on
            sentences.
        sinks: How many first tokens stay open beside a window, at least 1.
        layers, token_ids, padding, batch_size, progress: As in `measure_heads`.

    Returns:
        A `Suggestion`. `hm.apply_head_masks(model, suggestion.rules)` applies it; for a model that
        has rules, with `existing="replace"`.

    Raises:
        TypeError: if `model` is not a Keras model, or for an argument of another kind.
        ValueError: if `keep` is not above 0 and up to 1, or as in `measure_heads`.

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
    reader = Reader(model, inputs, layers, token_ids, padding, batch_size)
    family = [*_family(sinks, end_ids, special_ids)]
    bar, counted = Progress(reader.count, "batches", progress), _Counted(family)
    given = {"end_ids": end_ids, "special_ids": special_ids}
    for batch in reader.read(tuple(k for k, v in given.items() if v is not None)):
        counted.add(batch)
        bar.step()
    numbers = {entry.path: number for number, entry in numbered(reader.found)}
    return counted.suggestion(keep, numbers, reader.longest)


def _family(sinks: int, end_ids: Any, special_ids: Any) -> Iterator[MaskSpec]:
    """The rules to choose from; of those that cost as much, the first is taken."""
    itself = Window(0, 0)
    yield from (Nothing(), itself, Window(1, 0) & ~itself, Full())
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

    masks: list[np.ndarray]
    counts: np.ndarray  # (rules, 2): all, and those not after the query


class _Counted:
    """Adds up batches."""

    def __init__(self, family: list[MaskSpec]):
        self.family = family
        self.layers: dict[str, _Layer] = {}
        self.pairs = np.zeros((len(family), 2))

    def add(self, batch: Batch) -> None:
        of_texts: list[_Pairs] = []
        for path, probabilities in batch.layers:
            if not of_texts:
                of_texts = list(self._of_texts(batch))
                self.pairs += sum(text.counts for text in of_texts)
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
            of_text = [mask[i] & real & real[:, None] for mask in masks]
            counts = [(mask.sum(), (mask & back).sum()) for mask in of_text]
            yield _Pairs(of_text, np.array(counts, float))

    @staticmethod
    def _add_text(layer: _Layer, probabilities: np.ndarray, text: _Pairs, real: Any) -> None:
        p = np.where(real, probabilities, 0)
        total = p.sum(-1)
        sees = (total > 0) & real
        p *= np.where(sees, 1 / np.where(sees, total, 1), 0)[..., None]
        layer.queries += sees.sum(1)
        layer.kept += np.stack([np.einsum("hts,ts->h", p, mask) for mask in text.masks], -1)
        layer.is_causal &= not np.triu(p, 1).any()

    def suggestion(self, keep: float, numbers: dict[str, int | None], longest: int) -> Suggestion:
        heads = max(len(layer.queries) for layer in self.layers.values())
        rules: dict[str, tuple[MaskSpec, ...]] = {}
        kept, computed = np.full((2, len(self.layers), heads), np.nan)
        is_causal = all(layer.is_causal for layer in self.layers.values())
        for i, (path, layer) in enumerate(self.layers.items()):
            counts = self.pairs[:, int(layer.is_causal)]
            costs = counts / counts[self.family.index(Full())]
            # A head that sees nothing keeps all that it has.
            seen = np.where(layer.queries > 0, layer.queries, 1)[:, None]
            shares = np.where(layer.queries[:, None] > 0, layer.kept / seen, 1.0)
            of_heads = []
            for head, share in enumerate(shares):
                # (Sums of float32 shares that are 1 may be a little less.)
                able = np.flatnonzero(share >= keep - 1e-5)
                best = min(able, key=lambda rule: (costs[rule], rule))
                of_heads.append(self.family[best])
                kept[i, head], computed[i, head] = min(share[best], 1.0), costs[best]
            rules[path] = tuple(of_heads)
        return Suggestion(rules, numbers, keep, kept, computed, longest, is_causal)
