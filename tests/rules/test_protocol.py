"""What a spec is asked: a user's leaf gets what a built-in one gets, and no answer is unsound."""

import dataclasses
import warnings

import keras
import numpy as np
import pytest
from contract import numpy

import keras_headmask as hm
from keras_headmask.attention import gathered, kernels
from keras_headmask.attention.request import Request
from keras_headmask.export.signature import Input
from keras_headmask.retrofit.find import Found
from keras_headmask.retrofit.made_up import made_up
from keras_headmask.rules import config, evaluation
from keras_headmask.rules.leaves import ids_of

CAUSAL, NEAR = hm.Window(after=0), hm.Window(2, 2)
LEAVES = [
    hm.Window(3, 3),
    hm.Window(before=4),
    hm.Window(after=2),
    hm.Window(8, 8, step=4),
    hm.Chunk(4, before=1),
    hm.Keys(0, 3),
    hm.Keys(2),
    hm.Queries(1, 3),
    hm.SameSegment("ids"),
    hm.SameSentence(3, "ids"),
    hm.KeyFlag("ids"),
    hm.QueryFlag("ids"),
    hm.KeyIn("ids", (1, 9)),
    hm.QueryIn("ids", 2),
    hm.MaskInput("whole"),
]
OURS = {
    cls
    for cls in config.KINDS.values()
    if cls.__module__.startswith("keras_headmask.") and cls.allowed is not hm.MaskSpec.allowed
} - {hm.Full, hm.Nothing}  # known by their names
LENGTH = 300


def twin_of(cls):
    """The leaf written again as a user would: the same fields and members, another class."""
    fields = [
        (f.name, f.type, dataclasses.field(default=f.default)) for f in dataclasses.fields(cls)
    ]
    members = {}
    for part in reversed(cls.__mro__[: cls.__mro__.index(hm.MaskSpec)]):
        members |= {
            name: value
            for name, value in vars(part).items()
            if (not name.startswith("__") or name == "__post_init__")
            and name not in ("kind", *(name for name, *_ in fields))
        }
    twin = dataclasses.make_dataclass(
        f"Twin{cls.__name__}",
        fields,
        bases=(hm.MaskSpec,),
        namespace=members,
        frozen=True,
        repr=False,
    )
    return hm.register_spec(f"test_twin_of_{cls.kind}")(twin)


TWINS = {cls: twin_of(cls) for cls in OURS}


def twins(spec):
    """`spec` made of twins."""
    if type(spec) in TWINS:
        return TWINS[type(spec)](
            **{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        )
    return spec.with_children([twins(child) for child in spec.children])


def rules_with(leaf):
    return [leaf, ~(leaf & CAUSAL) | NEAR]


def inputs_of(spec, length):
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 5, (2, length)), axis=1).astype("int32")
    ids[:, :: length // 4] = 9
    given = {"ids": ids, "whole": rng.random((2, 1, length, length)) < 0.5}
    return {name: given[name] for name in spec.inputs}


@pytest.mark.parametrize("leaf", LEAVES, ids=repr)
def test_a_twin_is_treated_alike(leaf):
    """Plan, kernel, findings, words, made-up samples, and the warning of a forgotten offset."""
    assert {type(leaf) for leaf in LEAVES} == OURS == set(TWINS)
    warns = not leaf.inputs and not isinstance(leaf, hm.Keys)
    inputs = {name: Input((None, None), "int32") for name in leaf.inputs}
    for rule in rules_with(leaf):
        both = rule, twins(rule)
        of_both = []
        for one in both:
            x, survey = keras.ops.zeros((2, LENGTH, 2, 1)), Found(keras.Model())
            bound = evaluation.bind(one, inputs_of(one, LENGTH), LENGTH, LENGTH, 0, batch=2)
            request = Request(x, x, x, one, bound, scale=1.0)
            made = made_up(survey, [one], 2, 16, inputs=inputs)
            found = [hm.lint(one, mask_inputs=x) for x in (None, inputs_of(one, 24) or None)]
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", UserWarning)
                assert evaluation.checked_or_default_offset(None, one, 1, 4) == 0
            of_both.append(
                (
                    gathered.plan_of(kernels.part_of_all(request), LENGTH, LENGTH + 9, 3),
                    kernels.choose(request, kernels.part_of_all(request)),
                    str(found).replace("Twin", ""),
                    {name: numpy(ids).tolist() for name, ids in made.items()},
                    len(said),
                    one.describe() if not one.children else "",
                )
            )
        assert of_both[0] == of_both[1]
        if rule is leaf:
            assert len(said) == warns
            assert all(np.isin(ids_of(leaf), ids).all() for ids in made.values())
