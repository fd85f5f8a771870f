"""A SavedModel tried in a process that has TensorFlow and nothing of this package.

Run as a script, with the folder of the SavedModel and one of cases: `cases.json` lists, for each,
its `signature` and the `.npz` files with its `request` and what to hold against what comes back:
`answer`, `twin` (the answer of a model without rules), `allowed` (for scores: what rules allow).
Prints what was found as JSON, and judges nothing.
"""

import json
import os
import pathlib
import sys
import time

_BLOCKED = "keras_headmask"
# What Python and TensorFlow need to start, and the switches that change what is computed.
# fmt: off
_KEPT = {
    "APPDATA", "COMSPEC", "CONDA_PREFIX", "DYLD_LIBRARY_PATH", "HOME", "LANG", "LANGUAGE",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCALAPPDATA", "PATH", "PATHEXT", "SYSTEMROOT", "TEMP",
    "TMP", "TMPDIR", "TZ", "USERPROFILE", "VIRTUAL_ENV", "WINDIR",
}
_KEPT_FAMILIES = (
    "CUDA_", "DNNL_", "KMP_", "LC_", "MKL_", "OMP_", "ONEDNN_", "PYTHON", "TF_", "XLA_",
)
# fmt: on
# TF_ is Terraform's prefix as well: its TF_TOKEN_<host> and TF_VAR_<name> hold secrets.
_SECRET = ("CREDENTIAL", "KEY", "PASSW", "SECRET", "TF_VAR_", "TOKEN")
_LARGE = 1e4  # from here on an output's element is held against itself alone


class _Block:
    """Lets no import of this package through."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == _BLOCKED:
            raise ImportError(f"{_BLOCKED} must not be needed")


def environment() -> dict[str, str]:
    """The variables that a process of the export's check gets: no secret of this one, no GPU."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if (name.upper() in _KEPT or name.upper().startswith(_KEPT_FAMILIES))
        and not any(part in name.upper() for part in _SECRET)
    }
    # On the CPU: this process may hold all of an accelerator's memory.
    return kept | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def main(folder: pathlib.Path, cases: pathlib.Path) -> None:
    sys.meta_path.insert(0, _Block())
    import numpy as np
    import tensorflow as tf

    def read(name):
        with np.load(cases / name) as file:
            return {key[1:]: value for key, value in file.items()}

    start = time.perf_counter()
    loaded = tf.saved_model.load(str(folder))
    found = {"load_milliseconds": _since(start), "cases": []}
    for case in json.loads((cases / "cases.json").read_text()):
        function = loaded.signatures[case["signature"]]
        request = {k: tf.constant(v) for k, v in read(case["request"]).items()}
        # By argument, not by the specs' own names, which TensorFlow writes in small letters.
        specs = function.structured_input_signature[1]
        dtypes = {key: spec.dtype for key, spec in specs.items()}
        request = {k: tf.cast(v, dtypes[k]) for k, v in request.items()}
        function(**request)  # the first call of a shape plans it
        start = time.perf_counter()
        got = {k: np.asarray(v.numpy()) for k, v in function(**request).items()}
        measured = {"milliseconds": _since(start)}
        for name in ("answer", "twin"):
            if name in case:
                measured[name] = distance(got, read(case[name]))
        if "allowed" in case:
            allowed = read(case["allowed"])
            measured["outside"] = max(
                float(np.where(allowed[name], 0, got[name].astype("float64")).max(initial=0))
                for name in allowed
            )
        found["cases"].append(measured)
    if _BLOCKED in sys.modules:
        raise RuntimeError(f"{_BLOCKED} was imported")
    print(json.dumps(found))


def _since(start: float) -> float:
    return 1000 * (time.perf_counter() - start)


def distance(got: dict, wanted: dict) -> float:
    """The largest difference; infinite where names, shapes or what is finite are not the same.

    Differences of floats are in units of their output's largest element, at least 1: what rounding
    grows with. Elements from 1e4 on, such as the -1e9 of masked logits, have their own size for a
    unit instead, and so do not widen what the others may differ by.
    """
    if got.keys() != wanted.keys():
        return float("inf")
    return max((_apart(got[name], value) for name, value in wanted.items()), default=0.0)


def _apart(got, wanted) -> float:
    import numpy as np

    if got.shape != wanted.shape:
        return float("inf")
    if wanted.dtype.kind == "S":  # text, which TensorFlow gives as objects
        return 0.0 if (got.astype("S") == wanted).all() else float("inf")
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    whole = wanted.dtype.kind in "biu"
    if wanted.dtype.kind != "c":
        got, wanted = got.astype("float64"), wanted.astype("float64")
    size = np.abs(wanted)
    unit = 1.0 if whole else max(1.0, size[size < _LARGE].max(initial=0))
    with np.errstate(invalid="ignore"):
        apart = np.abs(got - wanted) / (1.0 if whole else np.where(size < _LARGE, unit, size))
    return float(np.nan_to_num(np.where(same, 0, apart), nan=np.inf).max(initial=0))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
