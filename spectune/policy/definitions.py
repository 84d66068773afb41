"""What every exported number means, in one sentence each; travels with the numbers."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "acceptance_length": (
        "1 + accepted / steps, pooled over all steps of an arm that has a drafter, the target's own token "
        "included; null where nothing was ever proposed"
    ),
    "acceptance_length_per_request": (
        "mean over requests of each one's own acceptance length; short requests weigh as much as long ones; "
        "never the headline"
    ),
    "alpha": "accepted / (accepted + rejections): right-censored estimate of a constant acceptance probability",
    "conditional_acceptance": "survival at a position over survival at the one before it",
    "depth_acceptance_rate": "accepted / (steps * num_steps), fraction 0..1",
    "draft_acceptance_rate": (
        "accepted / verified drafts, fraction 0..1; for trees this is the utilisation of the nodes; never ranks"
    ),
    "proposed_per_step": "drafted tokens per step, steps without a draft included",
    "survival": "share of all steps that accepted at least this many drafts; sums to acceptance_length - 1",
    "zero_accept_share": "share of the steps with a draft that accepted none of it",
    "tpot_s": (
        "(end to end - time to first token) / (output tokens - 1) of a request, seconds; at batch > 1 it contains "
        "the prefill of requests admitted meanwhile, which round_tpot_s does not"
    ),
    "ttft_s": "first token - arrival, seconds",
    "inter_chunk_s": (
        "gap between stream events; an event may hold several tokens, so this is no token time; contains the "
        "prefill of requests admitted meanwhile"
    ),
    "e2e_s": "finish - arrival, seconds",
    "round_tpot_s": (
        "mean seconds of a full-batch decode round / tokens a sequence gets from a round; the tokens are those of "
        "all decode rounds, for the first sequences to finish are the fast ones; prefill is left out; at a server: "
        "summed time from first to last token of whole requests / their tokens after the first, every one of "
        "them at full load throughout; the prefill of requests admitted meanwhile is in it"
    ),
    "output_tokens_per_s": (
        "output tokens of successful requests / duration of their blocks; at a server: / the time that these "
        "requests held their slots, over the number of slots"
    ),
    "kv_capacity_tokens": "tokens whose keys and values a server's cache holds; null where it does not say",
    "standby": (
        "an engine started with speculation that drafts nothing (K=0 at every batch size): its speedup below 1 is "
        "what being able to speculate costs"
    ),
    "last_start": "time per token of plain decoding in its last start / that in its first, same prompts",
    "speedup": (
        "plain-decoding round_tpot_s / the arm's, same engine, machine, prompts and load, in the same run; "
        "above 1 is faster; geometric mean over paired blocks, blocks of the same prompts are one cluster"
    ),
    "speedup_ci": "95% Student t interval of the mean log ratio over those clusters; null without an interval",
    "speedup_basis": (
        "paired blocks: both arms decoded the same blocks in turn; paired requests: the same, blocks of one "
        "category; pooled round time: the arm's rounds over all categories / tokens that a step of the category emits"
    ),
    "predicted_speedup": (
        "acceptance length of one half of the blocks * plain round / speculative round, rounds "
        "calibrated on other prompts"
    ),
    "ideal_speedup": "(1 - alpha^(K+1)) / ((1 - alpha)(K c + 1)): verification as cheap as a plain step",
    "draft_cost_ratio": "c: one draft step / one plain round",
    "break_even_acceptance_length": (
        "calibrated speculative round / calibrated plain round: below this speculation is predicted to be slower"
    ),
    "residual_fraction": "measured / predicted time per token - 1; measured on the other half of the blocks",
    "floor_tpot_s": "bytes of weights and cached keys and values / measured read bandwidth / acceptance length",
    "waterfall": "log of the speedup by part; the parts sum to the log of the measured speedup",
    "mean_tpot_ms": "vLLM's name for the mean of tpot_s, milliseconds",
    "mean_itl_ms": "vLLM's name for the mean of inter_chunk_s, milliseconds; not a time per token",
    "output_throughput": "vLLM's name for output_tokens_per_s",
    "spec_decode_acceptance_length": "vLLM's: 1 + accepted / steps that drafted; steps without a draft left out",
    "spec_decode_acceptance_rate": "vLLM's: accepted / verified drafts in percent",
    "request_rate": "vLLM's: inf, a new request starts as soon as a sequence of the batch is free",
    "burstiness": "vLLM's: 1 is a Poisson process, below 1 burstier; null where requests do not arrive at random",
    "request_goodput": "vLLM's: requests/s that kept every promise of --goodput; null where nothing was promised",
    "max_concurrent_requests": "most requests sent and not yet answered at one moment, fillers included",
    "client_share": (
        "share of what the measuring client can take that the load needed, 0..1; above 0.5 its times are partly "
        "the client's"
    ),
    "prefix_hit_rate": "share of the prompt tokens that a server's prefix cache held; null where it counts none",
    "mean_e2el_including_client_queue_ms": "vLLM's: last output - when the load asked for the request, ms",
    "mean_client_queue_time_ms": "vLLM's: mean of sent - asked for by the load, ms",
    "mean_output_tokens": "mean output tokens of successful answers",
    "spec_decode_num_spec_steps": "steps that verified at least one draft",
    "spec_decode_conditional_acceptance_rates": "conditional_acceptance, by position",
    "spec_decode_per_position_acceptance_rates": "vLLM's: share of drafting steps that accepted this position",
}
"""Keys are names in summary.json and summary.csv."""
