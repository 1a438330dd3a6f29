"""A node's settings: every field once, where its value comes from, and what is refused.

Precedence: command line > PDSERVE_* environment > --config file (YAML or TOML) > default. Everything is checked before
anything is built and all faults are reported together, each naming the flag, the value and the reason. This is the
only module that reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from pdserve import flags
from pdserve.errors import StartupError
from pdserve.flags import Flag

ENV_PREFIX = "PDSERVE_"


class Role(StrEnum):
    """What a node does: both phases, prompts only, or the front door that generates."""

    FUSED = "fused"
    PREFILL = "prefill"
    DECODE = "decode"


class DecodeFallback(StrEnum):
    """What a decode node does with a prompt that no peer can prefill."""

    FUSED = "fused"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class PrefillDelay:
    """The gate's two intervals in rounds: 1 <= attempt_interval <= any_interval."""

    attempt_interval: int
    any_interval: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong setting. origin: where the value came from if not from the command line."""

    name: str
    value: object
    reason: str
    origin: str = ""

    def __str__(self) -> str:
        where = f" (from {self.origin})" if self.origin else ""
        value = "" if self.value is None else f" {_shown(self.value)}"
        return f"{self.name}{value}{where}: {self.reason}"


class ConfigError(StartupError, ValueError):
    """Settings that can't be run with: one line, or a line a fault where there are several."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        assert self.faults
        lines = [str(fault) for fault in self.faults]
        several = f"{len(lines)} settings are wrong:\n  " + "\n  ".join(lines)
        super().__init__(lines[0] if len(lines) == 1 else several)


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(str(item) for item in value)
    return str(value)


# ---------------------------------------------------------------- the fields

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Enumerations may be given by value in code too; numbers stay strict.
Lax = Field(strict=False)

MODEL, ADDRESS, BATCH, MEMORY = "Model", "Address", "Batching", "KV memory"
GATE, PEERS, RUNNING = "Prefill gate", "Prefill and decode on different nodes", "Running"


