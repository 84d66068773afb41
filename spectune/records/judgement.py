"""What judging draft heads along the target's own texts gives: counts, cuts, pairs, one sentence."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from spectune.records.interval import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedText:
    """One answer of the target: what was asked, how, and whether the answer ran into a loop."""

    prompt_id: str
    category: str
    temperature: float
    num_prompt_tokens: int
    num_output_tokens: int
    had_loop: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Pooled over `num_rounds`: acceptance_length with an interval over texts, conditional by draft."""

    acceptance_length: Interval | None
    conditional: tuple[float | None, ...]
    num_rounds: int
    num_texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceBin:
    """Drafts whose probability lay in one tenth: how sure the head was, and how often it was right."""

    confidence: float
    accepted: float
    num_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """Everything that is said of one head. Cuts map a label to its acceptance."""

    name: str
    overall: Acceptance
    with_loops: Acceptance
    by_category: dict[str, Acceptance]
    by_temperature: dict[str, Acceptance]
    by_context: dict[str, Acceptance]
    by_position: dict[str, Acceptance]
    calibration: tuple[ConfidenceBin, ...]
    calibration_error: float | None
    coverage: float | None
    by_draft_vocab: dict[str, Acceptance]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """`ratio` = acceptance length of `head` over that of `base` on the same texts, with an interval."""

    head: str
    base: str
    ratio: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A report a head, every pair of heads, one sentence, and the texts behind it.

    num_tokens: drafts of a chain. settings: what was judged on what, as plain JSON values.
    """

    reports: tuple[HeadReport, ...]
    pairs: tuple[Pair, ...]
    verdict: str
    texts: tuple[AskedText, ...]
    num_tokens: int
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
