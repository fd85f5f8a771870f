"""What the graph of a SavedModel holds that not every server runs, read and not loaded."""

import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_headmask import _keras
from keras_headmask.export import fresh_process

# What runs Python code, or a compiler that a server does not have unless asked.
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_COMPILED = ("XlaCallModule", "XlaLaunch", "XlaLaunchV2")


def scan(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """For each signature, what its graph holds: nodes, Python code, compiled code, CPU pins."""
    graph = _graph(folder)
    functions = {f.signature.name: f for f in graph.graph_def.library.function}
    nodes = {node.name: node for node in graph.graph_def.node}
    found = {}
    for name, signature in graph.signature_def.items():
        if name.startswith("__"):
            continue
        wanted = [t.name.partition(":")[0] for t in signature.outputs.values()]
        seen = list(_reached(wanted, nodes, functions))
        pinned = {node.name for node in seen if "CPU" in node.device.upper()}
        if any(node.op.startswith("LookupTable") for node in seen):
            pinned = set()  # tables of text live there, and Keras says so
        found[name] = {
            "nodes": len(seen),
            "python": sorted({node.op for node in seen if node.op in _PYTHON}),
            "compiled": sorted({_compiled(node, functions) for node in seen} - {None}),
            "pinned": sorted(pinned),
        }
    return found


def _reached(names, nodes, functions):
    """All nodes that make the named ones, those inside functions too, each function once."""
    waiting, done, entered = list(names), set(), set()
    while waiting:
        name = waiting.pop().lstrip("^").partition(":")[0]
        if name in done:
            continue
        done.add(name)
        node = nodes[name]
        waiting.extend(node.input)
        inner = [node]
        while inner:
            node = inner.pop()
            yield node
            for called in _called(node):
                if called in functions and called not in entered:
                    entered.add(called)
                    inner.extend(functions[called].node_def)


def _called(node):
    yield node.op
    for value in node.attr.values():
        yield from (value.func.name, *(f.name for f in value.list.func))


def _compiled(node, functions):
    if node.op in _COMPILED:
        return node.op
    marks = [node.attr, *(functions[f].attr for f in _called(node) if f in functions)]
    name = _keras.XLA_MUST_COMPILE
    return name if any(mark[name].b for mark in marks) else None


def _graph(folder: pathlib.Path) -> Any:
    from tensorflow.core.protobuf import saved_model_pb2

    model = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    (graph,) = model.meta_graphs
    return graph


def custom_ops(folder: pathlib.Path) -> list[str]:
    """The ops anywhere in the SavedModel that TensorFlow alone has not.

    This process may have loaded them. So a fresh one is asked about ops that are not public.
    """
    import tensorflow as tf

    graph = _graph(folder).graph_def
    functions = {f.signature.name for f in graph.library.function}
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    rare = sorted(
        op
        for op in {node.op for node in nodes} - functions
        if not op.startswith("_") and not hasattr(tf.raw_ops, op)
    )
    if not rare:
        return []
    done = subprocess.run(
        [sys.executable, "-P", "-c", _keras.PRINT_UNKNOWN_OPS, *rare],
        capture_output=True,
        text=True,
        check=True,
        env=fresh_process.environment(),
    )
    return done.stdout.split()


def graph_problems(
    graphs: Mapping[str, Mapping[str, Any]], custom: Sequence[str] = ()
) -> Iterator[str]:
    """What no server could run, or only one started with special flags."""
    if custom:
        yield (
            f"its graph has the ops {', '.join(custom)}, which TensorFlow alone has not: a library "
            "loaded here brought them (tensorflow_text, say). Do their work before the model."
        )
    for name, graph in graphs.items():
        if graph["python"]:
            yield (
                f"the graph of {name} calls Python ({', '.join(graph['python'])}), which a server "
                "has not. Write tf.py_function and the like in TensorFlow or keras.ops."
            )
        if graph["compiled"] and not name.startswith("serve_xla_"):
            yield (
                f"the graph of {name} has parts compiled by XLA ({', '.join(graph['compiled'])}), "
                "which TF Serving runs only with its flags for XLA. Take jit_compile=True out of "
                "the model's code, and ask for `xla_buckets`."
            )
        if graph["pinned"]:
            yield (
                f"the graph of {name} pins {graph['pinned'][0]!r} to the CPU. Take the "
                "tf.device or keras.device out of the model's code."
            )
