"""Heads: what leaks, what each does, what it is worth, what can go, and on which device it is."""
