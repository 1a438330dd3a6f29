"""`pdserve bench chaos`: two prefill and two decode nodes under random faults."""

from __future__ import annotations

from pdserve.commands.arguments import Check, kept_directory, read, whole
from pdserve.commands.parsing import CommandParser, add_json, command_parser
from pdserve.faults import Fault

MOST_REQUESTS, MOST_FAULTS, MOST_STREAMS = 100_000, 10_000, 64
DEFAULT_TLS = "default"
# What UCX_TLS may list (UCX's documentation of it), beside `all`.
TRANSPORTS = (
    *("all", "self", "sm", "shm", "mm", "posix", "sysv", "xpmem", "knem", "cma", "tcp"),
    *("ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "dc", "dc_x"),
    *("dc_mlx5", "gga_mlx5", "srd", "ugni", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"),
    *("rocm", "rocm_copy", "rocm_ipc", "ze", "ze_copy", "ze_ipc", "ze_gdr"),
)


def main(argv: list[str]) -> int:
    """0 when every check is met."""
    arguments = read(_parser(), argv)
    # It takes seconds to import what computes; what is wrong with the arguments is told before.
    from pdserve.bench.chaos.run import run

    return run(arguments)


def _parser() -> CommandParser:
    parser = command_parser(
        "bench chaos",
        "",
        "Two prefill and two decode nodes under random faults: is every answer right, whoever stays answered, nothing\n"
        "kept? Processes are killed and stopped, clients leave, control channels are held, cut, slowed and truncated,\n"
        "each aimed at requests in a phase that was hit less than the others. Every answer is compared with an\n"
        "undisturbed fused node's. Takes about 5 s a fault; 1 is the exit status where a rule is broken.",
        "pdserve bench chaos --requests 400 --faults 60 --ucx-tls tcp,self",
    )
    parser.add_argument(
        "--requests",
        type=whole("--requests", 1, MOST_REQUESTS),
        default=2000,
        metavar="N",
        help="how many (default: %(default)s)",
    )
    parser.add_argument(
        "--faults",
        type=whole("--faults", 1, MOST_FAULTS),
        default=300,
        metavar="N",
        help="how many (default: %(default)s)",
    )
    parser.add_argument(
        "--streams",
        type=whole("--streams", 1, MOST_STREAMS),
        default=16,
        metavar="N",
        help="at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=whole("--seed", 0),
        default=1,
        metavar="N",
        help="of the requests and the faults (default: %(default)s)",
    )
    parser.add_argument("--model", help="what to serve (default: a tiny one with random weights)")
    parser.add_argument(
        "--ucx-tls",
        type=ucx_tls("--ucx-tls"),
        default="default",
        metavar="TLS",
        help="how KV travels: default, or UCX_TLS",
    )
    parser.add_argument(
        "--keep",
        type=kept_directory("--keep"),
        metavar="DIR",
        help="where the nodes' logs stay; they are thrown away without",
    )
    add_json(parser)
    return parser


def ucx_tls(flag: str) -> Check:
    """`default`, or a list of transports as UCX_TLS takes it: with ^ before it, all but these."""

    def check(text: str) -> str | Fault:
        names = text.removeprefix("^").split(",")
        if text == DEFAULT_TLS or all(name.lstrip("\\").removesuffix(":aux") in TRANSPORTS for name in names):
            return text
        return Fault(flag, text, "names no transports of UCX; give default, or a list such as tcp,self")

    return check
