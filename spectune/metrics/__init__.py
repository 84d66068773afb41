"""One pure function a metric, its formula as the docstring; records in, numbers out.

Counts are pooled first and divided once. A value that was never observed is None.
"""
