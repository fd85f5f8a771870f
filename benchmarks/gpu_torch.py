"""The parts of `benchmarks.gpu` that run on PyTorch."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases, gpu_semantics, peers_torch
from benchmarks.gpu import Record, ours, sized, titled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CARD = DEVICE == "cuda"


def timed(call: Callable[[], Any], quick: bool) -> dict[str, float]:
    """Milliseconds of a call: of the card, of its kernels alone, of the host; and launches."""
    calls = 50 if ON_CARD else 2 if quick else 5
    start = time.perf_counter()
    call()
    _wait()
    first = time.perf_counter() - start
    for _ in range(3 if ON_CARD else 0):
        call()
    _wait()
    found = {"first": 1e3 * first}
    if not ON_CARD:
        return found | {"ms": 1e3 * statistics.median(_seconds(call) for _ in range(calls))}
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    before.record()
    for _ in range(calls):
        call()
    after.record()
    host = time.perf_counter() - start  # (while the card works on)
    _wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        _wait()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return found | {
        "ms": before.elapsed_time(after) / calls,
        "kernels": sum(event.device_time for event in kernels) / 1e3,
        "host": 1e3 * host / calls,
        "launches": len(kernels),
    }


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _wait() -> None:
    if ON_CARD:
        torch.cuda.synchronize()


# --- What the card gives -------------------------------------------------------------------------


def card(record: Record) -> None:
    """A copy, in gigabytes moved a second, and products, in 10^12 operations a second."""
    number = 2**16 if record.quick else 2**28
    x, y = (torch.ones(number, device=DEVICE) for _ in range(2))
    copied = timed(lambda: y.copy_(x), record.quick)["ms"] / 1e3
    record.put("copy", value={"GB/s": 2 * 4 * number / copied / 1e9})
    size = 128 if record.quick else 8192
    for dtype in ("bfloat16", "float32"):
        a = torch.ones(size, size, device=DEVICE, dtype=getattr(torch, dtype))
        seconds = timed(lambda a=a: a @ a, record.quick)["ms"] / 1e3
        record.put("product", dtype, value={"TFLOP/s": 2 * size**3 / seconds / 1e12})


# --- Whether answers are right -------------------------------------------------------------------


def semantics(record: Record) -> None:
    """The largest difference from NumPy's answer, and from PyTorch's gradients in float64."""
    for name, question in gpu_semantics.questions(record.quick).items():
        for dtype in ("bfloat16", "float32"):
            # (So few positions are tiled only if that is asked for.)
            engines = {"all logits": ours(question.spec()), "tiled": ours(question.spec(), True)}
            if ON_CARD and dtype == "bfloat16":
                tiled = torch.compile(engines["tiled"], dynamic=False)
                engines["tiled, compiled"] = tiled
            rounded = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in question.operands]
            exact = dataclasses.replace(question, operands=[x.float().numpy() for x in rounded])
            wanted, operands = _exact(exact), [x.to(DEVICE) for x in rounded]
            for engine, attend in engines.items():
                do = functools.partial(_differences, attend, operands, exact, wanted)
                record.attempt(name, f"{engine}, {dtype}", do=do)


def _exact(question: gpu_semantics.Question) -> list[Any]:
    """The context, and gradients of its sum by masked softmax; hidden NaN and inf are 0 there."""
    operands = [torch.from_numpy(np.nan_to_num(x, posinf=0)).double() for x in question.operands]
    query, key, value = operands = [x.requires_grad_() for x in operands]
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    mask = torch.from_numpy(question.mask)
    logits = torch.einsum("bthd,bshd->bhts", query, key) / query.shape[3] ** 0.5
    weights = logits.masked_fill(~mask, -1e300).softmax(-1) * mask
    total = torch.einsum("bhts,bshd->bthd", weights, value).sum()
    return [torch.from_numpy(question.context()), *torch.autograd.grad(total, operands)]


def _differences(
    attend: Callable, given: list[Any], question: gpu_semantics.Question, wanted: list[Any]
) -> dict[str, float]:
    inputs = {name: torch.from_numpy(x).to(DEVICE) for name, x in question.inputs.items()}
    operands = [x.clone().requires_grad_() for x in given]
    context = attend(*operands, inputs)
    made = [context.detach(), *torch.autograd.grad(context.float().sum(), operands)]
    far = [float((x.double().cpu() - y).abs().max()) for x, y in zip(made, wanted, strict=True)]
    return {"context": far[0], "gradients": max(far[1:])}


# --- How fast ------------------------------------------------------------------------------------


def attention(record: Record) -> None:
    for case in sized(record.quick):
        _of_case(record, case, trains=False)


def training(record: Record) -> None:
    for case in sized(record.quick):
        if case.batch != 1:
            _of_case(record, case, trains=True)


def _of_case(record: Record, case: cases.Case, trains: bool) -> None:
    """Ours beside PyTorch's engines in bfloat16, forward, or with gradients of all operands."""
    heads_first = peers_torch.heads_first(case, "bfloat16", DEVICE)
    operands = [x.transpose(1, 2).contiguous() for x in heads_first]
    data = case.data()
    inputs = {name: torch.from_numpy(array).to(DEVICE) for name, array in data.items()}
    mask = torch.from_numpy(case.mask(data)).to(DEVICE)
    attend = ours(case.spec())
    calls: dict[str, tuple[Callable, list[Any]]] = {
        "ours": (lambda *qkv: attend(*qkv, inputs), operands)
    }
    if ON_CARD:
        compiled = torch.compile(attend, dynamic=False)
        calls["ours, compiled"] = lambda *qkv: compiled(*qkv, inputs), operands
    calls |= _sdpa(heads_first, mask)
    if ON_CARD or not trains:  # FlexAttention has no gradient on a CPU
        calls |= _flex(case, heads_first)
    for name, (call, given) in calls.items():
        do = functools.partial(timed, _step(call, given, trains), record.quick)
        record.attempt(titled(case), name, do=do)


