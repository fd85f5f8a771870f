"""`python -m keras_headmask.server`."""

import importlib.util
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("click") is None:
        sys.exit('Install the development server with `pip install "kserve>=0.21,<0.22"`.')
    from keras_headmask.server.main import main

    main(prog_name="python -m keras_headmask.server")
