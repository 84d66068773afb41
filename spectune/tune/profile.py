"""Profile: which shapes are timed and how, so that the time surface holds for the engine's real rounds.

All shapes of a batch size take turns round by round in one run of the engine, in a new random order each
pass, with forced acceptance: drift and cached tokens meet all of them alike. The runs of all batch sizes
and drafters take turns as well, so that none of them is timed in a better minute than the others; so do
those of plain decoding alone, without a drafter. A machine that has rested is quicker than one at work.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from spectune.tune.surface import Sample, draft_family, fit_lines, held_out, points_of, without_spikes

LOOKUPS = frozenset({Method.NGRAM.value, Method.SUFFIX.value})
MOST_SHAPES = 26
MIN_TURNS, MAX_TURNS = 4, 16
PLAIN_VISITS, PLAIN_ROUNDS, COLD_ROUNDS = 4, 8, 2
"""Plain decoding alone: runs of the engine, rounds of each, and how many of them come too early."""
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
        budget_s: seconds on the engine's clock; each shape gets the same number of rounds in each cell, at
            least MIN_TURNS.
    """
    shapes = lattice(configs)
    if not shapes:
        raise UsageError("nothing to profile: no configuration speculates")
    begin_s = clock()
    point = _point(SpecConfig.off(), next(iter(cells)))
    with backend.open(Launch(points=(point, *(_point(c, next(iter(cells))) for c in shapes)))) as session:
        if not isinstance(session, TimesRounds):
            raise UsageError(
                f"backend {backend.capabilities().name} cannot time single rounds",
                hint="spectune profile --run RUN_DIR takes step times from a sweep of it",
            )
        ordered = sorted(cells.items(), key=lambda item: (item[0].batch_size, item[0].context_tokens))
        # on a GPU every other batch size captures its graphs anew, and the clock is steadier
        parts = [[item] for item in ordered] if backend.fingerprint().is_gpu else [ordered]
        left_work = _work(ordered)
        groups: list[_Group] = []
        plain: list[_Plain] = []
        for part in parts:
            share_s = max(0.0, budget_s - (clock() - begin_s)) * _work(part) / left_work
            left_work -= _work(part)
            found = _time_cells(session, part, shapes, share_s, seed, clock, say)
            groups += found[0]
            plain += found[1]
    alone = {one.cell: one.samples for one in plain}
    samples = [sample for group in groups for sample in _without_forcing(group.samples, alone[group.cell])]
    samples += [sample for one in plain for sample in one.samples]
    fingerprint = asdict(backend.fingerprint())
    fingerprint.pop("read_bandwidth_bytes_per_s", None)  # measured anew each time, decides no round
    return TimeSurface(
        fingerprint=fingerprint,
        provenance=dict(provenance or {}),
        source="rounds",
        points=points_of(samples),
        lines=fit_lines(samples),
        held_out=held_out(samples),
        drift=max((one.change for one in plain), key=abs, default=None),
        duration_s=clock() - begin_s,
    )


def _work(cells: Sequence[tuple[Cell, Block]]) -> float:
    """Shares of the time: larger batches take longer, but not in proportion."""
    return math.fsum(cell.batch_size**0.7 for cell, _ in cells)


def _time_cells(
    session: TimesRounds,
    cells: Sequence[tuple[Cell, Block]],
    shapes: Sequence[SpecConfig],
    share_s: float,
    seed: int,
    clock: Clock,
    say: Callable[[str], None],
) -> tuple[list[_Group], list[_Plain]]:
    """All rounds of some cells, in turn."""
    begin_s = clock()
    plain = [_Plain(cell=cell, requests=requests) for cell, requests in cells]
    for one in plain:
        one.run(session, 0)
        one.samples.clear()  # that was to warm it
    visit_s = clock() - begin_s
    groups = [
        _warm(session, cell, requests, shapes, method, seed, clock)
        for cell, requests in cells
        for method in dict.fromkeys(shape.method for shape in shapes)
    ]
    left_s = share_s - (clock() - begin_s) - PLAIN_VISITS * visit_s
    turns = int(left_s / max(math.fsum(group.turn_s for group in groups), 1e-6))
    turns = min(max(turns, MIN_TURNS), MAX_TURNS)
    labels = "; ".join(cell.label for cell, _ in cells)
    say(f"profiling {len(shapes) + 1} shapes, {turns} rounds each, in turn: {labels}")
    _take_turns(session, [*groups, *plain], turns, say)
    return groups, plain


