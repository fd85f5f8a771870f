"""TensorFlow's graphs, as they would run on a GPU: read off the registry of kernels, run on a CPU.

A kernel for a GPU may want tensors in the memory of the host (`host_memory_arg`), where an int32 is
computed. Small ones decide sizes; one for each pair would be copied there and back.
"""

import dataclasses
import functools

import numpy as np
import pytest
from contract import numpy
from tiled_contract import attend, operands
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tuning import Tuning, tuned
from keras_headmask.rules import evaluation

pytestmark = pytest.mark.tensorflow
LENGTH, HEADS = 64, 2
FEWEST = LENGTH * 4  # of tiles x keys, with the tiles below; all that is allowed is smaller
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 6, (1, LENGTH))).astype("int32")
FLAGS = np.isin(np.arange(LENGTH), [0, 40])[None]
RULES = {
    "window": (hm.Window(3, 2), {}),
    "causal": (hm.recipes.causal(), {}),
    "dilated": (hm.Window(8, 8, step=4), {}),
    "streaming": (hm.recipes.streaming(sinks=2, window=4), {}),
    "chunks": (hm.Chunk(8, before=1), {}),
    "ranges": (hm.Keys(0, 4) | hm.Queries(8, 10) & ~hm.Keys(30), {}),
    "documents": (hm.SameSegment("ids") & hm.Window(after=0), {"ids": IDS}),
    "documents of 64 bits": (hm.SameSegment("ids"), {"ids": IDS.astype("int64")}),
    "sentences": (hm.SameSentence(1, "ids"), {"ids": IDS}),
    "ids of keys and queries": (hm.KeyIn("ids", 1) | hm.QueryIn("ids", (2, 3)), {"ids": IDS}),
    "flags": (hm.recipes.longformer(2, "flags"), {"flags": FLAGS}),
    "padding": (hm.KeyFlag("flags"), {"flags": ~FLAGS}),
    "a whole mask": (hm.MaskInput("mask"), {"mask": RNG.random((1, 1, LENGTH, LENGTH)) > 0.5}),
    "head groups": (hm.PerHead({0: hm.Window(3, 0)}, hm.SameSegment("ids")), {"ids": IDS}),
}
UNKNOWN = {2: (None, None), 4: (None, 1, None, None)}
MORE = {
    "dropout": {"dropout": 0.3, "seed": 5},
    "cap and sinks": {"logits_soft_cap": 0.8, "sinks": np.ones(HEADS, "float32")},
}
CASES = {name: (*case, {}) for name, case in RULES.items()}
CASES |= {name: (hm.recipes.streaming(2, 4), {}, more) for name, more in MORE.items()}
SCOPES = {"all logits": 2**40, "tiles": 0}
# Of each kind of code one; the other cases take a minute and run the same loops.
EVERY_DAY = "(documents|head groups|flags|dropout)"


# --- What the registry says -----------------------------------------------------------------------


@functools.cache
def kernels(op_type):
    """The constraints and host arguments of the kernels that a GPU would run."""
    from tensorflow.python.framework import kernels

    found = [
        (
            kernel.device_type,
            {c.name: set(c.allowed_values.list.type) for c in kernel.constraint},
            set(kernel.host_memory_arg),
        )
        for kernel in kernels.get_registered_kernels_for_op(op_type).kernel
        if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label
    ]
    return [kernel[1:] for kernel in sorted(found, key=lambda kernel: kernel[0] != "GPU")]


def arguments(op, of_op, tensors):
    """`(name, tensor)` for each of the `tensors` that an op takes or gives."""
    rest, named = list(tensors), []
    for argument in of_op:
        count = 1
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        named += [(argument.name, rest.pop(0)) for _ in range(count)]
    return named


CALLS = {"If", "StatelessIf", "While", "StatelessWhile"}
CALLS |= {"PartitionedCall", "StatefulPartitionedCall"}


def on_host(op):
    """The inputs and the outputs of `op` that would be in the memory of the host."""
    import tensorflow as tf

    inputs = arguments(op, op.op_def.input_arg, op.inputs)
    outputs = arguments(op, op.op_def.output_arg, op.outputs)
    if op.type == "Const":
        return [], op.outputs  # wherever it is read
    if op.type in CALLS | {"Placeholder"}:
        is_there = lambda name, x: x.dtype == tf.int32 or name == "cond"  # noqa: E731
    else:
        types = {a.name: op.node_def.attr[a.name].type for a in op.op_def.attr if a.type == "type"}
        fit = [
            host
            for allowed, host in kernels(op.type)
            if all(types.get(name) in dtypes for name, dtypes in allowed.items())
        ]
        # (Without any, it is all done by the CPU.)
        is_there = lambda name, x: not fit or name in fit[0]  # noqa: E731
    return tuple([x for name, x in of_op if is_there(name, x)] for of_op in (inputs, outputs))


# --- Graphs ---------------------------------------------------------------------------------------


@pytest.fixture
def as_on_gpu(monkeypatch):
    import tensorflow as tf

    from keras_headmask.attention.tensorflow import by_size

    monkeypatch.setattr(by_size, "on_gpu", lambda: tf.constant(1))


