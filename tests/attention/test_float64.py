"""float64 in layers; on JAX with `jax_enable_x64`."""

import numpy as np
from by_kernel import sixty_four_bits
from contract import gradient
from keras import ops
from tiled_contract import LONG, attend, operands, tiles


def test_float32_operands_where_there_are_64_bits():
    spec, inputs = LONG["documents"]
    qkv = operands(3, 23, 23, 2)
    with sixty_four_bits(), tiles(4, 6, 3):
        made = [
            gradient(lambda *x, t=t: ops.sum(attend(x, spec, inputs, tiled=t) ** 2), *qkv)
            for t in (True, False)
        ]
    for one, other in zip(*made, strict=True):
        assert one.dtype == "float32"
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
