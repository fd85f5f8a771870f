"""`generate()` under rules: the same tokens as without a cache, and only the keys that are seen."""

from pathlib import Path

import keras
import numpy as np
import pytest
from backbone_calls import drawn_by_numpy
from contract import numpy
from decoders import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask._keras import made_by
from keras_headmask.attention.logits import Changes
from keras_headmask.generation import head_cache, one_query
from keras_headmask.generation.head_cache import Slots

keras_hub = pytest.importorskip("keras_hub")
ROOT = Path(__file__).parents[2]

# --- Slots ----------------------------------------------------------------------------------------


@st.composite
def slots(draw):
    edges = sorted(draw(st.lists(st.integers(0, 12), max_size=4, unique=True)))
    fixed = tuple(zip(edges[::2], edges[1::2], strict=False))
    return Slots((0,), fixed, draw(st.integers(1, 7)))


def held_after(slots, last):
    """Position by position, what stands in each slot; -1 where nothing does."""
    held = np.full(slots.size, -1)
    for position in range(last + 1):
        held[int(slots.place(position))] = position
    return held


@given(slots(), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_slots_hold_the_last_positions_and_the_fixed_ones(slots, last):
    held = held_after(slots, last)
    said = numpy(slots.positions(last))
    np.testing.assert_array_equal(said[said >= 0], held[said >= 0])
    fixed = {i for start, stop in slots.fixed for i in range(start, min(stop, last + 1))}
    wanted = fixed | set(range(max(0, last - slots.ring + 1), last + 1))
    assert sorted(said[said >= 0]) == sorted(wanted)  # each once


@given(slots(), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_a_prompt_leaves_what_its_tokens_one_by_one_leave(slots, last):
    keys = np.random.default_rng(0).normal(size=(2, 12, 1, 3)).astype("float32")
    run = head_cache.Run(12, last)
    seeds = numpy(run._seeds(slots, {"key": ops.convert_to_tensor(keys)})["key"])
    kept = ops.zeros((2, 1, slots.size, 3))
    for position in range(last + 1):
        new = ops.convert_to_tensor(keys[:, position : position + 1].transpose(0, 2, 1, 3))
        kept = one_query.written(kept, new, slots.place(position))
    alive = numpy(slots.positions(last)) >= 0
    np.testing.assert_array_equal(seeds[:, :, alive], numpy(kept)[:, :, alive])


@given(slots(), st.integers(0, 11), st.sampled_from([1, 4]))
@settings(max_examples=30, deadline=None)
def test_a_mask_beside_the_rules_hides_its_slots(slots, last, heads):
    mask = np.random.default_rng(last).random((2, heads, 1, 12)) < 0.5
    seen = numpy(head_cache.Run(12, last)._mask([], slots, (1, 3), mask))
    held = numpy(slots.positions(last))
    for example, i in np.ndindex(2, seen.shape[1]):
        of_head = mask[example, (1, 3)[i] if heads == 4 else 0, 0]
        np.testing.assert_array_equal(seen[example, i, 0], (held >= 0) & of_head[held])


SINKS = np.array([0.5, -2.0, 3.0, 0.0], "float32")


@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, None), (0.5, None), (None, SINKS)])
@pytest.mark.parametrize("of_keys", [1, 2, 4])
def test_one_query_attends_as_any_query_does(of_keys, soft_cap, sinks):
    rng = np.random.default_rng(1)
    query, key, value = (
        rng.normal(size=shape).astype("float32")
        for shape in ((2, 1, 4, 8), (2, of_keys, 9, 8), (2, of_keys, 9, 5))
    )
    mask = rng.random((2, 4, 1, 9)) < 0.5
    mask[1, 2] = False
    changes = Changes(soft_cap, sinks=None if sinks is None else ops.convert_to_tensor(sinks))
    operands = map(ops.convert_to_tensor, (query, key, value, mask))
    got = numpy(one_query.attention(*operands, 0.3, changes))
    for example, head in np.ndindex(2, 4):
        of_head = head * of_keys // 4
        logits = key[example, of_head] @ query[example, 0, head] * 0.3
        if soft_cap:
            logits = soft_cap * np.tanh(logits / soft_cap)
        seen = mask[example, head, 0]
        wanted = np.zeros(5)
        if seen.any():
            weights = np.exp(logits[seen])
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            wanted = weights @ value[example, of_head][seen] / total
        assert_close(got[example, 0, head], wanted)


