"""The report as a page: every section for every kind of run, self-contained, honest about absence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spectune.policy.comparison import ArmSummary, Failure, RunSummary, Spread
from spectune.records import Interval, SpecConfig, Status
from spectune.report import render_report, write_report

Render = Callable[[RunSummary], str]
SECTIONS = {
    "verdict", "what-to-do", "decisions", "cautions", "advice", "speedup", "acceptance", "prediction",
    "rounds", "break-even", "floor", "categories", "latency", "policy", "failures", "definitions",
    "provenance",
}  # fmt: skip
CHARTS = {"speedup-0", "acceptance-0", "prediction", "rounds", "break-even"}
HOSTILE = '</code><script>alert("x")</script><img src=https://evil.example/x.png onerror=alert(1)>$\\frac{'


class Page(HTMLParser):
    """Tags with attributes, ids in order, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden += tag in {"script", "style"}

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in {"script", "style"}

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.tags if "id" in attributes]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def section_of(html: str, name: str) -> str:
    """Markup of one section."""
    return html.split(f'<section id="{name}">')[1].split("</section>")[0]


@pytest.fixture(
    scope="session", params=["full_summary", "one_point_summary", "all_failed_summary", "simulated_summary"]
)
def any_summary(request: pytest.FixtureRequest) -> RunSummary:
    return request.getfixturevalue(request.param)


def test_render_any_run_has_every_section_once(any_summary: RunSummary, render: Render) -> None:
    """Each section stands on the page exactly once, whatever the run holds, and no id is used twice."""
    page = Page(render(any_summary))

    assert {name for name in page.ids if name in SECTIONS} == SECTIONS
    assert len(page.ids) == len(set(page.ids))


def test_render_any_run_loads_nothing(any_summary: RunSummary, render: Render) -> None:
    """No element refers to anything outside the page, and the page forbids the browser to try."""
    html = render(any_summary)
    page = Page(html)

    assert re.findall(r"https?:|//[a-z]", html.replace("file://", "")) == []
    assert {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "image"} == set()
    references = [
        str(value)
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in {"href", "src", "xlink:href", "srcset", "data", "action"}
    ]
    assert [reference for reference in references if not reference.startswith("#")] == []
    assert "@import" not in html
    assert re.findall(r"url\((?!#)", html) == []
    policies = [
        attributes["content"] for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes
    ]
    assert [str(policy).split(";")[0] for policy in policies] == ["default-src 'none'"]


def test_render_any_run_resolves_its_own_anchors(any_summary: RunSummary, render: Render) -> None:
    """Every link and every reference inside a drawing points to an id on the page."""
    html = render(any_summary)
    page = Page(html)
    anchors = {str(attributes["href"])[1:] for _, attributes in page.tags if "href" in attributes}
    clips = set(re.findall(r"url\(#([^)]+)\)", html))

    assert (anchors | clips) - set(page.ids) == set()


def test_render_any_run_never_says_nan(any_summary: RunSummary, render: Render) -> None:
    """Absent values are dashes, so nan, inf and None never reach the reader."""
    text = Page(render(any_summary)).text

    assert re.findall(r"\b(nan|inf|None)\b", text, flags=re.IGNORECASE) == []


def test_render_one_point_draws_one_marker(one_point_summary: RunSummary, render: Render) -> None:
    """A single batch size still gets all charts; its speedup is one marker and no line."""
    html = render(one_point_summary)
    charts = {name.removeprefix("chart-") for name in Page(html).ids if name.startswith("chart-")}
    speedup = section_of(html, "speedup")

    assert charts == CHARTS
    assert "eagle3 K=2  1.42\N{MULTIPLICATION SIGN}" in speedup
    assert speedup.count("fill: #0072b2; stroke: #ffffff") == 1  # the first arm's colour, as a marker
    assert speedup.count("stroke: #0072b2; stroke-width: 1.8") == 0  # and as a line


def test_render_full_run_draws_lines(full_summary: RunSummary, render: Render) -> None:
    """With three batch sizes the first arm is a line, which proves that the check for none can fail."""
    speedup = section_of(render(full_summary), "speedup")

    assert "stroke: #0072b2; stroke-width: 1.8" in speedup


