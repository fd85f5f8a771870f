"""Time and memory of attention under a mask per head, side by side with its peers.

`python -m benchmarks` measures, and writes a JSON record and Markdown tables;
`python -m benchmarks.gpu` does the same on a CUDA machine.
"""
