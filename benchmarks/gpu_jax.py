"""The part of `benchmarks.gpu` that runs on JAX."""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_semantics
from benchmarks.gpu import Record, ours, sized, titled

ON_CARD = jax.default_backend() == "gpu"


def attention(record: Record) -> None:
    """Whether answers are right; then ours beside JAX' own, and what each takes to compile."""
    for name, question in gpu_semantics.questions(record.quick).items():
        for dtype, tiled in itertools.product(("float32", "bfloat16"), (True, False)):
            do = functools.partial(_difference, question, dtype, tiled)
            engine = "tiled" if tiled else "all logits"
            record.attempt("semantics", f"{name}, {engine}, {dtype}", do=do)
    for case in sized(record.quick):
        operands = [jnp.asarray(x, "bfloat16") for x in case.operands()]
        data = case.data()
        inputs = {name: jnp.asarray(array) for name, array in data.items()}
        mask = jnp.asarray(case.mask(data))
        calls = {"ours": (ours(case.spec()), (*operands, inputs))}
        for engine in ("cudnn", "xla") if ON_CARD else ("xla",):
            calls[engine] = functools.partial(_theirs, engine), (*operands, mask)
        for name, (attend, given) in calls.items():
            do = functools.partial(_timed, attend, given, record.quick)
            record.attempt(titled(case), name, do=do)
        if case.batch == 8 or record.quick:
            for name, (attend, given) in calls.items():
                do = functools.partial(_timed, _gradients(attend), given, record.quick)
                record.attempt(f"{titled(case)}, training", name, do=do)


def _theirs(engine: str, query: Any, key: Any, value: Any, mask: Any) -> Any:
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=engine)


def _gradients(attend: Callable) -> Callable:
    def step(query: Any, key: Any, value: Any, about: Any) -> Any:
        context, pull = jax.vjp(lambda *qkv: attend(*qkv, about), query, key, value)
        return context, pull(jnp.ones_like(context))

    return step


def _timed(attend: Callable, given: tuple, quick: bool) -> dict[str, float]:
    """Milliseconds of a call, and of the host; and seconds to compile."""
    start = time.perf_counter()
    compiled = jax.jit(attend).lower(*given).compile()
    seconds = time.perf_counter() - start
    calls = 2 if quick else 50 if ON_CARD else 5
    for _ in range(3):
        jax.block_until_ready(compiled(*given))
    start = time.perf_counter()
    results = [compiled(*given) for _ in range(calls)][-1:]
    host = time.perf_counter() - start  # (while the card works on)
    jax.block_until_ready(results)
    ms = 1e3 * (time.perf_counter() - start) / calls
    return {"ms": ms, "host": 1e3 * host / calls, "compiled in s": seconds}


def _difference(question: gpu_semantics.Question, dtype: str, tiled: bool) -> dict[str, float]:
    attend = ours(question.spec(), tiled)
    given = [jnp.asarray(x, dtype) for x in question.operands]
    exact = [np.asarray(x, "float32") for x in given]
    wanted = gpu_semantics.Question(question.rule, exact, question.inputs, question.mask).context()
    inputs = {name: jnp.asarray(x) for name, x in question.inputs.items()}
    made = jax.jit(attend)(*given, inputs)
    gradients = jax.grad(lambda *qkv: attend(*qkv, inputs).astype("float32").sum(), (0, 1, 2))(
        *given
    )
    are_finite = all(bool(jnp.isfinite(x).all()) for x in gradients)
    difference = float(np.abs(np.asarray(made, "float64") - wanted).max())
    return {"context": difference, "gradients are finite": are_finite}
