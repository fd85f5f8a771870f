"""The command `keras-headmask`."""
