"""A policy in, what the reference engine reads out: the policy itself, and how to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spectune.policy.emit_parts import EmitOptions, text_of

FILE = "policy.json"


def emit_reference(policy: Mapping[str, Any], options: EmitOptions) -> str:
    """The reference engine executes all of a policy, so it gets the file as it is."""
    del options
    notes = []
    if policy["validity"]["is_simulated"]:
        notes.append("from a simulated run: for trying the tool, not for deployment")
    notes.append(
        "the reference engine runs the policy itself (PolicyChooser); this serves with it, below, at and above "
        "every edge, and says whether it holds"
    )
    body = json.dumps(policy, indent=1)
    return text_of(notes, f"cat > {FILE} <<'EOF'\n{body}\nEOF\nspectune policy verify {FILE}")
