"""The gate file: what is decoded, what it gave, and what may not get worse. YAML, commented, with a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectune.errors import UsageError
from spectune.gate.entries import entry, parse_section, section_lines, section_schema
from spectune.records import Cell, Point, Sampling, SpecConfig

GATE_VERSION = 1
SCHEMA_FILE = "gate.schema.json"
DEAD_LENGTH = 1.05
"""An acceptance length below it says that the draft does nothing: no baseline to guard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    created: str = entry("string", "When the baseline was measured (ISO 8601).")
    run: str | None = entry("string", "Run directory it was taken from.", None, is_nullable=True)
    reason: str | None = entry("string", "Why the baseline was replaced.", None, is_nullable=True)
    previous: tuple[dict[str, Any], ...] = entry("array", "Earlier baselines.", (), items="object")
    max_age_days: int = entry("integer", "An older baseline is called stale.", 90, minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    config: Mapping[str, Any] = entry("object", "What is guarded: method, K or tree, draft head, options.")
    batch_size: int = entry("integer", "Sequences decoded together.", minimum=1)
    context_tokens: int = entry("integer", "Tokens of text before each prompt.", minimum=0)
    sampling: Mapping[str, Any] = entry("object", "Temperature, top-k and so on, seed, most output tokens.")
    workload: str = entry("string", "Name of the prompt set.")
    workload_digest: str = entry("string", "Hash of the prompts: other prompts are not comparable.")
    template_digest: str | None = entry("string", "Hash of the chat template.", None, is_nullable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    num_prompts: int = entry("integer", "Fewer answered prompts say nothing.", 8, minimum=1)
    num_steps: int = entry("integer", "Fewer verification steps say nothing.", 200, minimum=1)
    common_share: float = entry(
        "number",
        "Least share of the output that base and head must have in common.",
        0.5,
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceGate:
    is_enabled: bool = entry("boolean", "Whether acceptance is guarded; needs no particular machine.", True)
    acceptance_length: float = entry("number", "1 + accepted / steps of the baseline.", minimum=1)
    per_position: tuple[float, ...] = entry(
        "array",
        "Share of steps that accept at least 1, 2, ... drafts; its sum + 1 is the length.",
        items="number",
    )
    tolerance: float = entry(
        "number", "Largest relative change of acceptance length, down or up.", minimum=0, maximum=0.5
    )
    noise: float = entry("number", "Its spread between equal runs (sd of the logarithm).", 0.0, minimum=0)
    num_steps: int = entry("integer", "Steps behind the baseline.", minimum=1)
    output_tokens: int = entry("integer", "Output tokens behind the baseline.", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedGate:
    is_enabled: bool = entry("boolean", "Whether speed is guarded; the machine must be the same.", True)
    max_slowdown: float = entry("number", "Slowdown that must be caught, relative.", 0.03, minimum=0)
    min_speedup: float | None = entry(
        "number", "Least speedup over plain decoding.", None, minimum=0, is_nullable=True
    )
    speedup_runs: tuple[float, ...] = entry("array", "Speedup of each baseline run.", (), items="number")
    tpot_s_runs: tuple[float, ...] = entry(
        "array", "Seconds per output token of each baseline run.", (), items="number"
    )
    max_tpot_s: float | None = entry(
        "number", "Absolute limit, wide: machines share their cores.", None, minimum=0, is_nullable=True
    )
    min_tokens_per_s: float | None = entry(
        "number", "Absolute limit of throughput, wide.", None, minimum=0, is_nullable=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    false_alarm_rate: float = entry(
        "number", "Chance that a check of equal engines fails.", 0.005, minimum=1e-5, maximum=0.2
    )
    power: float = entry(
        "number", "Chance that a slowdown of max_slowdown is caught.", 0.95, minimum=0.5, maximum=0.999
    )
    num_starts: int = entry("integer", "Starts of base and head in a check of speed.", 6, minimum=2)
    pair_noise: float = entry(
        "number", "Upper bound of the spread of one start's log ratio of equal engines.", 0.0, minimum=0
    )
    aa_log_ratios: tuple[float, ...] = entry(
        "array", "Log time ratio of each start of equal engines.", (), items="number"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFile:
    """A gate. `fingerprint` and `settings` are those of the run it was made from."""

    name: str
    origin: Origin
    subject: Subject
    minimum: Minimum = field(default_factory=Minimum)
    acceptance: AcceptanceGate
    speed: SpeedGate = field(default_factory=SpeedGate)
    statistics: Statistics = field(default_factory=Statistics)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        acceptance, config = self.acceptance, self.config
        if config.is_off:
            raise UsageError(f"gate {self.name}: plain decoding has no acceptance to guard")
        if len(acceptance.per_position) != config.max_accepted:
            raise UsageError(
                f"gate {self.name}: acceptance.per_position has {len(acceptance.per_position)} values, "
                f"{config.label} accepts up to {config.max_accepted}"
            )
        total = 1 + sum(acceptance.per_position)
        # each position and the length may be rounded to two digits by hand
        if abs(total - acceptance.acceptance_length) > 0.005 * (len(acceptance.per_position) + 1):
            raise UsageError(
                f"gate {self.name}: acceptance.per_position sums to {total:.3f} with the target's own token, "
                f"acceptance_length is {acceptance.acceptance_length:.3f}"
            )
        if acceptance.acceptance_length < DEAD_LENGTH:
            raise UsageError(
                f"gate {self.name}: an acceptance length of {acceptance.acceptance_length:.2f} is a dead baseline: "
                "the draft is hardly ever accepted",
                hint="check that draft and target belong together before guarding it",
            )

    @property
    def config(self) -> SpecConfig:
        return SpecConfig.from_dict(dict(self.subject.config))

    @property
    def sampling(self) -> Sampling:
        values = dict(self.subject.sampling)
        return Sampling(**{**values, "stop": tuple(values.get("stop", ()))})

    @property
    def cell(self) -> Cell:
        return Cell(
            batch_size=self.subject.batch_size,
            context_tokens=self.subject.context_tokens,
            temperature=self.sampling.temperature,
        )

    def point(self, config: SpecConfig | None = None) -> Point:
        """The guarded arm, or another configuration under its conditions."""
        return Point(
            config=config or self.config,
            cell=self.cell,
            workload_hash=self.subject.workload_digest,
            sampling=self.sampling,
        )


SECTIONS: dict[str, type] = {
    "origin": Origin,
    "subject": Subject,
    "minimum": Minimum,
    "acceptance": AcceptanceGate,
    "speed": SpeedGate,
    "statistics": Statistics,
}
_FREE = {
    "fingerprint": "Engine and machine of the baseline.",
    "settings": "Settings of the sweep that a check decodes with, as in spectune.yaml.",
}


def gate_text(gate: GateFile) -> str:
    """The gate as commented YAML."""
    lines = [
        f"# Performance gate of speculative decoding; check it with: spectune gate check {gate.name}.yaml",
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"schema_version: {GATE_VERSION}",
        f"name: {json.dumps(gate.name)}",
    ]
    for name in SECTIONS:
        lines += [f"{name}:", *section_lines(getattr(gate, name))]
    for name, help in _FREE.items():
        lines += [f"# {help}", f"{name}:"]
        lines += [f"  {key}: {json.dumps(value)}" for key, value in getattr(gate, name).items()] or ["  {}"]
    return "\n".join(lines) + "\n"


def read_gate(path: Path) -> GateFile:
    """The gate of a YAML file; UsageError names file and entry."""
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"gate {path} cannot be read: {error}", hint="spectune gate init RUN") from error
    except yaml.YAMLError as error:
        raise UsageError(f"gate {path} is not YAML: {' '.join(str(error).split())}") from error
    return gate_of(document, str(path))


def gate_of(document: Any, where: str) -> GateFile:
    """The gate of a parsed document."""
    if not isinstance(document, dict):
        raise UsageError(f"gate {where}: expected sections, found {type(document).__name__}")
    known = ("schema_version", "name", *SECTIONS, *_FREE)
    for key in document:
        if key not in known:
            raise UsageError(f"gate {where}: unknown section {key}", hint=f"sections: {', '.join(known)}")
    if document.get("schema_version") != GATE_VERSION:
        raise UsageError(
            f"gate {where}: schema_version {document.get('schema_version')!r}, this spectune reads {GATE_VERSION}"
        )
    for key in ("origin", "subject", "acceptance"):
        if key not in document:
            raise UsageError(f"gate {where}: section {key} is missing")
    for key in _FREE:
        if not isinstance(document.get(key) or {}, dict):
            raise UsageError(f"gate {where}: {key} holds no entries")
    sections: dict[str, Any] = {
        name: parse_section(section, document.get(name) or {}, f"gate {where}: {name}")
        for name, section in SECTIONS.items()
    }
    free: dict[str, Any] = {key: dict(document.get(key) or {}) for key in _FREE}
    return GateFile(name=str(document.get("name", Path(where).stem)), **sections, **free)


def schema_document() -> dict[str, Any]:
    """JSON schema of a gate file; the published copy is compared by a test."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:spectune:schema:gate:1",
        "title": "spectune gate",
        "description": "What may not get worse about one speculative configuration, and how that is checked.",
        "type": "object",
        "additionalProperties": False,
        "required": ["schema_version", "origin", "subject", "acceptance"],
        "properties": {
            "schema_version": {"const": GATE_VERSION},
            "name": {"type": "string"},
            **{name: section_schema(section) for name, section in SECTIONS.items()},
            **{name: {"description": help, "type": "object"} for name, help in _FREE.items()},
        },
    }


def schema_text() -> str:
    """The published schema, as text."""
    return json.dumps(schema_document(), indent=2) + "\n"
