"""SEARCH: the space of configurations, the plan of a sweep, the sweep itself."""
