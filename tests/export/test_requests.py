"""Requests of shapes that no signature has: servers pass them on, and the graph refuses them."""

import keras
import numpy as np
import pytest
from export_models import masked, ours, server, tokens

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow
SIGNATURES = "serving_default", "serve_padded", "serve_scores"


def request(signature):
    given = {"token_ids": tokens(3, 6), "padding_mask": np.ones((3, 6), "int32")}
    return given | ({"lengths": np.array([6, 2, 0], "int32")} if "padded" in signature else {})


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with server(hm.export_saved_model(masked(), folder, scores=True, check=False).path) as ask:
        yield ask


@pytest.mark.parametrize("signature", SIGNATURES)
def test_an_input_of_another_rank_is_refused_by_its_name(ask, signature):
    import tensorflow as tf

    given = request(signature)
    assert ask(signature, **given)
    for name, right in given.items():
        for shape in {(), (3,), (3, 1), (3, 6, 1), (1, 1, 3, 6)}:
            if len(shape) == right.ndim:
                continue
            sizes = ",".join(map(str, shape))
            message = rf"\[{sizes}\] is not compatible .*[^$]*input_{name}_of_another_shape"
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                ask(signature, **given | {name: np.ones(shape, "int32")})


def test_lengths_are_one_for_each_example(ask):
    import tensorflow as tf

    for rows in 1, 4:
        message = rf"{rows} values, but .* shape has 3[^$]*lengths_of_another_batch"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            ask("serve_padded", **request("serve_padded") | {"lengths": np.ones(rows, "int32")})


def test_lengths_out_of_range_are_those_at_its_ends(ask):
    """Refused, one request would fail all others of its batch."""
    outputs = []
    for lengths in [6, 2, 0], [7, 2, -1], [2**31 - 1, 2, -(2**31)]:
        given = request("serve_padded") | {"lengths": np.array(lengths, "int32")}
        outputs.append(ask("serve_padded", **given))
    for other in outputs[1:]:
        keras.tree.map_structure(np.testing.assert_array_equal, other, outputs[0])


def test_a_signature_of_one_shape_refuses_every_other(tmp_path):
    """XLA would fill up a smaller batch with rows that nobody sent."""
    import tensorflow as tf

    path = hm.export_saved_model(ours(), tmp_path, xla_buckets=[(3, 6)], check=False).path
    with server(path) as ask:
        assert ask("serve_xla_3x6", token_ids=tokens(3, 6))["output_0"].shape == (3, 6, 8)
        for shape in (1, 6), (3, 5), (4, 6):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"expected shape \[3,6\]"):
                ask("serve_xla_3x6", token_ids=tokens(*shape))
