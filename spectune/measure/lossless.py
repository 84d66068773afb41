"""Is an arm lossless? Texts and samples in, a verdict with its reasons out; runs nothing.

Greedy (and keyed) arms: equal texts, or differences at near ties only, beside a control of plain decoding
against itself. Sampled arms: token frequencies of one prompt asked many times.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spectune import stats
from spectune.measure.divergence import AskGap, first_difference
from spectune.metrics.latency import is_success
from spectune.records import Gap, Request, RequestRecord

BROKEN_AGREEMENT = 0.5
"""Healthy pairs agree in 87-96% of the texts; below half, verification or template is broken."""

CONTROL_MARGIN = 0.10
"""How much more often than plain decoding against itself an arm may differ where no gap is known."""

ERROR_RATE = 0.001
"""Chance that a lossless arm is called lossy by a test of frequencies or rates."""

MAX_GAPS = 16
"""Differences whose gap is asked, the earliest first: each costs a decode."""


class Kind(enum.StrEnum):
    """What a difference from plain decoding is."""

    NEAR_TIE = "near tie"
    MISMATCH = "mismatch"
    RAN_ON = "ran on past the end of plain decoding"
    ENDED_EARLY = "ended early"
    UNKNOWN = "gap unknown"


FATAL = frozenset({Kind.MISMATCH, Kind.RAN_ON, Kind.ENDED_EARLY})


class Verdict(enum.StrEnum):
    LOSSLESS = "lossless"
    LOSSY = "lossy"
    BROKEN = "verification or template broken"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token at which a text leaves plain decoding's."""

    request_id: str
    index: int
    kind: Kind
    gap: Gap | None = None

    @property
    def text(self) -> str:
        where = f"request {self.request_id} at output token {self.index}: {self.kind}"
        if self.gap is None:
            return where
        return f"{where} (the two best tokens are {self.gap.value:.3g} apart, near ties end at {self.gap.tolerance:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Texts of one arm against plain decoding's, and plain decoding's against its own second run."""

    num_shared: int
    differences: tuple[Difference, ...]
    num_control: int
    control_differences: tuple[Difference, ...]
    num_accepted: int

    @property
    def num_equal(self) -> int:
        return self.num_shared - len(self.differences)

    @property
    def rate(self) -> float:
        return self.num_equal / self.num_shared if self.num_shared else 0.0

    @property
    def control_rate(self) -> float:
        equal = self.num_control - len(self.control_differences)
        return equal / self.num_control if self.num_control else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frequencies:
    """Samples of some prompts: the smallest p that both arms draw one distribution, corrected (Holm)."""

    num_samples: int
    num_tests: int
    p_value: float | None
    worst: str = ""
    num_accepted: int = 0


def compare_texts(
    plain: Sequence[RequestRecord],
    control: Sequence[RequestRecord],
    arm: Sequence[RequestRecord],
    requests: Mapping[str, Request],
    ask_gap: AskGap,
) -> Agreement:
    """Triage every text that differs; `ask_gap` tells how near a tie plain decoding's choice was."""
    ours, again, theirs = (_texts(records) for records in (plain, control, arm))
    return Agreement(
        num_shared=len(ours.keys() & theirs.keys()),
        differences=_differences(ours, theirs, requests, ask_gap),
        num_control=len(ours.keys() & again.keys()),
        control_differences=_differences(ours, again, requests, ask_gap),
        num_accepted=sum(step.num_accepted for record in arm for step in record.steps),
    )


def judge_texts(found: Agreement) -> tuple[Verdict, str]:
    """The verdict and its reason in one sentence, both rates in it."""
    both = (
        f"{found.num_equal} of {found.num_shared} texts equal plain decoding's, "
        f"{found.num_control - len(found.control_differences)} of {found.num_control} in its control"
    )
    if found.num_shared == 0:
        return Verdict.INCONCLUSIVE, "no request was answered by both"
    if found.rate < BROKEN_AGREEMENT <= found.control_rate:
        return Verdict.BROKEN, f"{both}: verification or template broken"
    fatal = [difference for difference in found.differences if difference.kind in FATAL]
    if fatal and not any(difference.kind in FATAL for difference in found.control_differences):
        return Verdict.LOSSY, f"{both}; {len(fatal)} beyond rounding, the first: {fatal[0].text}"
    if _exceeds_control(found):
        return Verdict.LOSSY, f"{both}: it differs more often than plain decoding from itself"
    if found.num_accepted == 0:
        return Verdict.INCONCLUSIVE, f"{both}, but no draft was ever accepted: verification was hardly used"
    if not found.differences:
        return Verdict.LOSSLESS, both
    kinds = Counter(difference.kind for difference in found.differences)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if kinds.get(Kind.UNKNOWN) and not found.num_control:
        return Verdict.INCONCLUSIVE, f"{both}; {counted}: neither gaps nor a control tell rounding from a bug"
    return Verdict.LOSSLESS, f"{both}; {counted}"


