"""`generate()` under rules: the logits and tokens of whole forwards, without a cache."""

import contextlib

import keras
import numpy as np
import pytest
from backbone_calls import ANSWER, data, drawn_by_numpy
from contract import numpy
from decoders import ENCODER_DECODERS, FAMILIES
from keras import ops
from own_attention import RULE
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.retrofit.frame import opened

keras_hub = pytest.importorskip("keras_hub")

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
        1: hm.recipes.causal() & (hm.Window(before=1) | hm.QueryFlag("generated")),
        2: hm.recipes.streaming(1, 2),
    }
)


def causal_lm(**sizes):
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=30, max_sequence_length=LENGTH, dropout=0.0, **SIZES | sizes
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
NEGATE_PADDING = "Gemma3CausalLM", "Gemma4CausalLM"


def without_cache(task, sampler, **inputs):
    """KerasHub's sampler, asking the whole model for each token."""
    names = [x.name for x in task.backbone.inputs]

    def hidden(given):  # as in the call of the task
        inputs = {name: ops.convert_to_tensor(x) for name, x in given.items()}
        with task._opened(inputs) if hasattr(task, "_opened") else contextlib.nullcontext():
            return task.backbone({name: inputs[name] for name in names})

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
def test_generation_under_any_rule_is_generation_without_a_cache(sampler):
    stock = causal_lm()
    masked = hm.apply_head_masks(stock, {"0": READING, "1": STREAMING}, add_inputs=True)
    run_eagerly = sampler != "greedy"  # compiled once: it takes its time
    got = generated(masked, SAMPLERS[sampler](), run_eagerly)
    np.testing.assert_array_equal(got, without_cache(masked, SAMPLERS[sampler]()))
    assert (got != without_cache(stock, SAMPLERS[sampler]())).any()


# --- Each family ----------------------------------------------------------------------------------

CAUSAL_LMS = [x.name for x in FAMILIES if x.name not in ("GPT-NeoX", "DeBERTa v3")]
# (KerasHub's linear attention goes over the padding after the prompt, too, also without a rule.)
NOT_LINEAR = {"num_layers": 1, "layer_types": ["full_attention"]}
OF_EACH = hm.PerHead(
    {0: hm.recipes.streaming(1, 2), 1: hm.Window(2, 0), 2: hm.SameSentence(END)},
    default=hm.KeyFlag("padding_mask"),
)


def task_of(backbone, kind="CausalLM"):
    drawn_by_numpy(backbone, 0.3)
    table = getattr(backbone, "decoder_token_embedding", backbone.token_embedding).embeddings
    table.assign(0.1 * table)  # else tied embeddings repeat the last token
    task = getattr(keras_hub.models, type(backbone).__name__.replace("Backbone", kind))
    return task(backbone=backbone, preprocessor=None)


def decoder(name, **arguments):
    family = next(x for x in FAMILIES if x.name == name)
    return task_of(getattr(keras_hub.models, family.backbone)(**family.arguments | arguments))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.long if x != "Qwen 3" else ()) for x in CAUSAL_LMS]
)
def test_a_family_generates_as_without_a_cache(name):
    stock = decoder(name, **NOT_LINEAR if "3.5" in name else {})
    masked = hm.apply_head_masks(stock, OF_EACH)
    got = generated(masked, "greedy", run_eagerly=True)
    np.testing.assert_array_equal(got, without_cache(masked, "greedy"))
    assert (got != without_cache(stock, "greedy")).any()


@pytest.mark.tensorflow
@pytest.mark.long
def test_generation_compiled_by_xla():
    import tensorflow as tf

    masked = hm.apply_head_masks(causal_lm(), STREAMING)
    masked.compile(sampler="greedy")
    got = tf.function(masked.generate_step, jit_compile=True)(inputs_of(masked))["token_ids"]
    np.testing.assert_array_equal(numpy(got), without_cache(masked, "greedy"))


