"""A Keras mask that a graph loses is named, and a warning comes just where padding is seen."""

import warnings

import keras
import numpy as np
import pytest

import keras_headmask as hm
from keras_headmask.attention.lost_masks import hides_padding

SIZE, REAL = 8, np.array([[5, 6, 7]])
PADDED = np.array([[5, 6, 7, 0, 0]])


def ours(**more):
    return hm.PerHeadMaskedMultiHeadAttention(2, 4, **more)


def stock():
    return keras.layers.MultiHeadAttention(2, 4)


def embedded(ids, mask_zero=True):
    return keras.layers.Embedding(9, SIZE, mask_zero=mask_zero)(ids)


def said(function, *args, **kwargs):
    """What `function` returns, and the warnings of padding."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **kwargs)
    return result, [str(x.message) for x in caught if "attends to padding" in str(x.message)]


def padding_moves(model):
    long, short = (keras.ops.convert_to_numpy(model(ids)) for ids in (PADDED, REAL))
    return np.abs(long[:, :3] - short).max() > 1e-5


def model_of(body):
    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int32", name="ids")
    return keras.Model(ids, body(ids))


def attended(attention, join, **more):
    """Attention twice; `join` makes the second input of the first one's input and output."""

    def body(ids):
        x = embedded(ids)
        x = join(ids, x, attention(**more)(x, x))
        return attention(**more)(x, x)

    return body


LOSING = {
    "`+`": lambda ids, x, y: x + y,
    "`-`": lambda ids, x, y: x - y,
    "`*`": lambda ids, x, y: x * 0.5 + y,
    "keras.ops.maximum": lambda ids, x, y: keras.ops.maximum(x, y),
    "'relu": lambda ids, x, y: keras.layers.Dense(SIZE)(keras.ops.relu(y)),
    "another operand has no mask": lambda ids, x, y: x + embedded(ids, mask_zero=False),
    "'join' (Add) drops it": lambda ids, x, y: keras.layers.Add(name="join")(
        [x, embedded(ids, mask_zero=False)]
    ),
}
KEEPING = {
    "Add": lambda ids, x, y: keras.layers.Add()([x, y]),
    "norm": lambda ids, x, y: keras.layers.LayerNormalization()(keras.layers.Dropout(0.1)(y)),
    "Concatenate": lambda ids, x, y: keras.layers.Concatenate()([x, y]),
    "another Embedding": lambda ids, x, y: embedded(ids),
}


@pytest.mark.parametrize("text", LOSING)
def test_a_lost_mask_is_named_once(text):
    model, found = said(model_of, attended(ours, LOSING[text]))
    assert padding_moves(model)
    assert len(found) == 1
    assert text in found[0]
    assert "hm.recipes.padding('ids')" in found[0]
    assert "`query_mask=`" in found[0]


@pytest.mark.parametrize("name", KEEPING)
def test_no_warning_where_the_mask_arrives(name):
    model, found = said(model_of, attended(ours, KEEPING[name]))
    assert not padding_moves(model)
    assert not found


def test_no_warning_where_something_else_hides_padding():
    def body(call):
        def of_ids(ids):
            x = embedded(ids)
            real = ids != 0
            return call(x + ours()(x), ids, real)

        return of_ids

    padding = hm.recipes.padding("ids")
    for call in (
        lambda x, ids, real: ours()(x, query_mask=real),
        lambda x, ids, real: ours()(x, mask=real),
        lambda x, ids, real: ours()(x, x, value_mask=real),
        lambda x, ids, real: ours()(x, attention_mask=keras.ops.expand_dims(real, 1)),
        lambda x, ids, real: ours(mask_spec=padding & hm.Window(8, 8))(x, mask_inputs={"ids": ids}),
    ):
        model, found = said(model_of, body(call))
        assert not padding_moves(model)
        assert not found


def test_what_uses_a_mask_up_has_not_lost_it():
    layers, ops = keras.layers, keras.ops
    for use_up in (
        lambda x: layers.RepeatVector(4)(layers.GlobalAveragePooling1D()(x)),
        lambda x: ops.mean(x, axis=1, keepdims=True),
        lambda x: ops.reshape(x, (-1, 6, SIZE)),
        lambda x: layers.Dense(SIZE)(ops.transpose(x, (0, 2, 1))),
        lambda x: ours()(embedded(keras.Input((4,)), mask_zero=False), x),
    ):
        ids = keras.Input((12,), dtype="int32")
        _, found = said(lambda ids, use_up: ours()(use_up(embedded(ids))), ids, use_up)
        assert not found
    # An operation that never had a mask before it, and one whose length is that of the size.
    bare = keras.Input((SIZE, SIZE))
    assert not said(ours(), ops.transpose(embedded(keras.Input((SIZE,))), (0, 2, 1)))[1]
    assert not said(ours(), bare + ours()(bare))[1]


def test_one_warning_of_a_deep_model():
    def body(ids):
        x = embedded(ids)
        for _ in range(4):
            x = keras.layers.LayerNormalization()(x + ours()(x))
        return x

    assert len(said(model_of, body)[1]) == 1


