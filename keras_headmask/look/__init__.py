"""Rules and attention as text, as pictures and in notebooks."""
