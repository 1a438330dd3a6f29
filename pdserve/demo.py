"""`pdserve demo`: six prompts through a prefill and a decode node, then through one fused node, and the comparison."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.client import Client
from pdserve.commands.measured import MeasuredAnswer, duration, measure
from pdserve.commands.parsing import add_json, command_parser
from pdserve.commands.tables import write_json
from pdserve.commands.up import threads_each
from pdserve.config import Role, ServerArgs
from pdserve.config.ports import free_port
from pdserve.demo_prompts import PROMPTS, Prompt
from pdserve.errors import PdserveError
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import NodeProcess, interrupted_by_sigterm, wait_until_ready

# Room for the longest prompt several times over; small enough for a laptop.
NUM_KV_BLOCKS = 192
MIB = 1024**2
LOG_LINES_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt's answer, and the KV that the decode node pulled for it: bytes, and in how many transfers."""

    prompt: Prompt
    answer: MeasuredAnswer
    kv_bytes: int
    kv_transfers: int

    def figures(self) -> dict[str, object]:
        moved = {"kv_bytes": self.kv_bytes, "kv_transfers": self.kv_transfers}
        return {"prompt": self.prompt.title, **self.answer.figures(), **moved}


def main(argv: list[str]) -> int:
    """0 when both ways gave the same tokens and every prompt of the first was computed by the prefill node, else 1."""
    parser = command_parser("demo", "", "See the whole thing work on this machine.", "pdserve demo --max-new-tokens 64")
    parser.add_argument("--model", default="smollm2", metavar="MODEL", help="what to serve (default: %(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=32, metavar="N", help="longest answer (default: %(default)s)"
    )
    add_json(parser)
    arguments = parser.parse_args(argv)
    console = Console(highlight=False, stderr=arguments.json == "-")
    demo = Demo(console, arguments.model, arguments.max_new_tokens)
    with interrupted_by_sigterm(), show_progress() as progress:
        hub.resolve(arguments.model, progress=progress)
        pair, fused = demo.ask_pair(), demo.ask_fused()
    if arguments.json:
        figures = {"prefill_and_decode": pair, "fused": fused}
        write_json(arguments.json, {name: [asked.figures() for asked in run] for name, run in figures.items()})
    wrong = [*not_remote(pair), *differences(pair, fused)]
    for line in wrong:
        console.print(line, style="red")
    if not wrong:
        num_tokens = sum(len(asked.answer.token_ids) for asked in pair)
        console.print(f"Both ways gave the same {num_tokens} tokens for {len(pair)} prompts.", style="green")
    return int(bool(wrong))


