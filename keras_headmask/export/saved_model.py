"""`export_saved_model`: a model as a version that TensorFlow Serving loads."""

import contextlib
import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention.tuning import forward_only
from keras_headmask.export import checking, signatures, tf_serving, versions
from keras_headmask.export.fresh_process import milliseconds_since
from keras_headmask.export.interface import (
    LENGTHS,
    Arrays,
    Interface,
    answer,
    as_tensors,
    interface_of,
    is_pair,
    request,
    size_of,
)
from keras_headmask.export.precision import PRECISIONS, computing_in, tolerance_of
from keras_headmask.export.report import ExportReport, installed_versions
from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.survey import Survey

FORMAT_VERSION = 1  # of what `assets.extra/keras_headmask.json` says, and of the signatures


def export_saved_model(
    model: keras.Model,
    base_path: str | os.PathLike,
    *,
    version: int | None = None,
    input_signature: Mapping[str, Any] | None = None,
    padded: bool = True,
    xla_buckets: Sequence[tuple[int, int]] = (),
    scores: Any = False,
    warmup: Sequence[Any] = (),
    precision: str | None = None,
    check: Any = True,
) -> ExportReport:
    """Write `model` as `<base_path>/<version>/`, a SavedModel for TensorFlow Serving.

    The rule is in the graph: a client sends what the model takes, never a mask. The version is
    written beside the others under a hidden name, checked, and appears by one rename; a process
    killed at any moment leaves nothing that a server would load. In `dense_scope()` the graph has
    no loops: for OpenVINO, which fails in loops of more than one step. Signatures:

    - `serving_default`: inputs as the model names them, any batch and, where the model allows it,
      any length; outputs by the keys of a dict, else `output_0`, `output_1`, ...; never XLA.
    - `serve_padded`: takes `lengths`, int32 `(batch,)`, too. Positions past an example's length are
      not attended, and outputs there are 0: for servers that pad (TF Serving fills with each
      tensor's first element). `lengths` are clipped to the sequence. Left out, with the reason
      in the report, where anything but attention could see the padding.
    - `serve_scores`, if asked for: probabilities, float32 `(batch, heads, queries, keys)`.
    - `serve_xla_<B>x<T>`, if asked for: compiled by XLA for one shape. TF Serving runs it only with
      its flags for XLA.

    Loaded by `tf.saved_model.load`, it has `serve` too, called as the model itself, as after
    `model.export`. Keep what `load` returns as long as `serve` is called: it holds the variables.

    Args:
        model: A model under `apply_head_masks`, one that holds `PerHeadMaskedMultiHeadAttention`,
            or any Keras model. Other threads may run and export it meanwhile.
        base_path: A folder of versions, or a new one.
        version: A whole number that is not there yet; by default the next free one.
        input_signature: A dict from names to `keras.InputSpec(shape=..., dtype=...)`, `None` for
            batch and length. Subclassed models need it; it may fix sizes of others.
        padded: Whether to add `serve_padded` where it is possible.
        xla_buckets: Pairs (batch, length).
        scores: `True` for all attention layers, or which, as `layers` of `apply_head_masks`.
        warmup: Requests that TF Serving runs on loading, in each signature but those for XLA: dicts
            of arrays by input name, or pairs (batch, length). Needs tensorflow-serving-api. A
            request of more rows than the server's `max_batch_size` keeps a server that batches from
            loading the version: a warning.
        precision: `"float16"` or `"bfloat16"`: layers compute in it, except those of float64 and,
            in a model of mixed precision, those of float32. The softmax of attention, `Softmax`
            layers and layers that end in a softmax compute in float32; `keras.ops.softmax` in a
            model's own code does not. Weights and the dtypes of inputs and outputs stay; the report
            has the error.
        check: Whether to compare the version, before it is published, with the model at three
            shapes and with its twin without rules, in a fresh process that cannot import this
            package. Or the requests to compare on, as for `warmup`.

    Returns:
        An `ExportReport`; `print` it.

    Raises:
        TypeError, ValueError: for arguments that do not fit, a subclassed model without
            `input_signature`, a base path that is not a folder of versions.
        FileExistsError: for a version that exists.
        OSError: where the folder is not writable.
        RuntimeError: for another backend than TensorFlow, and for an export that fails the check
            or holds Python code; nothing is published then.

    >>> import tempfile
    >>> from keras_headmask import PerHead, PerHeadMaskedMultiHeadAttention, SameSentence
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(10, 8)(ids)
    >>> attention = PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=PerHead({0: SameSentence(9)}))
    >>> model = keras.Model(ids, attention(x, mask_inputs={"token_ids": ids}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export_saved_model(model, folder, check=False)
    >>> report.version, sorted(report.signatures)
    (1, ['serve_padded', 'serving_default'])
    """
    took: dict[str, float] = {}
    with _timed(took, "total"):
        warm = _listed("warmup", warmup)
        check = check if isinstance(check, bool) else _listed("check", check)
        _check_arguments(model, precision, warm, check, padded)
        base = versions.checked_base(base_path)
        versions.checked_version(version, base)
        survey = Survey(model)
        interface = interface_of(survey, input_signature)
        in_buckets = _in_buckets(xla_buckets, interface)
        entries, left_out = _with_scores(survey, scores)
        with versions.being_written(base) as folder:
            extra = folder / tf_serving.EXTRA
            given = [] if check is False else checking.requests(interface, check)
            requests = [request(interface, item) for item in warm]
            largest = max((len(x) for one in requests for x in one.values()), default=0)
            if largest > (limit := tf_serving.batch_limit(base)):
                warnings.warn(
                    f"`warmup` has a request of {largest} rows. A TensorFlow Serving that batches "
                    f"up to {limit} rows refuses it and the whole version. Use at most {limit}, or "
                    f"`write_serving_config(..., max_batch_size={largest})`.",
                    stacklevel=2,
                )
            reference = [answer(interface, one) for one in given if precision is not None]
            interface = signatures.keeping_dtypes(interface, precision)
            with computing_in(model, precision):
                signed = signatures.signatures_of(interface, entries, in_buckets)
                if padded:
                    length = max((size_of(interface, one)[1] for one in given), default=8)
                    if reason := signatures.why_not_padded(interface, length):
                        left_out["serve_padded"] = reason
                    else:
                        signed["serve_padded"] = signatures.padded(interface)
                with _timed(took, "trace"), forward_only():  # signatures share functions
                    traced = {name: signatures.traced(name, x) for name, x in signed.items()}
                graphs = checking.scan(traced)
                with _timed(took, "write"):
                    signatures.write(interface, traced, folder)
                extra.mkdir(exist_ok=True)
                records = _records(interface, requests, signed)
                if records:
                    tf_serving.write_records(extra, records)
                result = None
                if check is not False:
                    tolerance = tolerance_of(model, precision)
                    with _timed(took, "check"):
                        result = checking.checked(
                            folder, interface, signed, given, reference, tolerance, graphs
                        )
            described = {name: signatures.described(x, traced[name]) for name, x in signed.items()}
            contents = {
                "format_version": FORMAT_VERSION,
                "versions": installed_versions(),
                "rules": {path: spec.get_config() for path, spec in survey.rules.items()},
                "precision": precision,
                "signatures": described,
                "left_out": left_out,
            }
            text = json.dumps(contents, indent=2) + "\n"
            (extra / "keras_headmask.json").write_text(text, encoding="utf-8")
            sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            number = versions.publish(folder, base, version)
    return ExportReport(
        path=base / str(number),
        version=number,
        signatures=described,
        left_out=left_out,
        rules=dict(survey.rules),
        precision=precision,
        warmup_records=len(records),
        bytes={
            "graph": sizes[folder / "saved_model.pb"],
            "variables": sum(n for path, n in sizes.items() if path.parent.name == "variables"),
            "total": sum(sizes.values()),
        },
        milliseconds=took,
        check=result,
    )


