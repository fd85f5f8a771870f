"""What `tiling` and `sampling` of a spec replace: one member for each answer, kept for one release.

Reading one warns. A class that defines one warns, too, and gets the new member with its answer.
"""

import warnings
from collections.abc import Collection
from typing import Any

# By the new member, each former name and the field that replaces it.
FORMER_NAMES = {
    "tiling": {
        "is_local": "is_local",
        "opens": "opens",
        "is_sparse": "is_sparse",
        "may_leave_gaps": "gaps",
    },
    "sampling": {
        "reach": "distance",
        "closes": "closes",
        "open_side": "open_side",
        "ids_of_interest": "ids",
        "reads_segments": "segments",
    },
}


class FormerNames:
    """The former names of a spec's members."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for member in FORMER_NAMES:
            names = _overridden(cls, member)
            is_first = bool(names) and not isinstance(getattr(cls, member), _OfFormerNames)
            if is_first:
                setattr(cls, member, _OfFormerNames(member))
            for name in names:
                if is_first or name in vars(cls):
                    _warn(f"{cls.__name__}.{name}", name, member, stacklevel=3)

    @property
    def is_local(self) -> bool:
        """`tiling.is_local`, by its former name."""
        return _read(self, "is_local", "tiling").is_local

    @property
    def opens(self) -> str | None:
        """`tiling.opens`, by its former name."""
        return _read(self, "opens", "tiling").opens

    @property
    def is_sparse(self) -> bool:
        """`tiling.is_sparse`, by its former name; also whether `tiling.opens` is set."""
        tiling = _read(self, "is_sparse", "tiling")
        opens = type(self).opens is not FormerNames.opens and self.opens is not None
        return tiling.is_sparse or tiling.opens is not None or opens

    def may_leave_gaps(self, taken_out: Collection[Any] = ()) -> bool:
        """`tiling.gaps`, by its former name.

        Args:
            taken_out: No longer used.

        Returns:
            Whether the keys of a query are best taken as two runs.
        """
        return _read(self, "may_leave_gaps", "tiling").gaps

    @property
    def reach(self) -> int | None:
        """`sampling.distance`, by its former name."""
        return _read(self, "reach", "sampling").distance

    def closes(self, side: str) -> bool:
        """`side in sampling.closes`, by its former name.

        Args:
            side: "before" or "after".

        Returns:
            Whether it keeps a query from seeing every token on that side.
        """
        return side in _read(self, "closes", "sampling").closes

    @property
    def open_side(self) -> Any:
        """`sampling.open_side`, by its former name."""
        return _read(self, "open_side", "sampling").open_side

    @property
    def ids_of_interest(self) -> tuple[int, ...]:
        """`sampling.ids`, by its former name."""
        return _read(self, "ids_of_interest", "sampling").ids

    @property
    def reads_segments(self) -> bool:
        """`sampling.segments`, by its former name."""
        return _read(self, "reads_segments", "sampling").segments


class _OfFormerNames:
    """The `tiling` or `sampling` of a class that answers by former names."""

    def __init__(self, member: str):
        self.member = member

    def __get__(self, spec: Any, cls: type) -> Any:
        if spec is None:
            return self
        fields = FORMER_NAMES[self.member]
        answers = {fields[name]: _answer(spec, name) for name in _overridden(cls, self.member)}
        return _inherited(spec, self.member)._replace(**answers)


def _overridden(cls: type, member: str) -> list[str]:
    """The former names that `cls` answers by, apart from those that `member` itself overrides."""
    names: list[str] = []
    for part in cls.__mro__:
        if part is FormerNames or _is_new(vars(part).get(member)):
            break  # a class with both suits both releases
        names += [name for name in FORMER_NAMES[member] if name in vars(part)]
    return list(dict.fromkeys(names))


def _answer(spec: Any, name: str) -> Any:
    """The answer to a former name, as its field holds it."""
    if name == "closes":
        return [side for side in ("before", "after") if spec.closes(side)]
    if name == "may_leave_gaps":
        return spec.may_leave_gaps(())
    return getattr(spec, name)


def _inherited(spec: Any, member: str) -> Any:
    """`member` of the first class of `spec` that has it by no former name.

    So an override may read its former name from `super()`.
    """
    in_classes = (vars(cls).get(member) for cls in type(spec).__mro__)
    found = next(filter(_is_new, in_classes))
    return found.__get__(spec) if isinstance(found, property) else found


def _is_new(found: Any) -> bool:
    return found is not None and not isinstance(found, _OfFormerNames)


def _read(spec: Any, name: str, member: str) -> Any:
    """The value that holds the answer to `name`."""
    _warn(f"{type(spec).__name__}.{name}", name, member, stacklevel=4)
    return _inherited(spec, member)


def _warn(old: str, name: str, member: str, stacklevel: int) -> None:
    value, field = f"hm.{member.capitalize()}", FORMER_NAMES[member][name]
    warnings.warn(
        f"`{old}` goes in the next release. It is `{field}` of `{member}` now, an {value}: "
        f"read it as spec.{member}.{field}, and define it as {member} = {value}({field}=...).",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
