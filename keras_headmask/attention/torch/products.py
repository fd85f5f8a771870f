"""Products of half operands on PyTorch, where a GPU sums them in float32."""

from typing import Any

import torch

from keras_headmask.attention import device
from keras_headmask.attention.subscripts import axes, left_gradient, right_gradient
from keras_headmask.masks import Tensor


def has_kernel(tensor: Tensor) -> bool:
    """Whether PyTorch has a product into float32 where `tensor` is."""
    return device.is_gpu(tensor) and hasattr(torch.ops.aten.bmm, "dtype")


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor, subscripts: str, half: str) -> Tensor:
        rows, columns, back = axes(subscripts)
        dtype = getattr(torch, half)
        left, right = (x.to(dtype).permute(o) for x, o in ((left, rows), (right, columns)))
        if has_kernel(left):
            flat = (x.flatten(0, 1) for x in (left, right))
            product = torch.bmm(*flat, out_dtype=torch.float32)
            product = product.unflatten(0, left.shape[:2])
        else:  # what is multiplied and summed is the same
            product = torch.matmul(left.float(), right.float())
        return product.permute(back)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        left, right, ctx.subscripts, ctx.half = inputs
        ctx.save_for_backward(left, right)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        left, right = ctx.saved_tensors
        d_left = Product.apply(upstream, right, left_gradient(ctx.subscripts), ctx.half)
        d_right = Product.apply(left, upstream, right_gradient(ctx.subscripts), ctx.half)
        return d_left.to(left.dtype), d_right.to(right.dtype), None, None
