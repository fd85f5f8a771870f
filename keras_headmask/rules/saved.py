"""What a spec is as JSON and as text: its kind and its fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_headmask.rules import config


class Saved:
    """A dataclass that is saved, read and printed by its fields, under a permanent `kind`."""

    kind: str = ""

    def get_config(self) -> dict[str, Any]:
        """This spec as plain JSON values; fields at their default are left out.

        >>> from keras_headmask import Window
        >>> Window(before=255, after=0).get_config()
        {'kind': 'window', 'before': 255, 'after': 0}
        """
        if not config.is_registered(type(self)):
            raise TypeError(
                f"{type(self).__name__} has no kind to be saved under: put "
                "@register_spec('a_name') above the class."
            )
        fields = {
            f.name: config.to_json(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        }
        return {"kind": self.kind, **fields}

    @staticmethod
    def from_config(config_dict: Mapping[str, Any]) -> Any:
        """The spec that `config_dict` describes. Errors name the path to the bad place.

        >>> from keras_headmask import MaskSpec
        >>> MaskSpec.from_config({"kind": "window", "before": 2, "after": 0})
        Window(before=2, after=0)
        """
        return config.build(config_dict)

    def __repr__(self) -> str:
        """The call that makes this spec: required fields by place, others by name if set."""
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING:
                shown.append(repr(value))
            elif value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> Any:
        """Make a spec of this kind from its JSON fields, which stand at `path`."""
        return config.build_dataclass(cls, fields, path)

    @classmethod
    def json_fields(cls) -> dict[str, dict[str, Any]]:
        """The JSON Schema of each field in `get_config`; by default from the annotations.

        Needed where `from_fields` is overridden. `{"$ref": "#/$defs/rule"}` is a spec; a field
        whose schema has a `default` may be left out.
        """
        return config.json_fields(cls)
