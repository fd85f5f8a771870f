"""Where private names of Keras are looked for; only attributes of objects need no lookup."""

import contextlib
import pkgutil
from typing import Any

import keras


def find(*places: str) -> Any:
    """What stands under the first of `places`, dotted names, that this version of Keras has."""
    for place in places:
        with contextlib.suppress(ImportError, AttributeError):
            return pkgutil.resolve_name(place)
    raise ImportError(
        f"keras_headmask needs {' or '.join(places)}, which Keras {keras.__version__} lacks. "
        "Install a version of Keras that keras_headmask names in its requirements."
    )
