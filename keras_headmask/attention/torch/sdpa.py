"""PyTorch's own attention on CUDA, of all logits: what is hidden is a bias of them."""

import keras
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from keras_headmask.attention import half_precision, head_groups
from keras_headmask.attention.gathered import is_stand_in
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.request import Request
from keras_headmask.attention.torch.compiled import can_compile, is_trained, one_compiled
from keras_headmask.attention.torch.repair import shaded, sound
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.evaluation import allowed_tile

_MOST_KEYS = 65_535  # in training: from there on the kernel crashes (PyTorch's issue 145040)
_MULTIPLE = 16  # of keys: else PyTorch would write the bias of all heads, filled up to that
# The fastest, cuDNN's, reads masks wrongly (PyTorch's issues 177842, 191612, 196678).
_ENGINES = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def why_not(request: Request) -> str | None:
    """Why it does not come into question, in words."""
    operands = request.query, request.key, request.value
    if request.wants_probabilities or keras.backend.is_keras_tensor(request.query):
        return "returned probabilities and symbolic Keras tensors need all logits"
    if request.dropout or request.changes.are_some or not isinstance(request.scale, (int, float)):
        return "it has no dropout, soft caps, biases, sinks, and no scale that is a tensor"
    if any(x.dtype == torch.float64 for x in operands):
        return "it has no float64"
    if 0 in (request.query.shape[0], request.query.shape[1], request.key.shape[1]):
        return "there are no examples, queries, or keys"
    if request.key.shape[1] > _MOST_KEYS and is_trained(*operands):
        return f"its gradient is of at most {_MOST_KEYS} keys"
    return "code is mapped" if any(map(is_stand_in, operands)) else None


def run(request: Request, part: Part) -> Tensor:
    """The context of all heads."""
    operands = [request.query, request.key, request.value]
    if half_precision.common_half(*operands) is None:
        operands = [x.float() for x in operands]
    if request.mask is not None:
        operands.append(request.mask)
    attend = compute
    if can_compile(request.query.device):
        attend = one_compiled(compute)
    return attend(part, request.query_offset, *operands).to(request.value.dtype)


def compute(part: Part, query_offset: int, *operands: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. `operands`: these, and a mask `(B or 1, H or 1, T or 1, S or 1)` if
    it is not the rule that restricts.
    """
    *tensors, mask = operands if len(operands) == 4 else (*operands, None)
    if mask is not None:
        return _context(part, mask, *tensors)

    def of_group(group: Part, *tensors: Tensor) -> Tensor:
        rule = group.rule
        mask = None if rule.constant else allowed_tile(rule, group.bound, group.heads)
        return _context(group, mask, *tensors)

    return head_groups.by_group(of_group, part, *tensors)


def _context(part: Part, mask: Mask | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if part.sharing != 1:  # (the kernel that takes a mask would read each key for itself)
        key, value = (x.repeat_interleave(part.sharing, 2) for x in (key, value))
    if mask is None:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return scaled_dot_product_attention(query, key, value, scale=part.scale).transpose(1, 2)
    query, key, value, bad_rows, bad_keys = sound(query, key, value, is_trained(query, key, value))
    keys = key.shape[1]
    mask = mask.expand(-1, -1, -1, keys)
    alive = mask.any(-1, keepdim=True)
    # Rows that see nothing see everything at first: the kernel would make NaN of them.
    bias = torch.where(mask | ~alive, 0.0, float("-inf")).to(query.dtype)
    more = -keys % _MULTIPLE
    key, value = (pad(x, (0, 0, 0, 0, 0, more)) for x in (key, value))
    bias = pad(bias, (0, more), value=float("-inf"))
    bias = bias.expand(query.shape[0], query.shape[2], query.shape[1], -1)
    with sdpa_kernel(_ENGINES):
        heads_first = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        context = scaled_dot_product_attention(*heads_first, bias, scale=part.scale)
    context = (context * alive.to(context.dtype)).transpose(1, 2)
    # (One thin product, in place of a look at each pair.)
    seen = mask.to(context.dtype) if mask.shape[1] != 1 else mask[:, 0].to(context.dtype)
    pairs = "bhts,bsh->bth" if mask.shape[1] != 1 else "bts,bsh->bth"
    seen = torch.einsum(pairs, seen, bad_keys.to(context.dtype)) > 0
    return shaded(context, query, bad_rows | seen)
