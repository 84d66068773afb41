"""The scheduler: who runs when, where texts end, and records that add up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from spectune.draft.ngram import NgramDrafter
from spectune.engine import step
from spectune.engine.scheduler import CacheRoom, Engine
from spectune.engine.tokenizer import Tokenizer
from spectune.engine.verify import ForcedAcceptance
from spectune.errors import InfeasibleConfig, UsageError
from spectune.metrics.acceptance import acceptance_length, pooled_steps
from spectune.records import BlockResult, SpecConfig
from tests.support.toys import CPU, cyclic_pair, ragged_requests, random_drafter, request, tiny_target

OFF = SpecConfig.off()
CHAIN = SpecConfig.chain("eagle3", 3)
TREE = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8)
WIDE = SpecConfig(method="eagle3", num_steps=5, topk=8, num_draft_tokens=32)

LETTERS = "abcdefghijklmnop"
"""Letter x of the walk stands for token x; after x comes x + 5 (mod 16): b g l a f k p e j o d i n c h m."""


def letters() -> Tokenizer:
    vocab = {letter: index for index, letter in enumerate(LETTERS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, eos_ids=())


def ticking() -> Callable[[], float]:
    """A clock that advances one second a look."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


def walk(config: SpecConfig = CHAIN, **sampling: Any) -> BlockResult:
    """The perfect head's walk from `b`: g l a f k p e j ..."""
    target, drafter = cyclic_pair()
    engine = Engine(target, letters(), drafter=drafter, clock=ticking())
    return engine.generate([request("walk", [12, 1], **sampling)], config)


# Where a text ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "text", "emitted", "accepted", "cut"),
    [
        pytest.param("g", "g", [], [], None, id="first-token"),
        pytest.param("gl", "gl", [1], [1], "stop", id="across-prefill-and-block"),
        pytest.param("a", "gla", [2], [2], "stop", id="inside-a-block"),
        pytest.param("af", "glaf", [3], [3], "stop", id="two-tokens-inside"),
        pytest.param("fk", "glafk", [4], [3], None, id="at-the-end-of-a-block"),
        pytest.param("kp", "glafkp", [4, 1], [3, 1], "stop", id="across-two-blocks"),
    ],
)
def test_stop_string_cuts_behind_the_token_that_completes_it(
    stop: str, text: str, emitted: list[int], accepted: list[int], cut: str | None
) -> None:
    """Later tokens of an accepted block are neither emitted nor counted."""
    record = walk(stop=(stop,)).requests[0]

    assert text == letters().decode(record.output_ids)
    assert "stop" == record.finish_reason
    assert emitted == [step.num_emitted for step in record.steps]
    assert accepted == [step.num_accepted for step in record.steps]
    assert cut == (record.steps[-1].cut if record.steps else None)
    assert record.broken_identity() is None


def test_first_of_several_stop_strings_ends_the_text() -> None:
    """The earliest completed one counts, in whatever order they are given."""
    assert 4 == walk(stop=("zz", "kp", "af")).requests[0].num_output_tokens


def test_stop_string_ends_the_same_text_with_and_without_drafts() -> None:
    """A stop inside a block leaves what plain decoding leaves."""
    texts = {config.label: walk(config, stop=("pe",)).requests[0].output_ids for config in (OFF, CHAIN, TREE)}

    assert 1 == len(set(texts.values()))


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6])
def test_max_tokens_is_met_exactly(max_tokens: int) -> None:
    """A text never overshoots, whatever part of a block it ends in."""
    record = walk(max_tokens=max_tokens).requests[0]

    assert (max_tokens, "length") == (record.num_output_tokens, record.finish_reason)
    assert record.broken_identity() is None


def test_eos_as_first_token_ends_in_prefill() -> None:
    """A text of one token has no steps and no time per output token."""
    target, drafter = cyclic_pair()

    record = Engine(target, drafter=drafter, eos_ids=[6]).generate([request("w", [1])], CHAIN).requests[0]

    assert ((6,), "eos", ()) == (record.output_ids, record.finish_reason, record.steps)
    assert record.tpot_s is None


def test_ignored_eos_runs_on_to_the_limit() -> None:
    """`ignore_eos` lets the end token pass, inside an accepted block too."""
    target, drafter = cyclic_pair()
    ask = request("w", [1], ignore_eos=True, max_tokens=9)

    record = Engine(target, drafter=drafter, eos_ids=[6, 0]).generate([ask], CHAIN).requests[0]

    assert (9, "length") == (record.num_output_tokens, record.finish_reason)


