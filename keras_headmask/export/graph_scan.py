"""What not every server runs in the graphs of an export."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from keras_headmask import _keras
from keras_headmask.export import fresh_process

# Ops that run Python code, or a compiler that a server starts only with special flags.
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_COMPILED = {"XlaCallModule", "XlaLaunch", "XlaLaunchV2"}


def scan(functions: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each concrete function: its nodes, Python code, compiled code and CPU pins.

    Raises:
        RuntimeError: for what no server runs, or only one started with special flags.
    """
    found: dict[str, dict[str, Any]] = {}
    operations, mark = set(), _keras.XLA_MUST_COMPILE
    for name, function in functions.items():
        definitions = [function.function_def, *function.graph.as_graph_def().library.function]
        nodes = [node for one in definitions for node in one.node_def]
        kinds = {node.op for node in nodes}
        operations |= kinds - {one.signature.name for one in definitions}
        marked = [one.attr for one in (*definitions, *nodes) if mark in one.attr]  # else [] adds it
        compiled = kinds & _COMPILED | {mark for attributes in marked if attributes[mark].b}
        pinned = {node.name for node in nodes if "CPU" in node.device.upper()}
        if any(kind.startswith("LookupTable") for kind in kinds):
            pinned = set()  # tables of text live there, and Keras says so
        what = {"python": kinds & _PYTHON, "compiled": compiled, "pinned": pinned}
        graph = found[name] = {key: sorted(value) for key, value in what.items()}
        if graph["python"]:
            _refuse(
                f"the graph of {name} calls Python ({', '.join(graph['python'])}), which a server "
                "lacks. Write tf.py_function and the like in TensorFlow or keras.ops."
            )
        if graph["compiled"] and not name.startswith("serve_xla_"):
            _refuse(
                f"the graph of {name} has parts compiled by XLA ({', '.join(graph['compiled'])}), "
                "which TF Serving runs only with its flags for XLA. Take jit_compile=True out of "
                "the model's code, and pass `xla_buckets`."
            )
        if graph["pinned"]:
            _refuse(
                f"the graph of {name} pins {graph['pinned'][0]!r} to the CPU. Take the "
                "tf.device or keras.device out of the model's code."
            )
        graph["nodes"] = len(nodes)
    if custom := custom_ops(operations):
        _refuse(
            f"its graph has the ops {', '.join(custom)}, which TensorFlow itself lacks: a library "
            "loaded here brought them (tensorflow_text, say). Do their work before the model."
        )
    return found


def _refuse(problem: str) -> None:
    raise RuntimeError(f"The export was not published: {problem}")


def custom_ops(operations: Iterable[str]) -> list[str]:
    """The ops that TensorFlow itself lacks; a fresh process looks up those that are not public."""
    import tensorflow as tf

    public = vars(tf.raw_ops)
    rare = sorted(op for op in operations if not op.startswith("_") and op not in public)
    if not rare:
        return []
    command = [sys.executable, "-P", "-c", _keras.PRINT_UNKNOWN_OPS, *rare]
    environment = fresh_process.environment()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()
