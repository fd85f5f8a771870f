"""Models people already have: find their attention layers, give each a rule, and keep it obeyed."""
