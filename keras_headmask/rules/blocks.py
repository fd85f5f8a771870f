"""The leaf that divides positions into blocks of one size."""

import dataclasses
from collections.abc import Mapping

from keras_headmask.rules import fields, words
from keras_headmask.rules.base import MaskSpec, register_spec
from keras_headmask.rules.positions import FARTHEST
from keras_headmask.rules.protocol import Bounds, Sampling, Tensor, Tiles, Tiling


@register_spec("chunk")
@dataclasses.dataclass(frozen=True, repr=False)
class Chunk(MaskSpec):
    """Keys in the same block of `size` positions as the query, or in neighbouring blocks.

    Args:
        size: Positions in a block.
        before: Further blocks that are open behind the query's own.
        after: Further blocks that are open ahead of it.

    >>> from keras_headmask import draw
    >>> print(draw(Chunk(2), queries=4))
    1 1 0 0
    1 1 0 0
    0 0 1 1
    0 0 1 1
    """

    size: fields.Positive
    before: fields.NotNegative = 0
    after: fields.NotNegative = 0
    tiling = Tiling(is_local=True)

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        query, key = query_positions // self.size, key_positions // self.size
        # (As in `Window`: pairs are compared, and not subtracted first.)
        return (key + min(self.before, FARTHEST) >= query) & (key - self.after <= query)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        least = tiles.key_first // self.size - tiles.query_last // self.size
        greatest = tiles.key_last // self.size - tiles.query_first // self.size
        return Bounds(
            (greatest >= -self.before) & (least <= self.after),
            (least >= -self.before) & (greatest <= self.after),
        )

    @property
    def sampling(self) -> Sampling:
        return Sampling(distance=self.size * max(1, self.before, self.after))

    def in_words(self) -> str:
        sides = [(self.before, "before it"), (self.after, "after it")]
        if self.before == self.after:
            sides = [(self.before, "on each side")]
        more = [f"{words.counted(count, 'block')} {where}" for count, where in sides if count]
        return words.listed([f"its own block of {words.counted(self.size, 'token')}", *more], "and")
