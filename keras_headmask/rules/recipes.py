"""Well-known attention patterns, each a spec made of the leaves, to use, combine or read.

>>> from keras_headmask import draw, recipes
>>> print(draw(recipes.streaming(sinks=1, window=2), queries=5))
1 0 0 0 0
1 1 0 0 0
1 1 1 0 0
1 0 1 1 0
1 0 0 1 1
"""

import os
from collections.abc import Sequence

from keras_headmask.rules import config
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.blocks import Chunk, RandomBlocks
from keras_headmask.rules.duo_attention import read_duo_attention
from keras_headmask.rules.fields import fraction, id_tuple, input_name, whole_number
from keras_headmask.rules.inputs import (
    KeyFlag,
    KeyIn,
    QueryFlag,
    QueryIn,
    SameSegment,
    SameSentence,
)
from keras_headmask.rules.per_head import ByLayer, PerHead
from keras_headmask.rules.positions import Full, Keys, Queries, Window

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

    Raises:
        TypeError: if `input` is not a name.

    >>> padding()
    KeyFlag('padding_mask')
    """
    return KeyFlag(input)


@config.recipe
def prefix_lm(length: int) -> MaskSpec:
    """The causal rule, with the first `length` keys open to all (Raffel et al. 2020).

    Args:
        length: The length of the prefix, in positions, at least 1.

    Raises:
        TypeError: if `length` is not a whole number.
        ValueError: for a `length` below 1.

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

    Raises:
        TypeError: if `each_side` is not a whole number, or `global_input` is not a name.
        ValueError: for a negative `each_side`.

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

    Raises:
        TypeError: if an id is not a whole number, or `input` is not a name.
        ValueError: without any id, or for one that does not fit 32 bits.

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

    Raises:
        TypeError: if a number is not whole.
        ValueError: for a negative `sinks`, or a `window` below 1.

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

    Raises:
        TypeError: if `documents` is not a name, or a number in `shared` is not whole.
        ValueError: without any number in `shared`, or for one that does not fit 32 bits.

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
def window_in_prompt(sinks: int, window: int) -> MaskSpec:
    """The rule of `streaming` in the prompt; a generated token sees every token before it.

    "Full attention decode" with the first tokens kept (SWAA, Yu et al. 2025). The mask input
    `generated` is true at generated tokens; `generate()` of a masked model makes it by itself.

    Args:
        sinks: How many first keys are always open, at least 0.
        window: How many last keys are open to a token of the prompt, at least 1, the token itself
            included.

    Raises:
        TypeError: if a number is not whole.
        ValueError: for a negative `sinks`, or a `window` below 1.

    >>> from keras_headmask import draw
    >>> generated = [[0, 0, 0, 0, 1, 1]]
    >>> rule = window_in_prompt(sinks=1, window=2)
    >>> print(draw(rule, queries=6, mask_inputs={"generated": generated}))
    1 0 0 0 0 0
    1 1 0 0 0 0
    1 1 1 0 0 0
    1 0 1 1 0 0
    1 1 1 1 1 0
    1 1 1 1 1 1
    """
    window = whole_number(window, "window", at_least=1)
    seen = Window(before=window - 1) | QueryFlag("generated")
    if whole_number(sinks, "sinks", at_least=0):
        seen = Keys(0, sinks) | seen
    return causal() & seen


@config.recipe
def sparse_transformer(stride: int) -> MaskSpec:
    """The strided pattern of Child et al. 2019: causal; distance < `stride`, or a multiple of it.

    Args:
        stride: In positions, at least 1.

    Raises:
        TypeError: if `stride` is not a whole number.
        ValueError: for a `stride` below 1.

    >>> sparse_transformer(8)
    Window(after=0) & (Window(before=7) | Window(step=8))
    """
    stride = whole_number(stride, "stride", at_least=1)
    return causal() & (Window(before=stride - 1) | Window(step=stride))


@config.recipe
def bigbird(block: int, density: float, global_blocks: int, seed: int) -> MaskSpec:
    """The neighbouring blocks, random blocks, and global blocks (Zaheer et al. 2020).

    Args:
        block: Positions in a block, at least 1.
        density: The share of the other pairs of blocks that is open at random, from 0 to 1.
        global_blocks: How many first blocks see all and are seen by all, at least 0.
        seed: The seed of the random blocks, a whole number from 0.

    Raises:
        TypeError: if an argument is not a number of its kind.
        ValueError: for a number out of its range.

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


def duo_attention(
    folder: str | os.PathLike[str], sparsity: float, num_layers: int, num_heads: int
) -> dict[str, MaskSpec]:
    """The rule of each layer by a published pattern of DuoAttention (Xiao et al. 2024).

    The pattern gives each key head of a decoder a number, the more the head needs the whole text.
    The least of them stream: they see the first `sink_size` tokens and the last `recent_size`, the
    query itself included, as the mask does that they were trained with. The others keep what the
    model lets them see. Of equal numbers, those of lower layers stream first, then those of lower
    heads; DuoAttention draws lots.

    Args:
        folder: Holds `full_attention_heads.tsv` and `config.json`, such as a copy of
            `attn_patterns/Llama-2-7B-32K-Instruct/...` of github.com/mit-han-lab/duo-attention.
        sparsity: The share of key heads that stream, over all layers together, from 0 to 1.
        num_layers: The layers of the model. The pattern must have as many.
        num_heads: The query heads of a layer, which a rule counts. Neighbouring ones share a key
            head, so it must be a multiple of the key heads in the pattern.

    Returns:
        The mapping that `apply_head_masks` takes: `{"0": spec, "1": spec, ...}`.

    Raises:
        TypeError: if a number is not of its kind.
        ValueError: if a size of the model does not fit the pattern, `sparsity` does not lie between
            0 and 1, or a file does not hold what it should.
        FileNotFoundError: if a file is not there.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text('{"sink_size": 4, "recent_size": 256}')
    >>> _ = (folder / "full_attention_heads.tsv").write_text("0.9\\t0.1\\n0.8\\t0.7\\n")
    >>> duo_attention(folder, sparsity=0.25, num_layers=2, num_heads=4)["0"]
    PerHead({'2-3': Window(after=0) & (Keys(0, stop=4) | Window(before=255))})
    """
    sparsity = fraction(sparsity, "sparsity")
    num_layers = whole_number(num_layers, "num_layers", at_least=1)
    num_heads = whole_number(num_heads, "num_heads", at_least=1)
    pattern = read_duo_attention(folder)
    layers, key_heads = len(pattern.gates), len(pattern.gates[0])
    if layers != num_layers or num_heads % key_heads:
        raise ValueError(
            f"{pattern.heads_file} is of another model: it has {layers} layers of {key_heads} key "
            f"heads, and yours {num_layers} layers of {num_heads} query heads (`num_layers`, "
            "`num_heads`). The layers must be as many, and the query heads a multiple."
        )
    rule, shared = streaming(pattern.sink_size, pattern.recent_size), num_heads // key_heads
    rules: dict[str, MaskSpec] = ByLayer()
    for layer, heads in enumerate(pattern.streaming_heads(sparsity)):
        named = {tuple(range(head * shared, (head + 1) * shared)): rule for head in sorted(heads)}
        rules[str(layer)] = PerHead(named) if named else Full()
    return rules
