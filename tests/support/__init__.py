"""Makers of small targets and heads for tests."""