class _Visited(Protocol):
    """Rounds of one cell that are timed in several runs of the engine."""

    def starts(self, turns: int) -> Sequence[int]:
        """Numbers of the first turns of its runs, of `turns` in all."""
        ...

    def run(self, session: TimesRounds, begin: int, turns: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Plain:
    """Plain decoding alone, without a drafter and without forcing."""

    cell: Cell
    requests: Block
    samples: list[Sample] = field(default_factory=list)

    def starts(self, turns: int) -> Sequence[int]:
        return [visit * turns // PLAIN_VISITS for visit in range(PLAIN_VISITS)]

    def run(self, session: TimesRounds, begin: int, turns: int = 0) -> None:
        off, kept = [SpecConfig.off()] * PLAIN_ROUNDS, [0] * PLAIN_ROUNDS
        point = _point(off[0], self.cell)
        rounds = session.time_rounds(point, _sized(self.requests, off, kept), off, kept)
        self.samples += [_sample(self.cell, off[0], turn, begin) for turn in rounds[COLD_ROUNDS:]]

    @property
    def change(self) -> float:
        """Relative change of a round from the first visit to the last."""
        visit = PLAIN_ROUNDS - COLD_ROUNDS
        parts = without_spikes(self.samples[:visit]), without_spikes(self.samples[-visit:])
        first, last = (median([sample.total_s for sample in part]) or math.inf for part in parts)
        return last / first - 1


@dataclass(slots=True, kw_only=True)
class _Group:
    """Shapes of one drafter in one cell, which are timed in the same runs of the engine.

    turn_s: expected seconds of one round of each, with their share of reading the prompts.
    """

    cell: Cell
    requests: Block
    shapes: tuple[SpecConfig, ...]
    chance: random.Random
    turn_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    @property
    def turns_per_run(self) -> int:
        """Few enough that texts do not grow far beyond those that are to be told, and that a group comes up
        several times."""
        return min(MIN_TURNS, max(1, GROWTH_TOKENS // (2 * len(self.shapes))))

    def starts(self, turns: int) -> Sequence[int]:
        return range(0, turns, self.turns_per_run)

    def run(self, session: TimesRounds, begin: int, turns: int) -> None:
        count = min(self.turns_per_run, turns - begin)
        order = list(_passes(self.shapes, count, self.chance))
        rounds = _run(session, self.cell, self.requests, order)
        self.samples += [
            _sample(self.cell, config, turn, begin + index // len(self.shapes))
            for index, (config, turn) in enumerate(zip(order, rounds, strict=True))
        ]


def _warm(
    session: TimesRounds,
    cell: Cell,
    requests: Block,
    shapes: Sequence[SpecConfig],
    method: str,
    seed: int,
    clock: Clock,
) -> _Group:
    """A drafter's shapes and plain decoding, after one round of each that does not count."""
    own = (*(shape for shape in shapes if shape.method == method), SpecConfig.off())
    chance = random.Random(f"{seed}|{cell.label}|{method}")
    group = _Group(cell=cell, requests=requests, shapes=own, chance=chance)
    start_s = clock()
    warm = _run(session, cell, requests, list(_passes(own, 1, chance)))
    rounds_s = math.fsum(turn.total_s for turn in warm)
    read_s = max(0.0, clock() - start_s - rounds_s)  # prompts are read again for every run
    group.turn_s = rounds_s + read_s / group.turns_per_run
    return group


def _take_turns(
    session: TimesRounds, timed: Sequence[_Visited], turns: int, say: Callable[[str], None]
) -> None:
    """All rounds, the runs of each spread evenly over the whole time, there and back again."""
    runs = [
        ((visit + 0.5) / len(starts), number if visit % 2 == 0 else -number, begin)
        for number, one in enumerate(timed)
        for starts in [one.starts(turns)]
        for visit, begin in enumerate(starts)
    ]
    for done, (_, number, begin) in enumerate(sorted(runs), 1):
        timed[abs(number)].run(session, begin, turns)
        if done * 4 // len(runs) > (done - 1) * 4 // len(runs):
            say(f"profiled {done} of {len(runs)} runs")


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
        stolen_s=turn.stolen_s,
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