def test_cross_attention_is_looked_at_by_its_keys():
    def body(ids):
        x = embedded(ids)
        queries = embedded(ids, mask_zero=False)
        y = ours()(queries, x)  # the queries have no mask, and need none
        return ours(name="second")(y, x * 2.0)

    _, found = said(model_of, body)
    assert len(found) == 1
    assert "'second'" in found[0]
    assert "`value_mask=`" in found[0]


def test_a_model_made_anew_says_nothing(tmp_path):
    model, found = said(model_of, attended(ours, LOSING["`+`"]))
    assert len(found) == 1
    model.save(tmp_path / "m.keras")
    for again in (
        lambda: keras.models.clone_model(model),
        lambda: keras.Model.from_config(model.get_config()),
        lambda: keras.saving.load_model(tmp_path / "m.keras"),
        lambda: hm.apply_head_masks(model, hm.Window(8, 8)),
        lambda: model(keras.Input((None,), dtype="int32")),
    ):
        assert not said(again)[1]


def test_apply_head_masks_names_what_loses_the_mask():
    rule = hm.PerHead({0: hm.SameSentence(4, input="ids")})
    model, found = said(model_of, attended(stock, LOSING["`+`"]))
    assert not found  # stock Keras is left as it is
    for again in (False, True):
        masked, found = said(hm.apply_head_masks, model, rule)
        assert padding_moves(masked)
        assert len(found) == (not again)
        if not again:
            assert "(`+`, `keras.ops.add`)" in found[0]
            assert "add `& hm.recipes.padding('ids')` to the rule" in found[0]
    assert not said(hm.apply_head_masks, masked, hm.Window(8, 8), existing="and")[1]
    model = model_of(attended(stock, LOSING["`+`"]))
    masked, found = said(hm.apply_head_masks, model, rule & hm.recipes.padding("ids"))
    assert not padding_moves(masked)
    assert not found


def test_a_mask_that_is_lost_inside_a_model_inside():
    def nested(lose):
        inner = keras.Input((None,), dtype="int32")
        return keras.Model(inner, lose(embedded(inner)))

    lost, found = said(model_of, lambda ids: ours()(nested(lambda x: x * 2.0)(ids)))
    assert padding_moves(lost)
    assert len(found) == 1
    assert "(`*`, `keras.ops.multiply`) drops it" in found[0]
    kept, found = said(model_of, lambda ids: ours()(nested(keras.layers.Rescaling(2.0))(ids)))
    assert not padding_moves(kept)
    assert not found


def test_a_number_is_no_operand_of_a_layer():
    _, found = said(model_of, lambda ids: ours()(embedded(ids) * 2.0))
    assert "Use `keras.layers.Rescaling()` in its place" in found[0]


def test_stock_attention_takes_the_mask_off_its_inputs():
    """For attention beside it, too. So even `Add` loses it, unless a layer stands between."""

    def beside(ids):
        x = embedded(ids)
        return keras.layers.Add()([stock()(x, x), stock()(x, x)])

    for body in (beside, attended(stock, KEEPING["Add"])):
        masked, found = said(hm.apply_head_masks, model_of(body), hm.Window(8, 8))
        assert padding_moves(masked)
        assert len(found) == 1
        assert "takes the mask off its inputs when it runs" in found[0]

    def before_norm(ids):
        x = embedded(ids)
        y = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, stock()(y, y)])
        return stock()(x, x)

    masked, found = said(hm.apply_head_masks, model_of(before_norm), hm.Window(8, 8))
    assert not padding_moves(masked)
    assert not found


class Block(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.supports_masking = True

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x, padding_mask=None):
        mask = None if padding_mask is None else padding_mask[:, None]
        return self.attention(x, x, attention_mask=mask)


def test_apply_head_masks_looks_at_layers_around_attention():
    def body(with_mask):
        def of_ids(ids):
            x = embedded(ids)
            for i in range(3):
                x = x + Block(name=f"block{i}")(x, padding_mask=ids != 0 if with_mask else None)
            return x

        return of_ids

    found = said(hm.apply_head_masks, model_of(body(False)), hm.Window(8, 8))[1]
    assert len(found) == 1
    assert found[0].startswith("The attention layer 'block1/multi_head_attention")
    assert "(and 1 more)" in found[0]
    assert not said(hm.apply_head_masks, model_of(body(True)), hm.Window(8, 8))[1]


def test_which_rules_hide_padding():
    padding = hm.recipes.padding("ids")
    for rule in (
        padding,
        hm.Window(2, 2) & padding,
        hm.PerHead({0: hm.Window(2, 2)}) & padding,
        hm.SameSegment("parts"),
        hm.MaskInput("whole"),
    ):
        assert hides_padding(rule, 2), rule
    for rule in (
        hm.Full(),
        hm.Window(2, 2),
        hm.Window(after=0),  # padding on the left is seen
        hm.SameSentence(9),
        hm.PerHead({0: padding}),
        padding | hm.Window(2, 2),
        hm.recipes.sentences(9, (1, 2)),
    ):
        assert not hides_padding(rule, 2), rule
