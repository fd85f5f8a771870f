"""A model as a version that TensorFlow Serving loads: traced, written, compared, published."""
