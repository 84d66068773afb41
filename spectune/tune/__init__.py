"""This searches the space of speculative configurations."""
