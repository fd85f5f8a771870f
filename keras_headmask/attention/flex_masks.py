"""`hm.flex_block_mask`: a rule for FlexAttention in PyTorch code of one's own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask.attention.request import Part
from keras_headmask.attention.scopes import current_tuning
from keras_headmask.rules.base import MaskSpec, check_heads, check_spec, whole_number
from keras_headmask.rules.evaluation import Lengths, bind, check_inputs, checked_offset
from keras_headmask.rules.protocol import Sides

_CALLED = "hm.flex_block_mask(spec, queries, keys, ...)"


def flex_block_mask(
    spec: MaskSpec,
    queries: int,
    keys: int,
    num_heads: int = 1,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: int = 0,
    device: Any = None,
    block_size: int = 128,
) -> Any:
    """FlexAttention's `BlockMask` of a rule, for `flex_attention(..., block_mask=...)`.

    It is equal to `create_block_mask` of the same rule. That function looks at every pair of a
    query and a key; this one asks the rule what it knows of whole blocks, so it takes a few
    operations on numbers of blocks. Keras must run on PyTorch (`KERAS_BACKEND=torch`).

    Args:
        spec: A `MaskSpec`.
        queries: Number of queries, T.
        keys: Number of keys, S.
        num_heads: Number of query heads, H.
        mask_inputs: A tensor for each name the spec reads, `(batch, length)`, integer or boolean,
            or a pair `(query_side, key_side)`.
        query_offset: Query i stands at position i + `query_offset`.
        device: Where the mask is made, such as "cuda". By default where the mask inputs are, and
            else PyTorch's default device.
        block_size: Queries, and keys, in a block.

    Returns:
        A `BlockMask`, `(B or 1, H or 1, T, S)`: 1 where examples, or heads, obey one mask. Its
        `mask_mod` says the same of one pair.

    Raises:
        TypeError: for a `spec` that is not a spec, or a mask input of floats.
        ValueError: for a rule that reads a whole mask, of which blocks show nothing (the error
            says what it would cost to read it); for mask inputs that do not fit; for a head that is
            not among `num_heads`.
        RuntimeError: if Keras does not run on PyTorch.

    >>> from keras_headmask import Window
    >>> mask = flex_block_mask(Window(128, 0), 512, 512)  # doctest: +SKIP
    """
    check_spec(spec, "spec", "hm.flex_block_mask(SPEC, queries, keys)")
    if keras.backend.backend() != "torch":
        raise RuntimeError(
            f"A BlockMask is PyTorch's, and Keras runs on {keras.backend.backend()}: set "
            "KERAS_BACKEND=torch before Keras is imported."
        )
    import torch

    from keras_headmask.attention.torch.block_masks import block_mask

    for name, size in (("queries", queries), ("keys", keys), ("block_size", block_size)):
        whole_number(size, name, at_least=1)
    query_offset = checked_offset(query_offset)
    check_heads(spec, num_heads)
    check_inputs(spec, mask_inputs, Lengths(None, num_heads, queries, keys), query_offset, _CALLED)
    if whole := [name for name, kind in spec.inputs.items() if kind.rank is None]:
        pairs = num_heads * queries * keys
        raise ValueError(
            f"The rule reads the whole mask {whole[0]!r}, whose blocks show only when each of "
            f"{num_heads} x {queries} x {keys} = {pairs:,} pairs of an example is read. If that is "
            f"cheap enough ({pairs / 2**20:,.1f} MiB an example, and their time): `mask = "
            "hm.make_mask(spec, queries, keys, num_heads, mask_inputs).expand(B, H, T, S)`, and "
            "PyTorch's `create_block_mask(lambda b, h, q, k: mask[b, h, q, k], B, H, T, S)`."
        )
    tensors = [x for x in keras.tree.flatten(dict(mask_inputs or {})) if torch.is_tensor(x)]
    if device is None:
        device = tensors[0].device if tensors else torch.get_default_device()
    device = torch.device(device)
    bound = bind(spec, mask_inputs, queries, keys, query_offset)
    bound = bound.changed(lambda sides: Sides(*(x if x is None else x.to(device) for x in sides)))
    tuning = dataclasses.replace(current_tuning(), block=block_size)
    part = Part(spec, tuple(range(num_heads)), bound, 1.0, tuning)
    return block_mask(part, query_offset, queries, keys, device)
