"""What PyTorch computes on a GPU, seen on a CPU: which engine, its blocks, what is compiled.

That its engines keep all laws is in `test_laws.py`, by the definitions of their kernels.
"""

import contextlib
import dataclasses
import gc
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
from tiled_contract import SCALE, attend, close, operands

import keras_headmask as hm
from keras_headmask.attention import device, kernels, tuning
from keras_headmask.attention.choose import choose, part_of_all
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.logits import checked_changes
from keras_headmask.attention.request import Request, bound_to
from keras_headmask.attention.tuning import tuned
from keras_headmask.rules import evaluation

if keras.backend.backend() != "torch":
    pytest.skip("needs the PyTorch backend", allow_module_level=True)

import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.nn.attention import flex_attention

from keras_headmask.attention.torch import compiled, flex, sdpa

DOCUMENTS = hm.SameSegment("ids")
FLEX, SDPA = "FlexAttention on CUDA", "SDPA with the mask"
# What is asked of 2,048 positions of 4 heads of 64, in bfloat16 unless said: which engine.
CHOICES = {
    "window": (hm.Window(99, 99), {}, FLEX),
    "documents": (DOCUMENTS, {}, FLEX),
    "four rules": (hm.PerHead({0: hm.Window(9, 9), 1: DOCUMENTS}, hm.Window(99, 0)), {}, FLEX),
    "capped, with sinks": (
        hm.Window(99, 99),
        {"changes": {"soft_cap": 3.0, "sinks": [0.0] * 4}},
        FLEX,
    ),
    "alibi": (hm.Window(99, 99), {"changes": {"position_bias": hm.alibi(4)}}, FLEX),
    "padding": (hm.KeyFlag("flags"), {}, SDPA),
    "one head in its document": (hm.PerHead({0: DOCUMENTS}, hm.KeyFlag("flags")), {}, SDPA),
    "no rule": (None, {}, SDPA),
    "short": (hm.Window(9, 9), {"length": 512}, SDPA),
    "all logits asked for": (hm.Window(99, 99), {"tiled": False}, SDPA),
    "a whole mask": (hm.MaskInput("mask"), {}, SDPA),
    "float32, padding": (hm.KeyFlag("flags"), {"dtype": torch.float32}, SDPA),
    "float32, window": (hm.Window(99, 99), {"dtype": torch.float32}, "by head group"),
    "heads of 8": (hm.Window(99, 99), {"size": 8}, "by head group"),
    "dropout": (hm.Window(99, 99), {"dropout": 0.1, "seed": 1}, "by head group"),
    "bias": (hm.KeyFlag("flags"), {"changes": {"bias": np.zeros((1, 1, 1, 1), "f4")}}, "dense"),
    "float64": (hm.KeyFlag("flags"), {"dtype": torch.float64}, "dense"),
    "probabilities": (hm.Window(99, 99), {"wants_probabilities": True}, "dense"),
}


def request(spec, length=2048, size=64, dtype=torch.bfloat16, changes=None, **rest):
    query = torch.zeros((2, length, 4, size), dtype=dtype)
    inputs = {
        "ids": torch.zeros((2, length), dtype=torch.int32),
        "flags": torch.ones((2, length), dtype=torch.bool),
        "mask": torch.ones((1, 1, length, length), dtype=torch.bool),
    }
    inputs = {name: inputs[name] for name in ([] if spec is None else spec.inputs)}
    bound = None if spec is None else bound_to(spec, inputs, query, query, 0)[0]
    changes = checked_changes((2, 4, length, length), **(changes or {}))
    return Request(query, query, query, spec, bound, scale=SCALE, changes=changes, **rest)


@pytest.mark.parametrize("name", CHOICES)
def test_which_engine_takes_it(name):
    spec, given, wanted = CHOICES[name]
    asked = request(spec, **given)
    with device.assuming("gpu"):
        assert choose(asked, part_of_all(asked)).name == wanted
    with device.assuming("cpu"):
        assert choose(asked, part_of_all(asked)).name not in (FLEX, SDPA)


# ---------------------------------------------------------------- which blocks, which pairs


def part_of(spec, inputs, queries, keys, offset=0, heads=1, block=4):
    bound = evaluation.bind(spec, inputs, queries, keys, offset)
    with tuned(block=block, wide_block=block) as tuning:
        return Part(spec, tuple(range(heads)), bound, SCALE, tuning)