def test_one_slot_is_all_or_nothing(recwarn):
    """A head that sees itself alone, or no key; Keras' softmax would warn at every step."""
    query, value = (ops.ones((2, 1, 1, 3)) * x for x in (5.0, 7.0))
    mask = ops.convert_to_tensor(np.array([True, False])[:, None, None, None])
    got = numpy(one_query.attention(query, query, value, mask, 1.0))
    np.testing.assert_array_equal(got[:, 0, 0, 0], [7, 0])
    assert not [x for x in recwarn if "softmax" in str(x.message)]


# --- Generation -----------------------------------------------------------------------------------

LENGTH, END = 14, 9
SIZES = {"num_layers": 2, "num_heads": 4, "hidden_dim": 16, "intermediate_dim": 16}
PROMPT = np.random.default_rng(0).integers(1, 30, (2, LENGTH)).astype("int32")
GIVEN = (np.arange(LENGTH) < [[5], [7]]).astype("int32")
PROMPT = np.where(GIVEN, PROMPT, 0).astype("int32")
PROMPT[:, 2] = END
OTHERS = {
    "segment_ids": np.repeat([[0] * 6 + [1] * 8, [0] * 3 + [1] * 11], 1, 0).astype("int32"),
    "position_ids": np.tile(np.arange(LENGTH, dtype="int32"), (2, 1)),  # Gemma 4's
    "is_global": np.array([[1, 0] * 7, [0, 0, 1, 0, 0, 0, 0] * 2], "int32"),
    "documents": np.array([[0, 1, 1, 2, 0] + [0] * 9, [0, 1, 1, 2, 2, 2, 0] + [0] * 7], "int32"),
    "generated": 1 - GIVEN,
}
STREAMING = hm.PerHead({0: hm.recipes.streaming(2, 3), 1: hm.Window(4, 0), 2: hm.Nothing()})
READING = hm.PerHead(
    {
        0: hm.SameSentence(END),
        1: hm.SameSegment("segment_ids"),
        2: hm.Window(2, 0) | hm.KeyFlag("is_global"),
        3: hm.KeyFlag("padding_mask") & hm.Window(5, 0),
    }
)


RETRIEVAL = hm.PerHead(
    {
        0: hm.recipes.separate_documents("documents"),
        1: hm.Window(after=0) & (hm.Keys(0, 1) | hm.Window(before=1) | hm.QueryFlag("generated")),
        2: hm.recipes.streaming(1, 2),
    }
)


def causal_lm():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=30, max_sequence_length=LENGTH, dropout=0.0, **SIZES
    )
    return keras_hub.models.GPT2CausalLM(drawn_by_numpy(backbone, 0.5), preprocessor=None)


def inputs_of(task, token_ids=PROMPT, padding_mask=GIVEN):
    given = {"token_ids": token_ids, "padding_mask": padding_mask} | OTHERS
    return {name: given[name].copy() for name in task.input if name in given}


def generated(task, sampler, run_eagerly=False, **inputs):
    task.compile(sampler=sampler, run_eagerly=run_eagerly)
    given = inputs_of(task) | inputs
    if type(task).__name__ in NEGATE_PADDING:
        given = {name: ops.convert_to_tensor(x) for name, x in given.items()}
        given["padding_mask"] = ops.cast(given["padding_mask"], "bool")
        step = task.generate_step if run_eagerly else task.make_generate_function()
        return numpy(step(given, stop_token_ids=None)["token_ids"])
    return task.generate(given, stop_token_ids=None)["token_ids"]


# By `~`; and the `generate()` of some adds images, though there be none.
NEGATE_PADDING = "Gemma3CausalLM", "Gemma4CausalLM", "Gemma3nCausalLM"


