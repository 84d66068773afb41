"""Arms under loads, in turn, every sample handed on as soon as it is there.

Knows how samples are made of an engine's rounds and in which order arms serve; what they mean is
decided elsewhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from spectune.errors import EngineFailure
from spectune.records import BlockResult, Cell, Prompt, Request, RoundRecord, Sampling
from spectune.records.policy_load import LoadPart, LoadSample, PolicyArm, PolicyLoad

SETTLED_ROUNDS = 3
"""Rounds after a switch that tell what a round of that configuration takes."""

Key = tuple[str, int, str]
"""(load, repeat, arm)"""


class Serves(Protocol):
    """An engine that can be run by an arm under a load."""

    def serve(self, arm: PolicyArm, load: PolicyLoad, requests: Sequence[Request]) -> BlockResult: ...


class Asks(Protocol):
    """Makes a request of a prompt; see `RequestBuilder.request`."""

    def request(self, prompt: Prompt, sample: int, cell: Cell, sampling: Sampling) -> Request: ...


def serve_in_turn(
    server: Serves,
    arms: Sequence[PolicyArm],
    loads: Sequence[PolicyLoad],
    requests_of: Callable[[PolicyLoad, int], Sequence[Request]],
    *,
    repeats: int,
    done: Collection[Key] = (),
    warms_each_load: bool = True,
    max_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[LoadSample]:
    """Samples of all arms under all loads, repeat by repeat, arms forwards and backwards in turn.

    Every arm is warmed once under each load before it is timed there, or once in all where an engine
    makes nothing anew for a batch size (`warms_each_load` false). What is in `done` is left out. Ends
    before `max_seconds` are over, between two samples; what is missing then is missing.
    """
    started = clock()
    warm: set[tuple[str, str]] = set()
    for repeat in range(repeats):
        for load in loads:
            order = arms if repeat % 2 == 0 else tuple(reversed(arms))
            missing = [arm for arm in order if (load.name, repeat, arm.label) not in done]
            if not missing:
                continue
            requests = requests_of(load, repeat)
            for arm in missing:
                if max_seconds is not None and clock() - started > max_seconds:
                    return
                shape = (load.name if warms_each_load else "", arm.label)
                if shape not in warm:
                    warm.add(shape)
                    server.serve(arm, warm_up(load), requests_of(warm_up(load), repeat))
                say(f"{load.name}, run {repeat + 1} of {repeats}: {arm.label}")
                yield sample_of(server.serve(arm, load, requests), load, arm, repeat)


def warm_up(load: PolicyLoad) -> PolicyLoad:
    """A short load that meets the same batch sizes."""
    levels = tuple((level, 2 * level) for level, _ in load.levels)
    num_requests = load.peak if load.is_steady else sum(level for level, _ in load.levels)
    return PolicyLoad(name=load.name, levels=levels, num_requests=num_requests, max_tokens=6)


def requests_by_load(
    asks: Asks, prompts: Sequence[Prompt], sampling: Sampling
) -> Callable[[PolicyLoad, int], tuple[Request, ...]]:
    """The requests of a load in a repeat: other prompts in each repeat, the same for every arm.

    All of them run to the load's length, so that every arm emits the same tokens.
    """
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = max(len(own) for own in by_category.values())
    ordered = [own[i] for i in range(turns) for own in by_category.values() if i < len(own)]

    def requests(load: PolicyLoad, repeat: int) -> tuple[Request, ...]:
        cell = Cell(batch_size=load.peak, context_tokens=0, temperature=sampling.temperature)
        own = Sampling(
            temperature=sampling.temperature, seed=sampling.seed, max_tokens=load.max_tokens, ignore_eos=True
        )
        first = repeat * load.num_requests
        made = []
        for index in range(first, first + load.num_requests):
            prompt = ordered[index % len(ordered)]
            request = asks.request(prompt, index // len(ordered), cell, own)
            made.append(request)
        return tuple(made)

    return requests


def sample_of(
    block: BlockResult, load: PolicyLoad, arm: PolicyArm, repeat: int, *, boot: int = 0
) -> LoadSample:
    """What a run took. Prefill of the target is left out where rounds tell it: all arms do the same."""
    if failed := [request for request in block.requests if request.error is not None]:
        raise EngineFailure(
            f"{load.name}, {arm.label}: {len(failed)} of {len(block.requests)} requests failed: {failed[0].error}",
            hint="what is verified has to be served whole; the same command goes on when the cause is gone",
        )
    decode = [turn for turn in block.rounds if turn.kind == "decode"]
    num_tokens = sum(request.num_output_tokens for request in block.requests)
    if not decode:
        return _served_sample(block, load, arm, repeat, num_tokens, boot)
    level = load.levels[0][0]
    # tokens of the drain are left out as well as its time: a policy runs something else at its batch sizes
    full = [turn for turn in decode if turn.batch_size == level]
    emitted = sum(turn.num_emitted for turn in full)
    tpot_s = sum(turn.total_s for turn in full) * level / emitted if load.is_steady and emitted else None
    num_switches, switch_s = switch_cost(decode)
    return LoadSample(
        load=load.name,
        arm=arm.label,
        repeat=repeat,
        seconds=sum(t.total_s for t in decode) + sum(t.draft_s for t in block.rounds if t.kind == "prefill"),
        num_tokens=num_tokens,
        tpot_s=tpot_s,
        parts=_parts(block.rounds),
        num_switches=num_switches,
        switch_s=switch_s,
    )


def _served_sample(
    block: BlockResult, load: PolicyLoad, arm: PolicyArm, repeat: int, num_tokens: int, boot: int
) -> LoadSample:
    """A server tells no rounds: time from first to last token of whole requests, and the block's own."""
    timed = [request for request in block.requests if request.tpot_s is not None]
    tokens = sum(request.num_output_tokens - 1 for request in timed)
    seconds = sum((request.finish_s or 0.0) - (request.first_token_s or 0.0) for request in timed)
    return LoadSample(
        load=load.name,
        arm=arm.label,
        repeat=repeat,
        seconds=block.duration_s,
        num_tokens=num_tokens,
        tpot_s=seconds / tokens if load.is_steady and tokens else None,
        boot=boot,
    )


