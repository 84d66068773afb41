"""This counts: one pure function a metric, its docstring the formula."""
