"""What fused kernels on accelerators are given, which needs none: the same masks as ours."""

import keras
import numpy as np
import oracle
import pytest
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from strategies import FEW, positional_specs
from tiled_contract import close, operands

import keras_headmask as hm

if keras.backend.backend() != "jax":
    pytest.skip("the kernels are JAX'", allow_module_level=True)

import jax

from keras_headmask.attention import accelerators_jax
from keras_headmask.attention.accelerators_jax import fused
from keras_headmask.rules.fused import Fused, lowered

LENGTH = 11
KERNELS = {
    "everything": (hm.Full(), Fused()),
    "no window": (hm.Window() | hm.Full(), Fused()),
    "causal": (hm.Window(after=0), Fused(True)),
    "behind": (hm.Window(3, 0), Fused(True, (3, 0))),
    "farther than all": (hm.Window(LENGTH - 1, 0), Fused(True)),
    "itself": (hm.Window(0, 0), Fused(True, (0, 0))),
    "both": (hm.Window(after=0) & hm.Window(4, 9) & hm.Window(before=6), Fused(True, (4, 0))),
}
OTHERS = {
    "ahead": hm.Window(3, 2),
    "not itself": hm.Window(3, -1),
    "far behind": hm.Window(-2, 5) & hm.Window(after=0),
    "dilated": hm.Window(4, 0, step=2),
    "sinks": hm.recipes.streaming(1, 3),
    "nothing": hm.Nothing(),
    "complement": ~hm.Window(3, 0),
    "data": hm.Window(3, 0) & hm.SameSegment("ids"),
}


def mask_of(arguments):
    """What `jax.nn.dot_product_attention` says of its arguments, in loops."""
    before = LENGTH if arguments.local_window_size is None else arguments.local_window_size[0]
    after = 0 if arguments.is_causal else LENGTH
    return np.array(
        [[i - before <= j <= i + after for j in range(LENGTH)] for i in range(LENGTH)], bool
    )


@pytest.mark.parametrize("name", KERNELS)
def test_rules_that_a_kernel_takes(name):
    rule, wanted = KERNELS[name]
    assert lowered(rule, LENGTH, LENGTH) == wanted
    ours = numpy(hm.make_mask(rule, LENGTH, LENGTH))[0, 0]
    np.testing.assert_array_equal(mask_of(wanted), ours)


@pytest.mark.parametrize("name", OTHERS)
def test_rules_that_no_kernel_takes(name):
    assert lowered(OTHERS[name], LENGTH, LENGTH) is None


def test_a_kernel_takes_one_sequence_to_itself():
    assert lowered(hm.Window(3, 0), LENGTH, LENGTH + 1) is None
    assert lowered(hm.Window(3, 0), LENGTH, LENGTH, 1) is None
    assert lowered(hm.Full(), LENGTH, LENGTH + 1, 3) == Fused()


@FEW
@given(positional_specs, st.integers(0, 2))
def test_whatever_is_lowered_is_the_rule(spec, head):
    rule = spec.for_head(head)
    arguments = lowered(rule, LENGTH, LENGTH)
    if arguments is not None:
        wanted = oracle.mask(rule, 1, 1, LENGTH, LENGTH)[0, 0]
        np.testing.assert_array_equal(mask_of(arguments), wanted)


SPEC = hm.PerHead({0: hm.Window(2, 0), 1: hm.Full()}, hm.Window(after=0))


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_attention_by_jax_own_function_is_ours(bad, place):
    """On a CPU by its plain implementation, which takes the same arguments."""
    qkv = operands(2, LENGTH, LENGTH, 4, size=8, value_size=8)
    qkv[place][1, 6, :, 3] = bad
    got = jax.jit(lambda *x: fused(SPEC, 0, 0.7, *x, implementation="xla"))(*qkv)
    wanted = hm.dot_product_attention(*qkv, mask_spec=SPEC, scale=0.7, tiled=False)
    sees_it = np.isnan(numpy(wanted)).any(-1)
    np.testing.assert_array_equal(np.isnan(numpy(got)).any(-1), sees_it)
    assert sees_it.any() == (bad != 0)
    close(numpy(got)[~sees_it], numpy(wanted)[~sees_it])


def test_heads_that_share_keys():
    qkv = operands(2, LENGTH, LENGTH, 4, size=8, value_size=8, key_heads=2)
    assert fused(SPEC, 0, 0.7, *qkv, implementation="xla") is None
    got = jax.jit(lambda *x: fused(hm.Window(2, 0), 0, 0.7, *x, implementation="xla"))(*qkv)
    close(got, hm.dot_product_attention(*qkv, mask_spec=hm.Window(2, 0), scale=0.7, tiled=False))


def test_cudnn_is_asked_on_its_devices_alone(monkeypatch):
    monkeypatch.setattr(accelerators_jax, "fused", lambda *given: "asked")
    qkv = [jax.numpy.asarray(x, "bfloat16") for x in operands(1, 8, 8, 2, size=8, value_size=8)]
    asked = accelerators_jax.by_cudnn
    assert asked(hm.Window(2, 0), 0, 0.7, *qkv) is None
    monkeypatch.setattr(accelerators_jax, "_has_cudnn", lambda: True)
    assert asked(hm.Window(2, 0), 0, 0.7, *qkv) == "asked"
    single = [x.astype("float32") for x in qkv]
    thin = [x[..., :4] for x in qkv]
    for others in (single, [*qkv[:2], single[2]], thin, [*qkv[:2], thin[2]]):
        assert asked(hm.Window(2, 0), 0, 0.7, *others) is None