def without_cache(task, sampler, **inputs):
    """KerasHub's sampler, asking the whole model for each token."""
    hidden = keras.Model(task.input, made_by(task.output)[1][0])

    def known(prompt, index):
        """As if all up to `index` were given."""
        prompt = numpy(prompt)
        times = len(prompt) // len(PROMPT)  # beams
        given = {name: np.repeat(x, times, 0) for name, x in (inputs_of(task) | inputs).items()}
        seen = np.arange(LENGTH) < int(index)
        both = {"token_ids": prompt, "padding_mask": np.maximum(given["padding_mask"], seen)}
        return given | {name: x.astype("int32") for name, x in both.items()}

    def following(prompt, cache, index):
        given = known(prompt, index)
        place = int(index) - 1
        return task(given)[:, place], hidden(given)[:, place], cache

    sampler = keras_hub.samplers.get(sampler)
    sampler.run_loop = lambda cond, body, loop_vars, maximum_iterations, model: _loop(
        cond, body, loop_vars, int(maximum_iterations)
    )
    index = int(GIVEN.sum(1).min())
    return numpy(
        sampler(
            next=following,
            prompt=ops.convert_to_tensor(PROMPT),
            cache=(),
            index=index,
            mask=ops.convert_to_tensor(GIVEN.astype(bool)),
            hidden_states=hidden(known(PROMPT, index)),
        )
    )


def _loop(cond, body, loop_vars, steps):
    for _ in range(steps):
        loop_vars = body(*loop_vars)
    return loop_vars


SAMPLERS = {
    "greedy": lambda: "greedy",
    "top_k": lambda: keras_hub.samplers.TopKSampler(k=4, seed=3),
    "beam": lambda: keras_hub.samplers.BeamSampler(num_beams=3),
    "contrastive": lambda: keras_hub.samplers.ContrastiveSampler(k=3, alpha=0.3),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.every_day("top_k")
def test_generation_under_any_rule_is_generation_without_a_cache(sampler):
    stock = causal_lm()
    masked = hm.apply_head_masks(stock, {"0": READING, "1": STREAMING}, add_inputs=True)
    run_eagerly = sampler != "greedy"  # compiled once: it takes its time
    got = generated(masked, SAMPLERS[sampler](), run_eagerly)
    np.testing.assert_array_equal(got, without_cache(masked, SAMPLERS[sampler]()))
    assert (got != without_cache(stock, SAMPLERS[sampler]())).any()


# --- Of families whose query heads share keys -----------------------------------------------------

CAUSAL_LMS = {
    "Falcon": "FalconCausalLM",
    "Llama": "LlamaCausalLM",
    "Mistral": "MistralCausalLM",
    "Qwen 2": "QwenCausalLM",
    "Qwen 3": "Qwen3CausalLM",
    "Phi-3": "Phi3CausalLM",
    "Gemma": "GemmaCausalLM",
    "Gemma 2": "GemmaCausalLM",
    "BLOOM": "BloomCausalLM",
    "Gemma 3, text": "Gemma3CausalLM",
    "Mixtral": "MixtralCausalLM",
    "Qwen MoE": "QwenMoeCausalLM",
    "Qwen 3 MoE": "Qwen3MoeCausalLM",
    "SmolLM 3": "SmolLM3CausalLM",
    "Gemma 3n, text": "Gemma3nCausalLM",
    "Gemma 4, text": "Gemma4CausalLM",
    "Qwen 3.5": "Qwen3_5CausalLM",
    "Qwen 3.5 MoE": "Qwen3_5MoeCausalLM",
    "gpt-oss": "GptOssCausalLM",
}
KEEP_ALL = "Falcon", "BLOOM", "Gemma 3n, text", "Gemma 4, text"
LINEAR = "Qwen 3.5", "Qwen 3.5 MoE"  # attention in some layers, linear attention in others
OF_EACH = hm.PerHead(
    {0: hm.recipes.streaming(1, 2), 1: hm.Window(2, 0), 2: hm.SameSentence(END)},
    default=hm.KeyFlag("padding_mask"),
)


def decoder(name, **arguments):
    family = next(x for x in FAMILIES if x.name == name)
    backbone = getattr(keras_hub.models, family.backbone)(**family.arguments | arguments)
    drawn_by_numpy(backbone, 0.3)
    if family.name == "Gemma 3n, text":
        table = backbone.language_model.embed_tokens.embedding.embeddings
    else:
        table = backbone.token_embedding.embeddings
    table.assign(0.1 * table)  # else tied embeddings repeat the last token
    return getattr(keras_hub.models, CAUSAL_LMS[name])(backbone=backbone, preprocessor=None)


ALIKE = (
    "Mistral",
    "Qwen 2",
    "Phi-3",
    "Gemma",
    "Gemma 2",
)  # what is special in them, one of the others has


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in ALIKE else ())
        for name in CAUSAL_LMS
        if name not in (*KEEP_ALL, *LINEAR)
    ],
)
@pytest.mark.every_day("Qwen 3$")
def test_decoders_with_shared_keys_generate_as_without_a_cache(name):
    stock = decoder(name)
    masked = hm.apply_head_masks(stock, OF_EACH)
    got = generated(masked, "greedy", run_eagerly=True)
    np.testing.assert_array_equal(got, without_cache(masked, "greedy"))
    assert (got != without_cache(stock, "greedy")).any()
    sampler = Looks()
    generated(masked, sampler, run_eagerly=True)
    # Queries 0 and 1 share the first head of keys: 1 sink and 3 last positions. Queries 2 and 3 may
    # look anywhere, or as far as the attention's own window of 4, which at gpt-oss is 5 keys wide.
    places = [group["key"].shape[2] for layer in sampler.cache["layers"] for group in layer]
    windows = [4, 4] if "Qwen" in name or "Gemma 3" in name else [4, LENGTH]
    of_two_layers = {"Gemma 2": [4, 4, 4, LENGTH], "SmolLM 3": 2 * [4, LENGTH]}
    of_two_layers["gpt-oss"] = [4, LENGTH, 4, 5]
    assert places == of_two_layers.get(name, windows)


