"""What must hold on a card: a few hundred positions, and NumPy's answers, a row at a time."""

import dataclasses
from typing import Any

import numpy as np

LENGTH = 300  # no multiple of a tile, and long enough for tiles
NEAR = 20


@dataclasses.dataclass(frozen=True)
class Question:
    """Query `(B, T, H, D)`, key and value `(B, T, Hk, D)`, a rule, and the same as a mask.

    `mask` is `(B or 1, H or 1, T, T)`.
    """

    rule: str
    operands: list[np.ndarray]
    inputs: dict[str, np.ndarray]
    mask: np.ndarray

    def spec(self) -> Any:
        import keras_headmask as hm

        window = hm.Window(NEAR, NEAR)
        return {
            "window": window,
            "padding": window & hm.KeyFlag("padding_mask"),
            "by head": hm.PerHead({0: hm.SameSegment("documents")}, default=window),
        }[self.rule]

    def context(self) -> np.ndarray:
        """The answer, in float64; 0 in a row that sees nothing."""
        query, key, value = (x.astype("float64") for x in self.operands)
        batch, length, heads, size = query.shape
        sharing, made = heads // key.shape[2], np.zeros_like(query)
        mask = np.broadcast_to(self.mask, (batch, heads, length, length))
        for b, h, t in np.ndindex(batch, heads, length):
            seen = mask[b, h, t]
            if seen.any():
                logits = key[b, seen, h // sharing] @ query[b, t, h] / size**0.5
                weights = np.exp(logits - logits.max())
                made[b, t, h] = weights / weights.sum() @ value[b, seen, h // sharing]
        return made


def questions(quick: bool) -> dict[str, Question]:
    rng = np.random.default_rng(0)
    length, heads = (48 if quick else LENGTH), 4
    place = np.arange(length)

    def normal(of_heads: int) -> np.ndarray:
        return rng.standard_normal((2, length, of_heads, 64), "float32")

    same, shared = ([normal(heads), normal(n), normal(n)] for n in (heads, 2))
    near = np.abs(place - place[:, None])[None, None] <= NEAR
    flags = np.ones((2, length), bool)
    flags[1, : NEAR + 9] = False  # so that nine queries see nothing
    padded = near & flags[:, None, None]
    documents = np.tile(place // 30, (2, 1)).astype("int32")
    by_head = np.tile(near, (2, heads, 1, 1))
    by_head[:, 0] = documents[:, :, None] == documents[:, None]
    spoilt = [x.copy() for x in same]
    for x in spoilt[1:]:
        x[1, 3], x[1, 4] = np.nan, np.inf  # padding
    padding = {"padding_mask": flags}
    return {
        "window": Question("window", same, {}, near),
        "grouped queries": Question("window", shared, {}, near),
        "rows that see nothing": Question("padding", same, padding, padded),
        "hidden NaN and inf": Question("padding", spoilt, padding, padded),
        "by head": Question("by head", same, {"documents": documents}, by_head),
    }
