"""How attention under a rule is computed: the dense definition, and tiles that skip masked work."""