def test_render_one_block_says_that_there_is_no_interval(
    one_point_summary: RunSummary, render: Render
) -> None:
    """A speedup without an interval is labelled with its count instead of a made-up interval."""
    assert "no interval, n=1" in Page(render(one_point_summary)).text


def test_render_all_failed_shows_points_and_log(all_failed_summary: RunSummary, render: Render) -> None:
    """When nothing succeeded the report leads with the failed points and the end of their logs."""
    html = render(all_failed_summary)
    page = Page(html)
    failed = Page(section_of(html, "failures")).text

    assert "No verdict: nothing could be measured." in page.text
    assert html.index('id="failures"') < html.index('id="decisions"')
    assert failed.count("last line of the log: illegal instruction") == 2
    assert "off @ batch 1, context 512, T=0" in failed
    assert page.count("svg") == 0


def test_render_run_without_cells_still_gives_a_page(all_failed_summary: RunSummary) -> None:
    """A run that never reached a cell is reported like any other."""
    page = Page(
        render_report(replace(all_failed_summary, cells=(), provenance={}, workload={}, definitions={}))
    )

    assert {name for name in page.ids if name in SECTIONS} == SECTIONS


def test_render_arm_that_no_failure_names_is_listed(all_failed_summary: RunSummary) -> None:
    """An arm without a result appears among the failed points even if no failure was recorded for it."""
    html = render_report(replace(all_failed_summary, failures=()))

    assert Page(section_of(html, "failures")).text.count("engine died") == 2


def test_render_absent_value_is_a_dash_with_its_reason(full_summary: RunSummary, render: Render) -> None:
    """Plain decoding has no acceptance length: a dash, the reason as tooltip and in the note below."""
    acceptance = section_of(render(full_summary), "acceptance")
    plain = acceptance.split("off&nbsp;(plain&nbsp;decoding)")[1].split("</tr>")[0]
    cells = [re.sub(r"<sup>.*?</sup>|<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", plain)]

    assert cells == ["\N{EM DASH}"] * 6 + ["6,000"]
    assert plain.count('title="plain decoding proposes no drafts"') == 6
    assert "<sup>a</sup> plain decoding proposes no drafts" in acceptance


def test_render_categories_names_counts_of_both_arms(full_summary: RunSummary, render: Render) -> None:
    """Each category shows its own counts, times and verdict for base and spec; the total is pooled."""
    categories = section_of(render(full_summary), "categories")
    rows = [Page(row).text for row in re.findall(r"<tr.*?</tr>", categories)]

    assert rows[2] == (
        "1 code 16 41.20 eagle3 K=4 16 20.64 2.70 2.00\N{MULTIPLICATION SIGN} (1.78 to 2.22) paired requests "
        "on eagle3 K=4"
    )
    assert rows[4].startswith("1 all (pooled) 48 41.20 eagle3 K=4 48 25.59")
    assert rows[9].endswith("off")  # chat at batch 16
    assert "pooled over the raw counts of all requests, never a mean of the rows" in categories
    assert len(rows) == 1 + 3 * (3 + 1)


def test_render_time_beside_a_speedup_is_that_of_decode_rounds(one_point_summary: RunSummary) -> None:
    """Request TPOT holds the prefill of others and may not stand beside a speedup that leaves it out."""
    [cell] = one_point_summary.cells
    slow = Spread(n=48, mean=9.0, p50=9.0, p90=9.0, p99=9.0)
    arms = tuple(replace(arm, latency=replace(arm.latency, tpot_s=slow)) for arm in cell.arms if arm.latency)
    cell = replace(cell, arms=arms)

    html = render_report(replace(one_point_summary, cells=(cell,), categories=(replace(cell, scope="chat"),)))

    rows = [Page(row).text for row in re.findall(r"<tr.*?</tr>", section_of(html, "categories"))]
    assert rows[1].startswith("1 chat 48 41.20 eagle3 K=2 48 29.01 2.23 1.42")


