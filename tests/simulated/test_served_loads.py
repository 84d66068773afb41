"""Loads of a sweep over servers beyond the closed loop, and what stands beside them, on a stand-in for vLLM."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectune.cli.app import run as run_spectune
from spectune.store import RunStore
from tests.support.served_sweep import counts, left_over, spectune

Words = Callable[..., list[str]]


def summary_of(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return document


def test_request_rate_is_measured_beside_the_closed_loop(arguments: Words, tmp_path: Path) -> None:
    """Two rates add two cells that decide nothing: every arm with waiting from the arrival, promises kept,
    vLLM's names, and a section of the report; policy and decision stay those of the closed loop."""
    done = spectune(
        *arguments("--request-rate", "40,80", "--goodput", "ttft:10000,tpot:10000", "--burstiness", "0.5")
    )

    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert [cell["cell"]["batch_size"] for cell in summary["cells"]] == [2]
    assert [cell["cell"]["request_rate"] for cell in summary["rates"]] == [40.0, 80.0]
    for cell in summary["rates"]:
        assert [arm["config"]["method"] for arm in cell["arms"]] == ["off", "ngram"]
        for arm in cell["arms"]:
            load = arm["load"]
            assert arm["status"] == "ok"
            assert load["share_kept"] == 1.0
            assert load["goodput_per_s"] == pytest.approx(load["requests_per_s"])
            assert load["scheduled_ttft_s"]["mean"] >= arm["latency"]["ttft_s"]["mean"]
    rows = [row for row in summary["results"] if row["request_rate"] == 40.0]
    assert {row["burstiness"] for row in rows} == {0.5}
    assert {row["max_concurrency"] for row in rows} == {None}
    # ranges around the one batch of the closed loop
    assert {cell["batch"][0] for cell in summary["policy"]["cells"]} <= {1, 2, 3}
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "40 requests/s (burstiness 0.5)" in page
    assert re.search(r"80 requests/s \(burstiness 0.5\) +ngram K=3 .* ok", done.stdout)


def test_promise_that_nobody_keeps_gives_a_goodput_of_zero(arguments: Words, tmp_path: Path) -> None:
    """Twelve tokens of 20 ms steps never end within 50 ms: no request counts, at the rate and in the loop."""
    truth = {"step_s": 0.02}
    spectune(*arguments("--request-rate", "40", "--goodput", "e2el:50", "--method", "off", truth=truth))

    summary = summary_of(tmp_path / "run")
    arms = [summary["rates"][0]["arms"][0], summary["cells"][0]["arms"][0]]
    assert [(arm["load"]["goodput_per_s"], arm["load"]["share_kept"]) for arm in arms] == [(0.0, 0.0)] * 2


