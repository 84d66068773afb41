"""A run on disk: append as you go, temp and rename, strict JSON, one schema version."""

from spectune.store.run import RunStore, Surface
from spectune.store.strict_json import dump_strict

__all__ = ["RunStore", "Surface", "dump_strict"]
