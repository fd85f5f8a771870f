"""What an export is held against: the model itself, its twin without rules, its examples alone."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.attention import looking
from keras_headmask.export import fresh_process, samples
from keras_headmask.export.interface import Arrays, Interface, answer, as_array
from keras_headmask.export.report import CheckResult
from keras_headmask.retrofit.finding import find_attention, longest_sequence
from keras_headmask.retrofit.observing import is_restricted, watched
from keras_headmask.retrofit.report import mask_specs

# As `fresh_process.distance` measures.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1.5e-1}
_MOST_OUTSIDE = 1e-9
# (batch, length): short, odd, and longer than a tile.
_SHAPES = ((1, 9), (3, 40), (2, 272))
_LONGEST_LOOK = 1024  # positions; how far to look for a length at which a rule restricts


@dataclasses.dataclass
class Case:
    """A request to one signature, and what to hold against what comes back."""

    signature: str
    request: Arrays
    answer: Arrays | None = None
    twin: Arrays | None = None
    allowed: Arrays | None = None


def requests(interface: Interface, wanted: Any) -> list[Arrays]:
    """Those of `wanted`, pairs (batch, length) or inputs by name; for `True` three of our own."""
    specs = tuple(mask_specs(interface.model).values())
    if wanted is not True:
        return [request(interface, item, specs) for item in wanted]
    longest = longest_sequence(interface.model) or _LONGEST_LOOK
    made = []
    for batch, length in _SHAPES:
        length = min(length, longest)
        while True:
            given = samples.sample(interface, specs, batch, length)
            try:
                answer(interface, given)
                break
            except Exception as error:  # a table of positions ends, say
                if length <= 2:
                    raise ValueError(
                        f"The check cannot run the model on made-up inputs: {error} Pass inputs "
                        "that it takes, check=[{name: array, ...}, ...], or (batch, length) pairs, "
                        "check=[(1, 8), ...]; check=False leaves the check out."
                    ) from error
                longest = length = length // 2
        made.append(given)
    if is_restricted(interface.model):
        most = min(longest, _LONGEST_LOOK)
        while not any(map(forbids, looked_at(interface, made[-1]))) and 2 * length <= most:
            length *= 2
            made[-1] = samples.sample(interface, specs, 1, length)
    return made


def request(interface: Interface, item: Any, specs: Sequence[Any] = ()) -> Arrays:
    """One request: inputs by name as arrays, or a sample for a pair (batch, length)."""
    if isinstance(item, Mapping):
        if item.keys() != interface.inputs.keys():
            raise ValueError(
                f"An example must have the inputs {sorted(interface.inputs)}. "
                f"Received: {sorted(item)}."
            )
        given = {name: _as_given(item[name]) for name in interface.inputs}
        for name, x in interface.inputs.items():
            shape, same_kind = given[name].shape, _kind(given[name].dtype) == _kind(x.dtype)
            fits = len(shape) == len(x.shape) and all(
                size in (None, have) for size, have in zip(x.shape, shape, strict=True)
            )
            if not fits or not same_kind:
                raise ValueError(
                    f"The example's {name!r} must be {x.dtype} of shape {x.shape}. Received: "
                    f"{given[name].dtype} of shape {shape}."
                )
        return given
    if not is_pair(item):
        raise TypeError(
            "An example must be a dict of arrays by input name, or a pair (batch, length), from 1. "
            f"Received: {item!r}."
        )
    check_length(interface, item)
    return samples.sample(interface, specs, *item)


def check_length(interface: Interface, pair: Sequence[int]) -> None:
    """An error where no input can have the length of (batch, length)."""
    sizes = {x.shape[1] for x in interface.inputs.values() if len(x.shape) > 1}
    if sizes and not sizes & {None, pair[1]}:
        raise ValueError(
            f"(batch, length) {tuple(pair)} asks for the length {pair[1]}, and the sizes of the "
            f"inputs are fixed: {sorted(sizes)}. Pass pairs of such a length."
        )


def is_pair(item: Any) -> bool:
    """Whether `item` is (batch, length), whole numbers from 1."""
    pair = isinstance(item, (tuple, list)) and len(item) == 2
    return pair and all(type(size) is int and size > 0 for size in item)


def _as_given(value: Any) -> np.ndarray:
    """As an array; text as the bytes of UTF-8, as TensorFlow has it."""
    array = np.asarray(value)
    if array.dtype.kind == "O" and all(isinstance(item, (str, bytes)) for item in array.flat):
        items = [item.encode() if isinstance(item, str) else item for item in array.flat]
        return np.array(items, "S").reshape(array.shape)
    return np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array


def _kind(dtype: Any) -> str:
    name = str(dtype)
    if getattr(dtype, "kind", None) == "S":
        return "string"
    return "float" if "float" in name else "int" if "int" in name else name


def looked_at(interface: Interface, given: Arrays) -> list[Any]:
    """The scores of every attention layer and what its rule allows, in memory."""
    entries = find_attention(interface.model).known
    with watched(entries, with_rules=True) as seen:
        answer(interface, given)
    return list(seen)


# --- The check -----------------------------------------------------------------------------------


def tolerance_of(model: keras.Model, precision: str | None) -> float:
    """What rounding may do; the coarsest of the dtypes that layers compute in."""
    dtypes = {precision or "float32", *(layer.compute_dtype for layer in _keras.layers_of(model))}
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


def default_cases(interface: Interface, given: Sequence[Arrays]) -> list[Case]:
    """`serving_default` on each request, with the answers of the model and of its twin."""
    cases = [Case("serving_default", one, answer(interface, one)) for one in given]
    if is_restricted(interface.model):
        with looking.rules_off():
            for case in cases:
                case.twin = answer(interface, case.request)
    return cases


def scores_case(given: Arrays, seen: Sequence[Any], paths: set[str]) -> Case:
    allowed = {
        one.path: np.broadcast_to(as_array(one.allowed), one.scores.shape)
        for one in seen
        if forbids(one) and one.path in paths
    }
    return Case("serve_scores", given, allowed=allowed or None)


def mass_outside(seen: Sequence[Any]) -> float | None:
    """The largest probability that a rule forbids, in memory; `None` where none forbids any."""
    outside = [
        float(np.where(as_array(one.allowed), 0, as_array(one.scores)).max(initial=0))
        for one in seen
        if forbids(one)
    ]
    return max(outside, default=None)


def forbids(one: Any) -> bool:
    """Whether the rule of a layer forbids anything in this run of it."""
    return one.allowed is not None and not as_array(one.allowed).all()


def judged(
    found: Mapping[str, Any],
    cases: Sequence[Case],
    tolerance: float,
    in_memory: float | None,
    precision_error: float | None,
    graphs: dict[str, dict[str, Any]],
) -> CheckResult:
    """What the fresh process found as a result; an error for what may not be published."""
    tried = list(zip(cases, found["cases"], strict=True))

    def worst(signature: str, what: str = "answer") -> float | None:
        values = [t[what] for c, t in tried if c.signature.startswith(signature) and what in t]
        return max(values, default=None)

    outside = worst("serve_scores", "outside")
    seen_in = None if in_memory is None else "the model in memory"
    default = [(case, t) for case, t in tried if case.signature == "serving_default"]
    result = CheckResult(
        shapes=tuple(_batch_and_length(case.request) for case, _ in default),
        error=worst("serving_default"),
        tolerance=tolerance,
        milliseconds=tuple(t["milliseconds"] for _, t in default),
        load_milliseconds=found["load_milliseconds"],
        twin_distance=worst("serving_default", "twin"),
        mass_outside=in_memory if outside is None else outside,
        mass_seen_in=seen_in if outside is None else "serve_scores",
        padded_error=worst("serve_padded"),
        compiled_error=worst("serve_xla"),
        precision_error=precision_error,
        graphs=graphs,
    )
    for problem in _problems(result):
        raise RuntimeError(f"The export was not published: {problem}")
    return result


def _problems(result: CheckResult) -> Iterator[str]:
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
            f"({result.twin_distance:.2g}): the rule has no effect on these inputs. Pass inputs "
            "on which it has, check=[{name: array, ...}]."
        )
    if result.mass_outside is not None and result.mass_outside > _MOST_OUTSIDE:
        yield f"its attention has {result.mass_outside:.2g} at a key that the rule forbids."


def _batch_and_length(given: Arrays) -> tuple[int, int]:
    shape = next(
        (x.shape for x in given.values() if x.ndim > 1), (len(next(iter(given.values()))), 1)
    )
    return shape[0], shape[1]


def run_fresh(folder: pathlib.Path, cases: Sequence[Case]) -> dict[str, Any]:
    """Try the SavedModel of `folder` in a process of its own, without this package."""
    with tempfile.TemporaryDirectory() as place:
        listed = []
        for i, case in enumerate(cases):
            names = {"signature": case.signature}
            for part in ("request", "answer", "twin", "allowed"):
                arrays = getattr(case, part)
                if arrays is not None:
                    names[part] = f"{part}-{i}.npz"
                    # (Under "file" savez would take an array for its own argument.)
                    named = {f"_{name}": value for name, value in arrays.items()}
                    np.savez(pathlib.Path(place, names[part]), **named)
            listed.append(names)
        pathlib.Path(place, "cases.json").write_text(json.dumps(listed))
        script = str(pathlib.Path(fresh_process.__file__))
        done = subprocess.run(
            [sys.executable, "-P", script, str(folder.resolve()), place],
            capture_output=True,
            text=True,
            cwd=place,
            env=fresh_process.environment(),
        )
    if done.returncode != 0:
        raise RuntimeError(
            "The export was not published: a fresh process could not run it. "
            + (done.stderr.strip().splitlines() or ["It died without a word."])[-1]
        )
    return json.loads(done.stdout.splitlines()[-1])
