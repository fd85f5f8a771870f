"""`hm.suggest_rules`: the cheapest rule of each head that keeps most of its attention."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask.heads.reading import allowed_pairs, read
from keras_headmask.look import plotting
from keras_headmask.look.tables import Printed, Table
from keras_headmask.rules import recipes
from keras_headmask.rules.algebra import PerHead
from keras_headmask.rules.base import MaskSpec, not_negative
from keras_headmask.rules.leaves import Full, Keys, Nothing, SameSentence, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        table = Table()
        for i, (path, specs) in enumerate(self.specs.items()):
            for head, spec in enumerate(specs):
                shares = f"keeps {self.kept[i, head]:.2f}, computes {self.computed[i, head]:.2f}"
                table.append((path, f"head {head}", str(spec), shares))
        yield table

    def plot(self) -> "Figure":
        """The share of pairs that each head computes, layers x heads: dark = much."""
        caption = [f"Rules that keep {self.keep:.0%} of the attention of each head"]
        return plotting.plot_heads({"computed": self.computed}, "share of pairs", caption)


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
    keep = not_negative(keep, "keep", most=1)
    if keep == 0:
        raise ValueError("`keep` must be above 0: `Nothing()` keeps nothing. Received: 0.")
    family = {spec: spec for spec in _family(end_ids, special_ids)}
    wanted = {"end_ids": end_ids, "special_ids": special_ids}
    kinds = functools.partial(allowed_pairs, family)
    # All runs of a layer obey its one rule.
    run_path = functools.partial(re.sub, r"\[\d+\]$", "")
    found = read(model, inputs, layers, batch_size, kinds, run_path, **wanted)
    heads = max(len(layer.queries) for layer in found.layers.values())
    specs: dict[str, tuple[MaskSpec, ...]] = {}
    kept, computed = np.full((2, len(found.layers), heads), np.nan)
    for i, (path, layer) in enumerate(found.layers.items()):
        counts = found.pairs[:, int(layer.is_causal)]
        costs = counts / counts[found.kinds.index(Full())]
        chosen = []
        for head, queries in enumerate(layer.queries):
            # A head that sees nothing keeps all that it has.
            shares = layer.sums[0, :, head] / queries if queries else np.ones(len(costs))
            # (Probabilities are rounded to float32.)
            able = np.flatnonzero(shares >= keep - 1e-5)
            best = min(able, key=lambda rule: (costs[rule], rule))
            chosen.append(found.kinds[best])
            kept[i, head], computed[i, head] = min(shares[best], 1.0), costs[best]
        specs[path] = tuple(chosen)
    causal = tuple(layer.is_causal for layer in found.layers.values())
    return Suggestion(specs, keep, kept, computed, causal)


def _family(end_ids: Any, special_ids: Any) -> Iterator[MaskSpec]:
    """The rules to choose from; of those that cost as much, the first is taken."""
    itself = Window(0, 0)
    # (In a causal layer the last two cost as much, and the first of them is safe elsewhere, too.)
    yield from (Nothing(), itself, Window(1, 0) & ~itself, Window(after=0), Full())
    if end_ids is not None:
        yield SameSentence(end_ids)
        if special_ids is not None:
            yield recipes.sentences(end_ids, special_ids)
    windows = [Window(2**k, after * 2**k) for after in (0, 1) for k in range(13)]
    yield from windows
    yield from (Keys(0, 1) | window for window in windows)


def _layer_rule(specs: tuple[MaskSpec, ...]) -> MaskSpec:
    """The rule of a layer: each head obeys its own of `specs`."""
    return PerHead(dict(enumerate(specs))) if len(set(specs)) > 1 else specs[0]
