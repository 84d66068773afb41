"""This teaches the draft head from the target's own text."""