class ServerArgs(BaseModel):
    """The settings of one node. Fields stay assignable; `validate()` checks them all and may be called again."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[
        str, Field(min_length=1), Flag(MODEL, "what to serve: smollm2, a model directory, or a hub id", "MODEL")
    ]
    served_model_name: Annotated[str | None, Flag(MODEL, "the name clients see (default: MODEL)", "NAME")] = None
    role: Annotated[Role, Lax, Flag(MODEL, "what this node does")] = Role.FUSED
    dtype: Annotated[Literal["float32"], Flag(MODEL, "type of weights, KV and arithmetic")] = "float32"
    max_model_len: Annotated[Count | None, Flag(MODEL, "longest prompt + answer in tokens (default: the model's)")] = (
        None
    )

    host: Annotated[str, Field(min_length=1), Flag(ADDRESS, "address to listen on", "HOST")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535), Flag(ADDRESS, "port of all gRPC services; 0 takes a free one")] = 50051
    advertise_host: Annotated[
        str | None, Flag(ADDRESS, "the host peers reach this node by (default: --host)", "HOST")
    ] = None
    insecure: Annotated[
        bool, Flag(ADDRESS, "allow a --host that other machines can reach, without TLS or credentials")
    ] = False
    max_message_mib: Annotated[Count, Field(le=2047), Flag(ADDRESS, "largest gRPC message in MiB")] = 16
    reflection: Annotated[bool, Flag(ADDRESS, "serve gRPC reflection")] = True

    max_num_seqs: Annotated[Count, Flag(BATCH, "requests that run at once")] = 32
    chunked_prefill_size: Annotated[Count, Flag(BATCH, "most tokens a round computes, prompts in chunks")] = 512
    enable_mixed_batch: Annotated[
        bool,
        Flag(BATCH, "let a round carry decodes beside prefill chunks", only=(Role.FUSED, Role.DECODE)),
    ] = False
    max_queued_requests: Annotated[Count, Flag(BATCH, "requests that may wait before new ones are refused")] = 1024

    block_size: Annotated[Count, Flag(MEMORY, "tokens a KV block holds")] = 64
    num_kv_blocks: Annotated[Count | None, Flag(MEMORY, "KV blocks (default: by --kv-memory-fraction)")] = None
    kv_memory_fraction: Annotated[
        float, Field(gt=0, le=1), Flag(MEMORY, "share of the memory available at start that KV may take", "FRACTION")
    ] = 0.5
    prefix_caching: Annotated[bool, Flag(MEMORY, "reuse the KV of equal prompt beginnings")] = True

    prefill_attempt_interval: Annotated[
        int | None, Flag(GATE, "rounds between openings where every rank may prefill", only=(Role.FUSED,))
    ] = None
    prefill_any_attempt_interval: Annotated[
        int | None, Flag(GATE, "rounds between openings where any rank may prefill", only=(Role.FUSED,))
    ] = None

    prefill_peers: Annotated[
        tuple[str, ...],
        Lax,
        NoDecode,
        Flag(PEERS, "prefill nodes, comma separated or repeated", "HOST:PORT", only=(Role.DECODE,)),
    ] = ()
    decode_fallback: Annotated[
        DecodeFallback,
        Lax,
        Flag(PEERS, "prompts no peer can prefill: compute them here, or fail them", only=(Role.DECODE,)),
    ] = DecodeFallback.FUSED
    remote_prefill_min_tokens: Annotated[
        int, Field(ge=0), Flag(PEERS, "prefill prompts with fewer uncached tokens here", only=(Role.DECODE,))
    ] = 0
    max_outstanding_prefills: Annotated[
        Count | None, Flag(PEERS, "prompts that may wait on peers (default: 2 × the peers' slots)", only=(Role.DECODE,))
    ] = None
    transfer_timeout_s: Annotated[
        Seconds, Flag(PEERS, "a prefill without progress for this long has failed", "S", only=(Role.DECODE,))
    ] = 60.0
    quarantine_s: Annotated[
        Seconds,
        Flag(PEERS, "how long a stuck transfer keeps its blocks before its peer is cut off", "S", only=(Role.DECODE,)),
    ] = 120.0
    kv_lease_s: Annotated[
        Seconds, Flag(PEERS, "how long finished KV waits for a decode node that went silent", "S", only=(Role.PREFILL,))
    ] = 30.0

    num_threads: Annotated[
        Count | None, Flag(RUNNING, "compute threads (default: one a core; OMP_NUM_THREADS wins where set)")
    ] = None
    startup_timeout_s: Annotated[Seconds, Flag(RUNNING, "give up when not ready after this long", "S")] = 600.0
    drain_timeout_s: Annotated[Seconds, Flag(RUNNING, "how long SIGTERM lets requests finish", "S")] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Flag(RUNNING, "least severe line that is logged")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Flag(RUNNING, "how log lines are written")] = "text"
    stats_interval_s: Annotated[Seconds, Flag(RUNNING, "seconds between lines of statistics while busy", "S")] = 10.0
    config: Annotated[str | None, Flag(RUNNING, "YAML or TOML file with settings named as the flags", "FILE")] = None

    @classmethod
    def from_command_line(cls, argv: Sequence[str] | None = None, role: Role | None = None) -> ServerArgs:
        """The settings of a launch, from every source, checked. role: what the started program is, if it's only one.

        Raises ConfigError with all faults. `--help` prints and exits.
        """
        prog = f"python -m {MODULES[role]}" if role else "pdserve serve"
        given, faults = parse_flags(argv, server_parser(prog, role))
        if role is not None and given.setdefault("role", role.value) != role.value:
            faults.append(Fault("--role", given.pop("role"), f"{prog} is a {role} node; leave the flag out"))
        args, more = read_layers(given)
        faults += more
        wrong = {fault.name for fault in faults}
        faults += [fault for fault in args.faults() if fault.name not in wrong]
        if faults:
            raise ConfigError(faults)
        return args

    def validate(self) -> None:  # type: ignore[override]  # pydantic's own `validate` is a deprecated class method
        """Check every field and how they go together. Raises ConfigError with all faults at once."""
        if faults := self.faults():
            raise ConfigError(faults)

    def faults(self) -> list[Fault]:
        """Everything wrong with the settings as they are now."""
        faults = self._field_faults()
        wrong = {fault.name for fault in faults}
        sane = self.model_copy(update={name: _default(name) for name in FIELDS if flag_name(name) in wrong})
        return faults + [fault for fault in sane._rule_faults() if fault.name not in wrong]

    def _field_faults(self) -> list[Fault]:
        try:
            ServerArgs.model_validate(dict(self))
        except ValidationError as error:
            return [_field_fault(item["loc"], item["input"], item["msg"]) for item in error.errors()]
        return []

    def _rule_faults(self) -> list[Fault]:
        return [
            *_ignored_flags(self),
            *_gate_faults(self),
            *_address_faults(self),
            *_size_faults(self),
            *_peer_faults(self),
            *_thread_faults(),
        ]

    @property
    def prefill_delay(self) -> PrefillDelay | None:
        """The prefill gate's intervals as the fields stand now; None only when both are unset.

        Raises ValueError for half a pair, for anything but whole numbers, and unless 1 <= attempt <= any.
        """
        pair = (self.prefill_attempt_interval, self.prefill_any_attempt_interval)
        if pair == (None, None):
            return None
        if faults := _interval_faults(*pair):
            raise ConfigError(faults)
        return PrefillDelay(*pair)  # type: ignore[arg-type]  # both are ints, as no fault was found

    @property
    def public_name(self) -> str:
        """The name clients see for the model."""
        return self.served_model_name or self.model

    @property
    def address(self) -> str:
        """host:port to listen on."""
        return join_address(self.host, self.port)

    @property
    def compute_threads(self) -> int:
        """Threads for arithmetic: a person's OMP_NUM_THREADS, else --num-threads, else one a core."""
        return _omp_num_threads() or self.num_threads or num_cores()

    def command_line(self) -> list[str]:
        """The flags that give these settings again, in a place without PDSERVE_* variables and config file."""
        words = [self.model]
        for name in FIELDS:
            if name in self.model_fields_set - {"model", "config"}:
                words += _as_flag(name, getattr(self, name))
        return words


