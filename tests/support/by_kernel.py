"""Each kernel of the backend, called by itself: what `test_laws.py` holds to every law.

`MODES` has the modes in which each is run (eagerly, at unknown lengths, by XLA), and its tuning.
"""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import keras
import numpy as np
import pytest
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from tiled_contract import SCALE, at_once, tiles

import keras_headmask as hm
from keras_headmask import masks
from keras_headmask.attention import fused, kernels
from keras_headmask.attention.api import checked_changes
from keras_headmask.attention.kernels import part_of_all
from keras_headmask.attention.request import Request, all_that_restricts
from keras_headmask.attention.scopes import tuned
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import leaves

BACKEND = keras.backend.backend()


class Kernel(NamedTuple):
    """A kernel, the numbers under which it runs, and how its code is run."""

    name: str
    compute: kernels.Kernel
    setting: object  # makes a context
    manner: str  # "known" or "unknown" lengths when a graph is traced, or "XLA"

    def __str__(self):
        return self.name

    @property
    def is_traced(self):
        """Whether each call takes seconds."""
        return self.manner != "known" or BACKEND == "jax"

    @property
    def is_fused(self):
        """Whether the backend's own code computes it."""
        return self.compute is kernels.fused

    @property
    def is_long(self):
        """Whether what has one case for it is for the long run; on JAX, what any backend can."""
        return self.manner != "known" or (BACKEND == "jax" and not self.is_fused)


class Refused(Exception):
    """The kernel does not compute the request, and says why."""


# So many sizes of tiles that some in a class are filled up.
_many_tiles = functools.partial(tiles, local=1, wide=2, block=2)


@contextlib.contextmanager
def _one_tile_a_step():
    """A tile that meets all keys then reads them as they lie."""
    with tiles(), tuned(most_logits_of_a_step=1):
        yield


@contextlib.contextmanager
def _as_on_a_gpu():
    """All tiles in one step, and gradients of keys added in a copy."""
    from keras_headmask.attention.tensorflow import by_size

    with tiles(), mock.patch.object(by_size, "on_gpu", return_value=1):
        yield


# By the name of a kernel, each mode in which it is run: a word, the tuning, how it is traced.
MODES = {
    "loop": [
        ("all logits", at_once, "known"),
        ("all logits, unknown lengths", at_once, "unknown"),
        ("tiles", _one_tile_a_step, "known"),
        ("tiles, unknown lengths", tiles, "unknown"),
        ("tiles of a GPU", _as_on_a_gpu, "known"),
    ],
    "gathered": [("", _many_tiles, "known"), ("XLA", _many_tiles, "XLA")],
    "fused": [("", tiles, "known")],
    "dense": [
        ("", tiles, "known"),
        ("exported", hm.dense_scope, "known"),
        ("unknown lengths", tiles, "unknown"),
        ("XLA", tiles, "XLA"),
    ],
}


def _kernels():
    (absent,) = {"tensorflow": ("fused",)}.get(BACKEND, ("loop",))
    for kernel in kernels.FILES:
        for word, setting, manner in MODES[kernel.__name__]:
            if kernel.__name__ != absent and (manner == "known" or BACKEND == "tensorflow"):
                name = f"{kernel.__name__}, {word}" if word else kernel.__name__
                yield Kernel(name, kernel, setting, manner)


KERNELS = list(_kernels())
LONG = {True: pytest.mark.long, False: ()}
each_kernel = pytest.mark.parametrize(
    "kernel", [pytest.param(x, id=x.name, marks=LONG[x.is_long]) for x in KERNELS]
)


def each(names, traced=(), xla=()):
    """Run a test for each kernel and each name.

    Of kernels that trace each case, `traced`, and of those that XLA compiles, `xla`; all others are
    for the long run.
    """

    def is_long(kernel, name):
        return kernel.is_traced and name not in (xla if kernel.manner == "XLA" else traced)

    return pytest.mark.parametrize(
        ("kernel", "name"),
        [
            pytest.param(kernel, name, id=f"{kernel}-{name}", marks=LONG[is_long(kernel, name)])
            for name in names
            for kernel in KERNELS
        ],
    )


