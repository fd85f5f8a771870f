"""Attention by JAX' splash attention, the fused kernel for TPUs (`splash_masks` makes its masks).

What is ANDed with a rule on positions, ids that must be equal and flags of one side, becomes the
kernel's segment ids. A query that sees nothing gets whatever a kernel makes of it, and what is not
finite spreads: both are mended here, by the rule.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from keras_headmask.attention import finite
from keras_headmask.attention.splash_masks import RuleMask, mask_of
from keras_headmask.attention.tuning import current_tuning
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import allowed_tile
from keras_headmask.rules.fused import Divided, divided, flagged_side
from keras_headmask.rules.heads import head_groups
from keras_headmask.rules.positions import Keys
from keras_headmask.rules.protocol import Bound, Cuts

_DTYPES = "float32", "bfloat16"
_LANES = 128  # lengths are multiples of it, and sizes of heads are filled up to one
_BLOCKS = 512, 256, _LANES  # the largest that divides a length
_MOST_BLOCKS = 2**16  # of the masks that differ; each takes some of a memory of about 1 MB


class Group(NamedTuple):
    """Heads that one call of the kernel computes, and what says which keys they see."""

    heads: tuple[int, ...]
    mask: Any  # of each head in turn
    segments: tuple[Tensor, Tensor] | None  # of queries `(B, T)`, of keys `(B, S)`: equal ones meet


def by_splash(
    spec: MaskSpec, bound: Bound, query_offset: Any, scale: Any, *operands: Tensor
) -> Tensor | None:
    """The context by the kernel, if it takes the rule and the operands."""
    query, key, value = operands
    sizes = (*query.shape, *key.shape, *value.shape, query_offset)
    if not all(isinstance(size, int) for size in sizes) or 0 in sizes[:-1]:
        return None
    dtypes = {str(x.dtype) for x in operands}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        return None
    queries, keys = query.shape[1], key.shape[1]
    if queries % _LANES or keys % _LANES or queries * keys < current_tuning().fewest_pairs:
        return None
    return attend(spec, bound, query_offset, scale, *operands)


def attend(
    spec: MaskSpec,
    bound: Bound,
    query_offset: int,
    scale: Any,
    *operands: Tensor,
    interpret: bool = False,
) -> Tensor | None:
    """The context `(B, T, H, Dv)`; `None` if the kernel does not take the rule of some head.

    A key or value that is not finite makes the rows NaN that may see it, and no other.
    `interpret` runs the kernel on any device, slowly.
    """
    query, key, value = operands
    lengths, heads = (query.shape[1], key.shape[1]), query.shape[2]
    sharing = heads // key.shape[2]
    groups = lowered(spec, bound, heads, *lengths, query_offset)
    if groups is None or (len(groups) > 1 and sharing > 1):  # shared keys would be repeated
        return None
    sound = finite.zeroed(*operands)
    scaled = [sound[0] * jnp.asarray(scale, query.dtype), *sound[1:]]
    made = jnp.zeros((*query.shape[:3], value.shape[3]), value.dtype)
    for group in groups:
        own = np.array(group.heads)
        given = scaled if len(own) == heads else [x[:, :, own] for x in scaled]
        made = made.at[:, :, own].set(_run(group, *given, interpret=interpret))
    dead, spoilt = _mended(spec, bound, query_offset, *operands)
    return jnp.where(dead, 0, jnp.where(spoilt, jnp.nan, made))


def lowered(
    spec: MaskSpec, bound: Bound, heads: int, queries: int, keys: int, query_offset: int = 0
) -> list[Group] | None:
    """All heads in groups, or `None` if some rule is not to be said in the kernel's terms."""
    masks: dict[int, Any] = {}
    by_ids: dict[tuple, list[int]] = {}
    for rule, members in head_groups(spec, heads):
        parts = divided(rule)
        if parts is None or not _are_32_bits(parts, bound):
            return None
        lengths = queries, keys
        visited = parts.positional
        if not _rows_alive(RuleMask(visited, lengths, query_offset)).any():
            visited = Keys(0, _LANES)  # the kernel wants some; nothing of it is left in the end
        masks |= dict.fromkeys(members, mask_of(visited, *lengths, query_offset))
        by_ids.setdefault((parts.ids, parts.flags), []).extend(members)
    blocks = queries // _block(queries) * (keys // _block(keys))
    for called in by_ids.values():
        is_shared = len({masks[head] for head in called}) == 1
        if blocks * (1 if is_shared else len(called)) > _MOST_BLOCKS:
            return None
    return [
        Group(
            tuple(sorted(members)),
            splash.MultiHeadMask([masks[head] for head in sorted(members)]),
            segments(bound, ids, flags, queries, keys),
        )
        for (ids, flags), members in by_ids.items()
    ]


# --- Ids -----------------------------------------------------------------------------------------


def segments(
    bound: Bound, ids: MaskSpec | None, flags: Collection[MaskSpec], queries: int, keys: int
) -> tuple[Tensor, Tensor] | None:
    """Ids of the queries and of the keys, equal where `ids` and all of `flags` allow the pair."""
    if ids is None and not flags:
        return None
    own, other = jnp.zeros((1, queries), "int32"), jnp.zeros((1, keys), "int32")
    if ids is not None:
        ((own, other),) = bound.leaf_inputs[ids].values()
        own, other = own.astype("int32"), other.astype("int32")
    open_queries, open_keys = own >= 0, other >= 0
    for flag in flags:
        of_flag = allowed_tile(flag, bound, (0,))
        if flagged_side(flag) == "query":
            open_queries &= of_flag[:, 0, :, 0]
        else:
            open_keys &= of_flag[:, 0, 0, :]
    return jnp.where(open_queries, own, -1), jnp.where(open_keys, other, -2)


