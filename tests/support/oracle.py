"""What every kind of rule means, in plain Python loops over its JSON, and attention in NumPy loops.

Nothing of the package's evaluation is used, so that the two can be compared.
"""

import math

import numpy as np


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
    if kind in _POSITIONAL:
        return _POSITIONAL[kind](config, i + query_offset, j)
    value = inputs[config.get("input", "token_ids")]
    if isinstance(value, tuple):  # (query_side, key_side)
        query = (list(value[0][example]), i) if value[0] is not None else None
        key = (list(value[1][example]), j) if value[1] is not None else None
    else:
        query, key = (list(value[example]), i + query_offset), (list(value[example]), j)
    return READING[kind](config, query, key)


def mask(spec, batch, heads, queries, keys, inputs=None, query_offset=0):
    """The whole mask `(B, H, T, S)`, entry by entry."""
    config = spec.get_config()
    return np.array(
        [
            [
                [
                    [allowed(config, h, i, j, b, inputs, query_offset) for j in range(keys)]
                    for i in range(queries)
                ]
                for h in range(heads)
            ]
            for b in range(batch)
        ],
        "bool",
    ).reshape(batch, heads, queries, keys)


def attention(query, key, value, mask, scale, bias=None):
    """Context `(B, T, H, Dv)` and probabilities `(B, H, T, S)` in float64, row by row."""
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    batch, queries, heads, _ = query.shape
    keys = key.shape[1]
    context = np.zeros((batch, queries, heads, value.shape[-1]))
    scores = np.zeros((batch, heads, queries, keys))
    for b, h, i in np.ndindex(batch, heads, queries):
        seen = [j for j in range(keys) if mask[b, h, i, j]]
        if not seen:
            continue
        raw = [float(query[b, i, h] @ key[b, j, h]) * scale for j in seen]
        if bias is not None:
            raw = [s + float(bias[b, h, i, j]) for s, j in zip(raw, seen, strict=True)]
        weights = [math.exp(s - max(raw)) for s in raw]
        for j, weight in zip(seen, weights, strict=True):
            scores[b, h, i, j] = weight / sum(weights)
            context[b, i, h] += scores[b, h, i, j] * value[b, j, h]
    return context, scores


def with_gradients(query, key, value, mask, scale, upstream):
    """The context, and by name the gradients of its sum times `upstream`, in float64.

    Each row touches the keys alone that it sees. Query heads may share key heads.
    """
    query, key, value, upstream = (np.asarray(x, "float64") for x in (query, key, value, upstream))
    sharing = query.shape[2] // key.shape[2]
    context = np.zeros_like(upstream)
    made = {"query": np.zeros_like(query), "key": np.zeros_like(key), "value": np.zeros_like(value)}
    for b, h, i in np.ndindex(mask.shape[:3]):
        seen, of_keys = np.flatnonzero(mask[b, h, i]), h // sharing
        if not seen.size:
            continue
        keys, values, above = key[b, seen, of_keys], value[b, seen, of_keys], upstream[b, i, h]
        logits = keys @ query[b, i, h] * scale
        p = np.exp(logits - logits.max())
        p /= p.sum()
        context[b, i, h] = p @ values
        d_p = values @ above
        d_logits = p * (d_p - p @ d_p) * scale
        made["query"][b, i, h] = d_logits @ keys
        made["key"][b, seen, of_keys] += d_logits[:, None] * query[b, i, h]
        made["value"][b, seen, of_keys] += p[:, None] * above
    return context, made


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


_POSITIONAL = {
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
