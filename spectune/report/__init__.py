"""This tells the result: tables, charts and one self-contained page."""
