"""`pdserve up MODEL`: one prefill node and one decode node as children of this process, until one of them ends."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from pdserve.config import ConfigError, Fault, Role, ServerArgs, flags, parse_flags, server_parser
from pdserve.config.environment import num_cores
from pdserve.config.fields import FIELDS, Settings, flag_name
from pdserve.config.policy_rules import FILL_FIELDS, GATE_FIELDS
from pdserve.config.ports import free_port
from pdserve.config.sources import read_layers
from pdserve.faults import unless_about
from pdserve.node_process import NodeProcess, interrupted_by_sigterm, wait_until_ready
from pdserve.startup import INTERRUPTED

POLL_S = 0.2
NO_GATE = "pdserve up starts no fused node, and only a fused node has a prefill gate"
# Settings that say nothing here, and why.
MISPLACED = {
    "role": "pdserve up starts one node of each",
    "prefill_peers": "pdserve up starts the peer itself",
    **dict.fromkeys(GATE_FIELDS, NO_GATE),
    **dict.fromkeys(FILL_FIELDS, f"{NO_GATE} for a fill condition to shape"),
}
# Of the memory that is available before either node starts.
KV_MEMORY_FRACTION_EACH = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """What the two nodes are started with."""

    prefill: ServerArgs
    decode: ServerArgs


def main(argv: list[str]) -> int:
    """Starts both, waits until both serve, then until one ends or a signal comes."""
    pair = read_pair(argv)
    with contextlib.ExitStack() as ending, interrupted_by_sigterm():
        prefill, decode = (_start(args, ending) for args in (pair.prefill, pair.decode))
        wait_until_ready([prefill, decode], lambda node: _say(f"{node.name} is ready"))
        _say(f'ready. Try, in another terminal:  pdserve generate --target {pair.decode.address} "Hello!"')
        return supervise(prefill, decode)


def read_pair(argv: list[str]) -> Pair:
    """The settings of both nodes from every source. Raises ConfigError with all faults of both."""
    parser = server_parser(
        "pdserve up",
        hidden=MISPLACED,
        purpose="Serve a model with one prefill and one decode node on this machine; the decode node takes --port.",
    )
    group = parser.add_argument_group("Prefill node")
    group.add_argument("--prefill-port", metavar="N", help="its port (default: a free one)")
    given, faults = parse_flags(argv, parser)
    prefill_port, more = _port(given.pop("prefill_port", None))
    settings, unreadable = read_layers(given)
    faults = [*faults, *more, *_misplaced_or(unreadable, settings)]
    pair = split(settings, prefill_port)
    faults += unless_about(faults, [*pair.prefill.faults(), *pair.decode.faults()])
    if faults:
        raise ConfigError({str(fault): fault for fault in faults}.values())
    return pair


def _port(text: str | None) -> tuple[int, list[Fault]]:
    if text is None:
        return free_port(), []
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return int(text), []
    return free_port(), [Fault("--prefill-port", text, "must be a port of 1 to 65535")]


def _misplaced_or(unreadable: list[Fault], settings: Settings) -> list[Fault]:
    """What is given and misplaced, by command line, environment or file, and then what is wrong with other values."""
    values = {fault.subject: fault.value for fault in unreadable}
    misplaced = {
        (flag := flag_name(name)): Fault(flag, values.get(flag, getattr(settings, name)), f"{reason}; leave it out")
        for name, reason in MISPLACED.items()
        if name in settings.model_fields_set
    }
    return [*misplaced.values(), *(fault for fault in unreadable if fault.subject not in misplaced)]


def split(settings: Settings, prefill_port: int) -> Pair:
    """Each node's part: the cores and the memory are shared, and each gets only the flags it heeds."""
    shared: dict[str, Any] = {}
    if settings.num_threads is None:
        shared["num_threads"] = threads_each()
    if settings.num_kv_blocks is None and "kv_memory_fraction" not in settings.model_fields_set:
        shared["kv_memory_fraction"] = KV_MEMORY_FRACTION_EACH
    prefill = _part(settings, Role.PREFILL, port=prefill_port, **shared)
    decode_port = settings.port or free_port()
    decode = _part(settings, Role.DECODE, port=decode_port, prefill_peers=(prefill.address,), **shared)
    return Pair(prefill, decode)


def threads_each() -> int:
    """Compute threads of two nodes that share this machine: together never more than its cores, if it has two."""
    return max(1, num_cores() // 2)


def _part(settings: Settings, role: Role, **changes: Any) -> ServerArgs:
    heeded = {
        name: getattr(settings, name)
        for name in settings.model_fields_set & set(FIELDS)
        if not (only := flags.described(FIELDS[name]).only) or role in only
    }
    values = {name: field.default for name, field in FIELDS.items()}
    chosen = heeded | {"role": role} | changes
    return ServerArgs.model_construct(set(chosen), **(values | chosen))


def _start(args: ServerArgs, ending: contextlib.ExitStack) -> NodeProcess:
    node = NodeProcess(args)
    ending.callback(node.end)
    _say(f"starting the {node.name}, {args.compute_threads} threads")
    return node


def supervise(prefill: NodeProcess, decode: NodeProcess) -> int:
    """Until one node ends by itself (1, said which) or a signal came and both ended in order (130)."""
    with forwarded_signals(decode, prefill) as signals:
        while not (prefill.has_ended or decode.has_ended):
            time.sleep(POLL_S)
        if signals:
            # The decode node's last requests may still need their prompts computed, so the other goes after it.
            decode.end()
            prefill.end()
            return INTERRUPTED
        dead, other = (prefill, decode) if prefill.has_ended else (decode, prefill)
        _say(f"the {dead.name} ended by itself (status {dead.exit_status}); ending the {other.name}")
        other.end()
        return 1


@contextlib.contextmanager
def forwarded_signals(first: NodeProcess, second: NodeProcess) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM reach the nodes: once, and `first` drains; again, and both end. The list says what came."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        first.ask_to_stop()
        if len(came) > 1:
            second.ask_to_stop()
        _say("stopping: running requests may finish; once more ends them" if len(came) == 1 else "ending now")

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    print(f"pdserve up: {line}", file=sys.stderr, flush=True)
