"""ASK: prompt files in every common shape come in, one sampled and fingerprinted Workload goes out.

Knows nothing of tokenizers and engines: a prompt is text, a category and an optional output limit.
"""

from __future__ import annotations

from spectune.workload.context import context_text
from spectune.workload.read import load_workload
from spectune.workload.workload import Workload

__all__ = ["Workload", "context_text", "load_workload"]
