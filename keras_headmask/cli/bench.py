"""The layer under a rule beside Keras' own layer with the same mask: time, and equal outputs."""

import dataclasses
import functools
import os
import statistics
import sys
import timeit
from collections.abc import Callable, Mapping
from typing import Any

import click
import keras
import numpy as np

from keras_headmask.attention import cpu
from keras_headmask.cli import frame
from keras_headmask.export.interface import Input
from keras_headmask.export.report import installed_versions
from keras_headmask.layers.multi_head import PerHeadMaskedMultiHeadAttention
from keras_headmask.retrofit.made_up import made_up
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import make_mask
from keras_headmask.rules.words import enough_heads, in_one_line

_WARM_UP = 2
TOLERANCE = 1e-4  # of outputs of size 1, in float32


def compare(
    spec: MaskSpec,
    queries: int,
    num_heads: int | None,
    key_dim: int,
    batch: int,
    mask_inputs: Mapping[str, Any] | None,
    repetitions: int,
    seed: int,
) -> dict[str, Any]:
    """Time self-attention of `num_heads` x `key_dim` features under `spec`, and Keras' own.

    Both layers have the same weights and run as one compiled graph (PyTorch: eagerly). Keras' own
    gets the finished mask, `(batch, heads, queries, queries)`: making it is not counted. Mask
    inputs that are not given are made up. "difference" is the largest between the two outputs where
    every head sees a key (Keras averages the values where none does); `None` without such a query.
    """
    num_heads = num_heads or max(8, enough_heads(spec))
    words = spec.describe(num_heads)
    _check_memory(batch, num_heads, queries)
    given = dict(mask_inputs or {})
    names = sorted(spec.inputs.keys() - given.keys())
    shapes = {2: (None, None), None: (None, num_heads, None, None)}
    types = {name: spec.inputs[name] for name in names}
    inputs = {name: Input(shapes[x.rank], x.dtype) for name, x in types.items()}
    given |= made_up(Survey(keras.Sequential()), [spec], batch, queries, seed, inputs)
    mask = keras.ops.convert_to_numpy(make_mask(spec, queries, queries, num_heads, given or None))
    if mask.shape[0] not in (1, batch):
        raise ValueError(
            f"The mask inputs hold {mask.shape[0]} examples, and the batch has {batch}."
        )
    mask = np.broadcast_to(mask, (batch, num_heads, queries, queries))

    keras.utils.set_random_seed(seed)
    features = np.random.default_rng(seed).normal(size=(batch, queries, num_heads * key_dim))
    x = keras.ops.convert_to_tensor(features, "float32")
    masked = PerHeadMaskedMultiHeadAttention(num_heads, key_dim, mask_spec=spec, dtype="float32")
    stock = keras.layers.MultiHeadAttention(num_heads, key_dim, dtype="float32")
    for layer in (masked, stock):
        layer.build(x.shape, x.shape)
    stock.set_weights(masked.get_weights())
    with_rule = _compiled(lambda x, inputs: masked(x, mask_inputs=inputs))
    with_mask = _compiled(lambda x, mask: stock(x, x, attention_mask=mask))
    tensors = {name: keras.ops.convert_to_tensor(value) for name, value in given.items()}
    calls = {
        "layer": functools.partial(with_rule, x, tensors or None),
        "stock": functools.partial(with_mask, x, keras.ops.convert_to_tensor(mask)),
    }

    alive = np.all(np.any(mask, axis=-1), axis=1)  # (batch, queries)
    ours, theirs = (keras.ops.convert_to_numpy(call())[alive] for call in calls.values())
    times = {
        name: {"median": statistics.median(taken), "least": min(taken), "greatest": max(taken)}
        for name, taken in _interleaved(calls, repetitions).items()
    }
    one_dnn = cpu.one_dnn()
    sizes = {"batch": batch, "queries": queries, "heads": num_heads, "key_dim": key_dim}
    return {"words": words, **sizes, "repetitions": repetitions, "seed": seed} | {
        "made_up": names,
        "allowed_share": float(mask.mean()),  # of all pairs of a query and a key
        **times,  # milliseconds of one forward
        "ratio": times["layer"]["median"] / times["stock"]["median"],
        "difference": float(np.abs(ours - theirs).max()) if alive.any() else None,
        "backend": keras.backend.backend(),
        "cores": os.cpu_count(),
        "onednn": one_dnn and dataclasses.asdict(one_dnn),
        "rule": spec,
        "versions": installed_versions(),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """What `compare` found, for a reader."""
    pairs = f"{found['allowed_share']:.1%} of all pairs are allowed"
    if found["made_up"]:
        pairs += f", with {', '.join(found['made_up'])} made up (seed {found['seed']})"
    layer, stock = (
        "{median:9.2f} ms  ({least:.2f} to {greatest:.2f})".format_map(found[name])
        for name in ("layer", "stock")
    )
    differ = "outputs not compared: every query has a head that sees nothing"
    if found["difference"] is not None:
        differ = f"outputs differ by {found['difference']:.1e}"
    one_dnn = found["onednn"]
    lines = [
        found["words"],
        "{batch} x {queries} positions, {heads} heads of {key_dim}".format_map(found),
        pairs,
        f"float32 on {found['backend']}, {found['cores'] or '?'} cores",
        *([str(cpu.OneDNN(**one_dnn))] if one_dnn else []),
        f"stock Keras, fed the mask  {stock}",
        f"the layer with the rule    {layer}",
        "ratio {ratio:.3f} of medians of {repetitions} interleaved runs, forward".format_map(found),
        differ,
    ]
    return "\n".join(map(in_one_line, lines))


def _interleaved(
    calls: Mapping[str, Callable[[], Any]], repetitions: int
) -> dict[str, list[float]]:
    """Milliseconds of each, called in turns so that a busy moment meets both alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names, rounds = list(calls), range(_WARM_UP + repetitions)
    with click.progressbar(
        rounds, label="measuring", file=sys.stderr, hidden=not frame.on_a_terminal()
    ) as shown:
        for number in shown:
            for name in names if number % 2 else reversed(names):  # neither is always the second
                start = timeit.default_timer()
                keras.ops.convert_to_numpy(calls[name]()[:1, :1, :1])  # waits for accelerators
                taken[name].append(1000 * (timeit.default_timer() - start))
    return {name: times[_WARM_UP:] for name, times in taken.items()}


def _compiled(function: Callable) -> Callable:
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function, autograph=False)
    if backend == "jax":
        import jax

        return jax.jit(function)
    if backend == "torch":
        import torch

        return torch.no_grad()(function)
    return function


def _check_memory(batch: int, num_heads: int, length: int) -> None:
    """Refuse what would stop the machine: Keras' own layer holds all logits and probabilities."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = 9 * batch * num_heads * length**2
    if needed > available:
        raise ValueError(
            f"Stock Keras needs about {needed / 2**30:.0f} GiB for the logits of {batch} x "
            f"{num_heads} x {length} x {length} pairs, and this machine has "
            f"{available / 2**30:.0f}. Take fewer queries, heads or examples."
        )