def test_render_tells_chains_that_did_not_run_and_says_that_they_are_estimated(
    one_point_summary: RunSummary,
) -> None:
    """A chain of 3 kept 1, 2 and 3 drafts in 50%, 25% and 10% of its 40 steps; K=2 ran itself, so only K=1
    is told: 1 + 0.5."""
    [cell] = one_point_summary.cells
    plain, spec = cell.arms
    assert spec.acceptance is not None
    longest = replace(
        spec,
        config=SpecConfig.chain("eagle3", 3),
        acceptance=replace(spec.acceptance, survival=(0.5, 0.25, 0.1), num_steps=40),
    )

    html = render_report(replace(one_point_summary, cells=(replace(cell, arms=(plain, spec, longest)),)))

    told = section_of(html, "acceptance").split("Chains that did not run")[1]
    rows = [Page(row).text for row in re.findall(r"<tr.*?</tr>", told)]
    assert rows[1:] == ["1 eagle3 K=1 1.50 K=3 40"]
    assert "Estimated from one run with the largest K" in told


def test_render_estimates_nothing_where_every_chain_ran(one_point_summary: RunSummary) -> None:
    """K=1 and K=2 ran both: there is nothing to tell."""
    [cell] = one_point_summary.cells
    plain, spec = cell.arms
    one = replace(spec, config=SpecConfig.chain("eagle3", 1, draft_model=spec.config.draft_model))

    html = render_report(replace(one_point_summary, cells=(replace(cell, arms=(plain, one, spec)),)))

    assert "Chains that did not run" not in html


def break_even_row(summary: RunSummary) -> str:
    html = section_of(render_report(summary), "break-even")
    return Page(re.findall(r"<tr.*?</tr>", html)[1]).text


def test_render_break_even_compares_measured_rounds(one_point_summary: RunSummary) -> None:
    """A round of 60 ms against a plain one of 40 needs 1.5 tokens; 1.4 emitted are too few although the
    acceptance length is 2.23 and the calibrated break-even 1.1."""
    [cell] = one_point_summary.cells
    plain, spec = cell.arms
    assert plain.rounds is not None
    assert spec.rounds is not None
    assert spec.prediction is not None
    one = replace(plain.rounds, draft_s=0.0, verify_s=0.040, other_s=0.0)
    many = replace(spec.rounds, draft_s=0.010, verify_s=0.048, other_s=0.002, tokens_per_sequence=1.4)
    lost = replace(
        spec,
        rounds=many,
        speedup=Interval(value=0.93, low=0.9, high=0.96, n=8),
        prediction=replace(spec.prediction, break_even_acceptance_length=1.1),
    )

    def told(arm: ArmSummary) -> RunSummary:
        return replace(one_point_summary, cells=(replace(cell, arms=(replace(plain, rounds=one), arm)),))

    assert break_even_row(told(lost)) == "1 eagle3 K=2 1.50 1.40 \N{MINUS SIGN}0.10 no 2.23"
    even = replace(lost, speedup=Interval(value=1.01, low=0.97, high=1.05, n=8))
    assert "about even" in break_even_row(told(even))
    unmeasured = replace(lost, rounds=None)
    assert break_even_row(told(unmeasured)).count("\N{EM DASH}") == 4


def test_render_latency_shows_the_peak_memory_of_every_arm(full_summary: RunSummary, render: Render) -> None:
    """812 MB are 774 MiB; five arms in three cells each show theirs."""
    latency = section_of(render(full_summary), "latency")

    assert "Peak memory" in latency
    assert latency.count(">774<") == 15


def test_render_decision_row_has_interval_and_reason(full_summary: RunSummary, render: Render) -> None:
    """The decision names what to run, its speedup with the interval, the runner-up and the reason."""
    rows = [
        Page(row).text for row in re.findall(r"<tr.*?</tr>", section_of(render(full_summary), "decisions"))
    ]

    assert rows[1] == (
        "1 512 tokens T=0 on eagle3 K=4 1.61\N{MULTIPLICATION SIGN} (1.54 to 1.68) eagle3 K=2 "
        "slower by 9% on the same blocks lower bound above 1 after correction for 4 candidates"
    )


