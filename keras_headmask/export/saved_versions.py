"""The version folders beneath a base path, as TensorFlow Serving sees them, read but not loaded."""

import pathlib


def version_folders(base_path):
    """`{version: folder}` for `<base_path>/<integer>/`, the newest first.

    Other names are passed over, as TensorFlow Serving does: configurations, folders half-written.

    Raises:
        FileNotFoundError: `base_path` is no folder.
    """
    base = pathlib.Path(base_path)
    if not base.is_dir():
        raise FileNotFoundError(
            f"`base_path` must be a folder that holds versions, <base_path>/1/ and so on. There is "
            f"no folder {str(base_path)!r}."
        )
    found = {
        int(folder.name): folder
        for folder in base.iterdir()
        # ASCII digits and no leading zero: "01" and "1" would be one version in two folders.
        if folder.name.isascii()
        and folder.name.isdigit()
        and str(int(folder.name)) == folder.name
        and folder.is_dir()
    }
    return dict(sorted(found.items(), reverse=True))


def read_signatures(folder):
    """`{name: SignatureDef}` of the SavedModel in `folder`, without what its initializer adds.

    Raises:
        ValueError: the file is missing, is not a SavedModel, or has nothing to serve.
    """
    from tensorflow.core.protobuf import saved_model_pb2

    path = pathlib.Path(folder) / "saved_model.pb"
    try:
        meta_graphs = saved_model_pb2.SavedModel.FromString(path.read_bytes()).meta_graphs
    except Exception as error:  # of protobuf's own class, which differs between its versions
        raise ValueError(f"{str(path)!r} cannot be read as a SavedModel: {error}") from error
    signatures = {
        name: signature
        for graph in meta_graphs
        if "serve" in graph.meta_info_def.tags
        for name, signature in graph.signature_def.items()
        if not name.startswith("__saved_model")  # `__saved_model_init_op`, which serves nothing
    }
    if not signatures:
        raise ValueError(
            f"{str(path)!r} holds no signature under the tag 'serve'. Write it with "
            f"`model.export(...)` or `keras.export.ExportArchive`."
        )
    return signatures
