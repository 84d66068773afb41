"""This guards a deployment against regressions."""