def test_flags_are_read_as_numbers():
    """A kernel reads booleans many times more slowly."""
    flags = torch.ones((1, 8), dtype=torch.bool)
    part = part_of(hm.KeyFlag("flags"), {"flags": flags}, 8, 8)
    ((_, inputs),) = part.bound.leaf_inputs.items()
    captured, is_flag = flex._captured(inputs["flags"].key)
    assert is_flag
    assert captured.dtype == torch.int32


# ---------------------------------------------------------------- what is compiled


@contextlib.contextmanager
def compiling(counter):
    """Let what is compiled for a GPU be counted, and run as it is."""
    usual = torch.compile
    torch._dynamo.reset()
    compiled._function.cache_clear()
    with mock.patch("torch.compile", lambda f, **rest: usual(f, **rest, backend=counter)):
        yield
    compiled._function.cache_clear()


def small(spec, inputs, length, heads=4, seed=0):
    """A request of float32, and the context that the definition has for it."""
    qkv = [torch.from_numpy(x) for x in operands(1, length, length, heads, seed, 16, 16)]
    bound = bound_to(spec, inputs, *qkv[:2], 0)[0]
    return Request(*qkv, spec, bound, scale=SCALE), attend(qkv, spec, inputs, tiled=False)


@torch.no_grad()
def test_each_rule_is_compiled_once_and_lengths_twice():
    """The twelfth window is compiled as the first: PyTorch gives up after eight of one code."""
    counter = CompileCounter()
    with compiling(counter):
        for before in range(12):
            asked, wanted = small(hm.Window(before, 1), {}, 64)
            for _ in range(2):
                close(flex.run(asked, part_of_all(asked)), wanted)
        assert counter.frame_count == 12
        for length in (65, 67, 71, 90, 64):
            asked, wanted = small(hm.Window(0, 1), {}, length)
            close(flex.run(asked, part_of_all(asked)), wanted)
        assert counter.frame_count == 13


@torch.no_grad()
def test_biases_by_position_count_the_offset():
    query, key, value = (torch.from_numpy(x) for x in operands(1, 40, 64, 4, 0, 16, 16))
    rule, bias = hm.Window(9, 30), {"position_bias": hm.alibi(4)}
    bound = bound_to(rule, {}, query, key, 24)[0]
    changes = checked_changes((1, 4, 40, 64), **bias)
    asked = Request(query, key, value, rule, bound, scale=SCALE, query_offset=24, changes=changes)
    with compiling(CompileCounter()):
        got = flex.run(asked, part_of_all(asked))
    close(got, attend((query, key, value), rule, None, 24, tiled=False, **bias))


@torch.no_grad()
def test_ids_and_layers_compile_nothing_more():
    counter = CompileCounter()
    with compiling(counter):
        for seed in range(3):
            ids = {"ids": torch.arange(64)[None] // (7 + seed)}
            asked, wanted = small(DOCUMENTS, ids, 64, seed=seed)
            close(flex.run(asked, part_of_all(asked)), wanted)
        assert counter.frame_count == 1


class Unreadable(hm.MaskSpec):
    """Its `allowed` leaves the graph: the compiler cannot follow."""

    tiling = hm.Tiling(is_local=True)

    def allowed(self, query_positions, key_positions, inputs):
        print(end="")
        return abs(query_positions - key_positions) <= int(torch.tensor(3).numpy())


def test_any_shapes(monkeypatch):
    """PyTorch would give up after eight compilations of one code."""
    sizes = [(2, 4, 4), (1, 4, 4), (2, 1, 4), (1, 1, 4), (2, 5, 8), (3, 6, 8), (1, 2, 1), (4, 5, 3)]
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    with compiling("aot_eager"):
        for number, (batch, queries, keys) in enumerate(sizes * 2):
            query, key, value = (
                torch.from_numpy(x).requires_grad_(number % 3 > 0)
                for x in operands(batch, queries, keys, 2, number, 16, 16)
            )
            rule, offset = hm.Window(5, 3), max(keys - queries, 0)
            bound = bound_to(rule, {}, query, key, offset)[0]
            asked = Request(query, key, value, rule, bound, scale=SCALE, query_offset=offset)
            got = flex.run(asked, part_of_all(asked))
            close(
                got.detach(), attend((query, key, value), rule, None, offset, tiled=False).detach()
            )
            if number % 3:
                (got**2).sum().backward()


@torch.no_grad()
def test_a_rule_that_cannot_be_compiled_is_computed_by_the_definition():
    qkv = [torch.from_numpy(x) for x in operands(1, 64, 64, 4, 0, 16, 16)]
    bound = bound_to(Unreadable(), {}, *qkv[:2], 0)[0]
    asked = Request(*qkv, Unreadable(), bound, scale=SCALE)
    with compiling(CompileCounter()):
        for _ in range(2):
            with pytest.warns(UserWarning, match="fails on a rule, so all logits are computed"):
                got, _ = kernels.FlexOnGpu().run(asked, part_of_all(asked))
            close(got, attend(qkv, hm.Window(3, 3), tiled=False))


def test_a_layer_is_a_part_of_code_that_a_user_compiles():
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 16, mask_spec=hm.Window(5, 3))
    x = torch.from_numpy(operands(1, 40, 40, 1, size=8)[0][:, :, 0])
    wanted = layer(x, x)
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend=CompileCounter())
    close(run(x, x).detach(), wanted.detach())