@pytest.mark.parametrize(
    ("outcome", "sentence", "kind"),
    [
        ("speculate", "Speculate.", "on"),
        ("do not speculate", "Do not speculate.", "off"),
        ("depends on load", "It depends on the load.", "dep"),
        ("depends on workload", "It depends on the workload.", "dep"),
        ("no data", "No verdict: nothing could be measured.", "bad"),
    ],
)
def test_render_verdict_first(one_point_summary: RunSummary, outcome: str, sentence: str, kind: str) -> None:
    """The main part opens with the verdict as a plain sentence, coloured by the outcome."""
    main = render_report(replace(one_point_summary, outcome=outcome)).split("<main>")[1]

    assert main.startswith(f'<div class="verdict {kind}"')
    assert Page(main).text.startswith(sentence)


def test_render_verdict_says_its_word_once(one_point_summary: RunSummary) -> None:
    """The sentence does not begin with the headline again, and what it is pooled over stands apart."""
    summary = replace(
        one_point_summary,
        outcome="speculate",
        verdict="Speculate: eagle3 K=2 at batch 1 runs at 1.42x. Pooled over requests of chat 4, code 4.",
    )

    html = render_report(summary)

    assert '<p class="say">eagle3 K=2 at batch 1 runs at 1.42x.</p>' in html
    assert '<p class="more">Pooled over requests of chat 4, code 4.</p>' in html


def test_render_caution_of_an_arm_is_listed_once(full_summary: RunSummary) -> None:
    """The run's cautions name the arms already; the arms' own copies are not added to them."""
    cell = full_summary.cells[0]
    arms = tuple(replace(arm, cautions=("rounds slowed down",)) for arm in cell.arms)
    told = replace(full_summary, cells=(replace(cell, arms=arms),), cautions=("off: rounds slowed down",))

    assert 1 == render_report(told).count("rounds slowed down")


def test_render_without_any_floor_says_so_instead_of_a_table_of_dashes(
    simulated_summary: RunSummary,
) -> None:
    """A run that knows no bandwidth has one sentence in place of the floors."""
    cells = tuple(
        replace(
            item,
            arms=tuple(
                replace(arm, prediction=None if arm.prediction is None
                        else replace(arm.prediction, floor_tpot_s=None, floor_share=None))
                for arm in item.arms
            ),
        )
        for item in simulated_summary.cells
    )  # fmt: skip

    floor = section_of(render_report(replace(simulated_summary, cells=cells)), "floor")

    assert "No floor: the read bandwidth or the size of the weights is unknown." in floor
    assert "<table" not in floor


def test_render_says_how_drafts_are_drawn_and_numbers_stored(full_summary: RunSummary) -> None:
    """What explains an acceptance length stands on the page with it: how drafts are sampled, the number
    format, and the quantization of both models."""
    assert full_summary.fingerprint is not None
    settings = {"draft_sampling": "greedy", "target_quantization": "none", "draft_quantization": "fp8"}
    mark = replace(full_summary.fingerprint, settings=settings)

    told = Page(section_of(render_report(replace(full_summary, fingerprint=mark)), "provenance")).text

    assert "draft_sampling greedy" in told
    assert "target_quantization none" in told
    assert "draft_quantization fp8" in told
    assert "dtype bfloat16" in told


def test_render_commands_can_be_copied(full_summary: RunSummary, render: Render) -> None:
    """Each command stands whole in an element that its copy button names."""
    html = render(full_summary)
    targets = re.findall(r'data-copy="([^"]+)"', html)

    assert targets == ["command-0", "command-1", "policy-json"]
    assert (
        "--speculative-num-draft-tokens 5" in Page(html.split('id="command-1">')[1].split("</pre>")[0]).text
    )


def test_render_simulated_run_is_labelled_everywhere(simulated_summary: RunSummary, render: Render) -> None:
    """A simulated run has a banner, a title mark, and a label on and under every chart."""
    html = render(simulated_summary)
    page = Page(html)
    charts = re.findall(r"<figure.*?</figure>", html, flags=re.DOTALL)

    assert len(charts) == 8
    assert [Page(chart).text.count("SIMULATED") for chart in charts] == [2] * 8
    assert "SIMULATED DATA: no engine and no model was run" in page.text
    assert "<title>SIMULATED: " in html


def test_render_measured_run_is_not_called_simulated(full_summary: RunSummary, render: Render) -> None:
    """The label means something because measured runs do not carry it."""
    assert "SIMULATED" not in Page(render(full_summary)).text


