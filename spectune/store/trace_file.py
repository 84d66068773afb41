"""trace.npz: what every configuration would have accepted, at every position of the target's text.

A position is a root: `num_outputs` tokens of a request's output are there, the draft is about the
next ones. Positions are stored request after request, num_outputs = 1, 2, ... (a request of T output
tokens has T-1 of them).

For one drafter and one topk, the *path* is the chain of drafted candidates that spell the text after
the root. `path` holds its length, and `ranks` for its node at depth l and for every tree depth D >= l
how many candidates of the pool of depth D stand before it in the order in which a tree is selected
(score, then pool index). So num_accepted of (D, topk, N) is the number of path nodes with rank < N-1.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectune.errors import StoreError, UsageError
from spectune.records import OPTION, SpecConfig
from spectune.store.files import naming_errors, replacing
from spectune.store.strict_json import dump_strict

TRACE_VERSION = 1
TRACE_FILE = "trace.npz"
ABSENT = 255
"""A child rank outside what was recorded, or a token that the vocabulary slice does not hold."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedCut:
    """Comparisons closer than the recorded floor that decide what a configuration accepts.

    Equal lengths; entry i speaks of configurations with topk[i], num_steps = steps[i] and
    num_draft_tokens = nodes[i]; nodes 0: any number of nodes, and any num_steps >= steps[i] (a beam
    or a child was cut there).
    """

    position: Array  # int32
    topk: Array  # uint8
    steps: Array  # uint8
    nodes: Array  # uint16
    margin: Array  # float32, difference of two cumulative log-probabilities

    @classmethod
    def none(cls) -> TiedCut:
        return cls(
            position=np.zeros(0, np.int32),
            topk=np.zeros(0, np.uint8),
            steps=np.zeros(0, np.uint8),
            nodes=np.zeros(0, np.uint16),
            margin=np.zeros(0, np.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrace:
    """What one drafter proposed along all texts. P positions, K topks, D depths, S slices.

    path: [P, K] uint8, usable length of the path.
    ranks: one array a topk, in order position, node depth l, tree depth D >= l; empty for topk 1,
        where the rank is l-1. A rank of max_draft_tokens - 1 means "never selected".
    drafted: [P] uint8, drafts that were there at all (drafters that may find none); None: always all.
    child_length, child_ranks: rank of the target's token among its parent's children, down the text
        as long as one slice holds it in its best `max_child_rank`: [P] uint8 and [sum, S] uint8.
    sampled: [P, D] float16, min(1, q/p) of the target's token at each depth, T > 0 only.
    """

    method: str
    draft_model: str | None
    options: tuple[tuple[str, OPTION], ...]
    topks: tuple[int, ...]
    max_steps: int
    max_draft_tokens: int
    path: Array
    ranks: tuple[Array, ...]
    ties: TiedCut
    tie_floor: float = 0.0
    drafted: Array | None = None
    vocab_slices: tuple[int, ...] = ()
    max_child_rank: int = 0
    child_length: Array | None = None
    child_ranks: Array | None = None
    sampled: Array | None = None

    @property
    def num_positions(self) -> int:
        return int(self.path.shape[0])

    def refusal(self, config: SpecConfig) -> str | None:
        """Why this trace cannot answer for a configuration, or None."""
        if config.method != self.method or dict(config.options) != dict(self.options):
            return f"the trace is of {self.method} {dict(self.options)}"
        if config.topk not in self.topks:
            return f"topk {config.topk} was not traced, only {', '.join(map(str, self.topks))}"
        if config.num_steps > self.max_steps:
            return f"num-tokens {config.num_steps} is deeper than the traced {self.max_steps}"
        if config.is_tree and config.num_draft_tokens > self.max_draft_tokens:
            return f"num-draft-tokens {config.num_draft_tokens} is above the traced {self.max_draft_tokens}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One workload decoded once, and what each drafter proposed along it. R requests.

    `fingerprint` and `provenance` say what it is comparable with; `sampling` is the one of all texts.
    """

    fingerprint: dict[str, Any]
    workload: dict[str, Any]
    sampling: dict[str, Any]
    provenance: dict[str, Any]
    request_ids: tuple[str, ...]
    categories: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    num_prompt_tokens: Array  # int32 [R]
    num_outputs: Array  # int32 [R]
    output_ids: Array  # flat, request after request
    drafters: tuple[DrafterTrace, ...]

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)

    @property
    def num_positions(self) -> int:
        return int(np.maximum(self.num_outputs - 1, 0).sum())

    def drafter_of(self, config: SpecConfig) -> DrafterTrace:
        """The drafter that answers for a configuration; UsageError names what was traced."""
        reasons = [drafter.refusal(config) for drafter in self.drafters]
        for drafter, reason in zip(self.drafters, reasons, strict=True):
            if reason is None:
                return drafter
        same = [r for d, r in zip(self.drafters, reasons, strict=True) if d.method == config.method and r]
        raise UsageError(
            f"{config.label}: {(same or ['this drafter was not traced'])[0]}",
            hint="trace again with a space that holds this configuration",
        )


_ARRAYS = ("path", "drafted", "child_length", "child_ranks", "sampled")
_TIES = ("position", "topk", "steps", "nodes", "margin")
_ABOUT = ("fingerprint", "workload", "sampling", "provenance")
_BY_REQUEST = ("request_ids", "categories", "finish_reasons")
_TEXT_ARRAYS = ("num_prompt_tokens", "num_outputs", "output_ids")


def write_trace(file: Path, trace: Trace) -> None:
    """Write to a temporary file, then rename. Raises StoreError."""
    meta: dict[str, Any] = {
        "trace_version": TRACE_VERSION,
        **{name: getattr(trace, name) for name in (*_ABOUT, *_BY_REQUEST)},
        "drafters": [_drafter_meta(drafter) for drafter in trace.drafters],
    }
    arrays = {"meta": np.frombuffer(dump_strict(meta, where=str(file)).encode(), np.uint8)}
    arrays |= {name: getattr(trace, name) for name in _TEXT_ARRAYS}
    for index, drafter in enumerate(trace.drafters):
        arrays |= {
            f"{index}/{name}": array for name in _ARRAYS if (array := getattr(drafter, name)) is not None
        }
        arrays |= {f"{index}/ranks_{k}": r for k, r in zip(drafter.topks, drafter.ranks, strict=True)}
        arrays |= {f"{index}/tie_{name}": getattr(drafter.ties, name) for name in _TIES}
    with naming_errors(file), replacing(file) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def _drafter_meta(drafter: DrafterTrace) -> dict[str, Any]:
    return {
        "method": drafter.method,
        "draft_model": drafter.draft_model,
        "options": dict(drafter.options),
        "topks": drafter.topks,
        "max_steps": drafter.max_steps,
        "max_draft_tokens": drafter.max_draft_tokens,
        "tie_floor": drafter.tie_floor,
        "vocab_slices": drafter.vocab_slices,
        "max_child_rank": drafter.max_child_rank,
    }


def read_trace(path: Path) -> Trace:
    """Read a trace file, or the one in a run directory.

    Raises StoreError for a file that is missing, damaged or of another version.
    """
    file = path / TRACE_FILE if path.is_dir() else path
    if not file.is_file():
        raise StoreError(f"{file}: no trace is there", hint="make one: spectune trace --output-dir DIR")
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        meta = json.loads(arrays["meta"].tobytes())
        if meta["trace_version"] != TRACE_VERSION:
            raise StoreError(
                f"{file} is of trace version {meta['trace_version']}, this spectune reads {TRACE_VERSION}",
                hint="trace again",
            )
        return _build(meta, arrays)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error, zipfile.BadZipFile) as error:
        raise StoreError(f"{file} is damaged: {error}", hint="trace again") from error


def _build(meta: dict[str, Any], arrays: dict[str, Array]) -> Trace:
    drafters = []
    for index, about in enumerate(meta["drafters"]):
        columns: dict[str, Any] = dict(about)
        columns |= {name: tuple(about[name]) for name in ("topks", "vocab_slices")}
        columns |= {name: arrays.get(f"{index}/{name}") for name in _ARRAYS}
        columns["options"] = tuple(sorted(about["options"].items()))
        columns["ranks"] = tuple(arrays[f"{index}/ranks_{k}"] for k in about["topks"])
        columns["ties"] = TiedCut(**{name: arrays[f"{index}/tie_{name}"] for name in _TIES})
        drafters.append(DrafterTrace(**columns))
    fields: dict[str, Any] = {name: meta[name] for name in _ABOUT}
    fields |= {name: tuple(meta[name]) for name in _BY_REQUEST}
    fields |= {name: arrays[name] for name in _TEXT_ARRAYS}
    trace = Trace(**fields, drafters=tuple(drafters))
    if any(drafter.num_positions != trace.num_positions for drafter in drafters):
        raise ValueError("positions of texts and drafters differ")
    return trace


def join_drafters(parts: Sequence[DrafterTrace]) -> DrafterTrace:
    """One drafter's rows at the positions of all parts, in order. StoreError if the parts differ."""
    first = parts[0]
    if any(_drafter_meta(part) != _drafter_meta(first) for part in parts):
        raise StoreError("parts of a trace differ in their drafters", hint="trace again")
    offsets = np.cumsum([0, *(part.num_positions for part in parts)])
    ties = {name: np.concatenate([getattr(part.ties, name) for part in parts]) for name in _TIES}
    shifts = [np.full(len(part.ties.position), o) for part, o in zip(parts, offsets[:-1], strict=True)]
    ties["position"] = (ties["position"] + np.concatenate(shifts)).astype(np.int32)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in _ARRAYS
        if getattr(first, name) is not None
    }
    return replace(
        first,
        **columns,
        ranks=tuple(np.concatenate(ranks) for ranks in zip(*(p.ranks for p in parts), strict=True)),
        ties=TiedCut(**ties),
    )


def join_traces(parts: Sequence[Trace]) -> Trace:
    """One trace of traces of different requests by the same drafters."""
    fields: dict[str, Any] = {
        name: tuple(value for part in parts for value in getattr(part, name)) for name in _BY_REQUEST
    }
    fields |= {name: np.concatenate([getattr(part, name) for part in parts]) for name in _TEXT_ARRAYS}
    drafters = zip(*(part.drafters for part in parts), strict=True)
    return replace(parts[0], **fields, drafters=tuple(join_drafters(d) for d in drafters))