class Demo:
    """Asks every prompt of nodes that live just as long."""

    def __init__(self, console: Console, model: str, max_new_tokens: int) -> None:
        self._console = console
        self._model = model
        self._max_new_tokens = max_new_tokens

    def ask_pair(self) -> list[Asked]:
        """Of a prefill and a decode node."""
        threads = threads_each()
        prefill = self._args(Role.PREFILL, num_threads=threads)
        decode = self._args(Role.DECODE, num_threads=threads, prefill_peers=(prefill.address,))
        self._console.rule("one prefill node and one decode node")
        with self._running([prefill, decode]):
            asked = self._ask_all(decode.address)
        self._console.print(table(asked, has_transfers=True))
        return asked

    def ask_fused(self) -> list[Asked]:
        """Of one node that does both."""
        fused = self._args(Role.FUSED)
        self._console.rule("one fused node")
        with self._running([fused]):
            asked = self._ask_all(fused.address)
        self._console.print(table(asked, has_transfers=False))
        return asked

    def _args(self, role: Role, **settings: Any) -> ServerArgs:
        args = ServerArgs(
            model=self._model, role=role, port=free_port(), num_kv_blocks=NUM_KV_BLOCKS, drain_timeout_s=5.0, **settings
        )
        args.validate()
        return args

    @contextlib.contextmanager
    def _running(self, nodes: Sequence[ServerArgs]) -> Iterator[None]:
        """Ends every node however the block is left; what a node said is shown where something failed."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
            logs = {args.role: Path(folder) / f"{args.role}.log" for args in nodes}
            try:
                started = [self._start(args, logs[args.role], ending) for args in nodes]
                wait_until_ready(started, lambda node: self._console.print(f"{node.name} is ready", style="dim"))
                yield
            except PdserveError:
                for role, log in logs.items():
                    self._show_log(role, log)
                raise

    def _start(self, args: ServerArgs, log: Path, ending: contextlib.ExitStack) -> NodeProcess:
        with log.open("wb") as file:
            node = NodeProcess(args, file)
        ending.callback(node.end)
        self._console.print(f"starting the {node.name}", style="dim")
        return node

    def _show_log(self, role: Role, log: Path) -> None:
        if log.exists():
            self._console.rule(f"what the {role} node said last")
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            self._console.print("\n".join(lines[-LOG_LINES_SHOWN:]), markup=False)

    def _ask_all(self, address: str) -> list[Asked]:
        with Client(address, timeout_s=120.0) as client:
            return [self._ask(client, prompt) for prompt in PROMPTS]

    def _ask(self, client: Client, prompt: Prompt) -> Asked:
        before = moved(client)
        self._console.print(f"\n{prompt.title}: {prompt.shown}", style="bold", markup=False)
        messages = [{"role": "user", "content": prompt.text}]
        with client.stream(messages=messages, temperature=0.0, max_new_tokens=self._max_new_tokens) as stream:
            answer = measure(stream, lambda text: self._console.print(text, end="", markup=False, soft_wrap=True))
        self._console.print()
        after = moved(client)
        return Asked(prompt, answer, after[0] - before[0], after[1] - before[1])


def moved(client: Client) -> tuple[int, int]:
    """KV the node pulled since its start: bytes, transfers. A node that pulls none doesn't count it."""
    loads = client.loads()
    return (
        sum(load.counters.get("kv_bytes_total", 0) for load in loads),
        sum(load.counters.get("kv_transfers_total", 0) for load in loads),
    )


def table(run: Sequence[Asked], has_transfers: bool) -> Table:
    """One row a prompt."""
    result = Table("prompt", "in", "out", "prefilled", box=SIMPLE, padding=(0, 1, 0, 0))
    if has_transfers:
        result.add_column("KV MiB", justify="right")
        result.add_column("transfers", justify="right")
    for name in ("TTFT", "ITL p50", "ITL max"):
        result.add_column(name, justify="right")
    for asked in run:
        answer = asked.answer
        transfers = [f"{asked.kv_bytes / MIB:.1f}", str(asked.kv_transfers)] if has_transfers else []
        result.add_row(
            asked.prompt.title,
            str(answer.usage.num_prompt_tokens),
            str(answer.usage.num_completion_tokens),
            where(answer.placement),
            *transfers,
            *(duration(seconds) for seconds in (answer.ttft_s, answer.itl_p50_s, answer.itl_max_s)),
        )
    return result


def where(placement: str) -> str:
    """Which node computed the prompt; and why, where it should have been the other."""
    side, _, detail = placement.partition(";")
    reason = detail.removeprefix("reason=")
    return "prefill" if side == "remote" else reason if reason == "fused" else f"decode ({reason})"


def not_remote(pair: Sequence[Asked]) -> list[str]:
    """A line for each prompt that the prefill node didn't compute, though it was there to."""
    return [
        f"{asked.prompt.title}: prefilled by the decode node itself ({asked.answer.placement or 'no reason given'})"
        for asked in pair
        if not asked.answer.placement.startswith("remote")
    ]


def differences(pair: Sequence[Asked], fused: Sequence[Asked]) -> list[str]:
    """A line for each prompt whose greedy tokens differ, with the first place where they do."""
    lines = []
    for ours, theirs in zip(pair, fused, strict=True):
        left, right = ours.answer.token_ids, theirs.answer.token_ids
        if left == right:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )
        lines.append(f"{ours.prompt.title}: token {place} differs: {left[place:][:1]} and, fused, {right[place:][:1]}")
    return lines
