"""The simulated engine keeps every counting identity and repeats itself."""

from __future__ import annotations

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.backend.truth import SimulatedTruth
from spectune.errors import EngineFailure, UsageError
from spectune.records import (
    Backend,
    Cell,
    Launch,
    Point,
    Prompt,
    Request,
    Sampling,
    SpecConfig,
)

OFF = SpecConfig.off()
TREE = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=6)
CONFIGS = [OFF, SpecConfig.chain("eagle3", 4), SpecConfig.chain("ngram", 2), TREE]


def point(config, batch_size=2):
    cell = Cell(batch_size=batch_size, context_tokens=0, temperature=0.0)
    return Point(config=config, cell=cell, workload_hash="w", sampling=Sampling())


def requests(count, **sampling):
    return [
        Request(request_id=f"r-{i}", prompt_ids=(1, 2, 3), category="chat", sampling=Sampling(**sampling))
        for i in range(count)
    ]


def run(backend, the_point, the_requests):
    (launch,) = backend.plan([the_point])
    with backend.open(launch) as session:
        return session.run(the_point, the_requests)


def test_simulated_backend_is_a_backend_that_says_it_is_simulated():
    """It fits the one door and never passes for a measurement."""
    backend = SimulatedBackend()

    assert isinstance(backend, Backend)
    assert backend.capabilities().is_simulated
    assert backend.fingerprint().is_simulated


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 400])
def test_run_keeps_the_counting_identities(config, max_tokens):
    """output = 1 + emitted, chunks pair with steps, rounds emit what steps emit, for any cut."""
    block = run(SimulatedBackend(), point(config), requests(5, max_tokens=max_tokens))

    decoded = sum(turn.num_emitted for turn in block.rounds if turn.kind == "decode")
    assert [record.broken_identity() for record in block.requests] == [None] * 5
    assert all(len(record.chunk_s) == 1 + len(record.steps) for record in block.requests)
    assert decoded == sum(step.num_emitted for record in block.requests for step in record.steps)
    assert all(record.num_output_tokens <= max_tokens for record in block.requests)
    assert {turn.config for turn in block.rounds} == {config.label}


def test_run_prefill_of_each_request_is_a_round_of_its_own():
    """Five requests, five prefills, never inside a decode round; at most two decode together."""
    block = run(SimulatedBackend(), point(OFF), requests(5, max_tokens=9))

    assert [turn.batch_size for turn in block.rounds if turn.kind == "prefill"] == [1] * 5
    assert max(turn.batch_size for turn in block.rounds if turn.kind == "decode") == 2


def test_run_rounds_follow_each_other_on_one_clock():
    """A round starts when the last one ended, and the block lasts as long as its rounds."""
    block = run(SimulatedBackend(), point(TREE), requests(3, max_tokens=20))

    ends = [turn.start_s + turn.total_s for turn in block.rounds]
    assert [turn.start_s for turn in block.rounds[1:]] == pytest.approx(ends[:-1])
    assert block.duration_s == pytest.approx(sum(turn.total_s for turn in block.rounds))


def test_run_twice_gives_the_same_block():
    """A new session repeats every number, so a resumed run repeats what it lost."""
    first = run(SimulatedBackend(seed=3), point(TREE), requests(4, max_tokens=30))
    second = run(SimulatedBackend(seed=3), point(TREE), requests(4, max_tokens=30))

    assert first == second


def test_run_text_does_not_depend_on_the_configuration():
    """Lossless: every configuration says the same."""
    texts = [
        [record.output_ids for record in run(SimulatedBackend(), point(config), requests(4)).requests]
        for config in CONFIGS
    ]

    assert all(text == texts[0] for text in texts)


def test_run_finish_reason_tells_length_from_end_of_sequence():
    """An output that reaches the limit is cut by length, a shorter one stopped by itself."""
    truth = SimulatedTruth(output_tokens={"default": 20, "chat": 20}, output_tokens_spread=0.0)
    backend = SimulatedBackend(truth=truth)

    reasons = [
        run(backend, point(OFF), requests(1, max_tokens=limit, ignore_eos=ignore)).requests[0]
        for limit, ignore in ((30, False), (10, False), (30, True))
    ]

    assert [(r.finish_reason, r.num_output_tokens) for r in reasons] == [
        ("stop", 20),
        ("length", 10),
        ("length", 30),
    ]


def test_run_ngram_without_a_match_proposes_nothing():
    """A method that never proposes has steps without a draft and no extra verification time."""
    truth = SimulatedTruth(proposal_rate={"ngram": 0.0}, noise_sd=0.0)

    block = run(SimulatedBackend(truth=truth), point(SpecConfig.chain("ngram", 3), 1), requests(1))

    assert {step.num_proposed for record in block.requests for step in record.steps} == {0}
    assert all(
        turn.verify_s == pytest.approx(0.026 + 2e-6 * turn.kv_tokens)
        for turn in block.rounds
        if turn.kind == "decode"
    )


@pytest.mark.parametrize("context_tokens", [0, 7, 5000])
def test_encode_puts_exactly_the_context_before_the_prompt(context_tokens):
    """A prompt of 8 characters is 2 tokens; the context is as long as asked, repeated if short."""
    prompt = Prompt(prompt_id="p", category="chat", turns=("12345678",))

    ids = SimulatedBackend().encode(prompt, "some long prose " * 9, context_tokens)

    assert len(ids) == context_tokens + 2
    assert ids[context_tokens:] == SimulatedBackend().encode(prompt, "", 0)


@pytest.mark.parametrize(("kind", "error"), [("oom", MemoryError), ("engine", EngineFailure)])
def test_run_declared_failure_is_raised(kind, error):
    """A failing label fails, by configuration or by point."""
    the_point = point(TREE)
    for label in (TREE.label, the_point.label):
        with pytest.raises(error):
            run(SimulatedBackend(failing={label: kind}), the_point, requests(1))


def test_failure_unknown_kind_is_refused():
    """A typo in a failure is not silently healthy."""
    with pytest.raises(UsageError, match="ooom"):
        SimulatedBackend(failing={"off": "ooom"})


def test_replay_of_a_text_repeats_its_acceptance_wherever_it_came_from() -> None:
    """A start whose texts part from plain decoding's, replayed by another start: the same steps."""
    truth = SimulatedTruth(text_flip_rate=1.0)
    asks = requests(6, max_tokens=40)
    with SimulatedBackend(truth=truth, noise_seed=1).open(Launch(points=())) as session:
        written = session.run(point(CONFIGS[1]), asks).requests
    texts = {record.request_id: record.output_ids for record in written}

    with SimulatedBackend(truth=truth, noise_seed=2).open(Launch(points=())) as session:
        replayed = session.replay(point(CONFIGS[1]), asks, texts).requests

    assert [record.output_ids for record in written] == [record.output_ids for record in replayed]
    assert [[s.num_accepted for s in r.steps] for r in written] == [
        [s.num_accepted for s in r.steps] for r in replayed
    ]


def test_starts_with_a_noise_of_their_own_take_different_times() -> None:
    """With a noise seed every start of the engine is slower or faster in its own way."""
    backend = SimulatedBackend(truth=SimulatedTruth(boot_noise_sd=0.05), noise_seed=1)
    durations = set()
    for _ in range(3):
        with backend.open(Launch(points=())) as session:
            durations.add(session.run(point(CONFIGS[1]), requests(2)).duration_s)

    assert len(durations) == 3
