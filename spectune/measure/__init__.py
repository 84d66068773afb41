"""This measures the arms of a cell in turn and notes every doubt."""
