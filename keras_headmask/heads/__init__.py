"""Heads: what leaks, what each does, what it is worth, and on which device it is."""
