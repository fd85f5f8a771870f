"""The layer under a rule beside Keras' own layer with the same mask: time, and equal outputs."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_headmask.export import samples
from keras_headmask.export.interface import Input, Interface
from keras_headmask.layer import PerHeadMaskedMultiHeadAttention
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import make_mask
from keras_headmask.rules.terminal import in_one_line
from keras_headmask.rules.words import enough_heads

_WARM_UP = 2
_TOLERANCE = 1e-4  # of outputs of size 1, in float32


@dataclasses.dataclass(frozen=True)
class Milliseconds:
    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:9.2f} ms  ({self.least:.2f} to {self.greatest:.2f})"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Times of one forward, in interleaved runs.

    `difference` is the largest between the two outputs, where every head sees a key; `None` where
    no query does, since Keras' layer then averages the values.
    """

    words: str
    batch: int
    queries: int
    heads: int
    key_dim: int
    repetitions: int
    seed: int
    made_up: tuple[str, ...]  # mask inputs
    allowed_share: float  # of all pairs of a query and a key
    layer: Milliseconds
    stock: Milliseconds
    ratio: float  # of medians: the layer's time over that of Keras' layer
    difference: float | None
    backend: str
    cores: int | None

    @property
    def agrees(self) -> bool:
        return self.difference is None or self.difference <= _TOLERANCE

    def __str__(self) -> str:
        lines = [
            self.words,
            f"{self.batch} x {self.queries} positions, {self.heads} heads of {self.key_dim}",
            f"{self.allowed_share:.1%} of all pairs are allowed",
            f"float32 on {self.backend}, {self.cores or '?'} cores",
            f"stock Keras, fed the mask  {self.stock}",
            f"the layer with the rule    {self.layer}",
            f"ratio {self.ratio:.3f} of medians of {self.repetitions} interleaved runs, forward",
            f"outputs differ by {self.difference:.1e}"
            if self.difference is not None
            else "outputs not compared: every query has a head that sees nothing",
        ]
        if self.made_up:
            lines[2] += f", with {', '.join(self.made_up)} made up (seed {self.seed})"
        return "\n".join(map(in_one_line, lines))


def compare(
    spec: MaskSpec,
    queries: int,
    num_heads: int | None = None,
    key_dim: int = 64,
    batch: int = 1,
    mask_inputs: Mapping[str, Any] | None = None,
    repetitions: int = 20,
    seed: int = 0,
    watch: Callable[[range], Iterable[int]] = iter,
) -> Comparison:
    """Time self-attention of `num_heads` x `key_dim` features under `spec`, and Keras' own.

    Both layers have the same weights and run as one compiled graph (PyTorch: eagerly). Keras' own
    gets the mask ready made, `(batch, heads, queries, queries)`: making it is not counted. Mask
    inputs that are not given are made up. `watch` sees the rounds go by.

    Raises:
        ValueError: for mask inputs and heads that do not fit, and for lengths at which stock's
            scores do not fit in memory.
    """
    num_heads = max(8, enough_heads(spec)) if num_heads is None else num_heads
    words = spec.describe(num_heads)
    _check_memory(batch, num_heads, queries)
    given = dict(mask_inputs or {})
    made_up = tuple(sorted(spec.inputs.keys() - given.keys()))
    given |= _samples(spec, made_up, batch, num_heads, queries, seed)
    mask = keras.ops.convert_to_numpy(make_mask(spec, queries, queries, num_heads, given or None))
    if mask.shape[0] not in (1, batch):
        raise ValueError(
            f"The mask inputs hold {mask.shape[0]} examples, and the batch has {batch}."
        )
    mask = np.broadcast_to(mask, (batch, num_heads, queries, queries))

    keras.utils.set_random_seed(seed)
    x = np.random.default_rng(seed).normal(size=(batch, queries, num_heads * key_dim))
    x = keras.ops.convert_to_tensor(x, "float32")
    ours = PerHeadMaskedMultiHeadAttention(num_heads, key_dim, mask_spec=spec, dtype="float32")
    stock = keras.layers.MultiHeadAttention(num_heads, key_dim, dtype="float32")
    for layer in (ours, stock):
        layer.build(x.shape, x.shape)
    stock.set_weights(ours.get_weights())
    tensors = {name: keras.ops.convert_to_tensor(value) for name, value in given.items()}
    arguments = {
        "layer": (x, tensors or None),
        "stock": (x, keras.ops.convert_to_tensor(mask)),
    }
    functions = {
        "layer": _compiled(lambda x, inputs: ours(x, mask_inputs=inputs)),
        "stock": _compiled(lambda x, mask: stock(x, x, attention_mask=mask)),
    }

    def run(name: str) -> Any:
        return functions[name](*arguments[name])

    alive = mask.any(-1).all(1)  # (batch, queries)
    outputs = {name: keras.ops.convert_to_numpy(run(name))[alive] for name in functions}
    milliseconds = _interleaved(run, list(functions), repetitions, watch)
    times = {
        name: Milliseconds(statistics.median(taken), min(taken), max(taken))
        for name, taken in milliseconds.items()
    }
    apart = np.abs(outputs["layer"] - outputs["stock"])
    return Comparison(
        words=words,
        batch=batch,
        queries=queries,
        heads=num_heads,
        key_dim=key_dim,
        repetitions=repetitions,
        seed=seed,
        made_up=made_up,
        allowed_share=float(mask.mean()),
        **times,
        ratio=times["layer"].median / times["stock"].median,
        difference=float(apart.max()) if apart.size else None,
        backend=keras.backend.backend(),
        cores=os.cpu_count(),
    )


def _interleaved(
    run: Callable[[str], Any],
    names: list[str],
    repetitions: int,
    watch: Callable[[range], Iterable[int]],
) -> dict[str, list[float]]:
    """Milliseconds of each, called in turns so that a busy moment meets both alike."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in watch(range(_WARM_UP + repetitions)):
        for name in names if number % 2 else reversed(names):  # neither is always the second
            start = time.perf_counter()
            keras.ops.convert_to_numpy(run(name)[:1, :1, :1])  # accelerators answer too early
            if number >= _WARM_UP:
                taken[name].append(1000 * (time.perf_counter() - start))
    return taken


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


def _samples(
    spec: MaskSpec, names: tuple[str, ...], batch: int, num_heads: int, length: int, seed: int
) -> dict[str, Any]:
    inputs = {}
    for name in names:
        kind = spec.inputs[name]
        shape = (None, None) if kind.rank is not None else (None, num_heads, None, None)
        inputs[name] = Input(shape, kind.dtype)
    interface = Interface(keras.Sequential(), inputs, lambda given: given, None, {}, dict)
    return samples.sample(interface, [spec], batch, length, seed)


def _check_memory(batch: int, num_heads: int, length: int) -> None:
    """Refuse what would take the machine down: stock makes all scores, and the softmax of them."""
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return
    needed = 9 * batch * num_heads * length**2
    if needed > available:
        raise ValueError(
            f"Stock Keras needs about {needed / 2**30:.0f} GiB for the scores of {batch} x "
            f"{num_heads} x {length} x {length} pairs, and this machine has "
            f"{available / 2**30:.0f}. Take fewer queries, heads or examples."
        )