def refusal(kernel, request):
    """Why the kernel does not compute `request`; `None` if it does."""
    if request.changes.bias is not None and kernel.compute is not kernels.dense:
        return "a bias needs all logits"
    if kernel.is_fused:
        return None if fused.takes(request) else "`fused.takes` says no"
    is_empty = 0 in (request.query.shape[1], request.key.shape[1])
    return "nothing to skip" if is_empty and kernel.compute is not kernels.dense else None


def _of_equal_sizes(kernel, query, key, value):
    """The operands, and the size of values; JAX' own attention wants values as large as keys."""
    size = value.shape[3]
    if not (kernel.is_fused and BACKEND == "jax") or size == key.shape[3]:
        return (query, key, value), size
    most = max(size, key.shape[3])
    pads = [[(0, 0)] * 3 + [(0, most - x.shape[3])] for x in (query, key, value)]
    return tuple(map(ops.pad, (query, key, value), pads)), size


def context(kernel, operands, spec, inputs=None, offset=0, *, changes, **rest):
    """The context of `operands`, `(query, key, value)`, by that kernel and no other.

    `changes` are arguments of `hm.dot_product_attention`, `rest` are fields of `Request`.
    """
    (query, key, value), size = _of_equal_sizes(kernel, *map(masks.as_tensor, operands))
    lengths = *query.shape[:1], query.shape[2], query.shape[1], key.shape[1]
    rule, inputs = all_that_restricts(spec, inputs)
    (examples, queries), keys = ops.shape(query)[:2], ops.shape(key)[1]
    bound = evaluation.bind(rule, inputs, queries, keys, offset, batch=examples)
    rest = {"changes": checked_changes(lengths, **changes), "scale": SCALE, **rest}
    request = Request(query, key, value, rule, bound, query_offset=offset, **rest)
    with tuned(fewest_pairs=0, most_computed=1.0):
        part = part_of_all(request)
    if reason := refusal(kernel, request):
        raise Refused(f"{kernel}: {reason}")
    return kernel.compute(request, part)[0][..., :size]


# --- How a kernel's code is run ------------------------------------------------------------------


def _ran_with_unknown_lengths(function, operands, inputs, offset):
    """Traced with no batch size, no length and, if `offset` is a tensor, any offset."""
    import tensorflow as tf

    def free(array):
        heads = {1: array.shape[1]} if array.ndim == 4 else {}  # of a whole mask
        return tf.TensorSpec([heads.get(axis) for axis in range(array.ndim)], array.dtype)

    of_qkv = [tf.TensorSpec([None, None, *x.shape[2:]], x.dtype) for x in operands[:3]]
    of_operands = [*of_qkv, *(tf.TensorSpec(x.shape, x.dtype) for x in operands[3:])]
    is_free = isinstance(offset, tf.Tensor)

    def run(operands, inputs, at):
        return function(operands, inputs, at if is_free else offset)

    signature = of_operands, tf.nest.map_structure(free, inputs), tf.TensorSpec([], "int32")
    traced = tf.function(run, autograph=False).get_concrete_function(*signature)
    given = tf.nest.map_structure(tf.constant, (list(operands), inputs))
    return traced(*given, tf.constant(offset))


def ran(kernel, function, operands, inputs, offset):
    """What `function(operands, inputs, offset)` makes, in the manner of `kernel`."""
    if BACKEND == "jax":
        import jax

        return jax.jit(lambda *x: function(*x, offset))(list(operands), inputs)
    if kernel.manner == "unknown":
        return _ran_with_unknown_lengths(function, operands, inputs, offset)
    tensors = [ops.convert_to_tensor(x) for x in operands]
    if kernel.manner == "XLA":
        import tensorflow as tf

        call = tf.function(lambda *x: function(*x, offset), jit_compile=True, autograph=False)
        return call(tensors, tf.nest.map_structure(tf.constant, inputs))
    return function(tensors, inputs, offset)


