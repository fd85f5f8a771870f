"""What not every server runs in the graphs of an export."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from keras_headmask import _keras
from keras_headmask.export import fresh_process

# Ops that run Python code, or a compiler that a server starts only with special flags.
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_COMPILED = {"XlaCallModule", "XlaLaunch", "XlaLaunchV2"}


def scan(traced: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each concrete function: its nodes, Python code, compiled code and CPU pins.

    Raises:
        RuntimeError: for what no server runs, or only one started with special flags.
    """
    found, operations = {}, set()
    for name, function in traced.items():
        functions = [function.function_def, *function.graph.as_graph_def().library.function]
        nodes = [node for one in functions for node in one.node_def]
        operations |= {node.op for node in nodes} - {one.signature.name for one in functions}
        pinned = {node.name for node in nodes if "CPU" in node.device.upper()}
        if any(node.op.startswith("LookupTable") for node in nodes):
            pinned = set()  # tables of text live there, and Keras says so
        compiled = {node.op for node in nodes} & _COMPILED
        mark = _keras.XLA_MUST_COMPILE
        marked = [one.attr for one in (*functions, *nodes) if mark in one.attr]  # else [] adds it
        compiled |= {mark for attributes in marked if attributes[mark].b}
        found[name] = {
            "nodes": len(nodes),
            "python": sorted({node.op for node in nodes} & _PYTHON),
            "compiled": sorted(compiled),
            "pinned": sorted(pinned),
        }
    for problem in _problems(found, custom_ops(operations)):
        raise RuntimeError(f"The export was not published: {problem}")
    return found


def custom_ops(operations: Iterable[str]) -> list[str]:
    """The ops that TensorFlow itself lacks; a fresh process looks up those that are not public."""
    import tensorflow as tf

    public = vars(tf.raw_ops)
    rare = sorted(op for op in operations if not op.startswith("_") and op not in public)
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


def _problems(graphs: Mapping[str, Mapping[str, Any]], custom: list[str]) -> Iterator[str]:
    if custom:
        yield (
            f"its graph has the ops {', '.join(custom)}, which TensorFlow itself lacks: a library "
            "loaded here brought them (tensorflow_text, say). Do their work before the model."
        )
    for name, graph in graphs.items():
        if graph["python"]:
            yield (
                f"the graph of {name} calls Python ({', '.join(graph['python'])}), which a server "
                "lacks. Write tf.py_function and the like in TensorFlow or keras.ops."
            )
        if graph["compiled"] and not name.startswith("serve_xla_"):
            yield (
                f"the graph of {name} has parts compiled by XLA ({', '.join(graph['compiled'])}), "
                "which TF Serving runs only with its flags for XLA. Take jit_compile=True out of "
                "the model's code, and pass `xla_buckets`."
            )
        if graph["pinned"]:
            yield (
                f"the graph of {name} pins {graph['pinned'][0]!r} to the CPU. Take the "
                "tf.device or keras.device out of the model's code."
            )