class Compares(keras_hub.samplers.GreedySampler):
    """Chooses the best token, and holds the logits of each cached step to a whole forward."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def __call__(self, next, prompt, cache, index, mask=None, **kwargs):
        prompt, mask = np.array(numpy(prompt)), numpy(mask).astype(bool)
        length = prompt.shape[1]
        for place in range(int(index), length):
            logits, _, cache = next(ops.convert_to_tensor(prompt), cache, place)
            seen = (mask | (np.arange(length) < place)).astype("int32")
            whole = numpy(self.task(inputs_of(self.task, prompt, seen)))[:, place - 1]
            assert_close(numpy(logits), whole)
            prompt[:, place] = np.where(mask[:, place], prompt[:, place], whole.argmax(-1))
        return ops.convert_to_tensor(prompt)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Gemma 2", "Falcon"])  # (of each hook)
def test_a_step_is_a_row_of_the_whole_forward(name, tmp_path):
    """Of a file, too; heads in groups of the order 0, 3, 1, 2, which is no inverse of itself."""
    of_first, of_second = hm.Window(1, 0), hm.SameSentence(END)
    rule = hm.PerHead({0: of_first, 1: of_second, 2: hm.Nothing(), 3: of_first})
    stock = causal_lm(num_layers=1) if name == "GPT-2" else decoder(name, num_layers=1)
    masked = hm.apply_head_masks(stock, rule)
    masked.save(tmp_path / "task.keras")
    again = keras.saving.load_model(tmp_path / "task.keras", compile=False)
    again.compile(sampler=Compares(masked), run_eagerly=True)
    given = (np.arange(5) < [[2], [3]]).astype("int32")
    again.generate({"token_ids": PROMPT[:, :5], "padding_mask": given}, stop_token_ids=None)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
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


def test_a_task_on_a_masked_backbone_generates_only_if_it_has_the_rule():
    """KerasHub's cache calls the layers of the backbone, not the backbone."""
    backbone = hm.apply_head_masks(causal_lm().backbone, STREAMING)
    task = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    with pytest.raises(ValueError, match="called outside of the masked model 'gpt2_backbone"):
        generated(task, "greedy", True)
    masked = hm.apply_head_masks(task, hm.Full(), existing="and")
    np.testing.assert_array_equal(generated(masked, "greedy", True), without_cache(task, "greedy"))


@pytest.mark.long
def test_scores_are_the_logits_of_the_whole_forward():
    """KerasHub's `score()` calls the layers one by one, without the model's inputs."""
    rule = hm.PerHead({0: hm.SameSentence(END), 1: hm.Window(1, 0)})
    masked, real = hm.apply_head_masks(causal_lm(), rule), np.ones_like(PROMPT)
    logits = numpy(masked({"token_ids": PROMPT, "padding_mask": real}))
    for padding in ((), (real,)):
        assert_close(numpy(masked.score(PROMPT, *padding)), logits, depth=6)


def test_a_whole_mask_holds_in_generation():
    rule = hm.PerHead({"0-1": hm.MaskInput("seen"), 2: hm.MaskInput("seen") & hm.Window(3, 0)})
    masked = hm.apply_head_masks(causal_lm(), {"0": rule}, add_inputs=True)
    seen = np.random.default_rng(5).random((2, 4, LENGTH, LENGTH)) < 0.6
    got = generated(masked, "greedy", True, seen=seen)
    np.testing.assert_array_equal(got, without_cache(masked, "greedy", seen=seen))
    assert (got != generated(masked, "greedy", True, seen=np.ones_like(seen))).any()
    with pytest.raises(ValueError, match=r"whole mask `seen`.*14, 14\).*\(2, 4, 14, 9\)"):
        generated(masked, "greedy", True, seen=seen[..., :9])


