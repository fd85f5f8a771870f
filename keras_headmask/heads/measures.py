"""`hm.measure_heads`: what each head attends to, over many texts."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask.heads.head_report import HeadReport
from keras_headmask.heads.pairs import Sums, Text, patterns
from keras_headmask.heads.progress import Progress, check_verbose
from keras_headmask.heads.reading import Batch, Reader
from keras_headmask.rules import evaluation, fields
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.inputs import SameSentence


def measure_heads(
    model: keras.Model,
    inputs: Any,
    end_ids: Any = None,
    special_ids: Any = None,
    layers: Any = None,
    token_ids: Any = None,
    padding: Any = None,
    batch_size: int = 32,
    verbose: int | str = "auto",
) -> HeadReport:
    """Measure what each head of self-attention attends to: shares of attention, over many texts.

    | measure     | the attention of query i goes to                                           |
    |-------------|----------------------------------------------------------------------------|
    | `self`      | key i                                                                      |
    | `previous`  | key i - 1                                                                  |
    | `next`      | key i + 1                                                                  |
    | `first`     | the first token of the text                                                |
    | `duplicate` | earlier keys with the same token                                           |
    | `induction` | what followed those: keys j <= i where token j - 1 is token i              |
    | `sentence`  | its own sentence, as `SameSentence(end_ids)` counts them                   |
    | `special`   | tokens whose id is in `special_ids`                                        |
    | `local`     | keys at most 8 positions away                                              |
    | `distance`  | the mean of abs(i - j), in positions                                       |
    | `entropy`   | its entropy, in nats: 0 for one key                                        |

    All are means over the queries that see something. Padding is neither query nor key: shares are
    of the attention that goes to real tokens. A query without such a key counts as 0 (`most` in the
    report has how many do not), so measure `duplicate` and `induction` on texts that repeat
    themselves. One batch is held at a time.

    Args:
        model: A model that `apply_head_masks` understands, with or without a rule.
        inputs: What the model is called on: arrays, in a dict or list where it has several inputs.
            Or an iterable of such batches: a generator, a `tf.data.Dataset`. As in `fit`, the first
            of a tuple are the inputs.
        end_ids: The id, or several, of tokens that end a sentence. Without it there is no
            `sentence`.
        special_ids: The id, or several, of special tokens, such as BERT's (101, 102). Without it
            there is no `special`.
        layers: Which layers, as in `apply_head_masks`. By default all self-attention.
        token_ids: The name of the input with the ids, or an array `(texts, length)` of them. By
            default the input named `token_ids`, `input_ids` or `ids`, or the only one of integers
            `(batch, length)`. Without any, measures that read ids are left out.
        padding: The name of the input that is true at real tokens, or an array `(texts, length)`.
            By default an input named `padding_mask` or `attention_mask`, or else the Keras mask
            that reaches the first attention layer. Without any, every position is a token.
        batch_size: Texts that the model runs on at once, if `inputs` are arrays.
        verbose: As in Keras, 0 for silence; "auto", 1 and 2 show progress on standard error: a bar
            in a terminal or notebook, after 3 seconds, and elsewhere a line every 30 seconds.

    Returns:
        A `HeadReport`. It prints as a table, and has `roles()`, `plot()` and `to_json()`.

    Raises:
        TypeError: if `model` is not a Keras model, or for `inputs` or ids of another kind.
        ValueError: if attention is out of reach or not self-attention; if there are no texts, or
            all have fewer than 2 tokens or the same one; if ids or padding are not found or do
            not fit.

    Measures: Clark et al. 2019, "What Does BERT Look At?"; Olsson et al. 2022, "In-context Learning
    and Induction Heads"; `detect_head` of TransformerLens, whose shares are these.

    >>> import keras_headmask as hm
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(50, 8)(ids)
    >>> model = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> rule = hm.PerHead({0: hm.Window(1, 0) & ~hm.Window(0, 0)})
    >>> texts = np.random.default_rng(0).integers(1, 50, (4, 24))
    >>> report = measure_heads(hm.apply_head_masks(model, rule), texts)
    >>> report.scores["previous"][0, 0]
    np.float64(1.0)
    >>> print(report.roles())
    attention  head 0  previous token
    """
    check_verbose(verbose)
    special = () if special_ids is None else fields.id_tuple(special_ids, "special_ids")
    sentences = None if end_ids is None else SameSentence(end_ids)
    reader = Reader(model, inputs, layers, token_ids, padding, batch_size)
    measuring = _Measuring(reader, sentences, special)
    bar = Progress(reader.count, "batches", verbose)
    for batch in reader.read(end_ids=end_ids, special_ids=special_ids):
        measuring.add(batch)
        bar.step()
    return measuring.report()


class _Measuring:
    """Adds up batches."""

    def __init__(self, reader: Reader, sentences: MaskSpec | None, special_ids: tuple[int, ...]):
        self.reader, self.sentences, self.special_ids = reader, sentences, special_ids
        self.sums: dict[str, Sums] = {}  # by path of the layer
        self.measures: tuple[str, ...] = ()

    def add(self, batch: Batch) -> None:
        """Measure one batch."""
        of_texts: list[Text] = []
        for path, probabilities in batch.layers:
            of_texts = of_texts or self._prepared(batch.ids, batch.real)
            if path not in self.sums:
                self.sums[path] = Sums(probabilities.shape[1], len(self.measures))
            for of_text, text in zip(probabilities, of_texts, strict=True):
                self.sums[path].add(of_text, text)

    def _prepared(self, ids: np.ndarray | None, real: np.ndarray) -> list[Text]:
        """The texts of a batch."""
        (count, length), same = real.shape, None
        if self.sentences is not None:
            mask = evaluation.make_mask(self.sentences, length, length, 1, {"token_ids": ids})
            same = ops.convert_to_numpy(mask)[:, 0]
        of_texts = []
        for i in range(count):
            of_ids = None if ids is None else ids[i]
            of_sentences = None if same is None else same[i]
            found = patterns(real[i], of_ids, of_sentences, self.special_ids)
            self.measures = tuple(found)
            of_texts.append(Text(real[i], found))
        return of_texts

    def report(self) -> HeadReport:
        return HeadReport(
            layers=tuple(self.sums),
            heads=tuple(len(sums.queries) for sums in self.sums.values()),
            scores=self._of_layers("measured", (*self.measures, "distance", "entropy")),
            even=self._of_layers("even", self.measures),
            most=self._of_layers("most", self.measures),
            texts=self.reader.texts,
            tokens=self.reader.tokens,
            padding=self.reader.padding,
            left_out=self._left_out(),
        )

    def _of_layers(self, name: str, measures: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Means over queries, `(layers, heads)` by measure; `nan` where there is no such head."""
        most = max(len(sums.queries) for sums in self.sums.values())
        means = np.full((len(self.sums), most, len(measures)), np.nan)
        for i, sums in enumerate(self.sums.values()):
            queries = np.where(sums.queries > 0, sums.queries, np.nan)[:, None]
            means[i, : len(queries)] = getattr(sums, name) / queries
        return {measure: means[..., k] for k, measure in enumerate(measures)}

    def _left_out(self) -> dict[str, str]:
        no_ids = "no input holds token ids. Pass `token_ids`, the name of an input or an array."
        why = dict.fromkeys(("duplicate", "induction"), no_ids)
        why["sentence"] = "pass `end_ids`, the ids of the tokens that end a sentence."
        why["special"] = "pass `special_ids`, such as BERT's (101, 102)."
        return {name: text for name, text in why.items() if name not in self.measures}
