"""`python -m benchmarks.kernels`: what computes each case of `benchmarks.cliffs`, and how much.

Of each case on the backend of Keras: the name of what computes its attention, for each head group
where these differ, and the share of all logits that tiles of it compute. Nothing is measured, and
no attention is computed. A test holds the package to the record.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.cliff_cases import Case, grid

RECORD = Path(__file__).parent / "results" / "kernels.json"
# Where the code of each starts, by backend.
_STARTS: dict[str, dict[str, str]] = {
    "tensorflow": {"loop": "tensorflow.by_size.compute", "gathered": "gathered.compute"},
    "jax": {"loop": "jax.block_loop.compute", "gathered": "gathered.compute"},
    "torch": {
        "SDPA": "torch.tiles.compute",
        "FlexAttention": "torch.flex.compute",
        "gathered": "gathered.compute",
    },
}


def main() -> None:
    import keras

    kept = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    kept[keras.backend.backend()] = record()
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def record(names: Collection[str] | None = None) -> dict[str, str]:
    """Of each case, or of those of these `names`, in words."""
    import keras

    backend = keras.backend.backend()
    found = {}
    # (What computes a context has its gradient.)
    for case in (case for case in grid() if case.step == "forward"):
        if case.lengths == "unknown" and backend != "tensorflow":
            continue
        for mode, compiling in _modes(backend):
            if names is None or f"{case}{mode}" in names:
                with compiling():
                    found[f"{case}{mode}"] = _of(case)
    return found


def _modes(backend: str) -> list[tuple[str, Callable]]:
    if backend != "torch":
        return [("", contextlib.nullcontext)]
    return [("", contextlib.nullcontext), (", compiled", _as_if_compiled)]


def _as_if_compiled() -> Any:
    return mock.patch("torch.compiler.is_compiling", return_value=True)


def _of(case: Case) -> str:
    with _seen() as seen:
        if _backend() == "tensorflow":
            from benchmarks.cliffs import _function

            _function(case, "ours").get_concrete_function()
        else:
            import keras

            import keras_headmask as hm

            hm.dot_product_attention(
                *map(keras.ops.convert_to_tensor, case.operands()[:3]),
                mask_spec=case.spec(),
                mask_inputs=case.data() or None,
                query_offset=case.keys - case.queries,
                dropout=case.dropout,
                seed=1,
            )
    names = [name for name, _ in seen]
    groups = [f"{name} of {len(heads)}" for name, heads in seen]
    said = names[0] if len(set(names)) == 1 else ", ".join(groups)
    return f"{said}; {shares(case)}"


@contextlib.contextmanager
def _seen() -> Iterator[list[tuple[str, tuple]]]:
    """The name of each that starts to compute, and of which heads; it returns zeros."""
    seen: list[tuple[str, tuple]] = []
    backend = _backend()
    with contextlib.ExitStack() as stack:
        for name, place in _STARTS[backend].items():
            module, _, function = place.rpartition(".")
            module = importlib.import_module(f"keras_headmask.attention.{module}")

            def start(part: Any, *given: Any, name: str = name) -> Any:
                seen.append((name, part.heads))
                query, _, value = [x for x in given if len(getattr(x, "shape", ())) == 4][:3]
                return _zeros(query, value)

            stack.enter_context(mock.patch.object(module, function, start))
        dense = importlib.import_module("keras_headmask.attention.dense")

        def of_all(query: Any, key: Any, value: Any, *rest: Any) -> tuple:
            seen.append(("dense", tuple(range(query.shape[2]))))
            return _zeros(query, value), None

        stack.enter_context(mock.patch.object(dense, "attention", of_all))
        yield seen


def _zeros(query: Any, value: Any) -> Any:
    return query[..., :1] * 0 + value[:, :1, :1, :] * 0


def _backend() -> str:
    import keras

    return keras.backend.backend()


# --- How much ------------------------------------------------------------------------------------


def shares(case: Case) -> str:
    """The share of all logits that tiles compute, of each head group; dense computes 1."""
    from keras_headmask.attention import head_groups
    from keras_headmask.attention.tuning import current_tuning
    from keras_headmask.rules import evaluation

    offset = case.keys - case.queries
    given = case.spec(), case.data(), case.queries, case.keys, offset
    bound = evaluation.bind(*given, batch=case.batch)
    of_all = head_groups.Part(case.spec(), tuple(range(case.heads)), bound, 1.0, current_tuning())
    sizes = case.batch, case.queries, case.keys, offset
    of_groups = []
    for part in head_groups.by_rule(of_all):
        made = (_by_positions(part, *sizes), _by_data(part, *sizes))
        of_groups.append("/".join(f"{share:.3f}" for share in made if share is not None))
    return "shares " + " ".join(of_groups)


def _by_positions(part: Any, batch: int, queries: int, keys: int, offset: int) -> float:
    from keras_headmask.attention import planner

    return planner.plan_of(part, queries, keys, offset).share(keys)


def _by_data(part: Any, batch: int, queries: int, keys: int, offset: int) -> float | None:
    backend = _backend()
    if backend == "torch":
        from keras_headmask.attention.torch import steps, tiles

        made = steps.steps_of(part, tiles._read(part.bound), batch, queries, keys, offset)
        return share_of_steps(made, batch, queries, keys)
    if backend == "jax":
        import numpy as np

        from keras_headmask.attention.jax import key_blocks

        plan, given = key_blocks.planned(part, offset)
        heads = len(part.heads)
        rows = np.zeros((batch, queries, heads, 1)), np.zeros((batch, keys, heads, 1))
        made = key_blocks.Steps.of(plan, given, *rows)
        counts = 1 if made.counts is None else float(np.asarray(made.counts).mean())
        return counts * made.size / keys
    from keras_headmask.attention.tensorflow.plan import planned

    found = planned(part)
    edges = found.runs.numpy().reshape(-1, found.runs.shape[-1])[:, 1:]
    looked_at = (edges[:, 1::2] - edges[:, ::2]).sum(1).mean()
    flagged = 0 if found.flagged is None else (found.flagged.numpy() >= 0).sum() / batch
    return float(looked_at + flagged) / keys


def share_of_steps(steps: list[Any], batch: int, queries: int, keys: int) -> float:
    """The share of all logits that is computed."""
    seen = sum(
        (stop - first) * (rows[1] - rows[0] if is_run else len(rows)) * step.keys
        for step in steps
        for (first, stop), rows, is_run in [step[:3]]
    )
    return seen / max(batch * queries * keys, 1)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    sys.exit(main())
