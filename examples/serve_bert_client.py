"""Asks a served sentence encoder which text is nearest to the first. Needs `requests` alone.

`examples/serve_bert.py` calls it: token ids arrive as JSON on standard input, since what splits
text into tokens is the model's business. TensorFlow Serving answers, and KServe's V1.
"""

import argparse
import json
import statistics
import sys
import time

import requests


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="up to the model's name: http://127.0.0.1:8501/v1/models/bert")
    parser.add_argument("--repeat", type=int, default=50, help="requests to take the time of")
    args = parser.parse_args()
    request = json.load(sys.stdin)
    with requests.Session() as session:
        milliseconds = []
        for _ in range(args.repeat):
            start = time.perf_counter()
            answer = session.post(f"{args.url}:predict", json=request["body"], timeout=60)
            milliseconds.append(1000 * (time.perf_counter() - start))
            answer.raise_for_status()

    # One output alone stands without its name: each prediction is an embedding of length 1.
    question, *texts = answer.json()["predictions"]
    cosines = [sum(a * b for a, b in zip(question, text, strict=True)) for text in texts]
    print(f"\n{request['texts'][0]}")
    for cosine, text in sorted(zip(cosines, request["texts"][1:], strict=True), reverse=True):
        print(f"{cosine:8.4f}  {text}")
    rows, length = len(request["texts"]), len(request["body"]["instances"][0]["token_ids"])
    print(
        f"\n{rows} texts of {length} tokens a request, "
        f"{len(milliseconds)} requests: median {statistics.median(milliseconds):.1f} ms, "
        f"first {milliseconds[0]:.1f} ms"
    )
    loaded = sorted({"keras", "tensorflow", "keras_headmask", "numpy"} & set(sys.modules))
    print(
        f"Of Keras, TensorFlow, keras_headmask and NumPy this client imported: {loaded or 'none'}"
    )


if __name__ == "__main__":
    main()