@pytest.mark.long  # (20 seconds)
def test_layers_of_gemma_4_keep_heads_of_their_own_size():
    own = {"num_kv_shared_layers": 0, "global_head_dim": 32, "num_global_key_value_heads": 1}
    stock = decoder("Gemma 4, text", **own)
    masked, sampler = hm.apply_head_masks(stock, OF_EACH), Looks()
    got = generated(masked, "greedy", run_eagerly=True)
    np.testing.assert_array_equal(got, without_cache(masked, "greedy"))
    assert (got != without_cache(stock, "greedy")).any()
    generated(masked, sampler, run_eagerly=True)
    shapes = [
        [group["key"].shape[1:] for group in of_layer] for of_layer in sampler.cache["layers"]
    ]
    slides = 2 * [(1, 4, 16)]
    assert shapes == [slides, [(1, LENGTH, 32)], slides]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.long
def test_linear_attention_keeps_its_states(name, monkeypatch):
    """The tokens are those with KerasHub's cache, whose linear attention goes over the padding."""
    masked = hm.apply_head_masks(decoder(name), STREAMING, "self_attention")
    got = generated(masked, "greedy", run_eagerly=True)
    sampler = Looks()
    generated(masked, sampler, run_eagerly=True)
    (of_layer,) = sampler.cache["layers"]
    assert [group["key"].shape[2] for group in of_layer] == [4]  # its window
    monkeypatch.setattr(type(masked), "keeps_by_head", lambda self: False)
    np.testing.assert_array_equal(got, generated(masked, "greedy", run_eagerly=True))
    free = generated(hm.unmasked(masked), "greedy", run_eagerly=True)
    assert (got != free).any()


@pytest.mark.parametrize("name", KEEP_ALL)
@pytest.mark.every_day("Falcon")
def test_rules_on_positions_hold_with_the_cache_of_keras_hub(name):
    stock = decoder(name)
    masked = hm.apply_head_masks(stock, STREAMING)
    got = generated(masked, "greedy", run_eagerly=True)
    np.testing.assert_array_equal(got, without_cache(masked, "greedy"))
    assert (got != without_cache(stock, "greedy")).any()


def test_a_class_with_all_in_one_method_keeps_all_keys():
    """Falcon's bias stands inside: its cache is KerasHub's, so rules that read ids are refused."""
    stock = decoder("Falcon")
    held = hm.cache_bytes(hm.apply_head_masks(stock, STREAMING), LENGTH)
    assert held.total == held.stock
    by_ids = hm.apply_head_masks(stock, hm.SameSentence(END))
    with pytest.raises(ValueError, match=r"reads \['token_ids'\].*KerasHub's cache"):
        generated(by_ids, "greedy", run_eagerly=True)


