"""Well-known attention patterns, each a spec made of the leaves, to use, combine or read.

>>> from keras_headmask import draw, recipes
>>> print(draw(recipes.streaming(sinks=1, window=2), queries=5))
1 0 0 0 0
1 1 0 0 0
1 1 1 0 0
1 0 1 1 0
1 0 0 1 1
"""

from collections.abc import Sequence

from keras_headmask.rules import config
from keras_headmask.rules.base import MaskSpec, id_tuple, input_name, whole_number
from keras_headmask.rules.leaves import (
    KeyFlag,
    KeyIn,
    Keys,
    QueryFlag,
    QueryIn,
    SameSegment,
    SameSentence,
    Window,
)

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
    """The keys that are no padding; the mask input `(batch, length)` is true at real tokens.

    Args:
        input: The name of that mask input.

    >>> padding()
    KeyFlag('padding_mask')
    """
    return KeyFlag(input)


@config.recipe
def prefix_lm(length: int) -> MaskSpec:
    """The causal rule, with the first `length` keys open to all (Raffel et al. 2020).

    Args:
        length: The length of the prefix, in positions, at least 1.

    >>> prefix_lm(4)
    Keys(0, stop=4) | Window(after=0)
    """
    return Keys(0, whole_number(length, "length", at_least=1)) | causal()


@config.recipe
def longformer(each_side: int, global_input: str) -> MaskSpec:
    """A window of `each_side` positions on both sides; flagged tokens see all and are seen by all.

    Beltagy et al. 2020.

    Args:
        each_side: Positions on each side of the query, at least 0.
        global_input: The name of the mask input with the flags, `(batch, length)`.

    >>> longformer(2, "is_global")
    Window(before=2, after=2) | QueryFlag('is_global') | KeyFlag('is_global')
    """
    each_side = whole_number(each_side, "each_side", at_least=0)
    return Window(each_side, each_side) | QueryFlag(global_input) | KeyFlag(global_input)


@config.recipe
def sentences(end_ids: _Ids, special_ids: _Ids, input: str = "token_ids") -> MaskSpec:
    """The query's own sentence; special tokens see all and are seen by all.

    For a pretrained encoder, whose `[CLS]` and `[SEP]` speak for the whole text: `SameSentence`
    alone would cut `[CLS]` to the first sentence, and leave the last `[SEP]` alone. Padding is left
    to the model's own mask.

    Args:
        end_ids: The id, or several, of tokens that end a sentence and belong to it.
        special_ids: The id, or several, of tokens such as `[CLS]` and `[SEP]`.
        input: The name of the mask input with the token ids, `(batch, length)`.

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
    same = SameSentence(end_ids, input)
    return same | QueryIn(input, special_ids) | KeyIn(input, special_ids)


@config.recipe
def streaming(sinks: int, window: int) -> MaskSpec:
    """The first `sinks` keys and the last `window`, the query itself included; causal.

    Xiao et al. 2023, "attention sinks".

    Args:
        sinks: How many first keys are always open, at least 0.
        window: How many last keys are open, at least 1.

    >>> streaming(sinks=4, window=256)
    Window(after=0) & (Keys(0, stop=4) | Window(before=255))
    """
    sinks = whole_number(sinks, "sinks", at_least=0)
    window = whole_number(window, "window", at_least=1)
    if sinks == 0:
        return Window(before=window - 1, after=0)
    return causal() & (Keys(0, sinks) | Window(before=window - 1))


@config.recipe
def separate_documents(documents: str, shared: _Ids = 0) -> MaskSpec:
    """A causal rule of documents that do not see each other; shared tokens see and are seen by all.

    For a prompt of instructions, documents and a question (Block-Attention, Ma et al. 2024; SDAG,
    Dekel et al. 2026). Instructions that no document may see, as in Block-Attention, are a document
    with a number of their own.

    Args:
        documents: The name of the mask input that numbers the document of each token,
            `(batch, length)`. A negative number is no document: the token sees shared tokens alone.
        shared: The number, or several, of tokens in no document: instructions, the question, what
            is generated.

    >>> from keras_headmask import draw
    >>> documents = [[0, 1, 1, 2, 2, 0]]  # an instruction, two documents, a question
    >>> rule = separate_documents("documents")
    >>> print(draw(rule, queries=6, mask_inputs={"documents": documents}))
    1 0 0 0 0 0
    1 1 0 0 0 0
    1 1 1 0 0 0
    1 0 0 1 0 0
    1 0 0 1 1 0
    1 1 1 1 1 1
    """
    shared = id_tuple(shared, "shared")
    same = SameSegment(input_name(documents, "documents"))
    return causal() & (same | QueryIn(documents, shared) | KeyIn(documents, shared))


@config.recipe
def sparse_transformer(stride: int) -> MaskSpec:
    """The strided pattern of Child et al. 2019: causal; distance < `stride`, or a multiple of it.

    Args:
        stride: In positions, at least 1.

    >>> sparse_transformer(8)
    Window(after=0) & (Window(before=7) | Window(step=8))
    """
    stride = whole_number(stride, "stride", at_least=1)
    return causal() & (Window(before=stride - 1) | Window(step=stride))
