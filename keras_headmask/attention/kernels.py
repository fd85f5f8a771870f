"""The kernels that can compute attention: each says which requests it takes, and why not others.

`choose` asks them in order. All that a kernel needs is here but the computing itself, so importing
this imports no code of a backend.
"""

import functools
import warnings
from typing import Any

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask._keras.tensorflow import in_vectorized_map, in_xla
from keras_headmask.attention import dense, device, gathered, half_precision, head_groups, planner
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.logits import for_tiles
from keras_headmask.attention.request import Request
from keras_headmask.attention.tuning import is_compiling, is_dense_scope, is_forward_only
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.by_head import restricts
from keras_headmask.rules.protocol import BOTH


class Kernel:
    """Computes attention under a rule without what the rule hides.

    It is asked of all heads as one `Part`, or of a head group as one.
    """

    name = ""
    file = ""  # where its code is
    block = ""  # the field of `Tuning` with how many keys it keeps or skips together

    def refuses(self, request: Request, part: Part) -> str | None:
        """Why it does not compute those heads, in words; `None` if it does."""
        return None

    def share(self, part: Part, queries: int, keys: int, query_offset: int) -> float:
        """The share of the pairs of a head group that it computes, by positions."""
        if not self.block:
            return 1.0
        return self._plan(part, queries, keys, query_offset).share(keys)

    def _plan(self, part: Part, queries: int, keys: int, query_offset: int) -> planner.Plan:
        block = getattr(part.tuning, self.block)
        tile = block if isinstance(self, FlexAttention) else part.tile
        return planner.plan(part.rule, queries, keys, query_offset, tile, block, len(part.heads))

    def compute(self, request: Request, part: Part, *operands: Tensor) -> Tensor:
        """The context `(B, T, H, Dv)`. Operands: query, key, value, tensors of `part.changes`."""
        raise NotImplementedError

    def run(self, request: Request, part: Part) -> tuple[Tensor, Tensor | None]:
        """The context, in the dtype of the value, and probabilities, which only `Dense` has."""
        tensors = request.query, request.key, request.value
        is_double = keras.backend.standardize_dtype(request.query.dtype) == "float64"
        operands = [ops.cast(x, "float64" if is_double else "float32") for x in tensors]
        changes = request.changes
        if changes.are_some or request.dropout:
            sizes = masks.sizes(request.query)[0], request.query.shape[2], *request.lengths
            changes = for_tiles(changes, operands[0].dtype, *sizes)
        part = part._replace(changes=changes.without_tensors())
        if request.dropout:
            drawn = head_groups.dropout(request.dropout, request.seed, *sizes[:2], request.bound)
            part = part._replace(dropout=drawn)
        context = self.compute(request, part, *operands, *changes.tensors)
        return ops.cast(context, request.value.dtype), None


class Dense(Kernel):
    """All logits, by the definition."""

    name, file = "dense", "dense"

    def run(self, request: Request, part: Part) -> tuple[Tensor, Tensor | None]:
        mask = _whole_mask(request)
        drop = None
        if request.dropout:
            drop = functools.partial(keras.random.dropout, rate=request.dropout, seed=request.seed)
        operands, changes = (request.query, request.key, request.value), request.changes
        positions = None if changes.position_bias is None else request.positions
        may_branch = not is_dense_scope()
        return dense.attention(*operands, mask, request.scale, changes, positions, drop, may_branch)


def _whole_mask(request: Request) -> Mask | None:
    """All that restricts, of rank 4; `None` where nothing does."""
    if request.rule is None:
        return request.mask
    return evaluation.mask_of_all_heads(request.rule, request.bound, request.query.shape[2])


# --- What holds for all that skip something ------------------------------------------------------


def without_choice(request: Request) -> str | None:
    """Why all logits are computed, whatever `tiled` says."""
    if request.mask is not None:
        return "a whole mask is given, by which no tile is skipped"
    if request.rule is None:
        return "nothing restricts, so there is nothing to skip"
    if 0 in _lengths(request):
        return "there are no queries, or no keys"
    return "`hm.dense_scope` holds" if is_dense_scope() else None


