"""Advice, verdict and cautions: sentences with their numbers."""

from __future__ import annotations

from spectune.policy.advice import advise
from spectune.policy.cautions import run_cautions
from spectune.policy.verdict import verdict_text


def advice_of(make, *arms, plain=None, batch_size=1, fingerprint=None):
    cell = make.compare(make.cell(batch_size), *arms, plain=plain)
    return " ".join(advise([cell], [], fingerprint))


def cautions_of(make, *arms, categories=()):
    cell = make.compare(make.cell(), *arms)
    return " ".join(
        run_cautions([cell], categories, is_simulated=False, num_missing=0, num_points=2, notes=())
    )


def test_advice_names_a_draft_that_is_too_expensive(make):
    """A draft step as dear as a plain step loses at a longer acceptance, and the reason is the draft."""
    arm = make.arm(make.chain(3), 0.79, length=3.0, rounds=make.rounds(3.0, draft=2.7, verify=1.1))

    text = advice_of(make, arm)

    assert "loses: draft too expensive, 2.70 of a plain step a round (one draft step costs 0.90)" in text


def test_advice_prints_break_even_and_zero_accept_share_of_a_loss(make):
    """Acceptance length 3.5 can lose: 3.4 emitted, break-even 5.9, and 30% of the steps accept nothing."""
    arm = make.arm(
        make.chain(5),
        0.59,
        acceptance=make.acceptance(3.5, zero_accept_share=0.30),
        rounds=make.rounds(3.4, draft=1.7, verify=4.2),
    )

    text = advice_of(make, arm)

    assert "verification too expensive" in text
    assert (
        "break-even at 5.90 tokens a step, emitted 3.40 (acceptance length 3.50); 30% of the steps with a draft"
    ) in text


def test_advice_to_sweep_deeper_needs_acceptance_above_four_at_the_deepest_chain(make):
    """4.3 at the deepest measured K asks for more depth; a deeper measured chain silences it."""
    deep = make.arm(make.chain(5), 2.2, length=4.3)

    assert "sweep --num-tokens 5,6,7" in advice_of(make, make.arm(make.chain(3), 1.8, length=3.2), deep)
    assert "sweep --num-tokens" not in advice_of(make, deep, make.arm(make.chain(7), 2.0, length=4.5))


def test_advice_on_idle_depth_compares_time_at_equal_acceptance(make):
    """2.18 and 2.19 accepted at 25% less speed: the depth beyond 3 is idle."""
    text = advice_of(
        make, make.arm(make.chain(3), 1.20, length=2.18), make.arm(make.chain(5), 0.90, length=2.19)
    )

    assert "eagle3 K=5 accepts as much as eagle3 K=3 (2.19 against 2.18)" in text
    assert "runs at 0.75 of its speed" in text


def test_advice_warns_of_a_high_rate_with_little_drafted(make):
    """94.7% acceptance of 0.23 drafts a step is told as an acceptance length of 1.22."""
    told = make.acceptance(1.217, draft_acceptance_rate=18 / 19, proposed_per_step=19 / 83)

    text = advice_of(make, make.arm(make.chain(5, "ngram"), 1.1, acceptance=told))

    assert "accepts 95% of what it drafts but drafts 0.23 tokens a step: acceptance length 1.22" in text


def test_advice_mentions_experts_only_if_the_fingerprint_does(make):
    """The note on mixtures of experts needs a target that has them."""
    arm = make.arm(make.chain(3), 1.2)

    assert "experts" not in advice_of(make, arm, fingerprint=make.fingerprint())
    assert "64 experts a layer" in advice_of(
        make, arm, fingerprint=make.fingerprint(settings={"num_experts": 64})
    )


def test_advice_compares_tree_and_chain_at_equal_verified_tokens(make):
    """A tree of 6 tokens stands against the chain of 6 tokens, not against another."""
    text = advice_of(
        make,
        make.arm(make.chain(5), 1.3, length=2.4),
        make.arm(make.tree(3, 4, 6), 1.5, length=2.7),
        make.arm(make.chain(2), 1.2, length=1.9),
    )

    assert "At 6 verified tokens" in text
    assert "accepts 2.70 at 1.50x, the chain eagle3 K=5 2.40 at 1.30x" in text


def test_advice_on_the_rule_for_short_acceptance_looks_at_a_deep_chain(make):
    """A chain of one cannot accept 3 tokens a step; one of five that accepts 1.9 shows that acceptance is
    short, and the best depth of 1 contradicts the rule."""
    shallow = make.arm(make.chain(1), 1.25, length=1.47)

    assert "rule of 3 to 4" not in advice_of(make, shallow)
    assert (
        "eagle3 K=5 accepts 1.90 tokens a step at batch 1, below 3; the best depth there is 1, which contradicts"
        in advice_of(make, shallow, make.arm(make.chain(5), 1.05, length=1.9))
    )


