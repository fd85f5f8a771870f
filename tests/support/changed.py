"""Attention with a soft cap, a bias and sinks by formula, and its gradients, in float64."""

import math

import numpy as np
import torch


def formula(
    query,
    key,
    value,
    mask,
    scale,
    soft_cap=None,
    bias=None,
    sinks=None,
    factors=None,
):
    """Context `(B, T, H, Dv)` and probabilities `(B, H, T, S)` of float64 tensors.

    `mask` is boolean `(B, H, T, S)`. Dropout multiplies the probabilities by `factors`.
    """
    sharing = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(sharing, dim=2) for x in (key, value))
    logits = torch.einsum("bthd,bshd->bhts", query, key) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + torch.where(mask, bias, 0.0)
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


def split(changes):
    """The arrays of `changes` (`soft_cap`, `bias`, `sinks`), and what else `formula` takes."""
    tensors = {name: changes[name] for name in ("bias", "sinks") if name in changes}
    return tensors, {"soft_cap": changes.get("soft_cap")}
