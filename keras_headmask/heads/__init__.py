"""Know your heads: what leaks, what a head does, what it is worth, and what can go."""
