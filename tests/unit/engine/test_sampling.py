"""Seeded sampling: the hash, the noise and the filters, against integers and fractions by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from spectune.engine.sampling import (
    RowSampling,
    choose,
    gumbel,
    perturbed,
    request_key,
    splitmix64,
    uniform,
    warp,
)
from spectune.records import Request
from tests.support.toys import CPU, request

MASK = (1 << 64) - 1


def splitmix64_integer(state: int) -> int:
    """The published generator on Python integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def inverse_splitmix64(output: int) -> int:
    """The state that gives `output`."""
    z = undo_shift(output, 31)
    z = undo_shift(z * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK, 27)
    z = undo_shift(z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK, 30)
    return (z - 0x9E3779B97F4A7C15) & MASK


def undo_shift(value: int, bits: int) -> int:
    """x from x ^ (x >> bits)."""
    x = value
    for _ in range(64 // bits):
        x = value ^ (x >> bits)
    return x


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def rows_of(count: int = 1, **sampling: Any) -> RowSampling:
    return RowSampling.of([request(f"r{i}", [1], **sampling) for i in range(count)], CPU)


def draws(logits: list[float], count: int, **sampling: Any) -> list[int]:
    """Tokens that one request draws at output indices 0 .. count-1 from the same logits."""
    scores = torch.tensor(logits).expand(1, count, -1)
    return choose(scores, rows_of(**sampling), torch.arange(count).unsqueeze(0))[0].tolist()


def log(probabilities: list[float]) -> list[float]:
    return [math.log(p) for p in probabilities]


STATES = [0, 1, 2**31, 2**63 - 1, 2**63, MASK, 0x123456789ABCDEF0, MASK - 0x9E3779B97F4A7C15]


def test_splitmix64_first_outputs_are_the_published_ones() -> None:
    """Seed 1234567 gives the reference sequence of the generator."""
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + i * golden) & MASK for i in range(3)]

    outputs = splitmix64(torch.tensor([signed(s) for s in states]))

    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert published == [value & MASK for value in outputs.tolist()]


def test_splitmix64_equals_integer_arithmetic() -> None:
    """Wrap-around and logical shifts hold over the whole range of int64, its corners included."""
    states = STATES + [splitmix64_integer(i) for i in range(500)]

    outputs = splitmix64(torch.tensor([signed(s) for s in states], dtype=torch.int64))

    assert [splitmix64_integer(s) for s in states] == [value & MASK for value in outputs.tolist()]


def test_uniform_is_flat_over_tokens_indices_and_keys() -> None:
    """Each of the three arguments alone runs through the unit interval evenly (chi-square, 64 bins)."""
    many = torch.arange(64_000)
    one = torch.full_like(many, 7)
    p_values = []
    for arguments in [(one, one, many), (one, many, one), (many, one, one)]:
        counts = torch.histc(uniform(*arguments), 64, 0, 1).tolist()
        p_values.append(stats.chisquare(counts).pvalue)

    assert min(p_values) > 1e-3


def test_uniform_of_neighbours_is_uncorrelated() -> None:
    """Values of adjacent tokens, and of adjacent output indices, say nothing of each other."""
    lanes, ones = torch.arange(64_000), torch.ones(64_000, dtype=torch.int64)
    here, next_token = uniform(ones, ones, lanes), uniform(ones, ones, lanes + 1)
    next_index = uniform(ones, ones + 1, lanes)

    pairs = torch.corrcoef(torch.stack([here, next_token, next_index]))

    assert pairs.fill_diagonal_(0).abs().max().item() < 4 / 64_000**0.5


@pytest.mark.parametrize("bits", [0, MASK], ids=["lowest", "highest"])
def test_uniform_extreme_hash_stays_inside_the_open_interval(bits: int) -> None:
    """No hash gives 0 or 1, so that no noise is infinite."""
    key, index = torch.tensor([3]), torch.tensor([5])
    stream = splitmix64_integer((splitmix64_integer(3) + 5) & MASK)
    lane = torch.tensor([signed((inverse_splitmix64(bits) - stream) & MASK)])

    value = uniform(key, index, lane)

    assert 0.0 < value.item() < 1.0
    assert math.isfinite(-math.log(-math.log1p(-value.item())))


