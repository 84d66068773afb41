"""Profile: which shapes are timed and how, so that the time surface holds for the engine's real rounds.

All shapes of a batch size take turns round by round in one run of the engine, in a new random order each
pass, with forced acceptance: drift and cached tokens meet all of them alike, and prompts are read once.
Plain decoding runs alone, without a drafter, before and after.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol, runtime_checkable

from spectune.errors import UsageError
from spectune.measure.requests import Block
from spectune.records import (
    Backend,
    Cell,
    Clock,
    Launch,
    Method,
    Point,
    Request,
    RoundRecord,
    Sampling,
    SpecConfig,
)
from spectune.stats import median
from spectune.store.surface import TimeSurface
from spectune.tune.surface import Sample, draft_family, fit_lines, held_out, points_of

LOOKUPS = frozenset({Method.NGRAM.value, Method.SUFFIX.value})
MOST_SHAPES = 26
MIN_TURNS, MAX_TURNS = 4, 16
OFF_ROUNDS = 15
COLD_ROUNDS = 3
GROWTH_TOKENS = 160
"""Tokens by which a text may grow in one run of the engine."""
KEPT = (0, 1, 0, 2, 1, 0, 3, 1)
"""Drafts that rounds keep in turn: the cost of reading them back is fitted, not assumed."""


@runtime_checkable
class TimesRounds(Protocol):
    """A session that runs single rounds of given shapes with forced acceptance."""

    def time_rounds(
        self,
        point: Point,
        requests: Sequence[Request],
        configs: Sequence[SpecConfig],
        kept: Sequence[int],
    ) -> tuple[RoundRecord, ...]:
        """One decode round of all requests for each configuration, in order; round i keeps kept[i] drafts
        of every sequence. The point's own method says which drafter is loaded."""
        ...


