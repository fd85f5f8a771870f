"""Rules and attention as text and as pictures."""