# Slots and records ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [OFF, CHAIN, TREE], ids=lambda config: config.label)
def test_ragged_batch_records_add_up(config: SpecConfig, tmp_path: Path) -> None:
    """Seven requests through three slots: order, counts, rounds and times agree with each other."""
    target = tiny_target()
    asks = ragged_requests(7, 97, temperature=1.0)
    engine = Engine(
        target, drafter=random_drafter(target, tmp_path, 97), batch_size=3, eos_ids=[], clock=ticking()
    )

    result = engine.generate(asks, config)

    records, decode = result.requests, [r for r in result.rounds if r.kind == "decode"]
    assert [ask.request_id for ask in asks] == [r.request_id for r in records]
    assert [ask.sampling.max_tokens for ask in asks] == [r.num_output_tokens for r in records]
    assert [None] * 7 == [r.broken_identity() for r in records]
    assert 7 == sum(r.kind == "prefill" for r in result.rounds)
    assert sum(r.num_output_tokens for r in records) == sum(r.num_emitted for r in result.rounds)
    assert sum(len(r.steps) for r in records) == sum(r.batch_size for r in decode)
    assert {config.num_draft_tokens - 1} == {step.num_verified for r in records for step in r.steps}
    # the batch is full while requests wait
    last_admitted = max(r.start_s for r in result.rounds if r.kind == "prefill")
    assert {3} == {r.batch_size for r in decode if r.start_s < last_admitted}
    for record in records:
        assert len(record.chunk_s) == len(record.steps) + 1
        assert list(record.chunk_s) == sorted(set(record.chunk_s))
        assert record.arrival_s < record.chunk_s[0] == record.first_token_s
        assert record.finish_s == record.chunk_s[-1]
    for round_, following in itertools.pairwise(result.rounds):
        assert round_.start_s + round_.total_s <= following.start_s


def test_closed_loop_request_arrives_when_a_slot_is_free() -> None:
    """Waiting for a slot is not part of a request's latency."""
    target, _ = cyclic_pair()
    asks = [request(f"r{i}", [1], max_tokens=4) for i in range(3)]

    records = Engine(target, eos_ids=[], clock=ticking()).generate(asks).requests

    for earlier, later in itertools.pairwise(records):
        assert earlier.finish_s is not None
        assert later.arrival_s > earlier.finish_s


def test_what_the_hypervisor_took_is_told_by_the_round_that_it_cut_into() -> None:
    """A counter that rises by 30 ms within the second decode round, and by 50 ms between rounds."""
    target, _ = cyclic_pair()
    counter = iter([0.0, 0.0, 0.0, 0.03, 0.08, 0.08])

    engine = Engine(target, eos_ids=[], stolen=lambda: next(counter))
    block = engine.generate([request("r", [1], max_tokens=4)])

    decoded = [turn for turn in block.rounds if turn.kind == "decode"]
    assert [turn.stolen_s for turn in decoded] == [0.0, 0.03, 0.0]


def test_engine_used_again_gives_the_same_result(tmp_path: Path) -> None:
    """Caches that have been used leave no trace in later texts, shorter or longer ones."""
    target = tiny_target()
    engine = Engine(target, drafter=random_drafter(target, tmp_path, 97), batch_size=2, eos_ids=[])
    asks = ragged_requests(3, 97, temperature=1.0)
    first = engine.generate(asks, TREE)
    engine.generate([request("long", list(range(3, 90)), max_tokens=60)], CHAIN)

    again = engine.generate(asks, TREE)

    assert [r.output_ids for r in first.requests] == [r.output_ids for r in again.requests]
    assert [r.steps for r in first.requests] == [r.steps for r in again.requests]


def test_margins_hold_one_gap_for_each_token_after_the_first(tmp_path: Path) -> None:
    """The gap between the two best is kept along the accepted path."""
    target = tiny_target()
    asks = ragged_requests(3, 97)
    plain, drafted = (
        Engine(target, batch_size=2, eos_ids=[]),
        Engine(target, batch_size=2, eos_ids=[], drafter=random_drafter(target, tmp_path, 97)),
    )

    records = plain.generate(asks, wants_margins=True).requests
    drafted.generate(asks, TREE, wants_margins=True)

    for record in records:
        margins = plain.margins[record.request_id]
        assert len(margins) == record.num_output_tokens - 1
        assert min(margins) > 0
        assert margins == pytest.approx(drafted.margins[record.request_id], abs=1e-4)


