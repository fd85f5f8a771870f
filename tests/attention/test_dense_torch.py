"""The definition on PyTorch, as a GPU runs it: in what order."""

import keras
import pytest
from contract import normal

import keras_headmask as hm

if keras.backend.backend() != "torch":
    pytest.skip("needs the PyTorch backend", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, QUERIES, KEYS, HEADS = 2, 6, 10, 3


class Written(TorchDispatchMode):
    """The tensors of as many numbers as there are logits that operations write."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() == BATCH * HEADS * QUERIES * KEYS:
            read = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            if made.untyped_storage().data_ptr() not in read:  # else it is a view
                self.found.append((str(function), made.dtype, made.is_contiguous()))
        return made


def test_the_logits_are_walked_in_order_and_seldom():
    """Found on a GPU: 20 passes, of which one read the logits with the heads innermost."""
    query, key, value = (
        torch.from_numpy(normal(BATCH, length, HEADS, 4, seed=length))
        for length in (QUERIES, KEYS, KEYS)
    )
    with hm.dense_scope(), Written() as written:
        hm.dot_product_attention(query, key, value, mask_spec=hm.Window(2, 2), query_offset=4)
    floats = [name for name, dtype, _ in written.found if dtype.is_floating_point]
    assert all(in_order for *_, in_order in written.found), written.found
    # The product, what hides, the softmax, 0 in rows that see none.
    assert len(floats) <= 4, floats
