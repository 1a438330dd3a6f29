"""The tables in a file of the documentation: what is around them there stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdserve.bench.speed.machine import Machine
from pdserve.bench.speed.report import failures, tables
from pdserve.bench.speed.turns import Row

BEGIN, END = "<!-- begin: pdserve bench speed -->", "<!-- end: pdserve bench speed -->"
NOTES = (
    "Start: from the start of its process until three short prompts were answered one after the other. "
    "MiB: the most that its processes held at once (PSS, sampled once a second). "
    "A decode cell's speed is that of all its streams together, while all of them are being written; llama.cpp's row "
    "holds its own tools' figures of their own prompts, llama-server's is heard over HTTP as vllm's is, "
    "pdserve's fused and pair over gRPC."
)


def write_markdown(path: Path, rows: Sequence[Row], command: str, machine: Machine) -> None:
    """Between BEGIN and END, which are added at the end of a file that has none."""
    before, after = _around(path.read_text(encoding="utf-8") if path.exists() else "")
    path.write_text(f"{before}{BEGIN}\n{markdown(rows, command, machine)}{END}\n{after}", encoding="utf-8")


def markdown(rows: Sequence[Row], command: str, machine: Machine) -> str:
    versions = dict.fromkeys(f"{row.engine} {row.version}" for row in rows if row.is_peer)
    ours = next((f"pdserve {row.version}" for row in rows if not row.is_peer), "")
    repeats = max(len(speeds) for row in rows for speeds in row.tokens_per_s.values())
    parts = [f"Measured by `{command}`, {repeats} repeats in turns, on {machine}."]
    parts.append(f"Versions: {', '.join(filter(None, [ours, *versions]))}.")
    parts += [f"**{title}**\n\n{_table(lines)}" for title, lines in tables(rows)]
    parts += [f"- {line}" for line in failures(rows)]
    return "\n\n".join([*parts, NOTES]) + "\n"


def _around(text: str) -> tuple[str, str]:
    before, begin, rest = text.partition(BEGIN + "\n")
    if not begin:
        return (text.rstrip("\n") + "\n\n" if text else ""), ""
    return before, rest.partition(END + "\n")[2]


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---|" + "---:|" * (len(lines[0]) - 1), *rest])
