"""What is measured: sizes, rules and their data, in NumPy alone, so that every peer gets the same.

Each rule is written twice here, as a spec and as a NumPy mask, so that a wrong result shows.
"""

import dataclasses
from typing import Any

import numpy as np

_END = 9  # the token that ends a sentence


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention: its sizes, and which rule its heads obey.

    `reach` is the window on each side, `part` the mean length of a sentence or document, both in
    positions.
    """

    name: str
    rule: str
    batch: int = 1
    length: int = 4096
    heads: int = 16
    size: int = 64
    reach: int = 255
    part: int = 200

    @property
    def reads_data(self) -> bool:
        return self.rule not in ("window", "mixed")

    @property
    def differs_by_head(self) -> bool:
        return self.rule in ("bert", "mixed")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.heads, self.size

    def operands(self, seed: int = 0) -> list[np.ndarray]:
        """Query, key and value `(B, T, H, D)`, float32."""
        rng = np.random.default_rng(seed)
        return [rng.standard_normal(self.shape, "float32") for _ in range(3)]

    def data(self) -> dict[str, np.ndarray]:
        """The mask inputs, `(B, T)`, by the names that the spec reads."""
        rng = np.random.default_rng(1)
        if self.rule == "documents":
            return {"documents": _numbers(_cuts(rng, self))}
        if self.rule == "bert":
            token_ids = np.where(_cuts(rng, self), _END, rng.integers(10, 1000, self.shape[:2]))
            # Examples of full, 7/8, 6/8, ... length.
            lengths = self.length - np.arange(self.batch) * self.length // 8
            padding_mask = np.arange(self.length) < lengths[:, None]
            return {"token_ids": token_ids.astype("int32"), "padding_mask": padding_mask}
        return {}

    def spec(self) -> Any:
        """The rule as a `MaskSpec`."""
        import keras_headmask as hm

        window = hm.Window(self.reach, self.reach)
        causal = hm.Window(after=0)
        if self.rule == "window":
            return window
        if self.rule == "documents":
            return hm.SameSegment("documents") & causal
        if self.rule == "bert":
            return hm.PerHead({0: hm.SameSentence(_END)}) & hm.KeyFlag("padding_mask")
        assert self.rule == "mixed"
        near, back = self.heads * 3 // 4, self.heads * 7 // 8
        uneven = hm.Window(self.reach + 1, self.reach)
        return hm.PerHead({f"0-{near - 1}": uneven, f"{near}-{back - 1}": causal})

    def mask(self, data: dict[str, np.ndarray]) -> np.ndarray:
        """The rule as a boolean mask, `(B or 1, H or 1, T, T)`."""
        distance = np.arange(self.length, dtype="int32") - np.arange(self.length)[:, None]
        distance = distance.astype("int32")[None, None]  # key - query
        if self.rule == "documents":
            return _same(data["documents"]) & (distance <= 0)
        if self.rule == "bert":
            mask = np.repeat(data["padding_mask"][:, None, None], self.length, 2)
            mask = np.repeat(mask, self.heads, 1)
            mask[:, :1] &= _same(sentences(data))
            return mask
        if self.rule == "mixed":
            mask = np.ones((1, self.heads, self.length, self.length), bool)
            near, back = self.heads * 3 // 4, self.heads * 7 // 8
            mask[:, :near] = (distance >= -self.reach - 1) & (distance <= self.reach)
            mask[:, near:back] = distance <= 0
            return mask
        assert self.rule == "window"
        return np.abs(distance) <= self.reach


def sentences(data: dict[str, np.ndarray]) -> np.ndarray:
    """The number of each token's sentence, `(B, T)`."""
    return _numbers(data["token_ids"] == _END)


def all_cases(quick: bool = False) -> dict[str, Case]:
    """Every case by name; tiny ones with `quick`."""
    long = {"length": 256, "reach": 31, "part": 20} if quick else {}
    bert = {"batch": 2, "length": 256} if quick else {"batch": 4, "length": 512}
    mixed = {"length": 256, "reach": 15} if quick else {"length": 2048, "reach": 63}
    cases = (
        Case("bert", "bert", **bert, part=25),
        Case("window", "window", **long),
        Case("documents", "documents", **long),
        Case("mixed", "mixed", **mixed),
    )
    return {case.name: case for case in cases}


def window_case(length: int, quick: bool = False) -> Case:
    """The window rule at another length."""
    return Case("window", "window", length=length, reach=31 if quick else 255)


def _cuts(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Where a sentence or document ends: every `part` positions, more or less."""
    ends = np.zeros((case.batch, case.length), bool)
    for row in ends:
        steps = rng.integers(case.part // 2, case.part * 3 // 2 + 1, case.length)
        stops = np.cumsum(steps) - 1
        row[stops[stops < case.length]] = True
    return ends


def _numbers(ends: np.ndarray) -> np.ndarray:
    return (np.cumsum(ends, 1) - ends).astype("int32")


def _same(ids: np.ndarray) -> np.ndarray:
    return ids[:, None, :, None] == ids[:, None, None]
