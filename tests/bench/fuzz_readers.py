"""Throws damaged prompt files at the readers and counts what is neither prompts nor a named error.

    python tests/bench/fuzz_readers.py [--inputs 100000] [--seed 0]     own byte mutations, any Python
    python tests/bench/fuzz_readers.py --atheris [-atheris_runs=100000] coverage-guided, needs atheris

Both start from the corpus of tests/unit/workload/odd_files.py. A finding is printed with its bytes and
makes the exit code 1; an input that takes more than a second of processor time is one as well.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "workload"))

from odd_files import odd_files

from spectune.errors import SpectuneError
from spectune.workload import load_workload

SUFFIXES = ("jsonl", "json", "csv", "tsv", "txt", "parquet", "dat")
TOKENS = [
    *b'{}[]",:;\t\n\r\x00\xef\xff\xc3',
    b"null", b"true", b"NaN", b"1e999", b"-1", b'""', b"\\ud800", b"\\u0000", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b'"prompt"', b'"turns"', b'"messages"', b'"conversations"', b'"data"', b'"role"', b'"content"',
    b'"output_tokens"', b"prompt,category\n", b"question,answer\n", b"PAR1", b"[" * 50, b"}" * 50,
]  # fmt: skip
SLOW_S = 1.0


def seeds() -> list[bytes]:
    """The odd files, the large ones shortened."""
    return [content[:4096] for _, _, content in odd_files()]


def mutate(data: bytes, generator: random.Random, others: list[bytes]) -> bytes:
    """One to eight edits: bytes flipped, cut, doubled, tokens put in, another file spliced in."""
    out = bytearray(data)
    for _ in range(generator.randint(1, 8)):
        at = generator.randint(0, len(out))
        match generator.randrange(6):
            case 0 if out:
                out[min(at, len(out) - 1)] = generator.randrange(256)
            case 1:
                del out[at : at + generator.randint(1, 40)]
            case 2:
                out[at:at] = out[at : at + generator.randint(1, 60)]
            case 3:
                token = generator.choice(TOKENS)
                out[at:at] = bytes([token]) if isinstance(token, int) else token
            case 4:
                out[at:at] = generator.choice(others)[: generator.randint(1, 200)]
            case _:
                out = out[:at]
    return bytes(out[:16384])


class Target:
    """Writes an input to a file of a suffix and reads it; remembers what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.findings: list[str] = []
        self.num_read = self.num_refused = 0

    def __call__(self, data: bytes, suffix: str) -> None:
        path = self.folder / f"input.{suffix}"
        path.write_bytes(data)
        start = time.process_time()
        try:
            load_workload(path, num_prompts=4)
            self.num_read += 1
        except SpectuneError as error:
            self.num_refused += 1
            if error.exit_code != 2 or str(self.folder) not in error.message or len(error.message) > 1200:
                self.findings.append(f"unclear: {error.message[:300]!r} for {data[:300]!r} .{suffix}")
        except RecursionError as error:
            self.findings.append(f"RecursionError {error} for {data[:300]!r} .{suffix}")
        except Exception as error:
            self.findings.append(f"{type(error).__name__} {error} for {data[:300]!r} .{suffix}")
        if time.process_time() - start > SLOW_S:
            self.findings.append(f"slow: {time.process_time() - start:.1f} s for {data[:300]!r} .{suffix}")


def run_mutations(target: Target, inputs: int, seed: int) -> None:
    generator, corpus = random.Random(seed), seeds()
    for _ in range(inputs):
        data = mutate(generator.choice(corpus), generator, corpus)
        target(data, generator.choice(SUFFIXES))


def run_atheris(target: Target) -> None:
    import atheris

    atheris.instrument_all()
    corpus = target.folder / "corpus"
    corpus.mkdir()
    for number, content in enumerate(seeds()):
        (corpus / str(number)).write_bytes(bytes([number % len(SUFFIXES)]) + content)

    def one(data: bytes) -> None:
        if data:
            target(data[1:], SUFFIXES[data[0] % len(SUFFIXES)])
            if target.findings:
                raise RuntimeError(target.findings[0])

    rest = [word for word in sys.argv[1:] if word != "--atheris"]
    atheris.Setup([sys.argv[0], *rest, str(corpus)], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    arguments, _ = parser.parse_known_args()
    with suppress(ModuleNotFoundError):
        import pyarrow.parquet  # noqa: F401  # its import is no input's time
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        if arguments.atheris:
            run_atheris(target)
        else:
            run_mutations(target, arguments.inputs, arguments.seed)
        for finding in target.findings[:20]:
            print(finding, file=sys.stderr)
        counts = {"read": target.num_read, "refused": target.num_refused, "findings": len(target.findings)}
        print(json.dumps(counts))
    return 1 if target.findings else 0


if __name__ == "__main__":
    sys.exit(main())
