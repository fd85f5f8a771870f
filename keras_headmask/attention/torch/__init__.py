"""Code that imports PyTorch: other backends need not have it."""
