"""This decides on or off per cell and writes what an engine executes."""
