"""`hm.flex_block_mask` against `make_mask`, and against PyTorch's `create_block_mask`."""

import keras
import numpy as np
import pytest
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from strategies import FEW, cases, positional_leaves, reading_leaves, specs

import keras_headmask as hm

needs_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="needs Keras on PyTorch"
)
_leaves = positional_leaves | reading_leaves.filter(lambda leaf: leaf.kind != "mask_input")


def pairs(mask, batch, heads, queries, keys):
    """What a BlockMask lets FlexAttention see, `(B, H, T, S)`: its blocks, and its `mask_mod`."""
    import torch

    shape = batch, heads, queries, keys
    b, h, q, k = (x.reshape(-1) for x in torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
    allowed = torch.vmap(mask.mask_mod)(b, h, q, k).reshape(shape).numpy()

    def listed(counts, indices):
        found = np.zeros(
            (batch, heads, *(-(-n // s) for n, s in zip(shape[2:], size, strict=True)))
        )
        for at in np.ndindex(found.shape[:3]):
            place = tuple(min(i, n - 1) for i, n in zip(at, counts.shape, strict=True))
            found[(*at, indices[place][: counts[place]].tolist())] = 1
        return found.repeat(size[0], 2)[:, :, :queries].repeat(size[1], 3)[..., :keys] > 0

    size = mask.BLOCK_SIZE
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    assert not (full & partial).any()
    return full | (partial & allowed)


@needs_torch
@FEW
@given(cases(specs(_leaves)), st.sampled_from([1, 2, 3, 128]))
def test_it_is_the_mask_of_the_rule(case, size):
    spec, inputs, batch, heads, queries, keys, offset = case
    wanted = numpy(hm.make_mask(spec, queries, keys, heads, inputs, offset))
    mask = hm.flex_block_mask(spec, queries, keys, heads, inputs, offset, block_size=size)
    assert mask.seq_lengths == (queries, keys)
    shape = batch, heads, queries, keys
    np.testing.assert_array_equal(pairs(mask, *shape), np.broadcast_to(wanted, shape))


@needs_torch
def test_flex_attention_takes_it():
    """Beside `create_block_mask`, which asks each pair: the same blocks and context."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    documents = torch.arange(300).expand(2, -1) // 70
    rule = hm.PerHead({0: hm.SameSegment("documents"), 1: hm.Window(40, 40)}) & hm.Window(after=0)
    ours = hm.flex_block_mask(rule, 300, 300, 4, {"documents": documents})
    plain = create_block_mask(ours.mask_mod, 2, 4, 300, 300, device="cpu")
    assert torch.equal(ours.to_dense().expand(2, 4, -1, -1), plain.to_dense())
    # Of the backward pass. (Which blocks need no mask may differ: the last is short.)
    visited = [mask.q_num_blocks + mask.full_q_num_blocks for mask in (ours, plain)]
    assert torch.equal(visited[0].expand(2, 4, -1), visited[1])
    qkv = [torch.randn(2, 4, 300, 16) for _ in range(3)]
    torch.testing.assert_close(*(flex_attention(*qkv, block_mask=mask) for mask in (ours, plain)))
    # Heads and examples under one mask share it.
    assert hm.flex_block_mask(hm.Window(9, 9), 500, 500, 16).shape == (1, 1, 500, 500)


class Additive(hm.MaskSpec):
    """Its numbers would count as True where they hide."""

    def allowed(self, query_positions, key_positions, inputs):
        return ops.where(query_positions >= key_positions, 0.0, -1e9)


@needs_torch
@pytest.mark.parametrize(
    ("spec", "more", "error", "message"),
    [
        ("causal", {}, TypeError, "`spec` must be a mask spec"),
        (hm.PerHead({3: hm.Full()}), {"num_heads": 2}, ValueError, "head 3, but there are 2 heads"),
        (hm.SameSegment("documents"), {}, ValueError, r"\['documents'\] missing"),
        (hm.Window(1, 1), {"block_size": 0}, ValueError, "`block_size` must be at least 1"),
        (Additive(), {}, TypeError, r"`Additive\.allowed` must return a boolean.*float32"),
        (
            hm.Window(9, 9) & hm.MaskInput("m"),
            {"num_heads": 4, "mask_inputs": {"m": np.ones((2, 4, 8, 8), bool)}},
            ValueError,
            r"whole mask 'm'.* 4 x 8 x 8 = 256 pairs .*MiB an example.*create_block_mask\(",
        ),
    ],
)
def test_what_does_not_fit_is_refused(spec, more, error, message):
    import torch

    with pytest.raises(error, match=message):
        hm.flex_block_mask(spec, 8, 8, **more).mask_mod(*map(torch.tensor, (0, 0, 1, 1)))


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="needs another backend")
def test_keras_on_another_backend_is_refused():
    with pytest.raises(RuntimeError, match="set KERAS_BACKEND=torch before Keras is imported"):
        hm.flex_block_mask(hm.Window(1, 1), 8, 8)
