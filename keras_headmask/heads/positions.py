"""Which outputs have the positions of the inputs."""

from collections.abc import Sequence

from keras_headmask.attention.lost_masks import padding_inputs
from keras_headmask.heads.changes import Arrays
from keras_headmask.heads.tested import Tested
from keras_headmask.rules.base import MaskSpec


def rows_of_outputs(
    tested: Tested, inputs: Arrays, outputs: Arrays, names: Sequence[str], rule: MaskSpec | None
) -> tuple[dict[str, int | None], list[str]]:
    """How many positions each output has, `None` for one without; and notes on some.

    An axis as long as the inputs has their positions if it gets shorter with them; else it may be
    one of features. Without a rule, outputs that have no positions are left out.

    Args:
        tested, inputs, outputs: What is searched, its inputs, and the outputs on these.
        names: The inputs whose positions are changed.
        rule: What the outputs may depend on, if it was passed.

    Raises:
        ValueError: if no output is left.
    """
    lengths = {inputs[name].shape[1] for name in names}
    batch = len(inputs[names[0]])
    shorter = _on_shorter_inputs(tested, inputs, lengths)
    rows: dict[str, int | None] = {}
    notes = []
    for name, x in outputs.items():
        which = f"The output {name!r}, {x.shape},"
        if not x.ndim or len(x) != batch:
            notes.append(f"{which} was left out: its first axis does not count the examples.")
            continue
        has_positions = x.ndim > 1 and x.shape[1] in lengths
        if shorter is None:  # of one length, so that an axis as long may be features or heads
            is_unclear = x.ndim == 2 or bool(lengths & set(x.shape[2:]))
            has_positions &= rule is not None or not is_unclear or x.ndim == 3
            if has_positions and is_unclear:
                notes.append(f"{which} was taken to have the input's positions.")
        else:
            # By a rule on positions alone it may have any number of them.
            has_positions |= rule is not None and not rule.inputs
            is_less = [a < b for a, b in zip(shorter[name].shape, x.shape, strict=True)]
            has_positions &= is_less[1:2] == [True] and (rule is not None or not any(is_less[2:]))
        if has_positions or rule is not None:
            rows[name] = x.shape[1] if has_positions else None
        if not has_positions and rule is None:
            notes.append(
                f"{which} has no axis that is known to be the input's positions: pass `rule` to "
                "include it."
            )
        elif not has_positions and x.ndim > 2:  # (examples x features have none)
            notes.append(
                f"{which} was taken to have no positions: it may depend on what any position may."
            )
    if not rows:
        way_out = "The first axis of one at least must count the examples."
        if rule is None:
            way_out = (
                "Pass as `rule` which positions such an output may depend on, for example "
                f"`rule={_example(inputs)}`."
            )
        raise ValueError(
            f"No output has an axis known to be positions: {shapes(outputs)} from "
            f"{shapes(inputs)}. {way_out}"
        )
    return rows, notes


def _on_shorter_inputs(tested: Tested, inputs: Arrays, lengths: set[int]) -> Arrays | None:
    """The outputs on inputs without their last position; `None` if their length is fixed."""
    less = {}
    for name, x in inputs.items():
        axes = x.shape[1:3] if x.dtype.kind == "b" else x.shape[1:2]  # (pairs, in a mask)
        axes = () if tested.lengths.get(name) else axes
        cut = (slice(-1) if size in lengths else slice(None) for size in axes)
        less[name] = x[(slice(None), *cut)] if x.ndim else x
    if all(less[name].shape == x.shape for name, x in inputs.items()):
        return None
    try:
        return tested.run(less).outputs
    except Exception:  # whatever a model of a fixed length raises
        return None


def _example(inputs: Arrays) -> str:
    """A rule to propose for a pooled output: the real tokens, or the first positions."""
    if masks := padding_inputs(inputs):
        return f"hm.recipes.padding({masks[0]!r})"
    ids = [name for name, x in inputs.items() if x.dtype.kind in "iu"]
    return f"~hm.KeyIn({ids[0]!r}, 0)" if ids else "hm.Keys(0, 4)"


def shapes(arrays: Arrays) -> str:
    return ", ".join(f"{name!r}: {x.dtype} {x.shape}" for name, x in arrays.items())
