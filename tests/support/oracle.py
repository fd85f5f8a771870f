"""What every kind of rule means, in plain Python loops over its JSON, and attention by formula.

Nothing of the package's evaluation is used, so that the two can be compared.
"""

import math

import numpy as np
import torch


def allowed(config, head, i, j, example, inputs=None, query_offset=0):
    """Whether query number `i` of `example` may attend to key number `j` in head number `head`."""
    kind = config["kind"]

    def of(part):
        return allowed(part, head, i, j, example, inputs, query_offset)

    if kind == "not":
        return not of(config["spec"])
    if kind == "and":
        return all(of(part) for part in config["specs"])
    if kind == "or":
        return any(of(part) for part in config["specs"])
    if kind == "per_head":
        for heads, rule in config["heads"].items():
            first, _, last = heads.partition("-")
            if int(first) <= head <= int(last or first):
                return of(rule)
        return of(config["default"])
    if kind == "mask_input":
        return _entry(inputs[config["input"]], example, head, i, j)
    if kind in POSITIONAL:
        return POSITIONAL[kind](config, i + query_offset, j)
    value = inputs[config.get("input", "token_ids")]
    if isinstance(value, tuple):  # (query_side, key_side)
        query = (list(value[0][example]), i) if value[0] is not None else None
        key = (list(value[1][example]), j) if value[1] is not None else None
    else:
        query, key = (list(value[example]), i + query_offset), (list(value[example]), j)
    return READING[kind](config, query, key)


def mask(spec, batch, heads, queries, keys, inputs=None, query_offset=0):
    """The whole mask `(B, H, T, S)`, entry by entry."""
    config, found = spec.get_config(), np.zeros((batch, heads, queries, keys), bool)
    for b, h, i, j in np.ndindex(found.shape):
        found[b, h, i, j] = allowed(config, h, i, j, b, inputs, query_offset)
    return found


def picture(mask):
    """A `(T, S)` mask as `"100 110 111"`, a word for each query."""
    return " ".join("".join("1" if x else "0" for x in row) for row in np.asarray(mask))


def _window(config, i, j):
    before, after = config.get("before"), config.get("after")
    return (
        (before is None or j >= i - before)
        and (after is None or j <= i + after)
        and (j - i) % config.get("step", 1) == 0
    )


def _chunk(config, i, j):
    block_i, block_j = math.floor(i / config["size"]), math.floor(j / config["size"])
    return block_i - config.get("before", 0) <= block_j <= block_i + config.get("after", 0)


def _in_range(config, position):
    stop = config.get("stop")
    return config["start"] <= position and (stop is None or position < stop)


POSITIONAL = {
    "full": lambda config, i, j: True,
    "nothing": lambda config, i, j: False,
    "window": _window,
    "chunk": _chunk,
    "keys": lambda config, i, j: _in_range(config, j),
    "queries": lambda config, i, j: _in_range(config, i),
}


def _sentence(config, side):
    """How many sentences have ended before this place."""
    ids, place = side
    return sum(1 for token in ids[:place] if token in config["end_ids"])


def value_at(side):
    ids, place = side
    return ids[place]


READING = {
    "same_segment": lambda config, q, k: value_at(q) == value_at(k) and value_at(q) >= 0,
    "same_sentence": lambda config, q, k: _sentence(config, q) == _sentence(config, k),
    "key_flag": lambda config, q, k: value_at(k) > 0,
    "query_flag": lambda config, q, k: value_at(q) > 0,
    "key_in": lambda config, q, k: value_at(k) in config["ids"],
    "query_in": lambda config, q, k: value_at(q) in config["ids"],
}


def _entry(whole, example, head, i, j):
    """One entry of a whole mask of rank 2, 3 or 4, size 1 broadcasting."""
    whole = np.asarray(whole)
    place = {2: (i, j), 3: (example, i, j), 4: (example, head, i, j)}[whole.ndim]
    return bool(
        whole[tuple(0 if size == 1 else p for size, p in zip(whole.shape, place, strict=True))]
    )


# --- Attention by formula, in float64 -------------------------------------------------------------


def formula(query, key, value, mask, scale, soft_cap=None, bias=None, sinks=None, factors=None):
    """Context `(B, T, H, Dv)` and probabilities `(B, H, T, S)` of PyTorch's float64 tensors.

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
    probabilities = torch.where(mask, torch.softmax(logits, -1)[..., :-1], 0.0)
    if factors is not None:
        probabilities = probabilities * factors
    return torch.einsum("bhts,bshd->bthd", probabilities, value), probabilities


def attention(query, key, value, mask, scale, **changes):
    """Context and probabilities of arrays; see `formula`."""
    tensors, rest = _doubles((query, key, value), mask, scale, changes)
    return tuple(x.detach().numpy() for x in formula(**tensors, **rest))


def with_gradients(qkv, mask, scale, upstream, **changes):
    """The context, and the gradients of its sum times `upstream` by each array, by name."""
    tensors, rest = _doubles(qkv, mask, scale, changes)
    context, _ = formula(**tensors, **rest)
    (context * torch.tensor(upstream)).sum().backward()
    return context.detach().numpy(), {name: x.grad.numpy() for name, x in tensors.items()}


def penalties(qkv, mask, scale, **changes):
    """The gradients, by name, of the sum of squares of the gradients of the context's cubes."""
    tensors, rest = _doubles(qkv, mask, scale, changes)
    context, _ = formula(**tensors, **rest)
    first = torch.autograd.grad((context**3).sum(), tensors.values(), create_graph=True)
    sum((x**2).sum() for x in first).backward()
    return {name: x.grad.numpy() for name, x in tensors.items()}


def _doubles(qkv, mask, scale, changes):
    """The arguments of `formula`: those that have a gradient, and the others."""
    given = dict(zip(("query", "key", "value"), qkv, strict=True)) | changes
    rest = {"mask": torch.tensor(mask), "scale": scale, "soft_cap": given.pop("soft_cap", None)}
    tensors = {
        name: torch.tensor(np.asarray(x, "float64"), requires_grad=True)
        for name, x in given.items()
        if x is not None
    }
    return tensors, rest
