"""The command `keras-headmask`, which is also `python -m keras_headmask`."""

import importlib.util
import sys


def main() -> None:
    if importlib.util.find_spec("click") is None:
        sys.exit(_without_click())
    from keras_headmask.cli.main import cli

    cli()


def _without_click() -> int:
    print(
        "The command line needs Click. Install it with `pip install click`.",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    main()
