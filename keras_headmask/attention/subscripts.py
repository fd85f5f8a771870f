"""The subscripts of a product of two operands, as `ops.einsum` has them."""


def left_gradient(subscripts: str) -> str:
    """The subscripts of the gradient of the left operand: that of the product, times the right."""
    left, right, out = _letters(subscripts)
    return f"{out},{right}->{left}"


def right_gradient(subscripts: str) -> str:
    left, right, out = _letters(subscripts)
    return f"{left},{out}->{right}"


def _letters(subscripts: str) -> list[str]:
    return subscripts.replace("->", ",").split(",")


def axes(subscripts: str) -> tuple[list[int], list[int], list[int]]:
    """The orders of axes that make `left @ right` of an einsum, and of its result what is wanted.

    The orders are (batch, head, row, summed), (batch, head, summed, column), and back.
    """
    left, right, out = _letters(subscripts)
    shared = "".join(x for x in left if x in right and x in out)
    (row,), (column,), (summed,) = (
        (set(one) & set(other)) - set(shared)
        for one, other in ((left, out), (right, out), (left, right))
    )
    left_gradient, right_gradient = (
        [operand.index(x) for x in shared + last]
        for operand, last in ((left, row + summed), (right, summed + column))
    )
    return left_gradient, right_gradient, [(shared + row + column).index(x) for x in out]