@pytest.mark.long
def test_full_is_stock_and_a_file_generates_alike(tmp_path):
    stock = causal_lm()
    full = hm.apply_head_masks(stock, hm.Full())
    np.testing.assert_array_equal(generated(full, "greedy", True), generated(stock, "greedy", True))
    masked = hm.apply_head_masks(stock, STREAMING, layers=1)
    masked.save(tmp_path / "masked.keras")
    again = keras.saving.load_model(tmp_path / "masked.keras", compile=False)
    assert type(again) is type(masked)
    got = generated(again, "greedy", True)
    np.testing.assert_array_equal(got, without_cache(masked, "greedy"))
    assert (got != without_cache(stock, "greedy")).any()


@pytest.mark.tensorflow
@pytest.mark.long
def test_generation_compiled_by_xla():
    """Where no size may depend on data: the prompt's forward goes over the padding, too."""
    import tensorflow as tf

    masked = hm.apply_head_masks(causal_lm(), STREAMING)
    masked.compile(sampler="greedy")
    got = tf.function(masked.generate_step, jit_compile=True)(inputs_of(masked))["token_ids"]
    np.testing.assert_array_equal(numpy(got), without_cache(masked, "greedy"))


class Looks(keras_hub.samplers.GreedySampler):
    """Keeps what it is given as a cache."""

    def __call__(self, next, prompt, cache, **kwargs):
        self.cache = cache
        return prompt


@pytest.mark.parametrize("rule", [STREAMING, hm.Full(), hm.SameSentence(END) & hm.Window(3, 0)])
def test_the_cache_holds_as_many_bytes_as_are_said(rule):
    masked = hm.apply_head_masks(causal_lm(), {"0": rule, "1": hm.Window(20)})
    sampler = Looks()
    generated(masked, sampler, run_eagerly=True)
    said = hm.cache_bytes(masked, LENGTH, batch=2)
    held = [
        sum(numpy(x).nbytes for x in keras.tree.flatten(layer)) for layer in sampler.cache["layers"]
    ]
    assert [ours for ours, _ in said.by_layer.values()] == held
    assert said.stock == 2 * 2 * 2 * LENGTH * 16 * 4
    assert said.inputs == sum(numpy(x).nbytes for x in sampler.cache["inputs"].values())
    assert said.total == sum(held) + said.inputs
    assert bool(said.inputs) == bool(rule.inputs)
    stock = hm.cache_bytes(hm.unmasked(masked), LENGTH, batch=2)
    assert stock.total == stock.stock == said.stock


