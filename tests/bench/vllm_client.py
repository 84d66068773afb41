"""The client's clock against vLLM's own: time per output token and throughput, at concurrency 1, 4 and 16.

    python tests/bench/vllm_client.py --engine-python /path/to/venv/bin/python

vLLM keeps, in its engine, each request's (last token - first token) / (tokens - 1) and counts its
tokens; the client times stream events on the other side of HTTP. For the same requests both means have
to agree within 2%. Throughput of a closed loop is concurrency x tokens / summed request time: from the
client's usage counts and times, and from the server's token counter and its own request times. Decode
throughput leaves the first tokens out: concurrency / time per token of the client, against tokens after the
first over decode seconds of the server. The peak of any second must not be below the mean.
"""

from __future__ import annotations

import argparse
import sys
from statistics import fmean

from spectune.backend.client import ClientOptions, run_requests
from spectune.backend.prometheus import grown
from spectune.backend.server_api import scrape
from spectune.backend.vllm import VllmBackend
from spectune.metrics.served import measure_served
from spectune.records import Cell, Point, Request, Sampling, ServedRequest, SpecConfig
from spectune.workload import load_workload
from spectune.workload.arrivals import ClosedLoop

HEAD = "smollm2-135m-eagle3"
TOLERANCE = 0.02
TPOT = "vllm:request_time_per_output_token_seconds"
TOKENS = "vllm:generation_tokens_total"
LIFE = "vllm:e2e_request_latency_seconds_sum"
DECODE = "vllm:request_decode_time_seconds_sum"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", help="interpreter that has vllm; the installed one if not given")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--num-tokens", type=int, default=3, help="drafts of the EAGLE-3 head; 0 for plain")
    arguments = parser.parse_args()
    config = (
        SpecConfig.chain("eagle3", arguments.num_tokens, draft_model=HEAD)
        if arguments.num_tokens
        else SpecConfig.off()
    )
    backend = VllmBackend(draft_model=HEAD, engine_python=arguments.engine_python, progress=print)
    sampling = Sampling(max_tokens=arguments.max_tokens, ignore_eos=True)
    levels = [int(value) for value in arguments.concurrency.split(",")]
    requests = [
        Request(
            request_id=prompt.prompt_id,
            prompt_ids=backend.encode(prompt, "", 0),
            category=prompt.category,
            sampling=sampling,
        )
        for prompt in load_workload(None, num_prompts=3 * max(levels)).prompts
    ]
    cell = Cell(batch_size=max(levels), context_tokens=0, temperature=0.0)
    point = Point(config=config, cell=cell, workload_hash="bench", sampling=sampling)
    worst = 0.0
    with backend.open(backend.plan([point])[0]) as session:
        session.run(point, requests[:4])  # warm
        address = session.address  # type: ignore[attr-defined]  # of ServerSession
        for level in levels:
            own = requests[: max(8, 2 * level)]
            worst = max(worst, compare(address.url, address.served_model, own, level))
    print(
        f"largest difference {worst:.2%}, limit {TOLERANCE:.0%}: {'holds' if worst <= TOLERANCE else 'FAILS'}"
    )
    return int(worst > TOLERANCE)


def compare(url: str, model: str, requests: list[Request], level: int) -> float:
    """Both sides of one load; the larger of the two relative differences."""
    before = scrape(url)
    done = run_requests(url, model, requests, ClosedLoop(concurrency=level), ClientOptions())
    after = scrape(url)
    if failed := [one for one in done if not one.is_success]:
        sys.exit(f"{len(failed)} requests failed: {failed[0].error}")
    count = grown(before, after, f"{TPOT}_count", model=model)
    total = grown(before, after, f"{TPOT}_sum", model=model)
    counted = grown(before, after, TOKENS, model=model)
    lived = grown(before, after, LIFE, model=model)
    decoded = grown(before, after, DECODE, model=model)
    if None in (count, total, counted, lived, decoded):
        sys.exit("this server does not count what is compared")
    tpot = fmean(one.tpot_s for one in done if one.tpot_s is not None)
    whole = measure_served(done, max_concurrency=level)
    peak, mean = whole.peak_output_tokens_per_s, whole.output_throughput
    held = sum(one.ended_s - one.sent_s for one in done)
    tokens = sum(one.num_output_tokens or 0 for one in done)
    rows = (
        ("mean time per output token", tpot * 1e3, total / count * 1e3, "ms"),
        ("throughput", level * tokens / held, level * counted / lived, "tokens/s"),
        ("decode throughput", level / pooled(done), level * (counted - count) / decoded, "tokens/s"),
    )
    print(f"concurrency {level}: {len(done)} requests, {count:.0f} in vLLM's histogram")
    for name, client, server, unit in rows:
        print(f"   {name}: client {client:.3f} {unit}, vllm {server:.3f} {unit}: {client / server - 1:+.2%}")
    print(f"   peak {peak:.1f} tokens/s, mean {mean:.1f}: {'holds' if peak >= mean else 'FAILS'}")
    return max(abs(client / server - 1) for _, client, server, _ in rows)


def pooled(done: list[ServedRequest]) -> float:
    """Seconds from first to last token / tokens after the first, over all requests."""
    seconds = sum(one.finish_s - one.first_token_s for one in done)
    return seconds / sum(one.num_output_tokens - 1 for one in done)


if __name__ == "__main__":
    sys.exit(main())
