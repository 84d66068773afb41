"""spectune tunes speculative decoding: measure, explain, decide, emit, verify."""

__version__ = "0.1.0"
