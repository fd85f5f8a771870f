"""How many bytes the keys and values of `generate()` take."""

import re
from typing import NamedTuple

import keras

from keras_headmask.generation import head_cache
from keras_headmask.retrofit.adapters import adapted
from keras_headmask.retrofit.rule import LayerRule, rules_in_force, whole_masks
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.fields import whole_number
from keras_headmask.rules.words import aligned


class CacheBytes(NamedTuple):
    """The size of the cache of `generate()`, in bytes.

    Args:
        by_layer: For each attention layer, by its path: the size of its keys and values, and their
            size in KerasHub's own cache.
        inputs: The mask inputs that the rules read, kept beside the keys.
    """

    by_layer: dict[str, tuple[int, int]]
    inputs: int

    @property
    def total(self) -> int:
        """The whole cache under the rules."""
        return sum(ours for ours, _ in self.by_layer.values()) + self.inputs

    @property
    def stock(self) -> int:
        """KerasHub's own cache."""
        return sum(stock for _, stock in self.by_layer.values())

    def __str__(self) -> str:
        rows = [("layer", "bytes", "stock", "share")]
        whole = self.by_layer | {"total": (self.total, self.stock)}
        rows += [(path, f"{a:,}", f"{b:,}", f"{a / b:.2f}") for path, (a, b) in whole.items()]
        return "\n".join(aligned(rows))


def cache_bytes(task: keras.Model, length: int, batch: int = 1) -> CacheBytes:
    """The size of the cache of `task.generate()`, beside KerasHub's own.

    Args:
        task: A causal language model of KerasHub's, `GPT2CausalLM` for one, under rules or not.
        length: The longest text in tokens, prompt included: `max_length` of `generate()`.
        batch: How many texts are generated at once.

    Returns:
        A `CacheBytes`; print it for a table by layer. The keys alone: the logits and the weights
        come on top.

    Raises:
        TypeError: if `task` is no causal language model.
        ValueError: if `length` or `batch` is not a whole number of at least 1.

    >>> import keras_hub
    >>> import keras_headmask as hm
    >>> sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 32}
    >>> backbone = keras_hub.models.GPT2Backbone(vocabulary_size=50, name="gpt2", **sizes)
    >>> task = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    >>> rule = hm.PerHead({"1-3": hm.recipes.streaming(sinks=4, window=60)})
    >>> print(cache_bytes(hm.apply_head_masks(task, rule), length=512))
    layer                                    bytes   stock    share
    gpt2/transformer_layer_0/self_attention  45,056  131,072  0.34
    gpt2/transformer_layer_1/self_attention  45,056  131,072  0.34
    total                                    90,112  262,144  0.34
    """
    if not (isinstance(task, keras.Model) and head_cache.generates(task)):
        raise TypeError(
            "`task` must be a causal language model that generates with a cache, such as "
            f"keras_hub.models.GPT2CausalLM. Received: {task!r}."
        )
    length = whole_number(length, "length", at_least=1)
    batch = whole_number(batch, "batch", at_least=1)
    keeps_by_head = getattr(task, "keeps_by_head", None)  # of a `causal_lm.HeadMaskedCausalLM`
    by_head = keeps_by_head is not None and keeps_by_head()
    by_layer: dict[str, tuple[int, int]] = {}
    in_force: list[LayerRule] = []
    for path, layer in ((entry.path, entry.layer) for entry in Survey(task).known):
        adapter = adapted(layer)
        rules = [x for x in rules_in_force(layer) if x.restricts]
        rules = head_cache.with_own_window(adapter, rules) if by_head else []
        slots = head_cache.slots_of(adapter, rules, length)
        bits = int(re.sub(r"\D", "", layer.compute_dtype))
        of_slot = 2 * batch * adapter.head_dim * bits // 8
        kept = sum(len(of_group.heads) * of_group.size for of_group in slots)
        by_layer[path] = (kept * of_slot, adapter.num_key_heads * length * of_slot)
        in_force += rules
    whole = {name: x.num_heads for x in in_force for name in whole_masks([x])}
    ids = {name for rule in in_force for name in rule.reads} - whole.keys()
    of_whole = sum(whole.values()) * length**2  # booleans
    return CacheBytes(by_layer, batch * (4 * length * len(ids) + of_whole))