def _as_flag(name: str, value: object) -> list[str]:
    if value is None or value == ():
        return []
    if isinstance(value, bool):
        return [flags.spelled(name) if value else "--no-" + flags.spelled(name)[2:]]
    return [flags.spelled(name), _shown(value)]


FIELDS = ServerArgs.model_fields
MODULES = {Role.FUSED: "fused", Role.PREFILL: "prefill_node", Role.DECODE: "decode_node"}


def flag_name(name: str) -> str:
    """What a person calls the field: its flag, or MODEL."""
    return "MODEL" if name == "model" else flags.spelled(name)


def join_address(host: str, port: int) -> str:
    """host:port as gRPC writes it; IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _default(name: str) -> object:
    return "" if name == "model" else FIELDS[name].default


# ---------------------------------------------------------------- what goes together


def _ignored_flags(args: ServerArgs) -> Iterable[Fault]:
    """A flag the role wouldn't look at is a misunderstanding; better said than ignored."""
    for name in sorted(args.model_fields_set & set(FIELDS)):
        only = flags.described(FIELDS[name]).only
        value = getattr(args, name)
        if not only or args.role in only or value is None or name in GATE_FIELDS:
            continue
        yield Fault(flag_name(name), value, f"a {args.role} node doesn't use it, only {' and '.join(only)} nodes do")


GATE_FIELDS = ("prefill_attempt_interval", "prefill_any_attempt_interval")


def _gate_faults(args: ServerArgs) -> list[Fault]:
    pair = (args.prefill_attempt_interval, args.prefill_any_attempt_interval)
    if pair == (None, None):
        return []
    if args.role is not Role.FUSED:
        reason = f"a {args.role} node runs without a prefill gate, as its prefills and decodes don't share a rank"
        return [Fault(flag_name(n), v, reason) for n, v in zip(GATE_FIELDS, pair, strict=True) if v is not None]
    if faults := _interval_faults(*pair):
        return faults
    reason = "the prefill gate is not available yet; leave both flags out"
    return [Fault(f"{flag_name(GATE_FIELDS[0])}, {flag_name(GATE_FIELDS[1])}", f"{pair[0]}, {pair[1]}", reason)]


def _interval_faults(attempt: object, any_rank: object) -> list[Fault]:
    """Half a pair, a value that is no whole number (True and 2.0 included), or numbers out of order."""
    attempt_flag, any_flag = (flag_name(name) for name in GATE_FIELDS)
    if attempt is None or any_rank is None:
        given, missing = (any_flag, attempt_flag) if attempt is None else (attempt_flag, any_flag)
        return [Fault(given, any_rank if attempt is None else attempt, f"needs {missing} beside it")]
    faults = [
        Fault(name, repr(value), f"must be a whole number, not {type(value).__name__}")
        for name, value in ((attempt_flag, attempt), (any_flag, any_rank))
        if type(value) is not int
    ]
    if not faults and isinstance(attempt, int) and isinstance(any_rank, int):
        if attempt < 1:
            faults.append(Fault(attempt_flag, attempt, "must be at least 1"))
        if any_rank < attempt:
            faults.append(Fault(any_flag, any_rank, f"must be at least {attempt_flag} ({attempt})"))
    return faults