def test_advice_on_categories_needs_more_than_a_few_requests(make):
    """Three requests a category rank nothing; four do."""

    def text_of(num_requests):
        parts = [
            make.compare(make.cell(), make.arm(make.chain(3), speed, num_requests=num_requests), scope=name)
            for name, speed in (("chat", 1.1), ("code", 1.6))
        ]
        return " ".join(advise([make.compare(make.cell())], parts, None))

    assert "" == text_of(3)
    assert "At batch 1 code gains most" in text_of(4)


def test_advice_without_measured_arms_is_empty(make):
    """No numbers, no sentences."""
    assert advise([make.compare(make.cell())], [], None) == ()


def counted(make, batch_size, name, num_requests):
    """A category of a cell in which every arm ran so many requests."""
    plain = make.plain_arm(scope=name, num_requests=num_requests)
    return make.compare(make.cell(batch_size), scope=name, plain=plain)


def test_verdict_names_choice_speedup_and_mix(make):
    """One sentence to act on, and what it was pooled over."""
    cells = [make.compare(make.cell(1), make.arm(make.chain(3), 1.5))]
    categories = [counted(make, 1, "chat", 10), counted(make, 1, "code", 12)]

    assert verdict_text("speculate", cells, categories) == (
        "Speculate: eagle3 K=3 at batch 1 runs at 1.50x (1.48 to 1.52). Pooled over requests of chat 10, code 12."
    )


def test_verdict_counts_the_requests_that_each_cell_really_ran(make):
    """A batch of 16 asks more prompts than a batch of 1: neither is told with the other's count."""
    cells = [make.compare(make.cell(batch), make.arm(make.chain(3), 1.5)) for batch in (1, 16)]
    categories = [
        counted(make, batch, name, requests)
        for batch, requests in ((1, 1), (16, 12))
        for name in ("chat", "code")
    ]

    text = verdict_text("speculate", cells, categories)

    assert text.endswith("Pooled over chat, code; requests: 2 at batch 1, 24 at batch 16.")


def test_verdict_of_opposed_categories_names_both_sides(make):
    """The reader sees which category gains and which loses."""
    cell = make.cell()
    overall = make.compare(cell, make.arm(make.chain(3), 2.5))
    repeat = make.compare(cell, make.arm(make.chain(3), 9.8), scope="repeat")
    prose = make.compare(cell, make.arm(make.chain(3), make.interval(0.98, 0.01)), scope="prose")

    text = verdict_text("depends on workload", [overall], [repeat, prose])

    assert "gains in repeat 9.80x (9.78 to 9.82) and loses in prose" in text
    assert "0.98x (0.97 to 0.99) of plain decoding" in text


def test_verdict_over_load_tells_where_it_turns(make):
    """On at batch 1 and off at batch 16 are both in the sentence."""
    cells = [
        make.compare(make.cell(1), make.arm(make.chain(3), 1.5)),
        make.compare(make.cell(16), make.arm(make.chain(3), 0.7)),
    ]

    text = verdict_text("depends on load", cells, [])

    assert "eagle3 K=3 at batch 1 runs at 1.50x" in text
    assert "off at batch 16, best candidate eagle3 K=3 runs at 0.70x (0.68 to 0.72) of plain decoding" in text


def test_caution_that_arms_share_is_said_once(make):
    """The same doubt about two arms of a cell is one sentence with both names."""
    arms = [make.arm(make.chain(depth), 1.2, cautions=("the machine was not steady",)) for depth in (1, 3)]

    assert cautions_of(make, *arms) == "eagle3 K=1, eagle3 K=3 at batch 1: the machine was not steady"


def test_caution_on_predictions_names_all_that_are_far_off(make):
    """Residuals beyond 10% are one sentence; those within are none."""
    arms = [
        make.arm(make.chain(depth), 1.2, prediction=make.prediction(residual))
        for depth, residual in ((1, 0.12), (3, -0.2), (5, 0.05))
    ]

    assert cautions_of(make, *arms) == (
        "measured time per token is more than 10% off the predicted one: "
        "eagle3 K=1 at batch 1 (+12%), eagle3 K=3 at batch 1 (-20%)"
    )


def test_caution_on_a_category_that_the_choice_slows_down(make):
    """A win overall does not hide the category that loses with the same setting."""
    prose = make.compare(make.cell(), make.arm(make.chain(3), 0.8), scope="prose")

    text = cautions_of(make, make.arm(make.chain(3), 1.5), categories=[prose])

    assert "eagle3 K=3, chosen at batch 1, slows prose down to 0.80x" in text


def test_caution_on_unfinished_and_simulated_runs(make):
    """What was declared or is missing is said first."""
    told = run_cautions([], [], is_simulated=True, num_missing=2, num_points=5, notes=("a line was broken",))

    assert told[0].startswith("simulated run")
    assert told[1] == "2 of 5 points are not finished: resume the run"
    assert told[2] == "a line was broken"