def compare_samples(
    plain: Sequence[RequestRecord], arm: Sequence[RequestRecord], *, num_positions: int = 4
) -> Frequencies:
    """Token frequencies of each prompt and output position after the first.

    Records of one prompt share their request_id up to its last dash. The first token comes from the
    prompt's own pass, which no draft touches. Samples that ended before a position count as one token.
    """
    ours, theirs = _by_prompt(plain), _by_prompt(arm)
    names, p_values = [], []
    for prompt in sorted(ours.keys() & theirs.keys()):
        for position in range(1, num_positions + 1):
            first, second = (_counts(texts[prompt], position) for texts in (ours, theirs))
            if len({*first, *second}) < 2:
                continue
            p_values.append(stats.homogeneity_p_value(first, second, seed=position))
            names.append(
                f"prompt {prompt}, output token {position}: {_summary(first)} against {_summary(second)}"
            )
    accepted = sum(step.num_accepted for record in arm for step in record.steps)
    if not p_values:
        return Frequencies(num_samples=_size(theirs), num_tests=0, p_value=None, num_accepted=accepted)
    adjusted = stats.holm(p_values)
    lowest = min(range(len(adjusted)), key=lambda index: adjusted[index])
    return Frequencies(
        num_samples=_size(theirs),
        num_tests=len(p_values),
        p_value=adjusted[lowest],
        worst=names[lowest],
        num_accepted=accepted,
    )


def judge_samples(found: Frequencies) -> tuple[Verdict, str]:
    """Lossy where a frequency differs by more than chance."""
    if found.p_value is None:
        return Verdict.INCONCLUSIVE, "every sample drew the same tokens: give a higher temperature"
    said = f"{found.num_tests} token frequencies of {found.num_samples} samples"
    if found.p_value <= ERROR_RATE:
        return Verdict.LOSSY, f"{said} differ from plain decoding's (p {found.p_value:.2g}); {found.worst}"
    if found.num_accepted == 0:
        return Verdict.INCONCLUSIVE, f"{said} agree, but no draft was ever accepted"
    return Verdict.LOSSLESS, f"{said} agree with plain decoding's (smallest p {found.p_value:.2g} after Holm)"


def _differences(
    plain: Mapping[str, RequestRecord],
    arm: Mapping[str, RequestRecord],
    requests: Mapping[str, Request],
    ask_gap: AskGap,
) -> tuple[Difference, ...]:
    parted = sorted(
        (first_difference(arm[name].output_ids, record.output_ids), name)
        for name, record in plain.items()
        if name in arm and arm[name].output_ids != record.output_ids
    )
    return tuple(
        _triage(name, index, plain[name], arm[name], requests.get(name), ask_gap if i < MAX_GAPS else None)
        for i, (index, name) in enumerate(parted)
    )


def _triage(
    name: str,
    index: int,
    plain: RequestRecord,
    arm: RequestRecord,
    request: Request | None,
    ask_gap: AskGap | None,
) -> Difference:
    if index >= plain.num_output_tokens:
        return Difference(request_id=name, index=index, kind=Kind.RAN_ON)
    gap = None if request is None or ask_gap is None else ask_gap(request, plain.output_ids, index)
    if gap is not None and gap.value <= gap.tolerance:
        return Difference(request_id=name, index=index, kind=Kind.NEAR_TIE, gap=gap)
    if index >= arm.num_output_tokens:
        return Difference(request_id=name, index=index, kind=Kind.ENDED_EARLY, gap=gap)
    kind = Kind.UNKNOWN if gap is None else Kind.MISMATCH
    return Difference(request_id=name, index=index, kind=kind, gap=gap)


def _exceeds_control(found: Agreement) -> bool:
    """The arm differs more often than the control by more than margin and chance.

    Near ties are told apart by their gap and count on neither side.
    """
    unclear = sum(difference.kind is not Kind.NEAR_TIE for difference in found.differences)
    control = sum(difference.kind is not Kind.NEAR_TIE for difference in found.control_differences)
    level = 1 - 2 * ERROR_RATE
    ours = stats.rate_interval(unclear, found.num_shared, level=level)
    theirs = stats.rate_interval(control, found.num_control, level=0.5)
    if ours is None or theirs is None or ours.low is None or theirs.high is None:
        return False
    return ours.low > theirs.high + CONTROL_MARGIN


def _texts(records: Sequence[RequestRecord]) -> dict[str, RequestRecord]:
    return {record.request_id: record for record in records if is_success(record)}


def _by_prompt(records: Sequence[RequestRecord]) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for record in records:
        if is_success(record):
            found.setdefault(record.request_id.rsplit("-", 1)[0], []).append(record.output_ids)
    return found


def _counts(texts: Sequence[tuple[int, ...]], position: int) -> Counter[int]:
    ended = -1
    return Counter(text[position] if position < len(text) else ended for text in texts)


def _summary(counts: Counter[int]) -> str:
    total = sum(counts.values())
    token, count = counts.most_common(1)[0]
    return f"{len(counts)} tokens, {count / total:.0%} of them {'the end' if token < 0 else token}"


def _size(texts: Mapping[str, Sequence[tuple[int, ...]]]) -> int:
    return sum(len(own) for own in texts.values())
