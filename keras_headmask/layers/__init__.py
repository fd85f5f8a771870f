"""Attention layers of Keras that take a rule: multi-head, and grouped-query."""