def test_render_hostile_text_stays_text(full_summary: RunSummary) -> None:
    """Markup in labels, reasons, names and commands is shown as typed and never becomes an element."""
    config = SpecConfig.chain("eagle3", 2, options=((HOSTILE, HOSTILE),))
    cell = full_summary.cells[0]
    arms = tuple(
        replace(arm, config=config, cautions=(HOSTILE,)) if index == 1 else arm
        for index, arm in enumerate(cell.arms)
    )
    decision = replace(cell.decision, chosen=config, reason=HOSTILE, runner_up_reason=HOSTILE)
    cell = replace(cell, arms=arms, decision=decision)
    hostile = replace(
        full_summary,
        run_name=HOSTILE,
        verdict=HOSTILE,
        outcome=HOSTILE,
        cells=(cell,),
        categories=(replace(cell, scope=HOSTILE),),
        failures=(Failure(label=HOSTILE, status=Status.FAILED, reason=f"{HOSTILE}\n{HOSTILE}\x00\ud800"),),
        pruned=((HOSTILE, HOSTILE),),
        commands={HOSTILE: HOSTILE},
        advice=(HOSTILE,),
        cautions=(HOSTILE,),
        workload={HOSTILE: HOSTILE, "name": HOSTILE},
        provenance={HOSTILE: [HOSTILE], "argv": [HOSTILE]},
        policy={"cells": [{"config": {HOSTILE: HOSTILE}, "category": HOSTILE, "batch": [1, HOSTILE]}],
                "fallback": HOSTILE},
        definitions={HOSTILE: HOSTILE},
    )  # fmt: skip

    page = Page(render_report(hostile))

    assert page.count("script") == 1
    assert page.count("img") == 0
    assert [name for _, attributes in page.tags for name in attributes if name.startswith("on")] == []
    assert HOSTILE in page.text


def test_render_non_finite_numbers_become_dashes(full_summary: RunSummary) -> None:
    """A nan that slipped into the records is told as absent, in text, tables, charts and the policy."""
    cell = full_summary.cells[0]
    arm = cell.arms[1]
    assert arm.prediction is not None
    broken = replace(
        arm,
        output_tokens_per_s=float("nan"),
        prediction=replace(arm.prediction, predicted_tpot_s=float("inf"), floor_share=float("nan")),
    )
    policy = {"cells": [{"batch": [1, None], "speedup": float("nan"), "speedup_ci": [float("inf"), None]}]}
    cells = (replace(cell, arms=(cell.arms[0], broken)),)

    text = Page(render_report(replace(full_summary, cells=cells, policy=policy))).text

    assert re.findall(r"\b(nan|inf|infinity)\b", text, flags=re.IGNORECASE) == []
    assert "the value is not a finite number" in text


def test_render_interval_level_is_named(full_summary: RunSummary) -> None:
    """The header of the speedup column names the level that was used."""
    cell = full_summary.cells[0]
    speedup = Interval(value=1.6, low=1.5, high=1.7, n=8, level=0.99)
    arms = (cell.arms[0], replace(cell.arms[1], speedup=speedup))
    decision = replace(cell.decision, speedup=speedup)
    html = render_report(
        replace(full_summary, cells=(replace(cell, arms=arms, decision=decision),), categories=())
    )

    assert "99% interval" in section_of(html, "decisions")


def test_write_report_replaces_the_old_page_whole(tmp_path: Path, one_point_summary: RunSummary) -> None:
    """Writing makes the folder, replaces an older page and leaves nothing beside it."""
    path = tmp_path / "reports" / "report.html"

    write_report(replace(one_point_summary, run_name="older"), path)
    write_report(one_point_summary, path)

    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8") == render_report(one_point_summary)


def test_write_report_that_cannot_render_keeps_the_old_page(
    tmp_path: Path, one_point_summary: RunSummary
) -> None:
    """A failure while rendering leaves the older page as it was."""
    path = tmp_path / "report.html"
    path.write_text("older", encoding="utf-8")
    broken = replace(one_point_summary, cells=(None,))  # type: ignore[arg-type]

    with pytest.raises(AttributeError):
        write_report(broken, path)

    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.html", "older")]