class Compares(keras_hub.samplers.GreedySampler):
    """Chooses the best token, and holds the logits of each cached step to a whole forward."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def __call__(self, next, prompt, cache, index, mask=None, **kwargs):
        prompt, mask = np.array(numpy(prompt)), numpy(mask).astype(bool)
        for place in range(int(index), LENGTH):
            logits, _, cache = next(ops.convert_to_tensor(prompt), cache, place)
            seen = np.maximum(GIVEN, np.arange(LENGTH) < place)
            whole = numpy(self.task(inputs_of(self.task, prompt, seen)))[:, place - 1]
            assert_close(numpy(logits), whole)
            prompt[:, place] = np.where(mask[:, place], prompt[:, place], whole.argmax(-1))
        return ops.convert_to_tensor(prompt)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
@pytest.mark.every_day("Llama")
def test_generation_knows_which_tokens_it_wrote(name):
    """`generated` is left out of the prompt; what is passed under that name counts."""
    stock = causal_lm() if name == "GPT-2" else decoder(name)
    masked = hm.apply_head_masks(stock, RETRIEVAL, add_inputs=True)
    prompt = inputs_of(masked)
    assert (prompt.pop("generated") == 1 - GIVEN).all()
    compared = []
    for sampler, run_eagerly in ((Compares(masked), True), ("greedy", name == "Llama")):
        masked.compile(sampler=sampler, run_eagerly=run_eagerly)
        compared.append(masked.generate(prompt, stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(*compared)
    np.testing.assert_array_equal(compared[0], without_cache(masked, "greedy"))
    in_window = generated(masked, "greedy", True, generated=np.zeros_like(GIVEN))
    assert (compared[0] != in_window).any()


@pytest.mark.parametrize(
    ("family", "layers", "sliding", "window", "built"),
    [("Gemma", 26, 13, 4096, 2), ("Gemma3", 34, 29, 1024, 6)],
)
def test_the_page_says_what_a_window_of_the_model_saves(family, layers, sliding, window, built):
    """By a narrow model of few layers, of which the first slides and the last does not."""
    page = (ROOT / "docs" / "generate.md").read_text("utf-8")
    assert f" {layers} layers, 4 key heads of 256 | {window:,} in {sliding} layers |" in page
    keys = {"head_dim": 256, "num_key_value_heads": 4, "num_query_heads": 4, "dtype": "bfloat16"}
    sizes = {"vocabulary_size": 8, "hidden_dim": 8, "intermediate_dim": 8, "num_layers": built}
    slides = {"use_sliding_window_attention": True, "sliding_window_size": window}
    slides |= {"image_size": 16} if family == "Gemma3" else {}
    backbone = getattr(keras_hub.models, f"{family}Backbone")(**keys, **sizes, **slides)
    task = getattr(keras_hub.models, f"{family}CausalLM")(backbone=backbone, preprocessor=None)
    masked = hm.apply_head_masks(task, hm.Full(), copy=False)
    for length in (4096, 16384):
        first, *_, last = hm.cache_bytes(masked, length).by_layer.values()
        ours, stock = (
            sliding * of_sliding + (layers - sliding) * of_full
            for of_sliding, of_full in zip(first, last, strict=True)
        )
        assert f"| {length:,} | {stock / 1e6:,.0f} MB | {ours / 1e6:,.0f} MB |" in page


def test_a_head_keeps_what_its_rule_may_show():
    """Sinks and a ring; a ring; nothing but the newest; all."""
    masked = hm.apply_head_masks(causal_lm(), STREAMING, layers=0)
    sampler = Looks()
    generated(masked, sampler, run_eagerly=True)
    first, second = sampler.cache["layers"]
    assert [tuple(group["key"].shape) for group in first] == [
        (2, 1, 2 + 3, 4),
        (2, 1, 5, 4),
        (2, 1, 1, 4),
        (2, 1, LENGTH, 4),
    ]
    assert [tuple(group["value"].shape) for group in second] == [(2, 4, LENGTH, 4)]


def test_a_whole_mask_holds_in_generation():
    rule = hm.PerHead({"0-1": hm.MaskInput("seen"), 2: hm.MaskInput("seen") & hm.Window(3, 0)})
    masked = hm.apply_head_masks(causal_lm(), {"0": rule}, add_inputs=True)
    seen = np.random.default_rng(5).random((2, 4, LENGTH, LENGTH)) < 0.6
    got = generated(masked, "greedy", True, seen=seen)
    np.testing.assert_array_equal(got, without_cache(masked, "greedy", seen=seen))
    assert (got != generated(masked, "greedy", True, seen=np.ones_like(seen))).any()
    assert hm.cache_bytes(masked, LENGTH, batch=2).inputs == seen.nbytes
    with pytest.raises(ValueError, match=r"whole mask `seen`.*14, 14\).*\(2, 4, 14, 9\)"):
        generated(masked, "greedy", True, seen=seen[..., :9])


def test_what_cannot_be_generated_or_counted_is_refused():
    masked = hm.apply_head_masks(causal_lm(), hm.SameSegment("segment_ids"), add_inputs=True)
    masked.compile(sampler="greedy", run_eagerly=True)
    given = {"token_ids": PROMPT, "padding_mask": GIVEN}
    with pytest.raises(ValueError, match=r"read \['segment_ids'\], which `generate\(\)` was not"):
        masked.generate(given, stop_token_ids=None)
    rule = hm.SameSegment("segment_ids") | hm.QueryFlag("generated")
    reads_both = hm.apply_head_masks(causal_lm(), rule, add_inputs=True)
    reads_both.compile(sampler="greedy", run_eagerly=True)
    with pytest.raises(ValueError, match=r"read \['segment_ids'\], .*'token_ids'\]"):
        reads_both.generate(given, stop_token_ids=None)
    with pytest.raises(ValueError, match=r"read \['generated', 'segment_ids'\], and `score\(\)`"):
        reads_both.score(PROMPT, GIVEN)
    short = given | {"segment_ids": OTHERS["segment_ids"][:, :5]}
    with pytest.raises(ValueError, match=r"`segment_ids`.*\(2, 14\).*\(2, 5\)"):
        masked.generate(short, stop_token_ids=None)
    with pytest.raises(TypeError, match="causal language model"):
        hm.cache_bytes(masked.backbone, 8)
    with pytest.raises(ValueError, match="`length`"):
        hm.cache_bytes(masked, 0)
