"""Text from causal language models under rules: `generate()`, and the keys that it keeps."""
