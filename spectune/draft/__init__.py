"""This proposes the draft tokens behind the engine's one protocol."""
