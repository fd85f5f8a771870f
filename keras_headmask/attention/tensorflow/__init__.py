"""Kernels of TensorFlow, imported when one of them computes: other backends need not have it."""