def pulled(function, upstream, again=False):
    """`function` with its gradients: of its result times `upstream`, by each of its tensors.

    `again`: these are differentiated in their turn.
    """

    def run(*tensors):
        if BACKEND == "jax":
            import jax

            result, pull = jax.vjp(function, *tensors)
            return result, *pull(ops.cast(upstream, result.dtype))
        if BACKEND == "torch":
            import torch

            tensors = [x if x.requires_grad else x.clone().requires_grad_() for x in tensors]
            result = function(*tensors)
            above = torch.as_tensor(upstream).to(result.dtype)
            return result, *torch.autograd.grad(result, tensors, above, create_graph=again)
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            result = function(*tensors)
        return result, *tape.gradient(result, tensors, tf.cast(upstream, result.dtype))

    return run


# --- What a law asks for -------------------------------------------------------------------------


def _offset_of(kernel, spec, inputs, offset):
    """A tensor where the lengths are unknown, too.

    (A rule that counts refuses a pair at an offset that it cannot see to be 0.)
    """
    counts = any(leaf.counts for leaf in leaves(spec))
    has_pairs = any(isinstance(x, tuple) for x in inputs.values())
    if kernel.manner != "unknown" or (counts and has_pairs):
        return offset
    return ops.convert_to_tensor(offset, "int32")


def results(
    kernel, qkv, spec, inputs=None, offset=0, upstream=None, changes=None, dtype=None, **rest
):
    """The context and, with `upstream`, the gradients by name, none where the kernel has none.

    `changes`: `soft_cap`, `bias`, `sinks`. With `dtype` the operands are rounded to it.
    """
    tensors, made = _called(kernel, spec, changes or {}, dtype, rest)
    inputs = dict(inputs or {})
    args = [*qkv, *tensors.values()], inputs, _offset_of(kernel, spec, inputs, offset)

    def alone(operands, *rest):
        return [made(*rest)(*operands)]

    def with_gradients(operands, *rest):
        return pulled(made(*rest), upstream)(*operands)

    context_made, *gradients = map(
        numpy, ran(kernel, alone if upstream is None else with_gradients, *args)
    )
    names = ("query", "key", "value", *tensors)
    return context_made, dict(zip(names, gradients, strict=bool(gradients)))


def penalties(kernel, qkv, spec, inputs, changes):
    """The gradients, by name, of the sum of squares of the gradients of the context's cubes."""
    tensors, made = _called(kernel, spec, changes, None, {})

    def run(operands, *rest):
        attend = made(*rest)
        first = pulled(lambda *x: ops.sum(attend(*x) ** 3), np.ones(()), again=True)
        penalty = pulled(lambda *x: sum(ops.sum(g**2) for g in first(*x)[1:]), np.ones(()))
        return penalty(*operands)[1:]

    found = ran(kernel, run, [*qkv, *tensors.values()], dict(inputs), 0)
    return dict(zip(("query", "key", "value", *tensors), map(numpy, found), strict=True))


def _called(kernel, spec, changes, dtype, rest):
    """The tensors of `changes` by name, and a function of operands for mask inputs and an offset.

    The operands are query, key, value and these tensors.
    """
    tensors = {name: changes[name] for name in ("bias", "sinks") if name in changes}

    def made(inputs, offset):
        def attend(*operands):
            qkv = [x if dtype is None else ops.cast(x, dtype) for x in operands[:3]]
            own = dict(zip(tensors, operands[3:], strict=True), soft_cap=changes.get("soft_cap"))
            result = context(kernel, qkv, spec, inputs, offset, changes=own, **rest)
            assert result.dtype == qkv[2].dtype
            return result

        return attend

    return tensors, made


def skipping(test):
    """Skip what a kernel refuses, with its sentence."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        try:
            return test(*args, **kwargs)
        except Refused as reason:
            pytest.skip(str(reason))

    return run


def for_examples(settings, *strategies):
    """Run the decorated function at once, for random examples; skip if all are refused."""

    def decorator(check):
        taken, reasons = [], []

        def one(example):
            try:
                check(*example)
                taken.append(True)
            except Refused as reason:
                reasons.append(str(reason))

        settings(given(st.tuples(*strategies))(one))()
        if not taken:
            pytest.skip(reasons[0])

    return decorator
