"""Losslessness judged from texts and samples, and bugs planted in the reference engine that it must find."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spectune.backend.reference import ReferenceBackend
from spectune.engine import rounds, step, verify
from spectune.engine.sampling import gumbel, uniform
from spectune.measure.lossless import (
    Kind,
    Verdict,
    compare_samples,
    compare_texts,
    judge_samples,
    judge_texts,
)
from spectune.measure.lossless_run import Check, check_lossless, sample_blocks
from spectune.records import Cell, Gap, RequestRecord, Sampling, SpecConfig, StepRecord
from tests.support.toys import cyclic_pair, request

CHAIN = SpecConfig.chain("eagle3", 3, draft_model="toy")
TREE = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=6, draft_model="toy")
DRAWN = SpecConfig.chain("eagle3", 3, draft_model="toy", options=(("draft_sampling", "probabilistic"),))


def answer(name, ids, *, accepted=1, reason="length"):
    """A record whose single step accepted so many drafts; only texts and acceptance are read."""
    step_record = StepRecord(num_proposed=9, num_verified=9, num_accepted=accepted, num_emitted=accepted + 1)
    return RequestRecord(
        request_id=name,
        category="toy",
        num_prompt_tokens=3,
        output_ids=tuple(ids),
        arrival_s=0.0,
        first_token_s=0.1,
        finish_s=1.0,
        finish_reason=reason,
        steps=(step_record,),
    )


REQUESTS = {f"r{i}-0": request(f"r{i}-0", [1, 2, 3]) for i in range(40)}


def judged(plain, arm, *, control=None, gap=None):
    found = compare_texts(plain, control or plain, arm, REQUESTS, lambda r, ids, i: gap)
    return judge_texts(found), found


def texts(*differing, count=40, length=8):
    """Forty answers; those named differ from token 5 on."""
    return [
        answer(f"r{i}-0", [*range(5), *([99] * 3 if i in differing else range(5, length))])
        for i in range(count)
    ]


def test_equal_texts_are_lossless():
    """Nothing differs, drafts were accepted."""
    (verdict, reason), _ = judged(texts(), texts())

    assert Verdict.LOSSLESS == verdict
    assert "40 of 40" in reason


def test_a_near_tie_is_told_and_passes():
    """A gap below the tolerance is rounding: index, gap and limit are told."""
    (verdict, reason), found = judged(texts(), texts(3), gap=Gap(value=0.2, tolerance=0.5))

    assert Verdict.LOSSLESS == verdict
    assert "1 near tie" in reason
    assert (5, Kind.NEAR_TIE) == (found.differences[0].index, found.differences[0].kind)


def test_a_mismatch_fails_with_its_place_and_gap():
    """A gap that no rounding turns over is a bug."""
    (verdict, reason), _ = judged(texts(), texts(3), gap=Gap(value=4.0, tolerance=0.5))

    assert Verdict.LOSSY == verdict
    assert "request r3-0 at output token 5: mismatch" in reason
    assert "4 apart" in reason


@pytest.mark.parametrize(
    ("ids", "kind"), [([*range(12)], Kind.RAN_ON), ([*range(6)], Kind.ENDED_EARLY)], ids=["ran-on", "early"]
)
def test_a_text_that_ends_elsewhere_fails(ids, kind):
    """Going on past the end of plain decoding, or stopping short of it, is no near tie."""
    arm = [answer("r0-0", ids), *texts()[1:]]

    (verdict, _), found = judged(texts(), arm)

    assert (Verdict.LOSSY, kind) == (verdict, found.differences[0].kind)


def test_an_engine_that_differs_from_itself_is_judged_by_its_own_control():
    """Six of forty differ, as five of forty do without speculation: both are shown, nothing is proved."""
    (verdict, reason), _ = judged(texts(), texts(*range(6)), control=texts(*range(20, 25)))

    assert Verdict.LOSSLESS == verdict
    assert "34 of 40" in reason
    assert "35 of 40 in its control" in reason


def test_differing_far_more_often_than_the_control_is_lossy_without_any_gap():
    """Eighteen of forty against two of forty is no rounding, whatever the engine can tell."""
    (verdict, reason), _ = judged(texts(), texts(*range(18)), control=texts(30, 31))

    assert Verdict.LOSSY == verdict
    assert "more often than plain decoding from itself" in reason


def test_agreement_below_half_is_called_broken():
    """Healthy pairs agree in 87-96% of the texts: this is no near tie, it is the wrong template."""
    (verdict, reason), _ = judged(texts(), texts(*range(36)), gap=Gap(value=0.1, tolerance=0.5))

    assert Verdict.BROKEN == verdict
    assert "verification or template broken" in reason


def test_drafts_that_were_never_accepted_prove_nothing():
    """A verifier that was never asked to accept is not verified."""
    arm = [answer(f"r{i}-0", range(8), accepted=0) for i in range(40)]

    assert Verdict.INCONCLUSIVE == judged(texts(), arm)[0][0]


def test_a_temperature_that_one_side_ignores_shows_in_the_frequencies():
    """Plain draws 7 in six of ten, the arm always: fifty samples tell."""
    plain = [answer(f"p-{i}", [1, 7 if i % 10 < 6 else 8]) for i in range(50)]
    arm = [answer(f"p-{i}", [1, 7]) for i in range(50)]

    verdict, reason = judge_samples(compare_samples(plain, arm))

    assert Verdict.LOSSY == verdict
    assert "output token 1: 2 tokens, 60% of them 7 against 1 tokens, 100% of them 7" in reason


# Planted bugs: replacements live here, the engine has no switch for them -----------------------------


@pytest.fixture
def backend():
    """A target that walks a permutation and a head that knows it: drafts are often right, never always."""
    target, drafter = cyclic_pair()
    made = ReferenceBackend(model="toy", draft_model="toy")
    vars(made)["target"] = target
    vars(made)["tokenizer"] = SimpleNamespace(
        template_digest="t", eos_ids=(2,), decode=lambda ids: "", encode=lambda text: []
    )
    vars(made)["_eagle3"] = drafter
    return made


def checks(*temperatures, batch_sizes=(1, 3), num_samples=0):
    made = []
    for temperature in temperatures:
        for batch_size in batch_sizes:
            sampling = Sampling(temperature=temperature, max_tokens=24, seed=5)
            asks = [
                request(f"ask{i}-0", [3 + i, 4 + i, 5 + i], temperature=temperature, max_tokens=24, seed=5)
                for i in range(6)
            ]
            blocks = tuple(tuple(asks[i : i + batch_size]) for i in range(0, len(asks), batch_size))
            samples = (
                sample_blocks(asks[:2], num_samples=num_samples, num_tokens=6)
                if num_samples and temperature
                else ()
            )
            made.append(
                Check(
                    cell=Cell(batch_size=batch_size, context_tokens=0, temperature=temperature),
                    sampling=sampling,
                    blocks=blocks,
                    samples=samples,
                )
            )
    return made


def verdicts(findings):
    return {(f.config.label, f.cell.batch_size, f.cell.temperature, f.test): f.verdict for f in findings}


def run(backend, configs, work):
    return check_lossless(backend, configs, work, say=lambda text: None)


def test_the_true_engine_keeps_its_text_greedy_and_keyed_alone_and_in_a_batch(backend):
    """Chains and trees at T = 0 and T = 1, batch 1 and 3: the same text as plain decoding."""
    found = run(backend, [CHAIN, TREE], checks(0.0, 1.0))

    assert {Verdict.LOSSLESS} == set(verdicts(found).values())
    assert {0.0, 1.0} == {finding.cell.temperature for finding in found}


def test_the_true_engine_keeps_its_frequencies(backend):
    """Samples of chains whose drafts are chosen and of chains whose drafts are drawn."""
    found = run(backend, [CHAIN, DRAWN], checks(1.0, batch_sizes=(32,), num_samples=128))

    assert {Verdict.LOSSLESS} == {f.verdict for f in found if f.test == "frequencies"}
    assert 2 == sum(f.test == "frequencies" for f in found)


def test_a_temperature_ignored_in_verification_is_found(backend, monkeypatch):
    """Argmax at drafted nodes whatever the temperature: keyed texts and frequencies both tell."""
    true_choose = step.choose

    def ignore_temperature(logits, rows, indices, *, draw=None, span=None):
        return logits.argmax(-1) if logits.shape[1] > 1 else true_choose(logits, rows, indices)

    monkeypatch.setattr(step, "choose", ignore_temperature)
    found = verdicts(run(backend, [CHAIN], checks(1.0, batch_sizes=(32,), num_samples=96)))

    assert found[CHAIN.label, 32, 1.0, "texts"] in (Verdict.LOSSY, Verdict.BROKEN)
    assert Verdict.LOSSY == found[CHAIN.label, 32, 1.0, "frequencies"]


def test_an_end_that_is_passed_in_mid_block_is_found(backend, monkeypatch):
    """An accepted end-of-sequence token that is not the first of its block is overrun."""
    true_ends = rounds.Rounds._ends

    def pass_end(self, row, token, kept):
        if (
            len(kept) > 1
            and token in self._engine.eos_ids
            and len(row.output_ids) < row.request.sampling.max_tokens
        ):
            return None
        return true_ends(self, row, token, kept)

    monkeypatch.setattr(rounds.Rounds, "_ends", pass_end)
    findings = run(backend, [CHAIN], checks(0.0, batch_sizes=(3,)))

    assert {Verdict.LOSSY, Verdict.BROKEN} >= {finding.verdict for finding in findings}
    kinds = {difference.kind for finding in findings for difference in finding.agreement.differences}
    assert {Kind.RAN_ON} == kinds


@pytest.mark.slow
def test_a_wrong_residual_is_found_by_its_frequencies(backend, monkeypatch):
    """Drawing from p instead of (p - q)+ after a refusal favours what the draft favours."""

    def wrong_residual(tree, logits, rows, indices):
        p = verify._probabilities(logits, rows)
        drafts = tree.tokens[:, 1:]
        p_draft = p[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)
        q_draft = tree.q.gather(2, drafts.unsqueeze(2)).squeeze(2)
        keys = rows.keys.unsqueeze(1).expand_as(indices)
        coins = uniform(keys ^ verify._REFUSAL_STREAM, indices, torch.zeros_like(indices))[:, :-1]
        accepted = (coins * q_draft < p_draft) & tree.valid[:, 1:]
        kept = torch.cat([torch.ones_like(accepted[:, :1]), accepted.cumprod(1).bool()], 1)
        return verify._verdict(tree, kept, (p.log() + gumbel(keys, indices, logits.shape[-1])).argmax(-1))

    target, drafter = cyclic_pair(shift=3)  # a draft that favours other tokens is refused often
    vars(backend)["target"], vars(backend)["_eagle3"] = target, drafter
    work = checks(1.0, batch_sizes=(64,), num_samples=448)
    assert {Verdict.LOSSLESS} == {f.verdict for f in run(backend, [DRAWN], work)}

    monkeypatch.setattr(step, "verify_residual", wrong_residual)
    found = run(backend, [DRAWN], work)

    assert {Verdict.LOSSY} == {finding.verdict for finding in found}
