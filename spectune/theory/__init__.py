"""This explains the measured numbers with arithmetic only."""
