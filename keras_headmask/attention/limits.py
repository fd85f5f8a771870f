"""Up to which sizes TensorFlow computes all logits of a head, or of a batch, in place of tiles."""

from keras_headmask.attention import blocks, head_groups
from keras_headmask.attention.head_groups import Part
from keras_headmask.rules.divided import divided


def most_pairs(part: Part) -> int:
    """Of a head; up to so many go head by head."""
    tuning = part.tuning
    if not part.rule.inputs:
        return tuning.most_pairs_by_head
    # Each example may have tiles of its own, with little work in each.
    return max(tuning.most_pairs_by_head, tuning.most_logits_by_head // len(part.heads))


def most_at_once(part: Part, drops: bool) -> int:
    """Of a batch; up to so many logits are computed at once."""
    tuning, groups = part.tuning, head_groups.by_rule(part)
    times = 1
    if all(map(_skips_little, groups)):
        times = tuning.at_once_where_little_is_skipped
    elif len(groups) > 1:
        times = tuning.at_once_of_head_groups
    elif drops:
        times = tuning.at_once_with_dropout
    return times * tuning.most_logits_at_once


def _skips_little(part: Part) -> bool:
    """Whether tiles would compute nearly all logits, by what the rule says of positions.

    Beside that flags may hide keys, of padding as a rule; ids hide more, and so may flags alone.
    """
    rule = divided(part.rule)
    if rule is None or rule.ids is not None or (rule.flags and rule.positional.constant):
        return False
    length = part.tuning.length_to_judge_by
    plan = blocks.plan_of(part._replace(rule=rule.positional), length, length, 0)
    seen = 0
    for runs in filter(None, plan.runs):
        first_gap = runs[1][0] - runs[0][1] if len(runs) > 1 else 0
        seen += runs[-1][1] - runs[0][0] - first_gap  # the loop skips no other
    return seen > part.tuning.little_is_skipped * length * len(plan.runs)