def impossible(request: Request) -> str | None:
    """Why nothing can be skipped here, though something restricts; an error for `tiled=True`."""
    sizes = *_lengths(request), request.query_offset
    # A symbolic Keras tensor cannot enter a loop of the backend's.
    if request.wants_probabilities or keras.backend.is_keras_tensor(request.query):
        return "returned probabilities and symbolic Keras tensors need all logits"
    if in_vectorized_map():
        return "`tf.vectorized_map` maps no loop over tiles. Leave `tiled` out"
    # (Sizes unknown to JAX are not `None`, and comparing them raises.)
    if not has_loops() and not all(isinstance(size, int) for size in sizes):
        return (
            "outside TensorFlow graphs, and in XLA, tiling needs known lengths and an int "
            "`query_offset`. Received: queries={}, keys={}, query_offset={!r}".format(*sizes)
        )
    return None


def _not_asked(request: Request) -> str | None:
    """Why all logits are computed, whatever they are."""
    reason = without_choice(request) or impossible(request)
    if reason is None and request.tiled is False:
        return "`tiled=False` asks for all logits"
    return reason


def _skips_nothing(request: Request, part: Part) -> str | None:
    reason = _not_asked(request)
    if reason is not None or request.tiled:
        return reason
    queries, keys = _lengths(request)
    is_gpu = _is_torch_on_gpu(request)
    fewest = part.tuning.fewest_pairs * (16 if is_gpu else 1)
    if None not in (queries, keys) and queries * keys < fewest:
        # (No sizes in these sentences: code that is compiled may not know them.)
        return f"there are fewer than {fewest} pairs, for which one product is faster"
    return None


def _lengths(request: Request) -> tuple[Any, Any]:
    """The static lengths of queries and keys."""
    return request.query.shape[1], request.key.shape[1]


def has_loops() -> bool:
    """Whether TensorFlow's loops, of sizes that the run decides, are possible here."""
    return keras.backend.backend() == "tensorflow" and not in_xla()


# --- TensorFlow -----------------------------------------------------------------------------------


class Loop(Kernel):
    """All logits where they are few, else a loop over tiles: a `tf.cond` on the sizes picks one."""

    name, file, block = "loop", "tensorflow/by_size", "tensorflow_block"

    def refuses(self, request: Request, part: Part) -> str | None:
        return _not_asked(request) or (None if has_loops() else "XLA compiles this code")

    def compute(self, request: Request, part: Part, *operands: Tensor) -> Tensor:
        from keras_headmask.attention.tensorflow import by_size

        return by_size.compute(part, *operands)


# --- JAX -----------------------------------------------------------------------------------------


class CuDNN(Kernel):
    """cuDNN's attention on an NVIDIA GPU: all logits, of which none is kept; a bias hides."""

    name, file = "cuDNN", "jax/cudnn"

    def refuses(self, request: Request, part: Part) -> str | None:
        from keras_headmask.attention.jax import cudnn

        operands = request.query, request.key, request.value
        if is_dense_scope():
            return "`hm.dense_scope` holds"
        if is_forward_only():
            return "a model is exported, to run on any device"
        read = [] if request.bound is None else request.bound.values
        if any(map(cudnn.is_mapped, keras.tree.flatten([operands, read]))):
            return "code is mapped"
        if keras.config.is_flash_attention_enabled() is False:
            return "`keras.config.disable_flash_attention()` was called"
        if request.wants_probabilities or keras.backend.is_keras_tensor(request.query):
            return "returned probabilities and symbolic Keras tensors need the logits"
        if request.dropout or request.changes.are_some:
            return "dropout, soft caps, biases and sinks"
        if evaluation.heads_are_spread():
            return "heads are spread over devices"
        sizes = [size for operand in operands for size in operand.shape]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return "a size is 0 or not known"
        return cudnn.limit(*operands, request.scale, self._is_masked(request))

    def run(self, request: Request, part: Part) -> tuple[Tensor, None]:
        from keras_headmask.attention.jax import cudnn

        operands = request.query, request.key, request.value
        mask = _whole_mask(request) if self._is_masked(request) else None
        return cudnn.attention(*operands, mask, request.scale), None

    def _is_masked(self, request: Request) -> bool:
        """Whether some pair may be hidden."""
        if request.rule is None:
            return request.mask is not None
        return restricts(request.rule, request.query.shape[2])


