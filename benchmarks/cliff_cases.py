"""The grid that `benchmarks.cliffs` walks: rules, their data, sizes. No framework is imported."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

DROPOUT = 0.1


class Case(NamedTuple):
    """One call of attention. One query alone stands at the position of the last key."""

    rule: str
    batch: int
    queries: int
    keys: int
    heads: int
    size: int
    step: str  # "forward" or "gradient"
    lengths: str  # "known" or "unknown" at trace time
    dropout: float = 0.0

    def __str__(self) -> str:
        positions = f"{self.queries}" + f" x {self.keys}" * (self.queries != self.keys)
        dropout = f", dropout {self.dropout}" if self.dropout else ""
        return (
            f"{self.rule}, {self.batch} x {positions} positions ({self.lengths}), "
            f"{self.heads} {'head' if self.heads == 1 else 'heads'} of {self.size}, "
            f"{self.step}{dropout}"
        )

    @property
    def compiled_as(self) -> tuple:
        """Cases in which this is equal share one compiled function."""
        sizes: Any = self.queries == 1
        if self.lengths == "known":
            sizes = self.batch, self.queries, self.keys
        return self.rule, self.heads, self.size, self.step, self.dropout, sizes

    def spec(self) -> Any:
        import keras_headmask as hm

        causal, near = hm.Window(after=0), hm.Window(31, 31)
        heads = range(self.heads)
        if self.rule == "window":
            return near
        if self.rule == "causal":
            return causal
        if self.rule == "streaming":
            return hm.recipes.streaming(4, 60)
        if self.rule == "padding":
            return hm.recipes.padding()
        if self.rule == "documents":
            return hm.SameSegment("documents") & causal
        if self.rule == "sentence head":
            return hm.PerHead({0: hm.SameSegment("documents")}) & hm.recipes.padding()
        if self.rule == "4 head groups":
            groups = hm.Window(3, 3), near, causal, hm.Full()
            return hm.PerHead({head: groups[head * 4 // self.heads] for head in heads})
        if self.rule == "a window for each head":
            return hm.PerHead({head: hm.Window(2 + 9 * head, 0) for head in heads})
        if self.rule == "longformer":
            return hm.recipes.longformer(31, "is_global")
        assert self.rule == "strided"
        return hm.recipes.sparse_transformer(32)

    def operands(self) -> list[np.ndarray]:
        """Query, key, value, and the gradient of the context; float32."""
        rng = np.random.default_rng(0)
        lengths = self.queries, self.keys, self.keys, self.queries
        shapes = [(self.batch, length, self.heads, self.size) for length in lengths]
        return [rng.standard_normal(shape, "float32") for shape in shapes]

    def data(self) -> dict[str, np.ndarray]:
        """The mask inputs that the rule reads, `(B, T)`, by name."""
        rng = np.random.default_rng(1)
        shape = self.batch, self.keys
        made = {}
        if self.rule in ("documents", "sentence head"):
            made["documents"] = np.cumsum(rng.random(shape) < 1 / 40, 1, dtype="int32")
        if self.rule in ("padding", "sentence head"):  # full, 7/8, 6/8, ... in turn
            lengths = self.keys - np.arange(self.batch) % 8 * self.keys // 8
            made["padding_mask"] = np.arange(self.keys) < lengths[:, None]
        if self.rule == "longformer":
            made["is_global"] = np.broadcast_to(np.arange(self.keys) % 64 == 0, shape)
        return made


OF_ALL_HEADS = (
    "window",
    "causal",
    "padding",
    "documents",
    "longformer",
    "strided",
)
BY_HEAD = (
    "sentence head",
    "4 head groups",
    "a window for each head",
)
STEPS = ("forward", "gradient")
# (batch, length), by (heads, size)
_UNKNOWN = {
    (8, 64): [(1, 16), (1, 64), (8, 64), (8, 200), (1, 512), (4, 512), (1, 1024), (1, 2048)],
    (4, 16): [(64, 16), (64, 64), (64, 260)],
    (1, 16): [(64, 16), (64, 64), (64, 260)],
}
_KNOWN = {
    (8, 64): [(8, 64), (8, 128), (8, 200), (8, 255), (1, 512), (1, 1024)],
    (4, 16): [(64, 200), (64, 260)],
    (1, 16): [(64, 200), (64, 260)],
}


def grid(quick: bool = False) -> Iterator[Case]:
    """Every case; those that share a compiled function follow each other."""
    if quick:
        for rule, step in (("window", "forward"), ("4 head groups", "gradient")):
            for lengths in ("unknown", "known"):
                yield Case(rule, 2, 40, 40, 4, 8, step, lengths)
        return
    for step in STEPS:
        for rule in (*OF_ALL_HEADS, *BY_HEAD):
            yield from _of_rule(rule, step)
    yield from _with_dropout()
    yield from _of_one_query()


def _of_rule(rule: str, step: str) -> Iterator[Case]:
    few = (1, 16) if rule in OF_ALL_HEADS else (4, 16)
    for lengths, sizes in (("unknown", _UNKNOWN), ("known", _KNOWN)):
        for of_heads in ((8, 64), few):
            for batch, length in sizes[of_heads]:
                if length > 1024 and rule.startswith("random"):
                    continue  # the dense mask alone would take seconds
                yield Case(rule, batch, length, length, *of_heads, step, lengths)


def _with_dropout() -> Iterator[Case]:
    for rule in ("window", "padding", "4 head groups"):
        for step in STEPS:
            for lengths in ("unknown", "known"):
                for length in (64, 200, 512):
                    yield Case(rule, 4, length, length, 8, 64, step, lengths, DROPOUT)


def _of_one_query() -> Iterator[Case]:
    for rule in ("window", "causal", "streaming", "4 head groups"):
        for lengths in ("unknown", "known"):
            for batch, keys in ((1, 512), (1, 4096), (8, 4096)):
                yield Case(rule, batch, 1, keys, 8, 64, "forward", lengths)