def _are_32_bits(parts: Divided, bound: Bound) -> bool:
    """Whether the dtype of the ids, if there are any, fits into int32."""
    if parts.ids is None:
        return True
    ((own, other),) = bound.leaf_inputs[parts.ids].values()
    return all(np.can_cast(x.dtype, "int32") for x in (own, other))


# --- The kernel ----------------------------------------------------------------------------------


def _run(group: Group, *operands: Tensor, interpret: bool) -> Tensor:
    query, key, value = (_lanes_filled(jnp.swapaxes(x, 1, 2)) for x in operands)
    rows, columns = _block(query.shape[2]), _block(key.shape[2])
    kernel = splash.make_splash_mha_single_device(
        group.mask,
        block_sizes=splash.BlockSizes(
            block_q=rows,
            block_kv=columns,
            block_q_dkv=rows,
            block_kv_dkv=columns,
            block_q_dq=rows,
            block_kv_dq=columns,
        ),
        interpret=interpret,
    )
    ids = None
    if group.segments is not None:
        ids = splash.SegmentIds(
            *(jnp.broadcast_to(x, (query.shape[0], x.shape[1])) for x in group.segments)
        )
    context = jax.vmap(kernel)(query, key, value, ids)
    return jnp.swapaxes(context, 1, 2)[..., : operands[2].shape[3]]


def _block(length: int) -> int:
    return next((size for size in _BLOCKS if length % size == 0), length)


def _lanes_filled(tensor: Tensor) -> Tensor:
    """The last axis filled up with zeros, as the device would store it anyhow."""
    return jnp.pad(tensor, [(0, 0)] * 3 + [(0, -tensor.shape[3] % _LANES)])


# --- What a kernel does not know -----------------------------------------------------------------


def _mended(
    spec: MaskSpec, bound: Bound, query_offset: int, *operands: Tensor
) -> tuple[Tensor, Tensor]:
    """Which rows see nothing, and which may see what is not finite: `(B, T, H, 1)` each.

    All pairs are looked at only if some key is not finite, or some row may be one that its own
    key does not show to be alive.
    """
    query, key, value = operands
    queries, keys, heads = query.shape[1], key.shape[1], query.shape[2]
    bad_queries = ~_rows_are_finite(query)
    bad_keys = jnp.repeat(
        ~(_rows_are_finite(key) & _rows_are_finite(value)), heads // key.shape[2], axis=2
    )

    def nothing(marks: Tensor) -> Mask:
        return jnp.zeros((marks.shape[0], queries, marks.shape[2]), bool)

    dead, spoilt = [], []
    groups = head_groups(spec, heads)
    for rule, members in groups:
        sees = functools.partial(_sees, rule, bound, queries)
        of_group = bad_keys[..., np.array(members)]
        dead_rows = _dead_rows(rule, bound, query_offset, (queries, keys), sees)
        dead.append(jnp.broadcast_to(dead_rows[..., None], (*query.shape[:2], len(members))))
        spoilt.append(lax.cond(of_group.any(), sees, nothing, of_group))
    order = np.argsort([head for _, members in groups for head in members])
    all_dead, all_spoilt = (jnp.concatenate(x, axis=2)[..., order] for x in (dead, spoilt))
    return all_dead[..., None], (all_spoilt | bad_queries)[..., None]


def _dead_rows(
    rule: MaskSpec,
    bound: Bound,
    query_offset: int,
    lengths: tuple[int, int],
    sees: Callable[[Tensor], Mask],
) -> Mask:
    """`(B or 1, T)`; `sees` looks at all pairs."""
    parts = divided(rule)
    assert parts is not None
    mask = RuleMask(parts.positional, lengths, query_offset)
    alive, of_ids = _rows_alive(mask), segments(bound, parts.ids, parts.flags, *lengths)
    if of_ids is None:
        return jnp.asarray(~alive)[None]
    own, other = of_ids
    place = np.clip(np.arange(lengths[0]) + query_offset, 0, lengths[1] - 1)
    sees_itself = (own == other[:, place]) & mask.diagonal()
    is_dead = (own < 0) | ~alive

    def looked_up() -> Mask:
        return ~sees(jnp.ones((len(sees_itself), lengths[1], 1), bool))[..., 0]

    return lax.cond((sees_itself | is_dead).all(), lambda: ~sees_itself, looked_up)


@functools.lru_cache(maxsize=64)
def _rows_alive(mask: RuleMask) -> np.ndarray:
    return mask.rows_alive()


def _sees(rule: MaskSpec, bound: Bound, queries: int, marks: Tensor) -> Mask:
    """Which queries may see a key that is marked: `(B, T, n)`, for n heads of one rule.

    `marks` `(B, S, n)`.
    """
    examples, keys, heads = marks.shape

    def of_block(start: Tensor) -> Mask:
        def rows(tensor: Tensor, axis: int) -> Tensor:
            return lax.dynamic_slice_in_dim(tensor, start, _LANES, axis)

        allowed = allowed_tile(rule, bound, (0,), Cuts(queries=rows))[:, 0]
        allowed = jnp.broadcast_to(allowed, (examples, _LANES, keys))
        return jnp.einsum("bts,bsn->btn", *(x.astype("float32") for x in (allowed, marks))) > 0

    blocks = lax.map(of_block, jnp.arange(0, queries, _LANES))
    return jnp.moveaxis(blocks, 0, 1).reshape(examples, queries, heads)


def _rows_are_finite(rows: Tensor) -> Tensor:
    return jnp.isfinite(rows).all(-1)
