"""A node's settings: `ServerArgs`, checked once before anything is built, all faults reported together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from pdserve.config import environment, flags, policy, rules, sources
from pdserve.config.environment import cache_dir
from pdserve.config.fields import (
    FIELDS,
    DecodeFallback,
    KvCacheDtype,
    LoadBalanceMethod,
    OnRankDeath,
    Quantization,
    QuantizationSetting,
    Role,
    Settings,
    flag_name,
)
from pdserve.config.peer_address import join_address, split_address
from pdserve.config.policy import CadenceSettings, FillSettings, PrefillDelay, policy_line
from pdserve.faults import ConfigError, Fault, shown, unless_about

__all__ = [
    "CadenceSettings",
    "ConfigError",
    "DecodeFallback",
    "Fault",
    "FillSettings",
    "KvCacheDtype",
    "LoadBalanceMethod",
    "OnRankDeath",
    "PrefillDelay",
    "Quantization",
    "QuantizationSetting",
    "Role",
    "ServerArgs",
    "cache_dir",
    "policy_line",
]

BYTES_PER_GB = 10**9
DEFAULT_KV_DIR_GB = 10.0

MODULES = {Role.FUSED: "fused", Role.PREFILL: "prefill_node", Role.DECODE: "decode_node"}


class ServerArgs(Settings):
    """The settings of one node. Fields stay assignable; `validate()` checks them all and may be called again.

    Made in code it holds what it is given and the defaults; `from_command_line` reads every source.
    """

    @classmethod
    def from_command_line(cls, argv: Sequence[str] | None = None, role: Role | None = None) -> ServerArgs:
        """The checked settings of a launch. role: what the started program is, where it is only one thing.

        Raises ConfigError with all faults; `--help` prints and exits.
        """
        parser = server_parser(f"python -m {MODULES[role]}" if role else "pdserve serve")
        given, faults = parse_flags(argv, parser)
        if role is not None and given.setdefault("role", role.value) != role.value:
            wanted = given["role"]
            given["role"] = role.value
            faults.append(Fault("--role", wanted, f"{parser.prog} is a {role} node; leave the flag out"))
        args, more = cls.from_layers(given)
        if faults := [*faults, *more]:
            raise ConfigError(faults)
        return args

    @classmethod
    def from_layers(cls, given: dict[str, Any]) -> tuple[ServerArgs, list[Fault]]:
        """The settings with `given` (text by field) over environment, file and defaults, and all their faults."""
        settings, faults = sources.read_layers(given)
        args = cls.model_construct(set(settings.model_fields_set), **dict(settings))
        return args, faults + unless_about(faults, rules.faults_of(args))

    def validate(self) -> None:  # type: ignore[override]  # pydantic's `validate` is a deprecated class method
        """Check every field and how they go together. Raises ConfigError with all faults at once."""
        if faults := self.faults():
            raise ConfigError(faults)

    def faults(self) -> list[Fault]:
        """Everything wrong with the settings as they are now."""
        try:
            Settings.model_validate(dict(self))
        except ValidationError as error:
            found = error.errors()
        else:
            return rules.faults_of(self)
        faults = [Fault(flag_name(str(e["loc"][0])), repr(e["input"]), sources.worded(e["msg"])) for e in found]
        sane = self.model_copy(update=sources.stand_ins({str(e["loc"][0]): e["input"] for e in found}))
        return faults + unless_about(faults, rules.faults_of(sane))

    @property
    def prefill_delay(self) -> PrefillDelay | None:
        """The prefill gate's intervals as the fields stand now; None only when both are unset.

        Raises ValueError for half a pair, for anything but whole numbers, unless 1 <= attempt <= any, and where a gate
        is refused: on a node of a pair, and beside a cadence.
        """
        return policy.prefill_delay(self)

    @property
    def prefill_gate(self) -> PrefillDelay | None:
        """The gate to run with: prefill_delay, or what a fill condition alone makes. Raises ValueError as both do."""
        return policy.prefill_gate(self)

    @property
    def fill(self) -> FillSettings | None:
        """The fill condition as the fields stand now; None when unset, and for `auto` on one rank.

        Raises ValueError for a size that no round has, and where a fill condition is refused.
        """
        return policy.fill(self)

    @property
    def cadence(self) -> CadenceSettings | None:
        """The rank's own rhythm as the fields stand now; a decode node that falls back has one by default.

        Raises ValueError for anything but whole numbers of at least 1, and where a cadence is refused.
        """
        return policy.cadence(self)

    @property
    def host_kv_bytes(self) -> int:
        """Size of the host tier; 0 = none."""
        return int(self.host_kv_gb * BYTES_PER_GB)

    @property
    def kv_dir_bytes(self) -> int:
        """Most that --kv-dir may hold."""
        return int((self.kv_dir_gb or DEFAULT_KV_DIR_GB) * BYTES_PER_GB)

    @property
    def public_name(self) -> str:
        """The name clients see for the model; of a directory given by its full path only the last part."""
        return self.served_model_name or (PurePath(self.model).name if self.model.startswith("/") else self.model)

    @property
    def address(self) -> str:
        """host:port to listen on, as gRPC writes it (IPv6 in brackets)."""
        return join_address(self.host, self.port)

    @property
    def meeting_point(self) -> tuple[str, int]:
        """Host and port of the first of several nodes, where the others come to."""
        address = split_address(self.dist_init_addr or "")
        assert address is not None, "rules._meeting_faults lets no other address through"
        return address

    @property
    def compute_threads(self) -> int:
        """Of each rank of this machine, for arithmetic."""
        return self.threads_of_one_in(self.num_local_ranks)

    def threads_of_one_in(self, num_local_ranks: int) -> int:
        """A person's OMP_NUM_THREADS, else --num-threads, else a share of the cores."""
        return environment.omp_num_threads() or self.num_threads or max(1, environment.num_cores() // num_local_ranks)

    @property
    def num_ranks(self) -> int:
        """Rank processes of the group."""
        return self.data_parallel_size * self.tensor_parallel_size

    @property
    def num_local_ranks(self) -> int:
        """Those of them on each machine."""
        return self.num_ranks // self.nnodes

    @property
    def max_num_seqs_a_rank(self) -> int:
        """Slots of a data-parallel rank."""
        return self.max_num_seqs // self.data_parallel_size

    def command_line(self) -> list[str]:
        """The words that give these settings again where there is no PDSERVE_* variable and no config file."""
        given = self.model_fields_set - {"model", "config"}
        return [self.model, *(word for name in FIELDS if name in given for word in _words(name, getattr(self, name)))]


def _words(name: str, value: object) -> list[str]:
    if value is None or value == ():
        return []
    if isinstance(value, bool):
        return [flags.spelled(name) if value else flags.spelled(f"no_{name}")]
    return [flags.spelled(name), shown(value)]


def server_parser(prog: str, hidden: Iterable[str] = (), purpose: str = "Serve a model.") -> flags.FlagParser:
    """The flags of a node. hidden: fields whose flags are read, to be refused with a reason, and not shown."""
    parser = flags.FlagParser(
        prog=prog,
        usage=f"{prog} MODEL [flags]",
        description=f"{purpose} Each flag may also be a PDSERVE_* variable or a line of the --config file.",
        epilog=f"example:\n  {prog} smollm2 --port 50051",
    )
    parser.add_argument(
        "positional_model", metavar="MODEL", nargs="?", help="smollm2, smollm2-moe, a model directory, or a hub id"
    )
    flags.add_flags(parser, FIELDS, set(hidden))
    return parser


def parse_flags(argv: Sequence[str] | None, parser: flags.FlagParser) -> tuple[dict[str, Any], list[Fault]]:
    """What the command line says, as text by field, and the words nobody knows."""
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except flags.FlagError as error:
        raise ConfigError([Fault("the command line", None, str(error))]) from None
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    model = given.pop("positional_model", None)
    # The word after a flag nobody knows is most likely its value.
    values = {n for n, word in enumerate(unknown[:-1], 1) if word.startswith("--") and "=" not in word}
    words = [word for n, word in enumerate(unknown) if n not in values or word.startswith("-")]
    faults = [_unknown(word, parser.prog) for word in words]
    if model is not None and given.setdefault("model", model) != model:
        faults.append(Fault("--model", given["model"], f"MODEL is given as {model} too; give one of them"))
    return given, faults


def _unknown(word: str, prog: str) -> Fault:
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return Fault(word, None, f"is one word too many; see {prog} --help")
    known = {flags.spelled(name) for name in FIELDS}
    if flag in known:
        return Fault(flag, None, f"is a flag of `pdserve serve` and says nothing to {prog}; leave it out")
    return Fault(flag, None, f"there is no such flag{sources.hint(flag, known)}")
