"""A run on disk: append as you go, temp and rename, strict JSON, one schema version."""

from spectune.store.run import MANIFEST, RunStore, Surface
from spectune.store.strict_json import dump_strict

__all__ = ["MANIFEST", "RunStore", "Surface", "dump_strict"]