def traced(case, lengths, trains, most_logits):
    """A function of a graph, and what to call it with."""
    import tensorflow as tf

    spec, inputs, more = case
    operand = tf.TensorSpec([1, LENGTH, HEADS, 3])
    of_inputs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in inputs.items()}
    if lengths == "unknown":
        operand = tf.TensorSpec([None, None, HEADS, 3])
        of_inputs = {name: tf.TensorSpec(UNKNOWN[x.ndim], x.dtype) for name, x in inputs.items()}

    @tf.function(autograph=False, input_signature=[operand] * 3 + [of_inputs])
    def call(query, key, value, inputs):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            context = attend((query, key, value), spec, inputs, tiled=None, **more)
            loss = tf.reduce_sum(context**2)
        return (context, *tape.gradient(loss, [query, key, value])) if trains else (context,)

    with tuned(local_tile=4, wide_tile=4, block=16, most_logits=most_logits):
        call.get_concrete_function()
    return call, (*operands(1, LENGTH, LENGTH, HEADS, value_size=3), inputs)


def pairs_on_host(*case):
    """The operations that would have as many numbers on the host as there are pairs."""
    import tensorflow as tf
    from tensorflow.python.framework import op_callbacks

    found = set()

    def watch(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None or not outputs or op_type in CALLS | {"Placeholder", "Const"}:
            return None
        tensors = [x for of_op in on_host(outputs[0].op) for x in of_op]
        if not tensors:
            return None
        name = f"{op_type} of {', '.join(sorted({x.dtype.name for x in tensors}))}: {op_name}"

        def see(*sizes):
            if max(sizes) >= FEWEST:
                found.add(name)
            return np.int32(0)

        sizes = [x.shape.num_elements() for x in tensors]
        if all(size is not None and size < FEWEST for size in sizes):
            return None
        seen = tf.numpy_function(see, [tf.size(x) for x in tensors], tf.int32, stateful=False)
        # Made of the answer, or it would be left out.
        made = [tf.reshape(x, tf.shape(x) + seen) for x in outputs]
        for new, x in zip(made, outputs, strict=True):
            new.set_shape(x.shape)
        return made

    op_callbacks.add_op_callback(watch)
    try:
        call, given = traced(*case)
    finally:
        op_callbacks.remove_op_callback(watch)
    call(*given)
    return sorted(found)


@pytest.mark.every_day(f"^{EVERY_DAY}-unknown-training-tiles")
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("trains", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("lengths", ["unknown", "known"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_as_large_as_pairs_is_on_the_host(as_on_gpu, name, lengths, trains, scope):
    assert pairs_on_host(CASES[name], lengths, trains, SCOPES[scope]) == []


@hm.register_spec("test_int32")
@dataclasses.dataclass(frozen=True)
class Int32(hm.MaskSpec):
    """Compares what a GPU would not."""

    def allowed(self, query_positions, key_positions, inputs):
        import tensorflow as tf

        return tf.cast(key_positions, tf.int32) <= tf.cast(query_positions, tf.int32)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("lengths", ["unknown", "known"])
def test_a_comparison_of_int32_is_found(as_on_gpu, lengths, scope):
    (found,) = pairs_on_host((Int32(), {}, {}), lengths, False, SCOPES[scope])
    assert found.startswith("LessEqual of bool, int32")


# --- What a loop waits for ------------------------------------------------------------------------


def waits(graph, in_loop=False, seen=None):
    """The operations in loops whose input a GPU has and the host wants: one wait for each turn."""
    seen = set() if seen is None else seen
    for op in graph.get_operations():
        if in_loop:
            wanted = on_host(op)[0] if op.inputs else []
            of_gpu = [x for x in wanted if not any(x is y for y in on_host(x.op)[1])]
            yield from (f"{op.type} {op.name} of {x.op.type}" for x in of_gpu)
        for attribute in op.node_def.attr.values():
            inner = graph._get_function(attribute.func.name) if attribute.HasField("func") else None
            if inner is not None and (inner.graph, in_loop) not in seen:
                seen.add((inner.graph, in_loop))
                yield from waits(inner.graph, in_loop or "While" in op.type, seen)


@pytest.mark.parametrize("lengths", ["unknown", "known"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every_day(f"^{EVERY_DAY}-unknown")
def test_no_turn_of_a_loop_waits_for_a_gpu(name, lengths):
    call, _ = traced(CASES[name], lengths, trains=True, most_logits=0)
    assert sorted(set(waits(call.get_concrete_function().graph))) == []


# --- What a GPU would compute ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "flags", "documents", "head groups", "dropout"])
@pytest.mark.every_day("flags|head groups|dropout")
def test_what_is_computed_for_a_gpu_is_the_same(name, monkeypatch):
    import tensorflow as tf

    from keras_headmask.attention.tensorflow import by_size

    answers = []
    for on_gpu in (0, 1):
        monkeypatch.setattr(by_size, "on_gpu", lambda on_gpu=on_gpu: tf.constant(on_gpu))
        call, given = traced(CASES[name], "unknown", True, most_logits=0)
        answers.append(call(*given))
    for got, wanted in zip(*answers, strict=True):
        assert_close(numpy(got), numpy(wanted), depth=3)


def test_a_step_of_a_gpu_holds_all_tiles():
    from keras_headmask.attention.tensorflow import plan
    from keras_headmask.attention.tensorflow.graph import on_gpu

    rule, length = hm.Window(64, 0), 4096
    bound = evaluation.bind(rule, None, length, length, batch=2)
    part = Part(rule, tuple(range(8)), bound, 1.0, Tuning())
    of_cpu, of_gpu = (plan.planned(part, where) for where in (on_gpu(), 1))
    assert of_cpu.in_step < len(of_cpu.queries) // 4
    assert of_gpu.in_step == len(of_gpu.queries)
