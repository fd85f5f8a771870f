"""Well-known attention patterns, each a spec made of the leaves, to use, combine or read.

>>> from keras_headmask import draw
>>> print(draw(streaming(sinks=1, window=2), queries=5))
1 0 0 0 0
1 1 0 0 0
1 1 1 0 0
1 0 1 1 0
1 0 0 1 1
"""

from collections.abc import Sequence

from keras_headmask.rules import config
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.blocks import Chunk, RandomBlocks
from keras_headmask.rules.fields import id_tuple, whole_number
from keras_headmask.rules.inputs import KeyFlag, KeyIn, QueryFlag, QueryIn, SameSentence
from keras_headmask.rules.positions import Keys, Queries, Window

_Ids = int | Sequence[int]


@config.recipe
def causal() -> MaskSpec:
    """The query itself and every key before it.

    >>> causal()
    Window(after=0)
    """
    return Window(after=0)


@config.recipe
def padding(input: str = "padding_mask") -> MaskSpec:
    """Every key but padding; the mask input `(batch, length)` is true at real tokens.

    >>> padding()
    KeyFlag('padding_mask')
    """
    return KeyFlag(input)


@config.recipe
def prefix_lm(length: int) -> MaskSpec:
    """The first `length` keys are open to all; after them, causal (Raffel et al. 2020).

    >>> prefix_lm(4)
    Keys(0, stop=4) | Window(after=0)
    """
    return Keys(0, whole_number(length, "length", at_least=1)) | causal()


@config.recipe
def longformer(each_side: int, global_input: str) -> MaskSpec:
    """A window of `each_side` positions on both sides; flagged tokens see all and are seen by all.

    Beltagy et al. 2020. `global_input` names the flags, `(batch, length)`.

    >>> longformer(2, "is_global")
    Window(before=2, after=2) | QueryFlag('is_global') | KeyFlag('is_global')
    """
    each_side = whole_number(each_side, "each_side", at_least=0)
    return Window(each_side, each_side) | QueryFlag(global_input) | KeyFlag(global_input)


@config.recipe
def sentences(end_ids: _Ids, special_ids: _Ids, input: str = "token_ids") -> MaskSpec:
    """The query's own sentence; special tokens see all and are seen by all.

    For a pretrained encoder, whose `[CLS]` and `[SEP]` speak for the whole text: `SameSentence`
    alone would cut `[CLS]` to the first sentence, and leave the last `[SEP]` alone. `end_ids` end a
    sentence and belong to it; `special_ids` are `[CLS]` and `[SEP]`. Each is one id or several.
    `input` names the token ids, `(batch, length)`. Padding is left to the model's own mask.

    >>> sentences(end_ids=1012, special_ids=(101, 102))  # BERT's full stop, [CLS] and [SEP]
    SameSentence((1012,)) | QueryIn('token_ids', (101, 102)) | KeyIn('token_ids', (101, 102))
    >>> from keras_headmask import draw
    >>> ids = [[101, 7, 1012, 8, 1012, 102]]
    >>> text = "[CLS] yes . no . [SEP]".split()
    >>> print(draw(sentences(1012, (101, 102)), mask_inputs={"token_ids": ids}, tokens=text))
          [CLS] yes . no . [SEP]
    [CLS]     1   1 1  1 1     1
    yes       1   1 1  0 0     1
    .         1   1 1  0 0     1
    no        1   0 0  1 1     1
    .         1   0 0  1 1     1
    [SEP]     1   1 1  1 1     1
    """
    special_ids = id_tuple(special_ids, "special_ids")
    own = SameSentence(end_ids, input)
    return own | QueryIn(input, special_ids) | KeyIn(input, special_ids)


@config.recipe
def streaming(sinks: int, window: int) -> MaskSpec:
    """Causal; the first `sinks` keys and the last `window`, the query itself included.

    Xiao et al. 2023, "attention sinks".

    >>> streaming(sinks=4, window=256)
    Window(after=0) & (Keys(0, stop=4) | Window(before=255))
    """
    sinks = whole_number(sinks, "sinks", at_least=0)
    window = whole_number(window, "window", at_least=1)
    if sinks == 0:
        return Window(before=window - 1, after=0)
    return causal() & (Keys(0, sinks) | Window(before=window - 1))


@config.recipe
def sparse_transformer(stride: int) -> MaskSpec:
    """The strided pattern of Child et al. 2019: causal; distance < `stride`, or a multiple of it.

    >>> sparse_transformer(8)
    Window(after=0) & (Window(before=7) | Window(step=8))
    """
    stride = whole_number(stride, "stride", at_least=1)
    return causal() & (Window(before=stride - 1) | Window(step=stride))


@config.recipe
def bigbird(block: int, density: float, global_blocks: int, seed: int) -> MaskSpec:
    """Neighbouring blocks, random blocks, and global blocks both ways (Zaheer et al. 2020).

    `block` is in positions; the first `global_blocks` blocks see all and are seen by all; of the
    other pairs of blocks a share of about `density` is open at random.

    >>> from keras_headmask import draw
    >>> print(draw(bigbird(block=1, density=0.1, global_blocks=1, seed=5), queries=7))
    1 1 1 1 1 1 1
    1 1 1 0 0 0 0
    1 1 1 1 0 0 0
    1 0 1 1 1 0 0
    1 0 0 1 1 1 1
    1 0 0 0 1 1 1
    1 0 0 0 0 1 1
    """
    block = whole_number(block, "block", at_least=1)
    global_blocks = whole_number(global_blocks, "global_blocks", at_least=0)
    spec = Chunk(block, before=1, after=1) | RandomBlocks(block, density, seed)
    if global_blocks:
        spec = spec | Queries(0, global_blocks * block) | Keys(0, global_blocks * block)
    return spec