def test_two_turns_pool_their_acceptance_over_all_steps() -> None:
    """A turn of 12 steps that accepts nothing and one of 2 that accept 4 each: 1 + 8/14, not (1 + 5)/2."""
    target, _ = cyclic_pair()
    engine = Engine(target, drafter=NgramDrafter(CPU), eos_ids=[])
    config = SpecConfig.chain("ngram", 4)
    ask = request("talk-turn0", [1, 6, 11], max_tokens=13)
    first = engine.generate([ask], config).requests[0]
    # the whole cycle of 16 tokens is history now; the user says 1 again
    history = [*ask.prompt_ids, *first.output_ids, 1]
    second = engine.generate([request("talk-turn1", history, max_tokens=11)], config).requests[0]

    assert (12, {0}) == (len(first.steps), {step.num_accepted for step in first.steps})
    assert [4, 4] == [step.num_accepted for step in second.steps]
    assert 1 + 8 / 14 == pytest.approx(acceptance_length(pooled_steps([first, second])))


# Changing configurations ---------------------------------------------------------------------------


class Cycling:
    """Picks the given configurations in turn and remembers what it was told."""

    def __init__(self, *configs: SpecConfig) -> None:
        self._configs = itertools.cycle(configs)
        self.told: list[tuple[int, int, float | None]] = []

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        self.told.append((batch_size, context_tokens, acceptance_ema))
        return next(self._configs)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_switching_configs_stays_lossless(batch_size: int, tmp_path: Path) -> None:
    """Off, chain and trees in turn write the plain text, up to the last column of the longest one."""
    target = tiny_target()
    asks = [
        *ragged_requests(4, 97, temperature=1.0),
        request("long", [5] * 20, max_tokens=44, temperature=1.0),
    ]
    plain = Engine(target, batch_size=batch_size, eos_ids=[]).generate(asks)
    engine = Engine(target, batch_size=batch_size, eos_ids=[], drafter=random_drafter(target, tmp_path, 97))

    result = engine.generate(asks, chooser=Cycling(OFF, CHAIN, WIDE, OFF, TREE), scratch=WIDE)

    assert [r.output_ids for r in plain.requests] == [r.output_ids for r in result.requests]
    labels = {r.config for r in result.rounds if r.kind == "decode"}
    assert {config.label for config in (OFF, CHAIN, WIDE, TREE)} == labels


def test_drafter_is_fresh_after_off_rounds() -> None:
    """A perfect head accepts everything in the round after any number of plain ones."""
    target, drafter = cyclic_pair()
    chooser = Cycling(OFF, OFF, CHAIN, OFF, TREE)
    engine = Engine(target, drafter=drafter, eos_ids=[])

    steps = engine.generate([request("w", [1], max_tokens=40)], chooser=chooser).requests[0].steps

    assert [1, 1, 4, 1, 4] * 3 == [step.num_emitted for step in steps[:15]]


def test_chooser_is_told_load_and_acceptance() -> None:
    """Batch, mean context and a moving mean of accepted drafts, None until something was drafted."""
    target, drafter = cyclic_pair()
    chooser = Cycling(OFF, CHAIN, CHAIN)
    engine = Engine(target, drafter=drafter, batch_size=2, eos_ids=[])

    engine.generate(
        [request("a", [1], max_tokens=10), request("b", [1, 6, 11], max_tokens=10)], chooser=chooser
    )

    assert [(2, 2, None), (2, 3, None), (2, 7, 3.0)] == chooser.told[:3]


def test_engines_that_take_turns_can_share_a_cache(tmp_path: Path) -> None:
    """Plain, speculative, plain again, of growing length: texts are those of engines by themselves, and all
    read and write one cache."""
    target = tiny_target()
    drafter, room = random_drafter(target, tmp_path, 97), CacheRoom()
    plain = Engine(target, batch_size=2, eos_ids=[], cache_room=room)
    drafting = Engine(target, drafter=drafter, batch_size=2, eos_ids=[], cache_room=room)

    for max_tokens in (5, 60, 20):
        asks = [request(f"r{i}", [5 + i, 9], max_tokens=max_tokens) for i in range(3)]
        for engine, config in ((plain, OFF), (drafting, CHAIN)):
            alone = Engine(target, drafter=engine.drafter, batch_size=2, eos_ids=[])
            shared, own = (one.generate(asks, config).requests for one in (engine, alone))
            assert [r.output_ids for r in own] == [r.output_ids for r in shared]
            assert engine.cache is room.cache