@contextlib.contextmanager
def _timed(took: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    took[name] = milliseconds_since(start)


def _listed(name: str, value: Any) -> list[Any]:
    """The requests, or pairs, of an argument."""
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, str) or not isinstance(value, Iterable):
        also = ", or True or False" if name == "check" else ""
        raise TypeError(f"`{name}` must be a list{also}. Received: {value!r}.")
    return list(value)


def _check_arguments(model: Any, precision: Any, warm: Any, check: Any, padded: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"Exports need the TensorFlow backend, and this process runs on "
            f"{keras.backend.backend()}. Save the model as .keras; load and export it in a process "
            "with KERAS_BACKEND=tensorflow."
        )
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a Keras model. Received: {model!r}.")
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise ValueError(
            f"`precision` must be one of {PRECISIONS}, or None for that of the model. "
            f"Received: {precision!r}."
        )
    if not isinstance(padded, bool):
        raise TypeError(f"`padded` must be True or False. Received: {padded!r}.")
    if check == []:
        raise ValueError(
            "`check` holds no request to check with. Pass some, True for three made-up ones, or "
            "False to leave the check out."
        )
    if warm:
        tf_serving.check_installed()


def _in_buckets(buckets: Any, interface: Interface) -> dict[str, Arrays]:
    """A request of each shape that XLA compiles a signature for, by the signature's name."""
    requests = {}
    for bucket in _listed("xla_buckets", buckets):
        if not is_pair(bucket):
            raise ValueError(
                f"`xla_buckets` must hold pairs (batch, length), from 1. Received: {bucket!r}."
            )
        if any(x.dtype == "string" for x in interface.inputs.values()):
            raise ValueError("XLA compiles no text: leave `xla_buckets` out.")
        requests["{}{}x{}".format(signatures.XLA, *bucket)] = request(interface, bucket)
    return requests


def _with_scores(survey: Survey, scores: Any) -> tuple[list[AttentionLayer], dict[str, str]]:
    """The attention layers whose probabilities are served, and why others are left out."""
    if scores is False:
        return [], {}
    entries = survey.known if scores is True else selected(survey, scores)
    if not entries:
        raise ValueError("`scores` asks for attention, and the model has no attention layer.")
    if flash := [entry for entry in entries if _keras.flash(entry.layer)]:
        raise ValueError(
            f"The attention layer {flash[0]} computes by flash attention, which returns no "
            "probabilities. Leave it out of `scores`, or build it without flash_attention=True."
        )
    unknown = survey.unknown if scores is True else ()
    reason = "its class is not known, so its attention is out of reach"
    return list(entries), {f"serve_scores of {entry}": reason for entry in unknown}


def _records(
    interface: Interface, requests: Sequence[Arrays], asked: Iterable[str]
) -> list[tuple[str, Any]]:
    """Warm-up for the signatures that run anywhere: a failing one fails the whole version."""
    records = []
    for given in requests:
        answer(interface, given)  # raises what the model refuses
        tensors = as_tensors(interface, given)
        batch, length = size_of(interface, given)
        lengths = {LENGTHS: keras.ops.full((batch,), length, "int32")}
        for name in asked:
            if not name.startswith(signatures.XLA):
                records.append((name, tensors | lengths if name == "serve_padded" else tensors))
    return records
