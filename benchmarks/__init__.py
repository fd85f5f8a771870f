"""Time and memory of attention under a mask per head, side by side with its peers.

`python -m benchmarks` measures, and writes a JSON record, a Markdown table and plots;
`python -m benchmarks.gpu` does the same on a CUDA machine.
"""