def test_trace_is_replayed_with_its_own_rate(arguments: Words, tmp_path: Path) -> None:
    """Nine arrivals in 400 ms are 20 requests/s; every arm sees them at the recorded moments."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp_ms": {5000 + 50 * i}}}\n' for i in range(9)), encoding="utf-8")

    done = spectune(*arguments("--arrivals", str(trace), "--method", "off"))

    assert done.returncode == 0, done.stderr
    cell = summary_of(tmp_path / "run")["rates"][0]["cell"]
    assert (cell["request_rate"], cell["arrivals"]) == (pytest.approx(20.0), "trace")
    store = RunStore.open(tmp_path / "run")
    point = next(o.point for o in store.outcomes().values() if o.point.cell.is_open_loop)
    asked = sorted(
        request.scheduled_s or 0.0
        for block in store.blocks(point.point_id).values()
        for request in block.requests
    )
    assert [round(at - asked[0], 6) for at in asked] == [round(0.05 * i, 6) for i in range(8)]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--arrivals", "sometimes"], "neither poisson nor constant nor a file"),
        (["--arrivals", "constant"], "--arrivals constant needs --request-rate"),
        (["--burstiness", "2"], "--burstiness 2 shapes random arrivals"),
        (["--request-rate", "0"], "below the minimum"),
        (["--goodput", "speed:3"], "--goodput speed:3 is not NAME:MS"),
        (["--request-rate", "2", "--backend", "simulated"], "--request-rate needs a serving engine"),
        (["--production", "--backend", "simulated"], "--production starts servers with other flags"),
        (["--chat-template", "nowhere.jinja"], "--chat-template nowhere.jinja is not a file"),
    ],
    ids=["arrivals", "constant", "burstiness", "zero", "goodput", "simulated", "production", "template"],
)
def test_load_that_cannot_be_is_refused_before_anything_starts(
    arguments: Words, flags: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The flag and its value are named, exit code 2."""
    words = arguments(*flags)
    if "simulated" in flags:
        words = ["sweep", *flags, "--dry-run"]

    assert run_spectune(words) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_trace_that_is_too_short_is_refused(
    arguments: Words, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Three arrivals cannot carry eight requests."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {i}}}\n' for i in range(3)), encoding="utf-8")

    assert run_spectune(arguments("--arrivals", str(trace), "--dry-run")) == 2
    assert "holds 3 arrivals, 8 requests are asked" in capsys.readouterr().err


def test_production_twin_says_what_the_cache_changes(arguments: Words, tmp_path: Path) -> None:
    """The longest chain is started once more with a warm prefix cache: its hits are told, it is never chosen
    and it is no arm of the verdict; the measured arms have no cache."""
    done = spectune(*arguments("--production"))

    assert done.returncode == 0, done.stderr
    assert "starting vllm for ngram K=3 n=1-5 as in production" in done.stderr
    cell = summary_of(tmp_path / "run")["cells"][0]
    assert [arm["config"]["method"] for arm in cell["arms"]] == ["off", "ngram"]
    assert cell["arms"][1]["load"]["prefix_hit_rate"] is None  # no cache, so the server counts none
    twin = cell["production"][0]
    assert dict(twin["config"]["options"])["production"] is True
    assert twin["load"]["prefix_hit_rate"] > 0.5
    caution = next(text for text in summary_of(tmp_path / "run")["cautions"] if "as in production" in text)
    assert re.search(r"\d+% of the prompt tokens from the cache", caution)
    assert "acceptance length +0.0%" in caution  # the stand-in's acceptance does not depend on its cache
    starts = (tmp_path / "run" / "servers").glob("*.log")
    lines = {log.name: log.read_text(encoding="utf-8").splitlines()[0] for log in starts}
    own = next(line for name, line in lines.items() if "production" in name)
    assert "--enable-prefix-caching" in own.split()
    assert "--enable-chunked-prefill" in own.split()
    assert all(
        "--no-enable-prefix-caching" in line.split()
        for name, line in lines.items()
        if "production" not in name
    )


def test_report_tells_the_clients_own_ceiling(arguments: Words, tmp_path: Path) -> None:
    """Every arm has the ceiling at its concurrency and the share that it needed, in summary and page."""
    spectune(*arguments())

    summary = summary_of(tmp_path / "run")
    for arm in summary["cells"][0]["arms"]:
        load = arm["load"]
        assert load["client_requests_per_s"] > 0
        assert load["client_events_per_s"] > 0
        assert load["max_in_flight"] == 2
        assert 0 < load["client_share"]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert 'id="client"' in page
    assert "Client can take" in page


def test_load_that_the_client_can_hardly_take_is_flagged(arguments: Words, tmp_path: Path) -> None:
    """A server that needs no time is as fast as the client: its times are said to be the client's too."""
    spectune(*arguments("--max-tokens", "64", truth={"step_s": 0.0, "output_tokens": None}))

    cautions = summary_of(tmp_path / "run")["cautions"]
    assert any("of what the client itself can take at concurrency 2" in text for text in cautions)


def conversations(folder: Path) -> Path:
    """Four conversations of two turns and four single prompts."""
    rows = [
        {"question_id": i, "category": "chat", "turns": [f"First {i}?", f"And then {i}?"]} for i in range(4)
    ] + [{"question_id": 10 + i, "category": "chat", "turns": [f"Only {i}?"]} for i in range(4)]
    path = folder / "turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_conversations_are_asked_turn_by_turn_at_the_chat_route(arguments: Words, tmp_path: Path) -> None:
    """Plain decoding answers the four first turns once, then all arms are asked the second turns after
    these answers; the resumed run asks nothing again."""
    path = conversations(tmp_path)
    words = arguments("--dataset-path", str(path))

    done = spectune(*words)

    assert done.returncode == 0, done.stderr
    assert "plain decoding answers 4 turns of conversations" in done.stderr
    run = tmp_path / "run"
    answers = json.loads((run / "conversations.json").read_text(encoding="utf-8"))
    assert sorted(len(own) for own in answers.values()) == [1, 1, 1, 1]
    assert all(text.strip() for own in answers.values() for text in own)
    cautions = RunStore.open(run).manifest["cautions"]
    assert any("each turn is asked after the answers that plain decoding gave" in text for text in cautions)
    assert not any("only the first is asked" in text for text in cautions)
    # the stand-in's chat route has a template of its own
    assert any("the server's own chat template writes 4 of 4 turns differently" in text for text in cautions)
    assert "4 starts of about" in done.stderr  # off, ngram, off, and one that answers
    again = spectune("sweep", "--resume", str(run))
    assert "answers" not in again.stderr


def test_second_turns_carry_the_first_and_its_answer(arguments: Words, tmp_path: Path) -> None:
    """Of a conversation the second request is longer than the first by the answer and the next turn."""
    spectune(*arguments("--dataset-path", str(conversations(tmp_path)), "--method", "off"))

    store = RunStore.open(tmp_path / "run")
    answers = [own[0] for own in store.read_json("conversations.json").values()]
    point_id = next(iter(store.outcomes()))
    lengths = sorted(
        request.num_prompt_tokens for block in store.blocks(point_id).values() for request in block.requests
    )
    # one token a character, paragraphs between messages: the template of a model without one
    firsts = {len("First 0?"), len("Only 0?")}
    seconds = {len(f"First 0?\n\n{answer}\n\nAnd then 0?") for answer in answers}
    assert set(lengths) & firsts
    assert max(lengths) <= max(seconds)
    assert max(lengths) > max(firsts)


def test_chat_template_of_a_file_is_used_here_and_at_the_server(arguments: Words, tmp_path: Path) -> None:
    """Prompts are written with it, servers are started with it, and its digest is in the fingerprint."""
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", encoding="utf-8")

    own = spectune(*arguments("--chat-template", str(template), "--method", "off"))

    assert own.returncode == 0, own.stderr
    store = RunStore.open(tmp_path / "run")
    assert store.manifest["fingerprint"]["settings"]["chat_template"] != "none"
    block = next(iter(store.blocks(next(iter(store.outcomes()))).values()))
    text = "Tell me about the number 0 in a few words."
    assert block.requests[0].num_prompt_tokens == len(f"<user>{text}")
    log = next((tmp_path / "run" / "servers").glob("*.log")).read_text(encoding="utf-8")
    assert f"--chat-template {template}" in log.splitlines()[0]


@pytest.mark.parametrize("place", [1, 4, 9], ids=["manifest", "first blocks", "later"])
def test_full_disk_ends_at_once_and_loses_no_point(
    arguments: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: int,
) -> None:
    """No space at the n-th write: exit code 1 with the file and what to do, no server left, and --resume
    ends with the table of a run that had space."""
    words = arguments("--method", "off")
    assert spectune(*words).returncode == 0
    expected = counts(tmp_path / "run")
    broken = tmp_path / "broken"
    words[words.index("--output-dir") + 1] = str(broken)
    sync, seen = os.fsync, []

    def full(file: int) -> None:
        seen.append(file)
        if len(seen) == place:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    code = run_spectune(words)
    monkeypatch.undo()

    assert code == 1
    assert f"no space left on the disk of {broken}" in capsys.readouterr().err
    assert left_over(broken) == []
    if place > 1:
        words = ["sweep", "--resume", str(broken)]
    assert spectune(*words).returncode == 0
    assert counts(broken) == expected
