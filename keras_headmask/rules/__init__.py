"""Rules: specs as values, their JSON, their words, and their masks."""
