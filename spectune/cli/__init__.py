"""This talks to people: the only place that parses, prints and exits."""
