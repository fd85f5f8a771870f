"""A model as a version that TensorFlow Serving can load: signatures, checks, files."""
