"""Attention with a soft cap, biases and sinks by formula, and its gradients, in float64."""

import math

import numpy as np
import torch


def slopes_of_alibi(heads):
    """The paper's: 2^(-8/n), 2^(-16/n), ...; others from every second one of twice the power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 / power * (i + 1)) for i in range(power)]
    if power < heads:
        slopes += slopes_of_alibi(2 * power)[::2][: heads - power]
    return slopes


def alibi(heads, queries, keys, offset=0):
    """`(heads, queries, keys)`, by a loop over pairs."""
    bias = np.zeros((heads, queries, keys))
    for h, slope in enumerate(slopes_of_alibi(heads)):
        for i in range(queries):
            for j in range(keys):
                bias[h, i, j] = -slope * abs(i + offset - j)
    return bias


def bucket(ahead, num_buckets, max_distance, bidirectional):
    """T5's bucket of a key that many positions ahead of the query."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if ahead > 0 else 0
        distance = abs(ahead)
    else:
        distance = max(-ahead, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    # In integers: the last step k with distance / exact >= (max_distance / exact)^(k / rest).
    rest, step = num_buckets - exact, 0
    while step + 1 < rest and distance**rest * exact ** (
        step + 1
    ) >= exact**rest * max_distance ** (step + 1):
        step += 1
    return first + exact + step


def buckets(value, queries, keys, offset=0):
    """Those of `hm.relative_position_bias(...)`, `(queries, keys)`, by a loop over pairs."""
    config = value.get_config()
    rest = [config[name] for name in ("num_buckets", "max_distance", "bidirectional")]
    return np.array([[bucket(j - i - offset, *rest) for j in range(keys)] for i in range(queries)])


def formula(
    query,
    key,
    value,
    mask,
    scale,
    soft_cap=None,
    bias=None,
    sinks=None,
    table=None,
    rows=None,
    by_position=None,
    factors=None,
):
    """Context `(B, T, H, Dv)` and probabilities `(B, H, T, S)` of float64 tensors.

    `mask` is boolean `(B, H, T, S)`. `rows` are the rows of `table` that the pairs read.
    `by_position` is one more bias; dropout multiplies the probabilities by `factors`.
    """
    sharing = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(sharing, dim=2) for x in (key, value))
    logits = torch.einsum("bthd,bshd->bhts", query, key) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + torch.where(mask, bias, 0.0)
    if table is not None:
        logits = logits + table[torch.as_tensor(rows)].permute(2, 0, 1)
    if by_position is not None:
        logits = logits + by_position
    logits = torch.where(mask, logits, -math.inf)
    column = torch.full((*logits.shape[:3], 1), -math.inf, dtype=torch.float64)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    dead = ~mask.any(-1, keepdim=True)
    logits = torch.where(dead, 0.0, torch.cat([logits, column], -1))
    probabilities = torch.softmax(logits, -1)[..., :-1]
    probabilities = torch.where(mask, probabilities, 0.0)
    if factors is not None:
        probabilities = probabilities * factors
    return torch.einsum("bhts,bshd->bthd", probabilities, value), probabilities


def wanted(qkv, mask, scale, weights=None, changes=None, constant=None):
    """Context, and with `weights` the gradients of its weighted sum by the operands, by name.

    `changes` holds the arrays among the arguments of `formula`, `constant` the others.
    """
    tensors = _doubles(qkv, changes)
    context, _ = formula(**tensors, mask=torch.tensor(mask), scale=scale, **(constant or {}))
    if weights is None:
        return context.detach().numpy(), {}
    (context * torch.tensor(np.asarray(weights, "float64"))).sum().backward()
    return context.detach().numpy(), {name: x.grad.numpy() for name, x in tensors.items()}


def penalties(qkv, mask, scale, changes=None, constant=None):
    """The gradients, by name, of the sum of squares of the gradients of the context's cubes."""
    tensors = _doubles(qkv, changes)
    context, _ = formula(**tensors, mask=torch.tensor(mask), scale=scale, **(constant or {}))
    first = torch.autograd.grad((context**3).sum(), tensors.values(), create_graph=True)
    sum((x**2).sum() for x in first).backward()
    return {name: x.grad.numpy() for name, x in tensors.items()}


def _doubles(qkv, changes):
    given = dict(zip(("query", "key", "value"), qkv, strict=True)) | (changes or {})
    return {
        name: torch.tensor(np.asarray(x, "float64"), requires_grad=True)
        for name, x in given.items()
    }


def split(changes, queries, keys, heads, offset=0):
    """The arrays of `changes` and the other arguments of `formula`.

    `changes` may hold `soft_cap`, `bias`, `position_bias`, `table` and `sinks`.
    """
    tensors = {name: changes[name] for name in ("bias", "table", "sinks") if name in changes}
    constant, bias = {"soft_cap": changes.get("soft_cap")}, changes.get("position_bias")
    if "table" in changes:
        constant["rows"] = buckets(bias, queries, keys, offset)
    elif bias is not None:
        constant["by_position"] = torch.tensor(alibi(heads, queries, keys, offset))
    return tensors, constant