def _address_faults(args: ServerArgs) -> Iterable[Fault]:
    if not args.insecure and not _is_loopback(args.host):
        reason = "other machines could reach this node, and it has no TLS yet; add --insecure to allow that"
        yield Fault(flag_name("host"), args.host, reason)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _size_faults(args: ServerArgs) -> Iterable[Fault]:
    if args.chunked_prefill_size < args.block_size:
        reason = f"must be at least --block-size ({args.block_size}), as chunks end on block boundaries"
        yield Fault(flag_name("chunked_prefill_size"), args.chunked_prefill_size, reason)
    if args.num_kv_blocks is not None and "kv_memory_fraction" in args.model_fields_set:
        reason = f"--num-kv-blocks ({args.num_kv_blocks}) sets the same size; give one of them"
        yield Fault(flag_name("kv_memory_fraction"), args.kv_memory_fraction, reason)


def _peer_faults(args: ServerArgs) -> Iterable[Fault]:
    for peer in args.prefill_peers:
        if reason := _wrong_with_address(peer):
            yield Fault(flag_name("prefill_peers"), peer, reason)
    if args.role is Role.DECODE and args.decode_fallback is DecodeFallback.FAIL and not args.prefill_peers:
        reason = "without --prefill-peers every request would fail; name a prefill node"
        yield Fault(flag_name("decode_fallback"), args.decode_fallback, reason)


def _wrong_with_address(peer: str) -> str | None:
    if "://" in peer or peer.startswith(("dns:", "file:")):
        return "only HOST:PORT is available yet, not a name service or a file"
    host, colon, port = peer.rpartition(":")
    if not (colon and host and port.isdecimal() and 1 <= int(port) <= 65535):
        return "must be HOST:PORT with a port of 1 to 65535"
    return None


def _thread_faults() -> Iterable[Fault]:
    text = os.environ.get("OMP_NUM_THREADS")
    if text and _omp_num_threads() is None:
        yield Fault("OMP_NUM_THREADS", text, "must be a whole number of at least 1", "the environment")


# ---------------------------------------------------------------- where values come from


def server_parser(prog: str, role: Role | None = None, leave_out: Iterable[str] = ()) -> flags.FlagParser:
    """The flags of a node; with a role, those it heeds."""
    unused = {n for n, field in FIELDS.items() if role and (only := flags.described(field).only) and role not in only}
    kind = f"Serve a model as one {role} node." if role else "Serve a model as one node."
    parser = flags.FlagParser(
        prog=prog,
        usage=f"{prog} MODEL [flags]",
        description=f"{kind} Each flag may also be a PDSERVE_* variable or a line of the --config file.",
        epilog=f"example:\n  {prog} smollm2 --port 50051",
    )
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="smollm2, a model directory, or a hub id")
    flags.add_flags(parser, FIELDS, {*leave_out, *unused} - {"role"})
    return parser


def parse_flags(argv: Sequence[str] | None, parser: flags.FlagParser) -> tuple[dict[str, Any], list[Fault]]:
    """What the command line says, as text by field, and the words nobody knows."""
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except flags.FlagError as error:
        raise ConfigError([Fault("the command line", None, str(error))]) from None
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    model = given.pop("positional_model", None)
    faults = [_unknown(word, parser.prog) for word in unknown]
    if model is not None and given.setdefault("model", model) != model:
        faults.append(Fault("--model", given["model"], f"MODEL is given as {model} too; give one of them"))
    return given, faults


def _unknown(word: str, prog: str) -> Fault:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return Fault(word, None, f"is one word too many; see {prog} --help")
    meant = flags.nearest(name, (flags.spelled(field) for field in FIELDS))
    return Fault(name, None, f"there is no such flag{_hint(meant)}")


def _hint(meant: str | None) -> str:
    return f"; did you mean {meant}?" if meant else ""