def lattice(configs: Sequence[SpecConfig], most: int = MOST_SHAPES) -> tuple[SpecConfig, ...]:
    """Shapes whose times tell those of all configurations, few enough to be timed.

    Every number of verified tokens is there, and every draft family at its least and its greatest depth;
    room that is left is given to further configurations, evenly over the list.
    """
    asked = [config for config in dict.fromkeys(configs) if not config.is_off]
    kept: dict[SpecConfig, None] = {}
    for family in dict.fromkeys(map(draft_family, asked)):
        own = [config for config in asked if draft_family(config) == family]
        kept[min(own, key=lambda config: (config.num_steps, config.num_draft_tokens))] = None
        kept[max(own, key=lambda config: (config.num_steps, -config.num_draft_tokens))] = None
    for width in sorted({config.num_draft_tokens for config in asked if has_fixed_width(config)}):
        if not any(config.num_draft_tokens == width and has_fixed_width(config) for config in kept):
            kept[next(c for c in asked if c.num_draft_tokens == width and has_fixed_width(c))] = None
    rest = [config for config in asked if config not in kept]
    room = max(0, most - len(kept))
    for index in range(min(room, len(rest))):
        kept[rest[index * len(rest) // min(room, len(rest))]] = None
    return tuple(config for config in asked if config in kept)


def has_fixed_width(config: SpecConfig) -> bool:
    """Whether the draft always has the size that was asked for; look-ups may find nothing."""
    return config.method not in LOOKUPS


def profile(
    backend: Backend,
    configs: Sequence[SpecConfig],
    cells: Mapping[Cell, Block],
    *,
    budget_s: float = 80.0,
    seed: int = 0,
    provenance: Mapping[str, Any] | None = None,
    clock: Clock = time.perf_counter,
    say: Callable[[str], None] = lambda text: None,
) -> TimeSurface:
    """Time every shape at every batch size and context of `cells`.

    Args:
        configs: the shapes; plain decoding is added.
        cells: a batch of requests for each batch size and context, of prompts that are not measured.
        budget_s: seconds on the engine's clock, shared out over the cells; each shape gets at least
            MIN_TURNS rounds.
    """
    shapes = lattice(configs)
    if not shapes:
        raise UsageError("nothing to profile: no configuration speculates")
    begin_s = clock()
    samples: list[Sample] = []
    drifts: list[float] = []
    point = _point(SpecConfig.off(), next(iter(cells)))
    with backend.open(Launch(points=(point, *(_point(c, next(iter(cells))) for c in shapes)))) as session:
        if not isinstance(session, TimesRounds):
            raise UsageError(
                f"backend {backend.capabilities().name} cannot time single rounds",
                hint="spectune profile --run RUN_DIR takes step times from a sweep of it",
            )
        ordered = sorted(cells.items(), key=lambda item: (item[0].batch_size, item[0].context_tokens))
        left_work = sum(cell.batch_size**0.7 for cell, _ in ordered)
        for cell, requests in ordered:
            work = cell.batch_size**0.7
            share_s = max(0.0, budget_s - (clock() - begin_s)) * work / left_work
            left_work -= work
            found, drift = _cell_samples(session, cell, requests, shapes, share_s, seed, clock)
            samples += found
            drifts += drift
            say(f"profiled {len(shapes) + 1} shapes at {cell.label} in {len(found)} rounds")
    fingerprint = asdict(backend.fingerprint())
    fingerprint.pop("read_bandwidth_bytes_per_s", None)  # measured anew each time, decides no round
    return TimeSurface(
        fingerprint=fingerprint,
        provenance=dict(provenance or {}),
        source="rounds",
        points=points_of(samples),
        lines=fit_lines(samples),
        held_out=held_out(samples),
        drift=max(drifts, key=abs, default=None),
        duration_s=clock() - begin_s,
    )


def _cell_samples(
    session: TimesRounds,
    cell: Cell,
    requests: Sequence[Request],
    shapes: Sequence[SpecConfig],
    share_s: float,
    seed: int,
    clock: Clock,
) -> tuple[list[Sample], list[float]]:
    """All rounds of one batch size and context, and how plain rounds changed over them."""
    samples: list[Sample] = []
    drifts: list[float] = []
    start_s = clock()
    off = [SpecConfig.off()] * OFF_ROUNDS
    early = _off_rounds(session, cell, requests, off)
    samples += early
    methods = list(dict.fromkeys(shape.method for shape in shapes))
    for number, method in enumerate(methods):
        own = [shape for shape in shapes if shape.method == method]
        turns_s = share_s - (clock() - start_s)
        is_last = number == len(methods) - 1
        share = turns_s if is_last else turns_s * 0.85
        found = _method_samples(session, cell, requests, own, share, seed, clock)
        samples += _without_forcing(found, early)
    late = _off_rounds(session, cell, requests, off)
    samples += [replace(sample, turn=MAX_TURNS) for sample in late]
    first, last = (median([s.total_s for s in part]) or math.inf for part in (early, late))
    drifts.append(last / first - 1)
    return samples, drifts


def _without_forcing(samples: Sequence[Sample], plain: Sequence[Sample]) -> list[Sample]:
    """Rounds without what forcing their acceptance costs, as plain rounds tell it: those among the samples
    are forced, `plain` are not.

    The forced plain rounds stay with their verification, so that plain decoding is timed beside all the
    others and not before and after them alone; a drafter's part in them is none of plain decoding's.
    """
    forced = [sample.other_s for sample in samples if sample.config.is_off]
    other_s, draft_s = (median([getattr(s, name) for s in plain]) or 0.0 for name in ("other_s", "draft_s"))
    extra = max(0.0, (median(forced) or 0.0) - other_s) if forced else 0.0
    told = [replace(sample, other_s=max(0.0, sample.other_s - extra)) for sample in samples]
    return [replace(sample, draft_s=draft_s) if sample.config.is_off else sample for sample in told]


def _off_rounds(
    session: TimesRounds, cell: Cell, requests: Sequence[Request], off: Sequence[SpecConfig]
) -> list[Sample]:
    kept = [0] * len(off)
    rounds = session.time_rounds(_point(off[0], cell), _sized(requests, off, kept), off, kept)
    return [_sample(cell, off[0], turn, number) for number, turn in enumerate(rounds[COLD_ROUNDS:])]


def _method_samples(
    session: TimesRounds,
    cell: Cell,
    requests: Sequence[Request],
    shapes: Sequence[SpecConfig],
    share_s: float,
    seed: int,
    clock: Clock,
) -> list[Sample]:
    """A pass to warm every shape, then as many passes as the share of time allows.

    A few passes a run of the engine: texts must not grow far beyond those that are to be told.
    """
    chance = random.Random(f"{seed}|{cell.label}|{shapes[0].method}")
    shapes = (*shapes, SpecConfig.off())
    start_s = clock()
    warm = _run(session, cell, requests, list(_passes(shapes, 1, chance)))
    pass_s = max(sum(turn.total_s for turn in warm), 1e-6)
    read_s = max(0.0, clock() - start_s - pass_s)  # prompts are read again for every run
    left_s = share_s - (clock() - start_s)
    per_run = max(1, GROWTH_TOKENS // (2 * len(shapes)))
    turns = int(left_s / (pass_s + read_s / per_run))
    turns = min(max(turns, MIN_TURNS), MAX_TURNS)
    samples: list[Sample] = []
    for begin in range(0, turns, per_run):
        order = list(_passes(shapes, min(per_run, turns - begin), chance))
        rounds = _run(session, cell, requests, order)
        samples += [
            _sample(cell, config, turn, begin + index // len(shapes))
            for index, (config, turn) in enumerate(zip(order, rounds, strict=True))
        ]
    return samples


def _passes(shapes: Sequence[SpecConfig], count: int, chance: random.Random) -> Iterator[SpecConfig]:
    for _ in range(count):
        order = list(shapes)
        chance.shuffle(order)
        yield from order


def _run(
    session: TimesRounds, cell: Cell, requests: Sequence[Request], order: Sequence[SpecConfig]
) -> tuple[RoundRecord, ...]:
    kept = [min(KEPT[index % len(KEPT)], config.max_accepted) for index, config in enumerate(order)]
    drafting = next((config for config in order if not config.is_off), order[0])
    return session.time_rounds(_point(drafting, cell), _sized(requests, order, kept), order, kept)


def _sized(requests: Sequence[Request], order: Sequence[SpecConfig], kept: Sequence[int]) -> Block:
    """The requests with room for exactly the tokens of the rounds, one more from the prompt."""
    tokens = 1 + len(order) + sum(kept)
    return tuple(
        replace(request, sampling=Sampling(max_tokens=tokens, ignore_eos=True)) for request in requests
    )


def _sample(cell: Cell, config: SpecConfig, turn: RoundRecord, number: int) -> Sample:
    return Sample(
        batch_size=cell.batch_size,
        config=config,
        width=config.num_draft_tokens if has_fixed_width(config) else None,
        kv_tokens=turn.kv_tokens,
        commit_tokens=turn.num_emitted / cell.batch_size,
        draft_s=turn.draft_s,
        verify_s=turn.verify_s,
        other_s=turn.other_s,
        turn=number,
    )


def _point(config: SpecConfig, cell: Cell) -> Point:
    return Point(config=config, cell=cell, workload_hash="profile", sampling=Sampling())


def repeatability(first: TimeSurface, second: TimeSurface) -> tuple[float, float]:
    """(median, 95th percentile) of the relative change of the points that two profiles share: how repeatable they are."""
    after = {(point.batch_size, point.config): point.total_s for point in second.points}
    changes = sorted(
        abs(after[key] / point.total_s - 1)
        for point in first.points
        if (key := (point.batch_size, point.config)) in after
    )
    if not changes:
        raise UsageError("the two profiles have no shape in common")
    return changes[len(changes) // 2], changes[math.ceil(len(changes) * 0.95) - 1]
