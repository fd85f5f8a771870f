"""Packed documents train as if each stood alone: the laws of examples/pack_documents.py."""

import os
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tutorials import check_pictures, numbers_of

import keras_headmask as hm

pytest.importorskip("grain")
pytestmark = pytest.mark.tensorflow

SCRIPT = Path(__file__).parents[2] / "examples" / "pack_documents.py"
ROW = 12  # tokens
lengths = st.lists(st.integers(1, ROW), min_size=1, max_size=5)
trained = st.lists(st.integers(2, ROW), min_size=1, max_size=5)  # one token predicts nothing
few = settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """What the script defines, run with `--quick`; what it prints; the folder it draws into."""
    pytest.importorskip("matplotlib").use("agg")
    folder, printed = tmp_path_factory.mktemp("packing"), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", [os.fspath(SCRIPT), "--quick", "--out", os.fspath(folder)])
        names = runpy.run_path(os.fspath(SCRIPT), run_name="__main__")
    return SimpleNamespace(**names, printed=printed.getvalue(), folder=folder)


@pytest.fixture(scope="module")
def model(tutorial):
    return tutorial.build()


def documents_of(lengths):
    """Each token of each document is another number, so that it names its place."""
    ends = np.cumsum(lengths)
    return [
        np.arange(end - n, end, dtype="int32") + 1 for n, end in zip(lengths, ends, strict=True)
    ]


def rows_of(tutorial, lengths, **arguments):
    return tutorial.batched(tutorial.pack(documents_of(lengths), ROW, **arguments), 1)


def places(inputs):
    """By token: the number of its document in the row, and its place in the document."""
    tokens, segments, positions = (
        inputs[name][0] for name in ("tokens", "segment_ids", "positions")
    )
    return {
        int(token): (int(segment), int(position))
        for token, segment, position in zip(tokens, segments, positions, strict=True)
        if segment >= 0
    }


@few
@given(lengths)
def test_every_token_is_in_one_row_once_and_at_its_place(tutorial, lengths):
    documents = documents_of(lengths)
    found = [places(inputs) for inputs, _, _ in rows_of(tutorial, lengths)]
    assert sum(map(len, found)) == sum(lengths)
    for document in documents:
        (row,) = (row for row in found if int(document[0]) in row)
        number = row[int(document[0])][0]
        assert [row[int(token)] for token in document] == [
            (number, place) for place in range(len(document))
        ]
        assert sum(of == number for of, _ in row.values()) == len(document)


@few
@given(lengths)
def test_a_token_sees_its_own_document_up_to_itself(tutorial, lengths):
    for inputs, _, _ in rows_of(tutorial, lengths):
        of = places(inputs)
        tokens = [int(token) for token in inputs["tokens"][0]]
        expected = [
            [a in of and b in of and of[a][0] == of[b][0] and of[b][1] <= of[a][1] for b in tokens]
            for a in tokens
        ]
        mask_inputs = {"segment_ids": inputs["segment_ids"]}
        mask = hm.make_mask(tutorial.RULE, ROW, ROW, mask_inputs=mask_inputs)
        np.testing.assert_array_equal(np.asarray(mask)[0, 0], expected)


@few
@given(lengths)
def test_what_counts_in_the_loss_is_each_token_after_the_first(tutorial, lengths):
    """The pairs of a token and its target, taken from the documents themselves."""
    expected = sorted((int(a), int(b)) for d in documents_of(lengths) for a, b in pairwise(d))
    for most in (None, 1):
        counted = [
            (int(token), int(target))
            for inputs, targets, weights in rows_of(tutorial, lengths, most_in_a_row=most)
            for token, target, weight in zip(
                inputs["tokens"][0], targets[0], weights[0], strict=True
            )
            if weight
        ]
        assert sorted(counted) == expected


@few
@given(trained)
def test_packed_equals_alone_and_no_document_sees_another(tutorial, model, lengths):
    for inputs, _, _ in rows_of(tutorial, lengths):
        assert tutorial.from_alone(model, inputs) < 1e-5
        moved = tutorial.effects(model, inputs)
        assert tutorial.apart(moved) < 1e-6
        assert moved.diagonal().min() > 1e-3  # the change is one
        slopes = tutorial.gradients(model, inputs)
        assert tutorial.apart(slopes) == 0
        assert slopes.diagonal().min() > 0


@few
@given(trained)
def test_a_step_is_the_same_packed_and_padded(tutorial, model, lengths):
    packed, padded = (
        tutorial.loss_and_gradients(model, batch)
        for most in (None, 1)
        for batch in tutorial.batched(
            tutorial.pack(documents_of(lengths), ROW, most_in_a_row=most), len(lengths)
        )
    )
    assert packed[0] == pytest.approx(padded[0], rel=1e-5)
    for ours, theirs in zip(packed[1], padded[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_is_printed_and_drawn(tutorial):
    def numbers(name):
        return numbers_of(tutorial.printed, name)

    assert numbers("weights")[3:] == [0, 1, 1, 0, 0, 0]  # a border, and padding
    assert numbers("largest difference in another document")[0] < 1e-6
    assert numbers("largest gradient in another document") == [0]
    assert numbers("packed, as here")[0] < 1e-5
    assert numbers("packed, but the rule causal alone")[0] > 0.01
    assert numbers("packed, but positions of the row")[0] > 0.01
    assert numbers("loss of 6 documents, packed") == numbers("loss of 6 documents, padded")
    assert numbers("largest difference of gradients")[0] < 1e-5 < numbers("largest gradient")[0]
    assert numbers("loss of 6 documents, after an epoch") < numbers("loss of 6 documents, packed")

    kinds = {name: numbers(name) for name in ("padded", "packed")}
    steps, padding, seconds, rate, gain = zip(*kinds.values(), strict=True)
    assert steps[1] < steps[0]
    assert padding[1] < padding[0]
    least, most = ((seconds[0] + by) / (seconds[1] - by) for by in (-0.0051, 0.0051))  # rounded
    assert least < rate[1] / rate[0] < most
    assert gain[0] == 1
    check_pictures("pack_documents", tutorial.folder)


def test_a_document_longer_than_a_row_is_refused(tutorial):
    with pytest.raises(ValueError, match="must be truncated to max length"):
        list(tutorial.pack([np.arange(ROW + 1)], ROW))


def test_segment_ids_of_another_length_than_the_text_are_refused(tutorial, model):
    ids = np.ones((2, ROW), "int32")
    with pytest.raises(ValueError, match="segment_ids"):
        model({"tokens": ids, "positions": ids, "segment_ids": ids[:, :-1]})
