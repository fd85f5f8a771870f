"""An export compared with the model, with its twin without rules, and with its examples alone."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.export import fresh_process
from keras_headmask.export.interface import (
    Arrays,
    Interface,
    answer,
    as_array,
    distance,
    padded_cases,
    request,
    size_of,
    tried,
)
from keras_headmask.export.report import CheckResult
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.adapters import AttentionLayer

_MOST_OUTSIDE = 1e-9
# (batch, length): short, odd, and longer than a tile.
_SHAPES = ((1, 9), (3, 40), (2, 272))
_LONGEST_LOOK = 1024  # positions; how far to look for a length at which a rule restricts


@dataclasses.dataclass
class Case:
    """A request to one signature, and what the model in memory gives for it."""

    signature: str
    request: Arrays
    answer: Arrays | None = None
    allowed: Arrays = dataclasses.field(default_factory=dict)  # of `serve_scores`, by layer


def requests(interface: Interface, wanted: Any) -> list[Arrays]:
    """The requests that `check` asks for; for `True` three made-up ones."""
    if wanted is not True:
        return [request(interface, item) for item in wanted]
    longest = interface.survey.longest_sequence or _LONGEST_LOOK
    samples = []
    for batch, length in _SHAPES:
        length = min(length, longest)
        while True:
            sample = interface.sample(batch, length)
            try:
                answer(interface, sample)
                break
            except Exception as error:  # a table of positions ends, say
                if length <= 2:
                    raise ValueError(
                        f"The check cannot run the model on made-up inputs: {error} Pass inputs "
                        "that it takes, check=[{name: array, ...}, ...], or (batch, length) pairs, "
                        "check=[(1, 8), ...]; check=False leaves the check out."
                    ) from error
                longest = length = length // 2
        samples.append(sample)
    if interface.survey.is_restricted:
        most, layers = min(longest, _LONGEST_LOOK), interface.survey.known
        while 2 * length <= most:
            forbidding, probabilities = looked_at(interface, layers, samples[-1])
            if forbidding or not probabilities:  # (In a `tf.function` there is nothing to see.)
                break
            length *= 2
            samples[-1] = interface.sample(1, length)
    return samples


def looked_at(
    interface: Interface, layers: list[AttentionLayer], given: Arrays
) -> tuple[Arrays, dict[str, Tensor]]:
    """By path: the masks of `layers` whose rules forbid anything, and all probabilities."""
    from keras_headmask.retrofit.observe import watched  # needs all of retrofit/

    with watched(layers, with_rules=True) as seen:
        answer(interface, given)
    seen = [one for one in seen if hasattr(one.probabilities, "numpy")]  # not while it is traced
    allowed = {one.path: as_array(one.allowed) for one in seen if one.allowed is not None}
    forbidding = {path: mask for path, mask in allowed.items() if not mask.all()}
    return forbidding, {one.path: one.probabilities for one in seen}


def mass_outside(allowed: Arrays, probabilities: Mapping[str, Tensor]) -> float | None:
    """The largest probability at a key that a rule forbids, by path; `None` without any rule."""
    return _largest(
        float(np.where(allowed[path], 0, as_array(x)).max(initial=0))
        for path, x in probabilities.items()
        if path in allowed
    )


def checked(
    folder: pathlib.Path,
    interface: Interface,
    signatures: Mapping[str, Interface],
    given: Sequence[Arrays],
    reference: Sequence[Arrays],
    tolerance: float,
    graphs: dict[str, dict[str, Any]],
) -> CheckResult:
    """Compare the SavedModel in `folder` with the model, and the model with `reference`.

    Raises:
        RuntimeError: if it must not be published.
    """
    wanted = [answer(interface, one) for one in given]
    cases = [Case("serving_default", *pair) for pair in zip(given, wanted, strict=True)]
    twins: list[Arrays] = []
    if interface.survey.is_restricted:
        with observers.rules_off():
            twins = [answer(interface, one) for one in given]
    in_memory, unseen = None, set(interface.survey.rules)
    layers = interface.survey.known if interface.survey.rules else []
    for one in given:  # a rule may forbid nothing in the short ones
        allowed, probabilities = looked_at(interface, layers, one) if layers else ({}, {})
        in_memory = _largest((in_memory, mass_outside(allowed, probabilities)))
        unseen -= probabilities.keys()
        if "serve_scores" in signatures:
            cases.append(Case("serve_scores", one, allowed=allowed))
    for name, signature in signatures.items():
        if name == "serve_padded":
            length = max(size_of(interface, one)[1] for one in given)
            cases.append(Case(name, *next(padded_cases(interface, length))))
        elif name.startswith("serve_xla_"):
            one = signature.sample(1, 1)  # of its fixed sizes
            cases.append(Case(name, one, answer(interface, one)))

    timings, answers = run_fresh(folder, cases)
    served, errors = None, {}
    for case, got in zip(cases, answers, strict=True):
        served = _largest((served, mass_outside(case.allowed, got)))
        if case.answer is not None:
            errors[case.signature] = distance(got, case.answer)  # one case of all but the first
    mass_seen_in = "serve_scores" if served is not None else "the model in memory"
    result = CheckResult(
        shapes=tuple(size_of(interface, one) for one in given),
        error=max(map(distance, answers, wanted)),
        tolerance=tolerance,
        milliseconds=tuple(timings["milliseconds"][: len(given)]),
        load_milliseconds=timings["load_milliseconds"],
        twin_distance=_largest(map(distance, answers, twins)),
        mass_outside=in_memory if served is None else served,
        mass_seen_in=None if in_memory is None else mass_seen_in,
        padded_error=errors.get("serve_padded"),
        compiled_error=_largest(x for name, x in errors.items() if name.startswith("serve_xla_")),
        precision_error=_largest(map(distance, wanted, reference)),
        graphs=graphs,
    )
    for problem in _problems(result, _why_alike(interface, given, unseen)):
        _refuse(problem)
    return result


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _why_alike(interface: Interface, given: Sequence[Arrays], unseen: Collection[str]) -> str:
    """Why the twin without rules answers alike, and what to do."""
    if unseen:
        return (
            f"the attention layer '{min(unseen)}' runs in a `tf.function` inside the model, which "
            "keeps what it traced first, or does not run at all. So the check cannot run it "
            "without its rule. Call the layer outside of the function: the export makes one graph "
            "of the whole model. Or pass check=False, which leaves the check out."
        )
    return (
        f"the rule has no effect on these inputs. {tried(interface, given)}Pass inputs on "
        "which it has, check=[{name: array, ...}]."
    )


def _problems(result: CheckResult, why_alike: str = "") -> Iterator[str]:
    errors = {
        "serving_default": result.error,
        "serve_padded": result.padded_error,
        "the XLA signatures": result.compiled_error,
    }
    for name, error in errors.items():
        if error is not None and not error <= result.tolerance:
            yield (
                f"{name} gives other outputs than the model in memory, by up to {error:.2g} where "
                f"{result.tolerance:.2g} is rounding. Does the model draw random numbers, or read "
                "something that is no input?"
            )
    if result.twin_distance is not None and not result.twin_distance > 2 * result.error:
        yield (
            "it answers as its twin without rules does, up to rounding "
            f"({result.twin_distance:.2g}): {why_alike}"
        )
    if result.mass_outside is not None and result.mass_outside > _MOST_OUTSIDE:
        yield f"its attention has {result.mass_outside:.2g} at a key that the rule forbids."


def run_fresh(folder: pathlib.Path, cases: Sequence[Case]) -> tuple[dict[str, Any], list[Arrays]]:
    """Run the SavedModel in `folder` in a process of its own: milliseconds, and its answers."""
    with tempfile.TemporaryDirectory() as place:
        fresh_process.write(f"{place}/requests.npz", (case.request for case in cases))
        command = [sys.executable, "-P", fresh_process.__file__, str(folder.resolve())]
        done = subprocess.run(
            [*command, *(case.signature for case in cases)],
            capture_output=True,
            text=True,
            cwd=place,
            env=fresh_process.environment(),
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["It died without a word."])[-1]
            _refuse(f"a fresh process could not run it. {last}")
        answers = fresh_process.read(f"{place}/answers.npz", len(cases))
    return json.loads(done.stdout.splitlines()[-1]), answers


# --- What not every server runs ------------------------------------------------------------------

# Ops that run Python code, or a compiler that a server starts only with special flags.
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_COMPILED = {"XlaCallModule", "XlaLaunch", "XlaLaunchV2"}


def scan(functions: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each concrete function: its nodes, Python code, compiled code and CPU pins.

    Raises:
        RuntimeError: for what no server runs, or only one started with special flags.
    """
    graphs: dict[str, dict[str, Any]] = {}
    operations, mark = set(), _keras.tensorflow.XLA_MUST_COMPILE
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
        graph = graphs[name] = {key: sorted(value) for key, value in what.items()}
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
    return graphs


def _refuse(problem: str) -> None:
    raise RuntimeError(f"The export was not published: {problem}")


def custom_ops(operations: Iterable[str]) -> list[str]:
    """The ops that TensorFlow itself lacks; a fresh process looks up those that are not public."""
    import tensorflow as tf

    public = vars(tf.raw_ops)
    rare = sorted(op for op in operations if not op.startswith("_") and op not in public)
    if not rare:
        return []
    command = [sys.executable, "-P", "-c", _keras.tensorflow.PRINT_UNKNOWN_OPS, *rare]
    environment = fresh_process.environment()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()
