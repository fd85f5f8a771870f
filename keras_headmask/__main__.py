"""The command `keras-headmask`, which is also `python -m keras_headmask`."""

import importlib.util
import sys


def main() -> None:
    if importlib.util.find_spec("click") is None:
        print("The command line needs Click. Install it with `pip install click`.", file=sys.stderr)
        sys.exit(2)
    from keras_headmask.cli.main import cli

    cli()


if __name__ == "__main__":
    main()
