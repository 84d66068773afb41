"""Options of requests that an engine does not support together with speculation.

An option that only the plain arm can use would make the comparison one of two different tasks, so it is
refused for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spectune.measure.doctor.findings import Finding, error, fine

REFUSED = {
    "vllm": {
        "min_p": "refused with a 400",
        "logit_bias": "refused with a 400",
        "logits_processors": "refused",
    },
    "trtllm": {"logprobs": "refused, or a hang", "min_p": "half applied", "logit_bias": "half applied"},
    "reference": dict.fromkeys(
        (
            "logit_bias", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "logits_processors", "n",
        ),
        "not there",
    ),
}  # fmt: skip
"""Engine, option, and what happens. An option that an engine takes with speculation is not listed."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logprobs": (False, 0),
    "n": (1,),
}


def check_sampling(engine: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Options of a request template against what `engine` supports with speculation on."""
    refused = REFUSED.get(engine, {})
    found = False
    for name, value in options.items():
        if (
            name not in refused
            or value is None
            or any(value is neutral or value == neutral for neutral in (*_NEUTRAL.get(name, ()), {}, []))
        ):
            continue
        found = True
        yield error(
            "sampling",
            f"{engine} with speculation does not take {name}={value!r}",
            signature=f"{refused[name]} on the speculative arm, while the plain arm answers",
            fix=f"remove {name} from both arms; a baseline with it would be another task",
        )
    if not found and options:
        yield fine("sampling", f"{engine} takes {', '.join(sorted(options))} with speculation")
