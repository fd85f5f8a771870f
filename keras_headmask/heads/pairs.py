"""Which pairs of positions a measure is about, and the attention that they get."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_NEAR = 8  # positions that are local
_SHARES = (
    *("self", "previous", "next", "first", "duplicate", "induction"),
    *("sentence", "special", "local"),
)


def shares(probabilities: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of one text, `(heads, T, T)`: shares of the attention that goes to real tokens.

    And which queries have any, `(heads, T)`: the shares of others, and of padding, are 0.
    """
    p = np.where(real, probabilities, 0)
    total = p.sum(-1)
    sees = (total > 0) & real
    p *= np.where(sees, 1 / np.where(sees, total, 1), 0).astype(p.dtype)[..., None]
    return p, sees


class Sums:
    """Sums over queries, for each head of a layer, in float64."""

    def __init__(self, heads: int, shares: int):
        self.queries = np.zeros(heads)
        self.measured = np.zeros((heads, shares + 2))  # with distance and entropy
        self.most = np.zeros((heads, shares))
        self.even = np.zeros((heads, shares))

    def add(self, probabilities: np.ndarray, text: "Text") -> None:
        """Of one text, `(heads, queries, keys)`."""
        p, sees = shares(probabilities.astype("float64"), text.real)
        logarithms = np.log(p, out=np.zeros_like(p), where=p > 0)
        entropy = -np.einsum("hts,hts->h", p, logarithms)
        flat = p.reshape(len(p), -1)
        self.measured += np.c_[flat @ text.weights(), entropy]
        self.queries += sees.sum(1)
        self.most += sees @ text.most
        self.even += sees @ text.even


class Text:
    """What is asked of the pairs of one text."""

    def __init__(self, real: np.ndarray, patterns: Mapping[str, np.ndarray]):
        self.real = real
        self.pairs = np.stack(list(patterns.values())) & real[:, None] & real
        self.most = self.pairs.any(-1).T.astype("float64")  # (queries, patterns)
        self.even = self.pairs.sum(-1).T / max(1, real.sum())

    def weights(self) -> np.ndarray:
        """What each pair counts, `(pairs, patterns + 1)`: 0 or 1, and the distance.

        It is made anew for each layer: of a whole batch it would be larger than its probabilities.
        """
        i, j = np.ogrid[: len(self.real), : len(self.real)]
        found = np.stack([*self.pairs, abs(i - j)], dtype="float64", casting="unsafe")
        return found.reshape(len(found), -1).T


def patterns(
    real: np.ndarray, ids: np.ndarray | None, same_sentence: Any, special_ids: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """By measure, which pairs of positions it is about, in the order of `_SHARES`."""
    length = len(real)
    i, j = np.ogrid[:length, :length]
    every = np.ones((length, length), bool)
    found = {
        "self": i == j,
        "previous": j == i - 1,
        "next": j == i + 1,
        "first": (j == real.argmax()) & every,
        "local": abs(i - j) <= _NEAR,
    }
    if ids is not None:
        same = ids[:, None] == ids
        followed = np.zeros_like(every)
        followed[:, 1:] = same[:, :-1] & real[:-1]
        found |= {"duplicate": same & (j < i), "induction": followed & (j <= i)}
        if special_ids:
            found["special"] = np.isin(ids, special_ids) & every
        if same_sentence is not None:
            found["sentence"] = same_sentence
    return {name: found[name] for name in _SHARES if name in found}
