"""PyTorch's attention with a mask, and compiled FlexAttention, in one process."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases, measure


def pin_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def run(names: list[str], dtype: str, quick: bool, repetitions: int) -> dict[str, dict]:
    """The results of the cases that are asked for, by name."""
    every = cases.all_cases(quick)
    results = {}
    for name in names:
        try:
            if name in every:
                # Each rule is a C++ build of its own: one will do where no time is looked at.
                with_flex = not quick or name == "documents"
                results[name] = attention(every[name], dtype, repetitions, with_flex)
        except Exception as error:  # one case must not cost the others
            results[name] = {"errors": {"all": measure.message(error)}}
    return results


def heads_first(case: cases.Case, dtype: str, device: str = "cpu") -> list[Any]:
    """Query, key and value `(B, H, T, D)`, contiguous: the layout that suits PyTorch best."""
    return [
        torch.from_numpy(x).transpose(1, 2).contiguous().to(device, getattr(torch, dtype))
        for x in case.operands()
    ]


def mask_mod(case: cases.Case, device: str = "cpu") -> Callable:
    """The rule in FlexAttention's words."""
    data = case.data()
    if case.rule == "bert":
        data = {"padding_mask": data["padding_mask"], "sentences": cases.sentences(data)}
    given = {name: torch.from_numpy(array).to(device) for name, array in data.items()}
    reach, near, back = case.reach, case.heads * 3 // 4, case.heads * 7 // 8
    if case.rule == "window":
        return lambda b, h, q, k: (k - q <= reach) & (q - k <= reach)
    if case.rule == "documents":
        documents = given["documents"]
        return lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (k <= q)
    if case.rule == "bert":
        padding, numbers = given["padding_mask"], given["sentences"]
        return lambda b, h, q, k: padding[b, k] & ((h > 0) | (numbers[b, q] == numbers[b, k]))
    assert case.rule == "mixed"
    return lambda b, h, q, k: (
        ((h < near) & (k - q <= reach) & (q - k <= reach + 1))
        | ((h >= near) & (h < back) & (k <= q))
        | (h >= back)
    )


def block_mask(case: cases.Case, device: str = "cpu") -> Any:
    """With an axis for examples or heads only where they differ."""
    batch = case.batch if case.reads_data else None
    heads = case.heads if case.differs_by_head else None
    sizes = batch, heads, case.length, case.length
    return create_block_mask(mask_mod(case, device), *sizes, device=device)


def compiled_flex() -> Callable:
    """Compiled anew, so that no case meets the shapes of another."""
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


@torch.no_grad()
def attention(case: cases.Case, dtype: str, repetitions: int, with_flex: bool) -> dict[str, Any]:
    """Attention alone, forward."""
    operands = heads_first(case, dtype)
    allowed = torch.from_numpy(case.mask(case.data()))
    sdpa = functools.partial(scaled_dot_product_attention, *operands, attn_mask=allowed)
    functions: dict[str, Callable] = {"sdpa": sdpa}
    if with_flex:
        flex, blocks = compiled_flex(), block_mask(case)
        functions["flex"] = lambda: flex(*operands, block_mask=blocks)
    result = measure.interleaved(functions, repetitions)
    if "flex" in result["seconds"]:
        alive = allowed.any(-1)[..., None]
        difference = torch.where(alive, functions["flex"]() - sdpa(), 0.0)
        result["difference"] = float(difference.abs().max())
    return result
