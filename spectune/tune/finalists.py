"""The finalists of a cell, measured in turn with plain decoding until nobody else can be the best.

Stages of interleaved blocks on ever new prompts. What a round takes is measured; what it yields is known
from the trace of all prompts, so the acceptance of a block's few prompts adds no noise. After a stage a
challenger leaves when the upper end of its speed over the incumbent's lies below 1 + ε, and the slower
half leaves at the latest. Plain decoding is a challenger like the others and is measured to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from spectune import stats
from spectune.measure.cell import CellRun, CellWork
from spectune.measure.door import Door
from spectune.measure.progress import SweepProgress
from spectune.measure.requests import RequestBuilder
from spectune.policy.arms import ArmData, pool_rounds
from spectune.policy.decide import corrected_level
from spectune.policy.speedup import paired_log_ratios, round_log_ratios
from spectune.records import Cell, Clock, Interval, Point, SpecConfig, Status
from spectune.store import RunStore
from spectune.tune.plan import SweepPlan
from spectune.tune.profile import LOOKUPS
from spectune.tune.race import Challenger, Guess, RaceResult, RaceRules, Stage

OFF = SpecConfig.off()


@dataclass(slots=True, kw_only=True)
class Race:
    """The finalists of one cell while they run. `on_points` is told the points before they start."""

    plan: SweepPlan
    cell: Cell
    finalists: Sequence[SpecConfig]
    guesses: Mapping[SpecConfig, Guess]
    run: CellRun
    requests: RequestBuilder
    store: RunStore
    rules: RaceRules
    on_points: Callable[[Sequence[Point]], None]
    retry: frozenset[str] = frozenset()
    stages: list[Stage] = field(default_factory=list)
    seconds: float = 0.0
    _last_s: float = 0.0
    _num_last: int = 1
    _racing: list[SpecConfig] = field(default_factory=list)
    _arms: dict[SpecConfig, ArmData] = field(default_factory=dict)
    _gone: dict[SpecConfig, Challenger] = field(default_factory=dict)
    _failed: dict[SpecConfig, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._racing = [config for config in dict.fromkeys(self.finalists) if not config.is_off]

    @property
    def end(self) -> str:
        """Why no further stage runs, as far as the race itself says."""
        if self.stages and not any(one.status == "racing" for one in self.stages[-1].challengers):
            return "settled"
        return "stages" if len(self.stages) >= self.rules.max_stages else "budget"

    @property
    def is_over(self) -> bool:
        return self.end != "budget"

    @property
    def expected_s(self) -> float:
        """Seconds of the next stage, by those of the last and its arms; 0 before the first."""
        return self._last_s * (1 + len(self._racing)) / self._num_last

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is open if anything beats plain decoding: more is at stake there than among finalists."""
        if self.is_over or not self.stages:
            return not self.is_over
        return self.result().winner.is_off

    def cool(self) -> None:
        """Another cell used the engine: every arm is warmed again."""
        self.run.cool()

    def advance(self, clock: Clock) -> None:
        """One more stage."""
        began_s, number = clock(), len(self.stages)
        self._num_last = 1 + len(self._racing)
        self._measure([OFF, *self._racing], number)
        racing = [config for config in self._racing if config not in self._failed]
        stage = self._judge(racing, number)
        self.stages.append(stage)
        told = [one.config for one in stage.challengers if one.status in ("racing", "incumbent")]
        self._racing = [config for config in told if not config.is_off]
        self._last_s = clock() - began_s
        self.seconds += self._last_s

    def _measure(self, configs: Sequence[SpecConfig], number: int) -> None:
        count = self.plan.num_blocks(self.cell)
        points = tuple(self.plan.point(config, self.cell, number) for config in configs)
        self.on_points(points)
        outcomes = self.store.outcomes()
        blocks = self.requests.blocks(
            self.plan.workload.prompts, self.cell, self.plan.sampling, count=count, repeat=number
        )
        missing = tuple(
            point
            for point in points
            if point.point_id not in outcomes
            or point.point_id in self.retry
            or (
                outcomes[point.point_id].status is Status.OK
                and len(self.store.blocks(point.point_id)) < count
            )
        )
        if missing:
            self.run.work = replace(
                self.run.work, points=missing, off={number: points[0]}, blocks={number: blocks}
            )
            self.run.run()
            outcomes = self.store.outcomes()
        for point in points:
            outcome = outcomes[point.point_id]
            if outcome.status is Status.OK:
                self._add(point)
            else:
                self._failed.setdefault(point.config, f"{outcome.status}: {outcome.reason or 'no reason'}")

    def _add(self, point: Point) -> None:
        known = self._arms.get(point.config) or ArmData(config=point.config, cell=self.cell)
        blocks = {(point.repeat, i): block for i, block in self.store.blocks(point.point_id).items()}
        self._arms[point.config] = replace(known, blocks={**known.blocks, **blocks})

    def _judge(self, racing: Sequence[SpecConfig], number: int) -> Stage:
        """Where everybody stands after a stage."""
        off = self._arms.get(OFF)
        known = [config for config in (OFF, *racing) if config in self._arms]
        estimates = {config: self._estimate(config, off) for config in known}
        num_blocks = 0 if off is None else len(off.blocks)
        if not known:
            return Stage(number=number, num_blocks=0, challengers=())
        incumbent = max(known, key=lambda config: (estimates[config], [-n for n in config.size]))
        level = 1 - (1 - self.rules.level) / max(1, len(known) - 1)
        told: list[Challenger] = []
        for config in known:
            against = None
            if config != incumbent:
                against = self._ratio(incumbent, config, level)
            status, reason = self._status(config, incumbent, against)
            told.append(self._challenger(config, off, against, estimates[config], status, reason))
        told = self._halve(told, number)
        for one in told:
            if one.status in ("settled", "halved") and not one.config.is_off:
                self._gone[one.config] = one
        earlier = [one for one in self._gone.values() if one.config not in estimates]
        lost = [
            self._challenger(config, off, None, 0.0, "failed", reason)
            for config, reason in self._failed.items()
        ]
        return Stage(number=number, num_blocks=num_blocks, challengers=(*told, *earlier, *lost))

    def _status(
        self, config: SpecConfig, incumbent: SpecConfig, against: Interval | None
    ) -> tuple[str, str | None]:
        if config == incumbent:
            return "incumbent", None
        if against is None or against.high is None:
            return "racing", "too few blocks for an interval"
        if config.is_off:
            return self._status_of_plain(incumbent)
        if against.high < 1 + self.rules.epsilon:
            return "settled", f"at most {against.high:.3f} of the speed of {incumbent.label}"
        return "racing", None

    def _status_of_plain(self, incumbent: SpecConfig) -> tuple[str, str | None]:
        """Plain decoding stays until the incumbent beats it by more than the noise, which it has to in order
        to win, or cannot be better than it by more than ε."""
        shown = self._speedup(incumbent, level=corrected_level(len(self._arms) - 1))
        if shown is None or shown.low is None or shown.high is None:
            return "racing", "too few blocks for an interval"
        if shown.low > 1.0:
            return "settled", f"{incumbent.label} is at least {shown.low:.3f} times as fast"
        if shown.high < 1 + self.rules.epsilon:
            return "settled", f"{incumbent.label} is at most {shown.high:.3f} times as fast"
        return "racing", None

    def _halve(self, told: Sequence[Challenger], number: int) -> list[Challenger]:
        """The slower half of what still races leaves, as long as more than one does."""
        racing = sorted(
            (one for one in told if one.status == "racing" and not one.config.is_off),
            key=lambda one: -one.estimate,
        )
        keep = max(1, math.ceil(len(racing) / 2)) if number or len(racing) > 3 else len(racing)
        leaving = {one.config for one in racing[keep:]}
        return [
            replace(one, status="halved", reason="slower half of a stage") if one.config in leaving else one
            for one in told
        ]

    def _estimate(self, config: SpecConfig, off: ArmData | None) -> float:
        """Speed over plain decoding: measurement and expectation, weighted by their precision."""
        if config.is_off:
            return 1.0
        guess = self.guesses.get(config)
        pairs = [] if off is None else self._log_ratios(OFF, config)
        if not pairs:
            return 0.0 if guess is None else guess.speedup
        mean = math.fsum(pairs) / len(pairs)
        if guess is None or len(pairs) < 2:
            return math.exp(mean)
        variance = max(stats.standard_deviation(pairs) ** 2 / len(pairs), 1e-8)
        weights = (1 / variance, 1 / max(guess.error, 1e-3) ** 2)
        return math.exp((weights[0] * mean + weights[1] * math.log(guess.speedup)) / sum(weights))

    def _log_ratios(self, slow: SpecConfig, fast: SpecConfig) -> list[float]:
        """log(time per token of `slow` / of `fast`) of each block that both decoded."""
        arms = self._arms[slow], self._arms[fast]
        slow_gain, fast_gain = self._gain(slow), self._gain(fast)
        if slow_gain is None or fast_gain is None:
            return [ratio for _, ratio in paired_log_ratios(*arms)]
        return [ratio + math.log(fast_gain / slow_gain) for ratio in round_log_ratios(*arms)]

    def _gain(self, config: SpecConfig) -> float | None:
        """Tokens a round on the traced prompts, None where rounds are not told apart from what they yield: a
        lookup that finds nothing is quick, so its times and its yield have to be of the same prompts."""
        guess = self.guesses.get(config)
        if config.is_off:
            return 1.0
        return None if guess is None or config.method in LOOKUPS else guess.gain

    def _ratio(self, slow: SpecConfig, fast: SpecConfig, level: float) -> Interval | None:
        """How much faster `fast` is, on the prompts of the trace."""
        ratios = self._log_ratios(slow, fast)
        # ratios of lookups scatter otherwise than those of drafters, so they lend each other no spread
        alike = [config for config in self._arms if (config.method in LOOKUPS) == (fast.method in LOOKUPS)]
        others = [self._log_ratios(slow, config) for config in alike if config not in (slow, fast)]
        return stats.pooled_ratio_interval(ratios, others, level=level) if ratios else None

    def _speedup(self, config: SpecConfig, *, level: float = 0.95) -> Interval | None:
        """Over plain decoding and on prompts like the traced ones: their spread is in the interval."""
        found = self._ratio(OFF, config, level)
        guess = self.guesses.get(config)
        if guess is None or self._gain(config) is None:
            return found
        if found is None or found.low is None or found.high is None:
            return found
        half = math.hypot(
            math.log(found.high / found.low) / 2,
            NormalDist().inv_cdf(0.5 + level / 2) * guess.gain_error,
        )
        return replace(found, low=found.value * math.exp(-half), high=found.value * math.exp(half))

    def _challenger(
        self,
        config: SpecConfig,
        off: ArmData | None,
        against: Interval | None,
        estimate: float,
        status: str,
        reason: str | None,
    ) -> Challenger:
        guess = self.guesses.get(config)
        arm = self._arms.get(config)
        measured = None if config.is_off or off is None or arm is None else self._speedup(config)
        return Challenger(
            config=config,
            expected=None if guess is None else guess.speedup,
            speedup=measured,
            against=against,
            estimate=estimate,
            status=status,
            reason=reason,
        )

    def result(self) -> RaceResult:
        """What is known by now."""
        failed = tuple((config.label, reason) for config, reason in self._failed.items())
        last = self.stages[-1].challengers if self.stages else ()
        fastest = next((one for one in last if one.status == "incumbent"), None)
        if fastest is None or OFF not in self._arms:
            why = self._failed.get(OFF, "no finalist gave a result")
            return RaceResult(
                cell=self.cell,
                winner=OFF,
                fastest=OFF,
                reason=f"plain decoding, because nothing could be compared: {why}",
                stages=tuple(self.stages),
                end="nothing to compare",
                seconds=self.seconds,
                failed=failed,
            )
        chosen = self._smallest(fastest, last)
        winner, reason, speedup = self._verdict(chosen, fastest, len(self._arms) - 1)
        rounds = pool_rounds(self._arms[winner])
        return RaceResult(
            cell=self.cell,
            winner=winner,
            fastest=fastest.config,
            reason=reason,
            stages=tuple(self.stages),
            end=self.end,
            seconds=self.seconds,
            tpot_s=None if rounds is None else rounds.round_tpot_s,
            speedup=speedup,
            failed=failed,
        )

    def _smallest(self, fastest: Challenger, last: Sequence[Challenger]) -> Challenger:
        """Finalists as good as the fastest: the smallest of them; never one chosen for its acceptance."""
        if fastest.config.is_off:
            return fastest
        close = [
            one
            for one in last
            if one.status in ("incumbent", "racing", "settled")
            and not one.config.is_off
            and one.estimate >= fastest.estimate * (1 - self.rules.tie)
        ]
        return min(close, key=lambda one: one.config.size)

    def _verdict(
        self, chosen: Challenger, fastest: Challenger, num_candidates: int
    ) -> tuple[SpecConfig, str, Interval | None]:
        if chosen.config.is_off:
            if not num_candidates:
                return OFF, "plain decoding: no other configuration could be predicted or measured here", None
            return OFF, "no finalist is faster than plain decoding", None
        level = corrected_level(num_candidates)
        shown = self._speedup(chosen.config, level=level)
        if shown is None or shown.low is None or shown.low <= 1.0:
            text = "" if shown is None or shown.low is None else f" ({shown.low:.3f} to {shown.high:.3f})"
            return (
                OFF,
                f"{chosen.config.label} at {chosen.estimate:.3f}x does not beat plain decoding by more than "
                f"the noise{text}",
                None,
            )
        what = f"{chosen.config.label} runs at {shown.value:.3f}x ({shown.low:.3f} to {shown.high:.3f})"
        if chosen.config != fastest.config:
            what += f", as fast as {fastest.config.label} and smaller"
        return chosen.config, what, chosen.speedup


def start_race(
    plan: SweepPlan,
    cell: Cell,
    finalists: Sequence[SpecConfig],
    guesses: Mapping[SpecConfig, Guess],
    *,
    door: Door,
    store: RunStore,
    requests: RequestBuilder,
    progress: SweepProgress,
    rules: RaceRules,
    on_points: Callable[[Sequence[Point]], None],
    retry: frozenset[str] = frozenset(),
) -> Race:
    """A race whose calibration prompts are those of the plan."""
    calibration = plan.workload.calibration or plan.workload.prompts
    work = CellWork(
        cell=cell,
        points=(),
        off={},
        blocks={},
        calibration=requests.calibration(calibration, cell, plan.sampling),
    )
    run = CellRun(work=work, door=door, store=store, progress=progress)
    return Race(
        plan=plan,
        cell=cell,
        finalists=finalists,
        guesses=guesses,
        run=run,
        requests=requests,
        store=store,
        rules=rules,
        on_points=on_points,
        retry=retry,
    )