def _parts(rounds: Sequence[RoundRecord]) -> tuple[LoadPart, ...]:
    """Decode rounds by batch size and configuration. What the draft took for a prompt is part of the decode
    round after it: that is where a draft which was at rest reads the prompt."""
    groups: dict[tuple[int, str], list[tuple[RoundRecord, float]]] = {}
    prefill_s = 0.0
    for turn in rounds:
        if turn.kind == "prefill":
            prefill_s += turn.draft_s
        elif turn.kind == "decode":
            groups.setdefault((turn.batch_size, turn.config), []).append((turn, prefill_s))
            prefill_s = 0.0
    return tuple(
        LoadPart(
            batch_size=size,
            config=config,
            num_rounds=len(own),
            seconds=sum(turn.total_s + before for turn, before in own),
            num_emitted=sum(turn.num_emitted for turn, _ in own),
        )
        for (size, config), own in sorted(groups.items())
    )


def switch_cost(decode: Sequence[RoundRecord]) -> tuple[int, float | None]:
    """Switches away from off, and the seconds that their first rounds took beyond the median of the next
    SETTLED_ROUNDS of the same configuration and batch size; None where no switch was followed by any."""
    num_switches, excess = 0, []
    for index in range(1, len(decode)):
        turn, before = decode[index], decode[index - 1]
        if before.config != "off" or turn.config == "off":
            continue
        num_switches += 1
        after = [
            other.total_s
            for other in decode[index + 1 : index + 1 + SETTLED_ROUNDS]
            if (other.config, other.batch_size) == (turn.config, turn.batch_size) and other.stolen_s <= 0
        ]
        if after and turn.stolen_s <= 0:  # what the hypervisor took is no cost of switching
            excess.append(max(0.0, turn.total_s - statistics.median(after)))
    # those without rounds to compare with cost what the others did
    return num_switches, sum(excess) / len(excess) * num_switches if excess else None