def test_gumbel_follows_its_distribution() -> None:
    """The noise has the standard Gumbel distribution function (Kolmogorov-Smirnov)."""
    noise = gumbel(torch.tensor([11]), torch.tensor([0]), 50_000)[0]

    assert stats.kstest(noise.double().numpy(), "gumbel_r").pvalue > 1e-3


def test_request_key_depends_on_seed_and_name_only() -> None:
    """Prompt, category and limits do not move the noise; seed and request id do."""
    base = request("a", [1, 2], seed=1)
    same = request("a", [9], seed=1, max_tokens=3, temperature=0.3, category="other")
    keys = {request_key(r) for r in (base, request("a", [1, 2], seed=2), request("b", [1, 2], seed=1))}

    assert request_key(base) == request_key(same)
    assert 3 == len(keys)


def test_choose_is_equal_under_batch_and_order() -> None:
    """A row's tokens do not depend on the rows beside it, whatever their settings."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 3, "min_p": 0.05},
        {"temperature": 1.0},
    ]
    asks: list[Request] = [request(f"r{i}", [1], **s) for i, s in enumerate(settings)]
    logits = torch.randn(5, 4, 40, generator=torch.Generator().manual_seed(2))
    indices = torch.tensor([[i, i + 1, i + 2, i + 3] for i in range(5)])
    order = [3, 1, 4, 0, 2]

    together = choose(logits, RowSampling.of(asks, CPU), indices)
    shuffled = choose(logits[order], RowSampling.of([asks[i] for i in order], CPU), indices[order])
    alone = [
        choose(logits[i : i + 1], RowSampling.of([asks[i]], CPU), indices[i : i + 1])[0] for i in range(5)
    ]

    assert torch.equal(together, torch.stack(alone))
    assert torch.equal(together[order], shuffled)


@pytest.mark.parametrize(
    "indices",
    [
        pytest.param([[4, 5, 6, 7], [9, 10, 11, 12]], id="chains"),
        pytest.param([[4, 5, 5, 6], [9, 10, 11, 11]], id="trees"),
        pytest.param([[4, 5, 6, 7], [9, 10, 10, 11]], id="a-tree-beside-a-chain"),
        pytest.param([[4, 5, 5, 5], [9, 10, 11, 12]], id="a-chain-below-a-tree"),
    ],
)
def test_perturbed_noise_at_a_node_is_that_of_its_output_index(indices: list[list[int]]) -> None:
    """Nodes of one depth share their noise, and every row of a batch keeps its own depths."""
    rows = rows_of(2, temperature=1.0)
    wanted = torch.tensor(indices)

    noise = perturbed(torch.zeros(2, 4, 9), rows, wanted)

    expected = torch.stack([gumbel(rows.keys[b].expand(4), wanted[b], 9) for b in range(2)])
    assert torch.equal(expected, noise)


def test_choose_greedy_tie_goes_to_the_lower_token() -> None:
    """Equal logits have one winner in every kernel."""
    assert [1] == draws([0.0, 2.0, 2.0, 1.0], 1, temperature=0.0)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        pytest.param({"temperature": 1.0}, [0.5, 0.25, 0.15, 0.10], id="plain"),
        # squares 25 : 6.25 : 2.25 : 1, sum 34.5
        pytest.param({"temperature": 0.5}, [25 / 34.5, 6.25 / 34.5, 2.25 / 34.5, 1 / 34.5], id="T=0.5"),
        # 0.5 : 0.25 : 0.15
        pytest.param({"temperature": 1.0, "top_k": 3}, [50 / 90, 25 / 90, 15 / 90, 0], id="top-k"),
        # 0.5 + 0.25 reaches 0.7; the token that crosses stays
        pytest.param({"temperature": 1.0, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0], id="top-p"),
        # 0.25 of the best: at least 0.125
        pytest.param({"temperature": 1.0, "min_p": 0.25}, [50 / 90, 25 / 90, 15 / 90, 0], id="min-p"),
        # of 0.5 : 0.25 : 0.15 the first two hold 83 %, so 0.8 needs no third
        pytest.param({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0], id="k-then-p"),
        # squares first: the best alone holds 72 %
        pytest.param({"temperature": 0.5, "top_p": 0.7}, [1, 0, 0, 0], id="T-then-top-p"),
    ],
)
def test_choose_frequencies_are_those_of_the_warped_softmax(
    sampling: dict[str, Any], expected: list[float]
) -> None:
    """4000 draws agree with the distribution worked out by hand; a token outside it never comes."""
    counts = Counter(draws(log([0.5, 0.25, 0.15, 0.10]), 4000, seed=1, **sampling))

    inside = [t for t, p in enumerate(expected) if p > 0]
    assert set(counts) <= set(inside)
    if len(inside) > 1:
        observed = [counts[t] for t in inside]
        assert stats.chisquare(observed, [4000 * expected[t] for t in inside]).pvalue > 1e-3


def test_choose_draws_of_neighbouring_indices_are_independent() -> None:
    """Pairs of consecutive tokens fall as the product of their probabilities (chi-square, 9 cells)."""
    p = [0.5, 0.3, 0.2]
    tokens = draws(log(p), 8000, temperature=1.0, seed=4)
    counts = Counter(zip(tokens[::2], tokens[1::2], strict=True))

    cells = [(a, b) for a in range(3) for b in range(3)]
    expected = [4000 * p[a] * p[b] for a, b in cells]
    assert stats.chisquare([counts[cell] for cell in cells], expected).pvalue > 1e-3


def test_warp_top_k_tie_keeps_the_lower_tokens() -> None:
    """Exactly k tokens are left, also among equals."""
    warped = warp(torch.tensor([[[1.0, 2.0, 2.0, 2.0]]]), rows_of(temperature=1.0, top_k=2))

    assert [False, True, True, False] == warped[0, 0].isfinite().tolist()


@pytest.mark.parametrize("top_p", [1e-9, 0.2], ids=["nearly-nothing", "below-the-best"])
def test_warp_small_top_p_keeps_the_best_token(top_p: float) -> None:
    """The nucleus is never empty."""
    warped = warp(torch.tensor([log([0.1, 0.6, 0.3])]).unsqueeze(0), rows_of(temperature=1.0, top_p=top_p))

    assert [False, True, False] == warped[0, 0].isfinite().tolist()


def test_warp_row_without_top_p_loses_no_token_to_its_neighbour() -> None:
    """A row at top-p 1 keeps its whole tail beside a row that filters, as it does alone."""
    logits = torch.tensor([[[0.0, -20.0, -21.0]]])  # the best one's mass rounds to 1
    asks = [request("open", [1], temperature=1.0), request("nucleus", [1], temperature=1.0, top_p=0.9)]

    alone = warp(logits, RowSampling.of(asks[:1], CPU))
    beside = warp(logits.expand(2, -1, -1), RowSampling.of(asks, CPU))

    assert torch.equal(alone[0], beside[0])


def test_warp_float_filters_agree_with_exact_ones() -> None:
    """Over random logits the kept set is the one that sorting by hand in float64 gives."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        logits: Tensor = torch.randn(1, 1, 30, generator=generator) * 3
        kept = warp(logits, rows_of(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02))[0, 0].isfinite()

        scores = (logits[0, 0].double() / 0.8).tolist()
        ranked = sorted(range(30), key=lambda t: -scores[t])[:12]
        weights = [math.exp(scores[t]) for t in ranked]
        total, mass, nucleus = sum(weights), 0.0, []
        for token, weight in zip(ranked, weights, strict=True):
            if mass < 0.9 * total:
                nucleus.append(token)
            mass += weight
        best = math.exp(scores[ranked[0]])
        expected = {t for t in nucleus if math.exp(scores[t]) >= 0.02 * best}
        assert expected == set(kept.nonzero().flatten().tolist())
