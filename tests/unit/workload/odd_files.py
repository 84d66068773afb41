"""Malformed and odd prompt files, made here: name, file name, bytes. What is right differs; see the test."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

GOOD = b'{"prompt": "a"}\n'
CHAT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}


def _rows(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _csv(*rows: list[str], dialect: str = "excel") -> bytes:
    out = io.StringIO()
    csv.writer(out, dialect).writerows(rows)
    return out.getvalue().encode()


def odd_files() -> Iterator[tuple[str, str, bytes]]:
    """Every odd file."""
    yield from _bytes()
    yield from _json()
    yield from _shapes()
    yield from _tables()


def _bytes() -> Iterator[tuple[str, str, bytes]]:
    yield "empty", "f.jsonl", b""
    yield "one-newline", "f.jsonl", b"\n"
    yield "only-bom", "f.jsonl", b"\xef\xbb\xbf"
    yield "bom", "f.jsonl", b"\xef\xbb\xbf" + GOOD
    yield "bom-in-the-middle", "f.jsonl", GOOD + b"\xef\xbb\xbf" + GOOD.replace(b"a", b"b")
    yield "utf-16", "f.jsonl", '{"prompt": "a"}'.encode("utf-16")
    yield "utf-32", "f.jsonl", '{"prompt": "a"}'.encode("utf-32")
    yield "latin-1", "f.jsonl", '{"prompt": "é"}\n'.encode("latin-1")
    yield "cut-utf-8", "f.jsonl", '{"prompt": "é"}'.encode()[:-3]
    yield "overlong-utf-8", "f.jsonl", b'{"prompt": "\xc0\xaf"}\n'
    yield "encoded-surrogate", "f.jsonl", b'{"prompt": "\xed\xa0\x80"}\n'
    yield "nul-bytes", "f.jsonl", b"\x00" * 64
    yield "nul-in-a-string", "f.jsonl", b'{"prompt": "a\\u0000b"}\n'
    yield "raw-nul-in-a-string", "f.jsonl", b'{"prompt": "a\x00b"}\n'
    yield "gzip", "f.jsonl", b"\x1f\x8b\x08\x00\x00\x00\x00\x00"
    yield "zip", "f.jsonl", b"PK\x03\x04\x14\x00"
    yield "zstd", "f.jsonl", b"\x28\xb5\x2f\xfd\x00"
    yield "random", "f.jsonl", bytes(range(256)) * 4
    yield "binary-without-suffix", "f", bytes(range(128, 256))
    yield "cr-only", "f.jsonl", b'{"prompt": "a"}\r{"prompt": "b"}\r'
    yield "crlf", "f.jsonl", b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n'
    yield "no-last-newline", "f.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}'
    yield "form-feeds", "f.jsonl", b'\x0c{"prompt": "a"}\x0c\n'
    yield "long-line", "f.jsonl", b'{"prompt": "' + b"x" * 3_000_000 + b'"}\n'


def _json() -> Iterator[tuple[str, str, bytes]]:
    yield "truncated-last-line", "f.jsonl", GOOD * 3 + b'{"prompt": "b'
    yield "truncated-array", "f.json", b'[{"prompt": "a"}, {"prom'
    yield "truncated-object", "f.json", b'{\n"data": [{"prompt": "a"}'
    yield "trailing-comma", "f.json", b'[{"prompt": "a"},]'
    yield "two-arrays", "f.json", b'[{"prompt": "a"}]\n[{"prompt": "b"}]'
    yield "array-then-garbage", "f.json", b'[{"prompt": "a"}] garbage'
    yield "objects-without-newline", "f.jsonl", b'{"prompt": "a"}{"prompt": "b"}'
    yield "single-quotes", "f.jsonl", b"{'prompt': 'a'}\n"
    yield "python-literals", "f.jsonl", b'{"prompt": "a", "x": None}\n'
    yield "nan", "f.jsonl", b'{"prompt": "a", "score": NaN}\n'
    yield "infinity-limit", "f.jsonl", b'{"prompt": "a", "output_tokens": Infinity}\n'
    yield "huge-number", "f.jsonl", b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}\n"
    yield "huge-exponent", "f.jsonl", b'{"prompt": "a", "output_tokens": 1e999}\n'
    yield "deep-array", "f.jsonl", b'{"prompt": "a", "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}\n"
    yield "deep-first-line", "f.json", b"[" * 200_000
    yield "deep-objects", "f.json", b'{"data":' * 50_000
    yield "comments", "f.jsonl", b'// prompts\n{"prompt": "a"}\n'
    yield "scalar", "f.json", b"42"
    yield "string", "f.json", b'"prompt"'
    yield "null", "f.json", b"null"
    yield "null-rows", "f.jsonl", b"null\nnull\n"
    yield "array-of-scalars", "f.json", b"[1, 2, 3]"
    yield "empty-object", "f.json", b"{}"
    yield "empty-array", "f.json", b"[]"
    yield "data-is-an-object", "f.json", b'{"data": {"prompt": "a"}}'
    yield "data-twice", "f.json", b'{"data": [{"prompt": "a"}], "data": [{"prompt": "b"}]}'
    yield "key-twice", "f.jsonl", b'{"prompt": "a", "prompt": "b"}\n'
    yield "log-lines", "f.jsonl", b"INFO start\nINFO stop\n"
    yield "html", "f.json", b"<!doctype html><html>404</html>"
    yield "git-lfs-pointer", "f.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def _shapes() -> Iterator[tuple[str, str, bytes]]:
    yield "unknown-columns", "f.jsonl", _rows({"text": "a"}, {"text": "b"})
    yield "prompt-is-a-number", "f.jsonl", _rows({"prompt": 3})
    yield "prompt-is-ids", "f.jsonl", _rows({"prompt": [1, 2]})
    yield "prompt-is-null", "f.jsonl", _rows({"prompt": None})
    yield "prompt-is-blank", "f.jsonl", _rows({"prompt": " \t\n"})
    yield "turns-is-text", "f.jsonl", _rows({"turns": "a"})
    yield "turns-is-an-object", "f.jsonl", _rows({"turns": {"1": "a"}})
    yield "turns-holds-null", "f.jsonl", _rows({"turns": ["a", None]})
    yield "messages-is-text", "f.jsonl", _rows({"messages": "a"})
    yield "messages-empty", "f.jsonl", _rows({"messages": []})
    yield "messages-of-text", "f.jsonl", _rows({"messages": ["a"]})
    yield "assistant-first", "f.jsonl", _rows({"messages": [{"role": "assistant", "content": "a"}]})
    yield "unknown-role", "f.jsonl", _rows({"messages": [{"role": "narrator", "content": "a"}]})
    yield "role-is-a-number", "f.jsonl", _rows({"messages": [{"role": 1, "content": "a"}]})
    yield (
        "content-is-parts",
        "f.jsonl",
        _rows({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    )
    yield "list-of-pairs", "f.jsonl", _rows({"conversations": [["a", "b"], ["c", "d"]]})
    yield "list-of-role-pairs", "f.jsonl", _rows({"conversations": [["human", "a"], ["gpt", "b"]]})
    yield "list-of-lists", "f.json", json.dumps([CHAT["conversations"]]).encode()
    yield "half-surrogate", "f.jsonl", b'{"prompt": "\\ud800"}\n'
    yield "id-is-an-object", "f.jsonl", _rows({"id": {}, "prompt": "a"})
    yield "category-is-a-list", "f.jsonl", _rows({"category": ["x"], "prompt": "a"})
    yield "limit-is-text", "f.jsonl", _rows({"output_tokens": "9", "prompt": "a"})
    yield "limit-is-negative", "f.jsonl", _rows({"output_tokens": -1, "prompt": "a"})
    yield "all-the-same", "f.jsonl", GOOD * 50
    yield "one-bad-of-two", "f.jsonl", GOOD + _rows({"text": "b"})
    yield "one-bad-of-many", "f.jsonl", _rows(*({"prompt": str(i)} for i in range(200))) + b"{torn\n"
    yield "mixed-shapes", "f.jsonl", _rows({"prompt": "a"}, CHAT, {"turns": ["x"]})


def _tables() -> Iterator[tuple[str, str, bytes]]:
    yield "csv", "f.csv", _csv(["prompt", "output_tokens"], ["a, b", "5"], ['say "x"', ""])
    yield "csv-in-lines", "f.csv", _csv(["prompt"], ["a\nb"], ["c"])
    yield "csv-semicolons", "f.csv", b"prompt;category\na;x\n"
    yield "csv-tabs", "f.tsv", _csv(["question", "answer"], ["a", "b"], dialect="excel-tab")
    yield "csv-bom", "f.csv", b"\xef\xbb\xbfprompt\na\n"
    yield "csv-without-header", "f.csv", b"hello,world\n"
    yield "csv-header-alone", "f.csv", b"prompt,category\n"
    yield "csv-more-cells", "f.csv", b"prompt,category\na,b,c,d\n"
    yield "csv-fewer-cells", "f.csv", b"prompt,category\na\n"
    yield "csv-open-quote", "f.csv", b'prompt\n"a\n'
    yield "csv-quote-inside", "f.csv", b'prompt\n"a"b\n'
    yield "csv-nul", "f.csv", b"prompt\na\x00b\n"
    yield "csv-long-cell", "f.csv", b"prompt\n" + b"x" * 400_000 + b"\n"
    yield "csv-column-twice", "f.csv", b"prompt,prompt\na,b\n"
    yield "csv-messages", "f.csv", _csv(["messages"], [json.dumps([{"role": "user", "content": "a"}])])
    yield "csv-broken-messages", "f.csv", _csv(["messages"], ["[{"])
    yield "csv-bad-limit", "f.csv", b"prompt,output_tokens\na,many\n"
    yield "csv-latin-1", "f.csv", "prompt\né\n".encode("latin-1")
    yield "text", "f.txt", b"one\n\ntwo\r\n"
    yield "text-blank", "f.txt", b" \n\t\n"
    yield "text-latin-1", "f.txt", "é\n".encode("latin-1")
    yield "parquet-cut", "f.parquet", b"PAR1" + b"\x00" * 20
    yield "parquet-magic-alone", "f.jsonl", b"PAR1"
    yield "parquet-by-name-alone", "f.parquet", GOOD