@pytest.mark.parametrize("engine", [flex, sdpa], ids=["FlexAttention", "SDPA"])
def test_what_was_computed_is_not_held(engine):
    counter = CompileCounter()
    with compiling(counter), mock.patch.object(sdpa, "can_compile", return_value=True):
        ids = torch.arange(64)[None] // 7
        with torch.no_grad():
            asked, _ = small(DOCUMENTS, {"ids": ids}, 64)
            engine.run(asked, part_of_all(asked))
        assert counter.frame_count == 1
        held = [weakref.ref(x) for x in (asked.query, asked.key, ids)]
        del asked, ids
        gc.collect()
        assert not any(x() is not None for x in held)


@pytest.fixture
def on_gpu(monkeypatch):
    """Code is chosen as for a GPU. (`device.assuming` would split the graph.)"""
    monkeypatch.setattr(device, "is_gpu", lambda _: True)
    monkeypatch.setattr(flex, "_DTYPES", [{"float32"}])
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    small = dataclasses.replace(tuning.current_tuning(), fewest_pairs=0)
    monkeypatch.setattr(tuning._tuning, "default", small)  # (`tuned` would, too)
    torch._dynamo.reset()


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["four rules", "padding"])
@pytest.mark.every_day("four rules-training|padding-inference")
def test_code_that_a_user_compiles_is_one_graph(name, trains):
    """And two graphs serve all lengths."""
    spec, _, engine = CHOICES[name]
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(
        lambda inputs, *qkv: attend(qkv, spec, inputs, tiled=None), fullgraph=True, backend=counter
    )
    for length in (300, 301, 323):
        qkv = [torch.from_numpy(x) for x in operands(2, length, length, 4, 0, 16, 16)]
        ids = torch.arange(length)[None].expand(2, -1)
        inputs = {"ids": ids // 70, "flags": ids < 290}
        inputs = {name: inputs[name] for name in spec.inputs}
        with hm.dense_scope():
            wanted = attend(qkv, spec, inputs, tiled=None)
        close(run(inputs, *(x.requires_grad_(trains) for x in qkv)).detach(), wanted)
    assert counter.frame_count == 2
    called = {FLEX: "flex_attention", SDPA: "scaled_dot_product_attention"}[engine]
    for graph in counter.graphs:
        assert called in {getattr(x.target, "__name__", x.target) for x in graph.graph.nodes}


@pytest.mark.long
@torch.no_grad()
@pytest.mark.skipif(not flex._HAS_KERNEL, reason="needs AVX2")
def test_one_call_of_all_heads_by_a_kernel_that_is_compiled():
    """The axis of heads, shared key heads, and a length that fits no block."""
    spec = hm.PerHead({0: DOCUMENTS, 2: hm.Window(70, 0)}, hm.Window(30, 9)) & hm.KeyFlag("pad")
    inputs = {"ids": torch.arange(301)[None] // 70, "pad": torch.arange(301)[None] < 290}
    qkv = [torch.from_numpy(x) for x in operands(2, 301, 301, 4, 0, 16, 16, key_heads=2)]
    inputs = {name: x.expand(2, -1) for name, x in inputs.items()}
    bound = bound_to(spec, inputs, *qkv[:2], 0)[0]
    asked = Request(*qkv, spec, bound, scale=SCALE)
    torch._dynamo.reset()
    compiled._function.cache_clear()
    got = flex.run(asked, part_of_all(asked))
    compiled._function.cache_clear()
    close(got, attend(qkv, spec, inputs, tiled=False))
