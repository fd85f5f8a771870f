"""What a rule says: specs as values, their JSON, their words, and the masks they stand for."""