# --- A head group --------------------------------------------------------------------------------


def _not_in_float32(request: Request) -> str | None:
    """Why the tiles of PyTorch or JAX do not come into question, that know no other."""
    if request.dropout:
        return "dropout"
    # In half precision PyTorch's gradient rounds more than that of all logits at once.
    operands = request.query, request.key, request.value
    if half_precision.half_dtype(request.scale, *operands) is not None:
        return "operands of half precision are multiplied as such"
    return None


class BlockLoop(Kernel):
    """JAX' loops over tiles and the keys that each meets: block by block, or one run."""

    name, file, block = "loop", "jax/block_loop", "wide_block"

    def refuses(self, request: Request, part: Part) -> str | None:
        import jax

        # A step of theirs would gather what several devices hold.
        if jax.default_backend() != "cpu" or jax.device_count() != 1:
            return "loops suit one CPU"
        if not all(isinstance(size, int) for size in request.query.shape):
            return "a size is not known"
        if not request.query.shape[0]:
            return "there is no example"
        return _not_in_float32(request)

    def compute(self, request: Request, part: Part, *operands: Tensor) -> Tensor:
        from keras_headmask.attention.jax import block_loop

        return block_loop.compute(part, request.query_offset, *operands)


def _is_torch_on_gpu(request: Request) -> bool:
    return keras.backend.backend() == "torch" and device.is_gpu(request.query)


def _not_on_torch(request: Request) -> str | None:
    changed = "soft caps, biases and sinks" if request.changes.are_some else None
    return _not_in_float32(request) or changed


class Sdpa(Kernel):
    """PyTorch's own attention, of each tile and the keys that it may see."""

    name, file, block = "SDPA", "torch/tiles", "block"

    def refuses(self, request: Request, part: Part) -> str | None:
        from keras_headmask.attention.torch import tiles

        reason = _not_on_torch(request)
        if reason or tiles.can_read(request.bound, request.query, request.key, request.value):
            return reason
        return "values are not known yet: code is compiled, exported or mapped"

    def compute(self, request: Request, part: Part, *operands: Tensor) -> Tensor:
        from keras_headmask.attention.torch import tiles

        return tiles.compute(part, request.query_offset, *operands)


class FlexAttention(Kernel):
    """PyTorch's kernel that is compiled for a rule, on a CPU."""

    name, file, block = "FlexAttention", "torch/flex", "block"

    def refuses(self, request: Request, part: Part) -> str | None:
        from keras_headmask.attention.torch import flex

        return _not_on_torch(request) or flex.why_not_on_cpu(request)

    def compute(self, request: Request, part: Part, *operands: Tensor) -> Tensor:
        from keras_headmask.attention.torch import flex

        return flex.compute(part, request.query_offset, *operands)


class FlexOnGpu(FlexAttention):
    """FlexAttention on a GPU: one call for all heads, compiled for the rule."""

    name, block = "FlexAttention on CUDA", "wide_block"

    def refuses(self, request: Request, part: Part) -> str | None:
        from keras_headmask.attention.torch import flex

        reason = _skips_nothing(request, part) or flex.why_not_on_gpu(request)
        return reason or (None if request.tiled else _skips_little(part))

    def run(self, request: Request, part: Part) -> tuple[Tensor, None]:
        from keras_headmask.attention.torch import flex

        return _unless_not_compiled(flex.run, request, part)


def _skips_little(part: Part) -> str | None:
    """Why a GPU computes all logits rather than blocks.

    By what the rule says of itself, since code that is compiled knows neither sizes nor ids.
    """
    skipping = [heads for rule, heads in part.groups() if _may_skip_half(rule)]
    if 2 * sum(map(len, skipping)) > len(part.heads):
        return None
    return "most heads see most keys"


def _may_skip_half(rule: Any) -> bool:
    compares_ids = any(kind.sides == BOTH for kind in rule.inputs.values())
    return rule.tiling.is_local or compares_ids or "after" in rule.sampling.closes


