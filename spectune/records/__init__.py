"""The frozen nouns that travel between stages, the protocols that join the stacks, the glossary.

Glossary
    target, draft        the model that decides; the thing that proposes
    SpecConfig           what is tuned; `SpecConfig.off()` is plain decoding
    num_steps (D)        depth of the draft tree; for a chain the number of draft tokens K
    topk (k)             children per expanded node
    num_draft_tokens (N) tokens verified per sequence and round, the root included
    step                 one verification of one sequence after its first token
    round                one turn of the whole batch
    acceptance length    1 + accepted / steps, pooled over steps, the target's own token included
    tpot                 (e2e - ttft) / (output tokens - 1)
    cell                 the conditions that arms share: batch size, context, temperature, workload
    arm                  one SpecConfig inside a cell
    block                the smallest group of prompts that all arms of a cell decode in turn

Seconds, bytes and fractions 0..1 only; None means "not observed", never 0 or NaN.
"""

from __future__ import annotations

from spectune.records.config import OPTION, Method, SpecConfig, chain_or_tree_pool
from spectune.records.engine import (
    NEAR_TIE,
    Backend,
    Capabilities,
    ChatAnswer,
    Chooser,
    Clock,
    Converses,
    Fingerprint,
    Gap,
    Launch,
    LoadSession,
    Measure,
    MeasureSides,
    Replays,
    Session,
    SideArm,
)
from spectune.records.interval import Interval
from spectune.records.judgement import (
    Acceptance,
    AskedText,
    ConfidenceBin,
    HeadReport,
    Judgement,
    Pair,
)
from spectune.records.point import BlockResult, Cell, LoadRecord, Point, PointOutcome, RoundTimes, Status
from spectune.records.request import Cut, Prompt, Request, RequestRecord, RoundRecord, Sampling, StepRecord
from spectune.records.served import FailureKind, ServedRequest, SpecCounts, TokenSource
from spectune.records.served_point import Durations, ImportedPoint, ServedMeasurement

SCHEMA_VERSION = 1

__all__ = [
    "Pair",
    "Judgement",
    "HeadReport",
    "ConfidenceBin",
    "AskedText",
    "Acceptance",
    "SCHEMA_VERSION",
    "Backend",
    "BlockResult",
    "Capabilities",
    "Cell",
    "ChatAnswer",
    "Chooser",
    "Clock",
    "Converses",
    "Cut",
    "Durations",
    "FailureKind",
    "Fingerprint",
    "Gap",
    "ImportedPoint",
    "Interval",
    "Launch",
    "LoadRecord",
    "LoadSession",
    "Measure",
    "MeasureSides",
    "Method",
    "NEAR_TIE",
    "OPTION",
    "Point",
    "PointOutcome",
    "Prompt",
    "Replays",
    "Request",
    "RequestRecord",
    "RoundRecord",
    "RoundTimes",
    "Sampling",
    "ServedMeasurement",
    "ServedRequest",
    "Session",
    "SideArm",
    "SpecConfig",
    "SpecCounts",
    "Status",
    "StepRecord",
    "TokenSource",
    "chain_or_tree_pool",
]
