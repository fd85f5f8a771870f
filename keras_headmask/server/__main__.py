"""`python -m keras_headmask.server`."""

from keras_headmask.server.main import main

if __name__ == "__main__":
    main()