def test_chooser_beyond_the_reserved_room_is_refused(tmp_path: Path) -> None:
    """A tree that no room was made for is named instead of written over a neighbour."""
    target = tiny_target()
    engine = Engine(target, drafter=random_drafter(target, tmp_path, 97), batch_size=2, eos_ids=[])

    with pytest.raises(InfeasibleConfig, match="verifies 32 tokens, room was made for 16"):
        engine.generate(ragged_requests(2, 97), chooser=Cycling(WIDE))


@pytest.mark.parametrize("config", [SpecConfig.chain("eagle3", 4), TREE], ids=lambda config: config.label)
@pytest.mark.parametrize("mean", [0.0, 0.5, 1.75, 3.0])
def test_forced_acceptance_meets_its_mean(config: SpecConfig, mean: float, tmp_path: Path) -> None:
    """Whatever the head drafts, each text accepts the asked mean to within one draft."""
    target = tiny_target()
    engine = Engine(target, drafter=random_drafter(target, tmp_path, 97), batch_size=2, eos_ids=[])
    asks = [request(f"r{i}", [5 + i, 9], max_tokens=30) for i in range(3)]

    records = engine.generate(asks, config, forced=ForcedAcceptance(mean)).requests

    for record in records:
        uncut = [step.num_accepted for step in record.steps if step.cut is None]
        assert abs(sum(uncut) - mean * len(uncut)) <= 1


def test_the_time_of_forcing_is_none_of_the_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forcing that takes a thousand seconds leaves every round's parts at the few looks at the clock."""
    seconds = [0.0]
    plain = step.force

    def slow(*args: Any) -> Any:
        seconds[0] += 1000.0
        return plain(*args)

    def clock() -> float:
        seconds[0] += 1.0
        return seconds[0]

    monkeypatch.setattr(step, "force", slow)
    target = tiny_target()
    drafter = random_drafter(target, tmp_path, 97)
    engine = Engine(target, drafter=drafter, batch_size=2, eos_ids=[], clock=clock)

    block = engine.generate([request("r", [5, 9], max_tokens=12)], TREE, forced=ForcedAcceptance(1.0))

    decoded = [turn for turn in block.rounds if turn.kind == "decode"]
    assert seconds[0] > 1000 * len(decoded) > 3000
    assert max(turn.draft_s + turn.verify_s + turn.other_s for turn in decoded) < 20


# What is refused -----------------------------------------------------------------------------------


def engine_on_walk() -> Engine:
    target, drafter = cyclic_pair()
    return Engine(target, drafter=drafter, eos_ids=[])


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        pytest.param([request("a", [1]), request("a", [2])], "share a request id", id="same-id"),
        pytest.param([request("a", [1] * 500, max_tokens=13)], "need 513 tokens, .* is 512", id="context"),
        pytest.param([request("a", [])], "request a has no prompt tokens", id="empty-prompt"),
        pytest.param([request("a", [1], stop=("x",))], "stop strings", id="stop-without-tokenizer"),
    ],
)
def test_requests_that_cannot_run_are_refused(asks: list[Any], words: str) -> None:
    """The defect is named before anything is decoded."""
    with pytest.raises(UsageError, match=words):
        engine_on_walk().generate(asks, CHAIN)


def test_request_that_fills_the_context_is_accepted() -> None:
    """Prompt and output may reach the limit itself, with a draft tree at the very end."""
    record = engine_on_walk().generate([request("a", [1] * 500, max_tokens=12)], TREE).requests[0]

    assert 12 == record.num_output_tokens


def test_speculation_without_a_drafter_is_refused() -> None:
    """A missing head is named."""
    target, _ = cyclic_pair()

    with pytest.raises(UsageError, match="eagle3 K=3 needs a drafter"):
        Engine(target).generate([request("a", [1])], CHAIN)


def test_no_requests_give_an_empty_result() -> None:
    """Nothing to do is no error."""
    result = engine_on_walk().generate([], CHAIN)

    assert ((), ()) == (result.requests, result.rounds)
