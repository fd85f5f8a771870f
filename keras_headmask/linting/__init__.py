"""What is likely wrong with a rule, found before a model is trained under it."""
