"""`python -m benchmarks.request_bytes`: what a client sends, with a rule and with a mask instead.

One request to a BERT of 16 heads over 512 tokens, head 0 within its sentence: token ids, segment
ids and padding mask, from which the graph makes the mask; or the same and the boolean mask
(1, 16, 512, 512). As JSON (REST) and as a serialized PredictRequest (gRPC).
"""

import json
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np

HEADS, LENGTH, FULL_STOP = 16, 512, 1012


def requests() -> dict[str, dict[str, Any]]:
    """Inputs by name, with the rule in the graph and with the mask in the request."""
    import keras_headmask as hm

    rng = np.random.default_rng(0)
    token_ids = rng.integers(1000, 30000, (1, LENGTH)).astype("int32")
    token_ids[:, 15::16] = FULL_STOP
    inputs = {
        "token_ids": token_ids,
        "segment_ids": np.zeros((1, LENGTH), "int32"),
        "padding_mask": np.ones((1, LENGTH), "int32"),
    }
    rule = hm.PerHead({0: hm.SameSentence(FULL_STOP)}, default=hm.Full())
    mask = hm.make_mask(rule, LENGTH, LENGTH, HEADS, {"token_ids": token_ids})
    return {"rule in the graph": inputs, "mask in the request": inputs | {"mask": np.asarray(mask)}}


def sizes(inputs: dict[str, Any]) -> dict[str, int]:
    """Bytes of one request, as JSON and as protobuf."""
    import tensorflow as tf
    from tensorflow_serving.apis import model_pb2, predict_pb2

    columns = {name: value.tolist() for name, value in inputs.items()}
    body = json.dumps({"inputs": columns}, separators=(",", ":"))
    request = predict_pb2.PredictRequest(
        model_spec=model_pb2.ModelSpec(name="bert", signature_name="serving_default"),
        inputs={name: tf.make_tensor_proto(value) for name, value in inputs.items()},
    )
    return {"JSON": len(body.encode()), "protobuf": request.ByteSize()}


def main() -> None:
    for name, inputs in requests().items():
        told = ", ".join(f"{kind} {count:,} bytes" for kind, count in sizes(inputs).items())
        print(f"{name}: {told}")


if __name__ == "__main__":
    main()
