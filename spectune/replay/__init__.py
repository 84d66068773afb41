"""This replays a trace to count the acceptance of every configuration."""