def _step(attend: Callable, operands: list[Any], trains: bool) -> Callable[[], Any]:
    if not trains:
        return lambda: torch.no_grad()(attend)(*operands)
    upstream = torch.ones_like(operands[0])

    def step() -> Any:
        given = [x.detach().requires_grad_() for x in operands]
        return torch.autograd.grad(attend(*given), given, upstream)

    return step


def _sdpa(operands: list[Any], mask: Any) -> dict[str, tuple[Callable, list[Any]]]:
    def by(engine: Any) -> Callable:
        def attend(*qkv: Any) -> Any:
            with sdpa_kernel(engine):
                return scaled_dot_product_attention(*qkv, attn_mask=mask)

        return attend

    engines = {"math": SDPBackend.MATH}
    if ON_CARD:
        engines |= {
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
        }
    return {f"sdpa, {name}": (by(engine), operands) for name, engine in engines.items()}


def _flex(case: cases.Case, operands: list[Any]) -> dict[str, tuple[Callable, list[Any]]]:
    flex = torch.compile(flex_attention.flex_attention, dynamic=False)
    ready = peers_torch.block_mask(case, DEVICE)
    calls = {"flex": (lambda *qkv: flex(*qkv, block_mask=ready), operands)}
    if case.reads_data and ON_CARD:
        make = torch.compile(flex_attention.create_block_mask, dynamic=False)
        maker = peers_torch.block_mask_maker(case, DEVICE, make)
        calls["flex and its mask"] = lambda *qkv: flex(*qkv, block_mask=maker()), operands
    return calls


# --- TensorFlow, by proxy ------------------------------------------------------------------------


def proxies(record: Record) -> None:
    """What TensorFlow runs, operation by operation, in float32: all logits, and gathered tiles."""
    from keras_headmask.attention import choose, kernels
    from keras_headmask.attention.request import Request, bound_to

    for case in sized(record.quick):
        if case.reads_data or case.differs_by_head:
            continue  # what is gathered is known by positions alone
        operands = [torch.from_numpy(x).to(DEVICE) for x in case.operands()]
        spec, hides = case.spec(), torch.where(torch.from_numpy(case.mask({})), 0.0, -1e38)
        hides = hides.to(DEVICE)

        def all_logits(operands: Any = operands, hides: Any = hides) -> Any:
            query, key, value = (x.transpose(1, 2) for x in operands)
            logits = query * query.shape[3] ** -0.5 @ key.transpose(2, 3)
            return ((logits + hides).softmax(-1) @ value).transpose(1, 2)

        def gathered(operands: Any = operands, spec: Any = spec) -> Any:
            bound, _ = bound_to(spec, {}, *operands, 0)
            scale = operands[0].shape[3] ** -0.5
            request = Request(*operands, spec, bound, scale=scale, tiled=True)
            part = choose.part_of_all(request)
            return kernels.gathered(request, part)[0]

        calls = {"all logits": all_logits, "gathered": gathered}
        for name, call in calls.items():
            do = functools.partial(timed, torch.no_grad()(call), record.quick)
            record.attempt(titled(case), name, do=do)