def test_what_cannot_be_generated_is_refused():
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
    drafted = hm.apply_head_masks(causal_lm(), hm.SameSentence(END))
    drafted._assistant_model = object()  # as Gemma 4 may have one
    drafted.compile(sampler="greedy", run_eagerly=True)
    with pytest.raises(ValueError, match=r"reads \['token_ids'\], .*KerasHub's cache"):
        drafted.generate(given, stop_token_ids=None)


# --- Encoder and decoder --------------------------------------------------------------------------

# By the place in the translation: with another offset other keys are seen.
OF_CROSS = hm.PerHead({0: hm.Window(1, 1)}, default=hm.Queries(3) | hm.Keys(0, 3))


def translator(name):
    if name == "Bart":
        sizes = SIZES | {"vocabulary_size": 30, "max_sequence_length": LENGTH, "dropout": 0.0}
        return task_of(keras_hub.models.BartBackbone(**sizes), "Seq2SeqLM")
    family = next(x for x in ENCODER_DECODERS if x.name == name)
    return task_of(getattr(keras_hub.models, family.backbone)(**family.arguments), "Seq2SeqLM")


def translated(task, run_eagerly=True):
    task.compile(sampler="greedy", run_eagerly=run_eagerly, jit_compile=False)
    return task.generate(to_translate(task), stop_token_ids=None)["decoder_token_ids"]


def to_translate(task):
    """Two texts, and the first two tokens of their translations."""
    given = data(task)
    given["encoder_padding_mask"][:] = 1
    given["decoder_padding_mask"][:] = np.arange(ANSWER) < 2
    given["decoder_token_ids"][:, 2:] = 0
    return given


def translated_without_cache(task):
    given = to_translate(task)
    given["decoder_padding_mask"][:] = 1
    for place in range(2, ANSWER):
        best = numpy(task(given))[:, place - 1].argmax(-1)
        given["decoder_token_ids"][:, place] = best
    return given["decoder_token_ids"]


BY_LAYER = [pytest.param(x.name, 2, marks=pytest.mark.long) for x in ENCODER_DECODERS]
OF_ALL = [pytest.param(x.name, None, marks=pytest.mark.long) for x in ENCODER_DECODERS]


@pytest.mark.parametrize(("name", "layer"), [("Bart", None), *OF_ALL, *BY_LAYER])
def test_a_translation_is_that_of_uncached_forwards(name, layer):
    """Rules on positions, in self- and in cross-attention, or in one layer of those before it."""
    stock = translator(name)
    masked = hm.apply_head_masks(stock, RULE, layers=layer)
    if layer is None:
        masked = hm.apply_head_masks(masked, OF_CROSS, layers="cross")
    # (Compiled once: it takes its time.)
    run_eagerly = name != "Bart" or keras.backend.backend() != "tensorflow"
    got = translated(masked, run_eagerly)
    np.testing.assert_array_equal(got, translated_without_cache(masked))
    assert layer is not None or (got != translated_without_cache(stock)).any()


@pytest.mark.long
def test_a_step_of_a_translation_needs_its_place():
    masked = hm.apply_head_masks(translator("Bart"), OF_CROSS, layers="cross")
    given = to_translate(masked)
    inputs = (given[f"encoder_{x}"] for x in ("token_ids", "padding_mask"))
    layer = masked.backbone.decoder_transformer_layers[0]
    with opened({masked: {}}):
        _, encoded, own, cross = masked._build_cache(*inputs, given["decoder_token_ids"])
        caches = {"self_attention_cache": own[:, 0], "cross_attention_cache": cross[:, 0]}
        with pytest.raises(ValueError, match="needs the place of the first token: pass `self_att"):
            layer(encoded[:, :1], encoder_sequence=encoded, **caches)


@pytest.mark.long
def test_a_translation_that_could_not_hold_the_rule_is_refused():
    by_ids = hm.SameSentence(29, input="encoder_token_ids")
    with pytest.raises(ValueError, match=r"reads \['encoder_token_ids'\].*KerasHub's cache"):
        translated(hm.apply_head_masks(translator("Bart"), by_ids, layers="encoder"))