class MaskedSdpa(Kernel):
    """PyTorch's own attention of all logits, with what hides as their bias, on a GPU."""

    name, file = "SDPA with the mask", "torch/sdpa"

    def refuses(self, request: Request, part: Part) -> str | None:
        from keras_headmask.attention.torch import sdpa

        return "`hm.dense_scope` holds" if is_dense_scope() else sdpa.why_not(request)

    def run(self, request: Request, part: Part) -> tuple[Tensor, None]:
        from keras_headmask.attention.torch import sdpa

        return _unless_not_compiled(sdpa.run, request, part)


def _unless_not_compiled(run: Any, request: Request, part: Part) -> tuple[Tensor, Tensor | None]:
    """`run(request, part)`; the definition for a rule that PyTorch's compiler fails on."""
    from keras_headmask.attention.torch.compiled import NotCompiled

    try:
        return run(request, part), None
    except NotCompiled as reason:
        warnings.warn(
            "PyTorch's compiler fails on a rule, so all logits are computed, without an engine for "
            f"GPUs: {reason} Let `allowed` use operations of `keras.ops` or torch alone.",
            stacklevel=2,
        )
        return Dense().run(request, part)


class Gathered(Kernel):
    """Known lengths: tiles that meet about as many keys at once, by positions alone."""

    name, file, block = "gathered", "gathered", "block"

    def compute(self, request: Request, part: Part, *operands: Tensor) -> Tensor:
        plan = self._plan(part, *_lengths(request), request.query_offset)
        return gathered.compute(part, plan, *operands)

    def share(self, part: Part, queries: int, keys: int, query_offset: int) -> float:
        return gathered.share(self._plan(part, queries, keys, query_offset), keys)


class ByGroup(Kernel):
    """Each head group by itself, by the first of `kernels` that takes it."""

    name, file = "by head group", "kernels"

    def __init__(self, *kernels: Kernel) -> None:
        self.kernels = kernels

    def refuses(self, request: Request, part: Part) -> str | None:
        reason = _skips_nothing(request, part)
        if reason is not None:
            return reason
        *others, last = self.kernels
        if request.tiled or first(others, request, part) is not None:
            return None
        if _is_torch_on_gpu(request) and is_compiling():
            return "a plan by NumPy would split the code that is compiled"
        # The last looks at positions alone, and copies the keys of each tile.
        shares, sizes = [], (*_lengths(request), request.query_offset)
        for group in head_groups.by_rule(part):
            shares.extend([last.share(group, *sizes)] * len(group.heads))
        share, most = sum(shares) / len(shares), part.tuning.most_computed
        if share <= most:
            return None
        return f"{last.name}, tiles would compute {share:.0%} of the logits, more than {most:.0%}"

    def compute(self, request: Request, part: Part, *operands: Tensor) -> Tensor:
        def of_group(group: Part, *operands: Tensor) -> Tensor:
            kernel = first(self.kernels, request, group)
            assert kernel is not None
            return kernel.compute(request, group, *operands)

        return head_groups.by_group(of_group, part, *operands)


def first(kernels: Any, request: Request, part: Part) -> Kernel | None:
    """The first that does not refuse."""
    for kernel in kernels:
        if kernel.refuses(request, part) is None:
            return kernel
    return None


# --- In order of preference ----------------------------------------------------------------------

KERNELS: dict[str, dict[str, tuple[Kernel, ...]]] = {
    # (A graph is traced on one device and may run on another: the loop asks when it runs.)
    "tensorflow": dict.fromkeys(("cpu", "gpu"), (Loop(), ByGroup(Gathered()), Dense())),
    "jax": {
        "cpu": (ByGroup(BlockLoop(), Gathered()), Dense()),
        "gpu": (ByGroup(Gathered()), CuDNN(), Dense()),
    },
    "torch": {
        "cpu": (ByGroup(Sdpa(), FlexAttention(), Gathered()), Dense()),
        "gpu": (FlexOnGpu(), ByGroup(Gathered()), MaskedSdpa(), Dense()),
    },
}


def kernels_for(request: Request) -> tuple[Kernel, ...]:
    """The kernels of the backend and of the device of `request`, in order of preference."""
    of_backend = KERNELS.get(keras.backend.backend())
    if of_backend is None:  # that this package does not know
        return ByGroup(Gathered()), Dense()
    return of_backend["gpu" if device.is_gpu(request.query) else "cpu"]
