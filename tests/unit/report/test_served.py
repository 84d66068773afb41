"""The parts of the page that only servers have, and lengths, which every run has."""

from __future__ import annotations

from dataclasses import replace

from spectune.policy.comparison import LengthBucket, RunSummary, ServedLoad, Spread
from spectune.records import Interval, SpecConfig
from spectune.report import render_report

K2 = SpecConfig.chain("eagle3", 2)


def spread(mean: float) -> Spread:
    return Spread(n=48, mean=mean, p50=mean, p90=mean, p99=2 * mean)


def load(share: float, *, kept: float | None = 0.8) -> ServedLoad:
    return ServedLoad(
        scheduled_ttft_s=spread(0.25), scheduled_e2e_s=spread(1.5), dispatch_delay_s=0.004,
        requests_per_s=1.9, goodput_per_s=None if kept is None else 1.9 * kept, share_kept=kept,
        max_in_flight=5, prefix_hit_rate=None, num_preemptions=0, client_requests_per_s=900.0,
        client_events_per_s=6000.0, client_share=share,
    )  # fmt: skip


def served(summary: RunSummary, share: float, *, kept: float | None = 0.8) -> RunSummary:
    """The run as one of servers, with a cell at 2 requests/s."""
    cell = summary.cells[0]
    arms = tuple(replace(arm, load=load(share, kept=kept)) for arm in cell.arms)
    rate = replace(cell.cell, request_rate=2.0, arrivals="poisson")
    return replace(
        summary,
        cells=(replace(cell, arms=arms), *summary.cells[1:]),
        rates=(replace(cell, cell=rate, arms=arms),),
    )


def part(page: str, name: str) -> str:
    return page.split(f'<section id="{name}">')[1].split("</section>")[0]


def test_rates_show_waiting_goodput_and_what_was_in_flight(full_summary: RunSummary) -> None:
    """250 ms to the first token from the arrival, 1.52 of 1.90 requests a second kept their promises."""
    text = part(render_report(served(full_summary, 0.1)), "rates")

    for shown in ("2 requests/s (poisson)", "250.0", "4.00", "1.90", "1.52", "80%", "(5)"):
        assert shown in text


def test_rates_without_promises_say_how_to_promise(full_summary: RunSummary) -> None:
    """An absent goodput is a dash with the flag that would give one, not a zero."""
    text = part(render_report(served(full_summary, 0.1, kept=None)), "rates")

    assert "--goodput ttft:200,tpot:20" in text


def test_client_is_blamed_above_half_of_its_ceiling(full_summary: RunSummary) -> None:
    """A load of 60% of what the client can take has times that are partly the client's; of 40% it has not."""
    heavy = part(render_report(served(full_summary, 0.6)), "client")
    light = part(render_report(served(full_summary, 0.4)), "client")

    assert "60.0%" in heavy
    assert "partly the client" in heavy
    assert "40.0%" in light
    assert "partly the client" not in light
    for shown in ("900", "6,000"):
        assert shown in light


def test_runs_without_servers_have_no_parts_of_servers(full_summary: RunSummary) -> None:
    """The reference engine has no client that could be slow."""
    page = render_report(full_summary)

    assert all(f'id="{name}"' not in page for name in ("rates", "client", "production"))


def test_lengths_show_count_interval_and_the_heads_limit(full_summary: RunSummary) -> None:
    """Each bucket with its requests, steps and interval; what lies beyond the head's context is marked."""
    buckets = (
        LengthBucket(
            config=K2, low=0, high=127, num_requests=30, num_steps=1200,
            acceptance_length=Interval(value=2.295, low=2.2, high=2.4, n=30),
        ),
        LengthBucket(
            config=K2, low=2048, high=4095, num_requests=2, num_steps=90, acceptance_length=None,
            is_beyond_head=True,
        ),
    )  # fmt: skip
    cell = replace(full_summary.cells[0], lengths=buckets)
    text = part(render_report(replace(full_summary, cells=(cell,))), "lengths")

    for shown in (
        "0 to 127",
        "30",
        "1,200",
        "2.29",
        "(2.20 to 2.40)",
        "2,048 to 4,095",
        "no: some are beyond it",
    ):
        assert shown in text


def test_output_lengths_stand_with_the_latency(full_summary: RunSummary) -> None:
    """How much each arm decoded: 338 tokens on the mean, 676 at the 99th percentile."""
    cell = full_summary.cells[0]
    arms = tuple(replace(arm, output_lengths=spread(338.0)) for arm in cell.arms)
    text = part(render_report(replace(full_summary, cells=(replace(cell, arms=arms),))), "latency")

    assert "How long the answers were" in text
    assert "338.0" in text
    assert "676.0" in text


def test_production_twin_stands_below_its_arm(full_summary: RunSummary) -> None:
    """The arm without cache, then the arm with it, with its hits."""
    summary = served(full_summary, 0.1)
    cell = summary.cells[0]
    own = next(arm for arm in cell.arms if arm.config == K2)
    assert own.load is not None
    twin = replace(
        own,
        config=replace(K2, options=(("production", True),)),
        load=replace(own.load, prefix_hit_rate=0.93),
    )
    page = render_report(replace(summary, cells=(replace(cell, production=(twin,)),)))
    text = part(page, "production")

    assert text.index("<code>eagle3 K=2</code>") < text.index("eagle3 K=2 as in production")
    assert "93%" in text
    assert "Not measured: --production" in part(render_report(summary), "production")
