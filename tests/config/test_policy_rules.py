"""Every refusal of the prefill policies: by command line, by validate(), at the property, after a change in code."""

import itertools
from collections.abc import Callable, Mapping

import pytest

import decode_node.node
import fused.node
import prefill_node.node
from pdserve.config import ConfigError, Role, ServerArgs
from pdserve.config.policy_rules import CADENCE_FIELDS, FILL_FIELDS, GATE_FIELDS, POLICY_FIELDS

A, N, M = "--prefill-attempt-interval", "--prefill-any-attempt-interval", "--prefill-max-open-rounds"
F, H = "--prefill-fill-tokens", "--prefill-fill-max-holds"
EVERY, INTERVAL, BUDGET = "--decode-interleave-every", "--prefill-decode-interval", "--prefill-hold-budget"

# Right on its own, each of them.
VALUES = {A: 4, N: 16, M: 8, F: "auto", H: 30, EVERY: 8, INTERVAL: 4, BUDGET: 30}
PROPERTIES = {
    **dict.fromkeys((A, N, M), "prefill_delay"),
    **dict.fromkeys((F, H), "fill"),
    **dict.fromkeys((EVERY, INTERVAL, BUDGET), "cadence"),
}

# What a flag lacks on a fused node where nothing else is given, and the flags that are all it needs.
LACKS = {
    A: (f"needs {N} beside it", {N}),
    N: (f"needs {A} beside it", {A}),
    M: (f"limits a gate, and there is none; give {A} and {N} too", {A, N}),
    H: (f"bounds {F}; give that too", {F}),
    BUDGET: (f"bounds {INTERVAL}; give that too", {INTERVAL}),
}
HELD_OUT = "a decode that is due on one rank would keep it out of a window the group opened; keep one of the policies"
HELD_TWICE = "the interval would keep a rank out of a window the group opened, and the gate would hold a prompt whose "
HELD_TWICE += "hold budget is spent; keep one of the policies"
# Two flags that are each right and can't be together, and which of them is told so.
CLASHES = {
    **{(gate, EVERY): (EVERY, f"can't go with {gate}: {HELD_OUT}") for gate in (A, N, F)},
    **{(gate, INTERVAL): (INTERVAL, f"can't go with {gate}: {HELD_TWICE}") for gate in (A, N, F)},
    (EVERY, INTERVAL): (INTERVAL, f"sets the other side of the cadence that {EVERY} (8) sets; give one of them"),
    (M, F): (M, f"limits a gate, and {F} auto makes none for one rank; give {A} and {N} too"),
}

NO_STREAM = "a prefill node runs without a prefill gate, as it has no stream that a prompt could hold up; leave it out"
NO_FILL = "a prefill node runs without a fill condition, as it computes whatever waits in every round; leave it out"
NO_DECODE = "a prefill node has no decode rounds to make room for; leave it out"
PEERS_WORK = "a decode node runs without a prefill gate, as its prompts are its peers' work; leave it out"
PEERS_FILL = "a decode node runs without a fill condition, as its prompts gather on its peers; leave it out"
NO_PROMPT = "with --decode-fallback fail no prompt of a peer is computed here, so none has to leave room; leave it out"


def told(gate: str = "", fill: str = "", cadence: str = "") -> dict[str, str]:
    reasons = dict.fromkeys((A, N, M), gate) | dict.fromkeys((F, H), fill)
    reasons |= dict.fromkeys((EVERY, INTERVAL, BUDGET), cadence)
    return {flag: reason for flag, reason in reasons.items() if reason}


# Each kind of node: what it is made of, and why it refuses which flag whatever is given beside it.
NODES: dict[str, tuple[dict[str, object], dict[str, str]]] = {
    "fused": ({"role": Role.FUSED}, {}),
    "prefill": ({"role": Role.PREFILL}, told(NO_STREAM, NO_FILL, NO_DECODE)),
    "decode": ({"role": Role.DECODE}, told(PEERS_WORK, PEERS_FILL)),
    "decode that fails": (
        {"role": Role.DECODE, "decode_fallback": "fail", "prefill_peers": ("a:1",)},
        told(PEERS_WORK, PEERS_FILL, NO_PROMPT),
    ),
}


def expected(node: str, flags: tuple[str, ...]) -> dict[str, str]:
    """The reason by flag for what is refused of `flags`, in the order of VALUES."""
    by_role = NODES[node][1]
    reasons = {flag: lack for flag in flags if (lack := lacking(flag, flags))}
    for pair in itertools.combinations(flags, 2):
        if pair in CLASHES and not any(flag in by_role for flag in pair):
            flag, reason = CLASHES[pair]
            reasons[flag] = reason
    return reasons | {flag: by_role[flag] for flag in flags if flag in by_role}


def lacking(flag: str, flags: tuple[str, ...]) -> str:
    lack, needed = LACKS.get(flag, ("", set()))
    return "" if needed & set(flags) else lack


def field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def made(node: str, values: Mapping[str, object]) -> ServerArgs:
    """The settings of such a node with `values` by flag, assigned in code."""
    args = ServerArgs(model="m", **NODES[node][0])
    for flag, value in values.items():
        setattr(args, field(flag), value)
    return args


def faults_of(args: ServerArgs) -> dict[str, str]:
    return {fault.subject: fault.reason for fault in args.faults()}


def read(node: str, values: Mapping[str, object]) -> dict[str, str]:
    """What the command line's reader says of the same."""
    words = [word for name, value in NODES[node][0].items() for word in (f"--{name.replace('_', '-')}", said(value))]
    words += [word for flag, value in values.items() for word in (flag, said(value))]
    try:
        ServerArgs.from_command_line(["m", *words])
    except ConfigError as error:
        return {fault.subject: fault.reason for fault in error.faults}
    return {}


def said(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("flags", [*itertools.combinations(VALUES, 1), *itertools.combinations(VALUES, 2)])
def test_every_flag_and_pair_of_flags_is_judged_by_the_node_with_a_reason(node: str, flags: tuple[str, ...]) -> None:
    values = {flag: VALUES[flag] for flag in flags}
    wanted = expected(node, flags)
    args = made(node, values)
    assert faults_of(args) == wanted
    assert read(node, values) == wanted
    for flag, reason in wanted.items():
        with pytest.raises(ValueError, match=flag) as raised:
            getattr(args, PROPERTIES[flag])
        assert f"{flag} {VALUES[flag]}: {reason}" in str(raised.value)


@pytest.mark.parametrize(("gate", "cadence"), [pair for pair in CLASHES if pair[1] in (EVERY, INTERVAL)])
def test_a_clash_is_told_at_both_properties(gate: str, cadence: str) -> None:
    args = made("fused", {gate: VALUES[gate], cadence: VALUES[cadence]})
    for name in {PROPERTIES[gate], PROPERTIES[cadence]}:
        with pytest.raises(ConfigError, match=cadence):
            getattr(args, name)


WHOLE = [
    {},
    {A: 4, N: 16},
    {A: 1, N: 1},
    {A: 4, N: 16, M: 1},
    {A: 4, N: 16, F: "auto", H: 5},
    {F: "auto"},
    {F: "auto", H: 1},
]
CADENCES = [{EVERY: 1}, {INTERVAL: 1}, {INTERVAL: 4, BUDGET: 1}]


@pytest.mark.parametrize(
    ("node", "values"),
    [
        *[("fused", values) for values in (*WHOLE, *CADENCES)],
        *[("decode", values) for values in ({}, *CADENCES)],
        *[("prefill", {}), ("decode that fails", {})],
    ],
)
def test_a_whole_policy_is_taken_from_code_and_from_words(node: str, values: dict[str, object]) -> None:
    args = made(node, values)
    args.validate()
    assert read(node, values) == {}
    again = ServerArgs.from_command_line(args.command_line())
    assert all(getattr(again, name) == getattr(args, name) for name in POLICY_FIELDS)


def test_a_clash_of_whole_policies_names_all_flags_of_the_gate_once() -> None:
    found = made("fused", {A: 4, N: 16, F: "auto", EVERY: 8}).faults()
    assert [str(fault) for fault in found] == [f"{EVERY} 8: can't go with {A} and {N}: {HELD_OUT}"]


# ---------------------------------------------------------------- values


NOT_COUNTS = {
    "True": (True, "must be a whole number, not bool"),
    "2.0": (2.0, "must be a whole number, not float"),
    "'3'": ("3", "must be a whole number, not str"),
    "0": (0, "must be at least 1"),
    "-1": (-1, "must be at least 1"),
}
# What each flag is given with, for its own value to be all that is wrong.
COMPANY = {
    A: {N: 16},
    N: {A: 1},
    M: {A: 4, N: 16},
    F: {},
    H: {F: "auto"},
    EVERY: {},
    INTERVAL: {},
    BUDGET: {INTERVAL: 4},
}


@pytest.mark.parametrize("shown", NOT_COUNTS)
@pytest.mark.parametrize("flag", VALUES)
def test_only_whole_numbers_from_1_are_taken_in_code(flag: str, shown: str) -> None:
    value, reason = NOT_COUNTS[shown]
    if flag == F:
        reason = reason.replace("whole number", "whole number or auto")
    args = made("fused", {**COMPANY[flag], flag: value})
    with pytest.raises(ValueError, match="must be") as raised:
        getattr(args, PROPERTIES[flag])
    assert f"{flag} {shown}: {reason}" in str(raised.value)
    with pytest.raises(ConfigError) as refused:
        args.validate()
    assert {fault.subject for fault in refused.value.faults} == {flag}
    setattr(args, field(flag), VALUES[flag])
    args.validate()


@pytest.mark.parametrize("word", ["0", "-1", "2.0", "many", "True", ""])
@pytest.mark.parametrize("flag", VALUES)
def test_only_whole_numbers_from_1_are_taken_from_words(flag: str, word: str) -> None:
    words = [word for pair in COMPANY[flag].items() for word in (pair[0], str(pair[1]))]
    with pytest.raises(ConfigError) as raised:
        ServerArgs.from_command_line(["m", *words, f"{flag}={word}"])
    assert {fault.subject for fault in raised.value.faults} == {flag}


def test_one_rank_s_want_may_not_open_more_rounds_than_everyone_s() -> None:
    args = made("fused", {A: 5, N: 4})
    reason = f"must be at least {A} (5), as one rank's want is to open fewer rounds than everyone's"
    assert faults_of(args) == {N: reason}
    with pytest.raises(ValueError, match=N):
        _ = args.prefill_delay


def test_both_values_of_a_pair_are_judged() -> None:
    assert set(faults_of(made("fused", {A: 0, N: "4"}))) == {A, N}


def test_one_rank_refuses_a_number_of_fill_tokens_with_or_without_intervals() -> None:
    reason = "on one rank this only delays first tokens, as no other rank's prompts join the round; give auto"
    for values in ({F: 256}, {F: 256, A: 4, N: 16}):
        args = made("fused", values)
        assert faults_of(args) == {F: reason}
        for name in ("fill", "prefill_gate"):
            with pytest.raises(ValueError, match=F):
                getattr(args, name)


def test_fill_tokens_are_at_most_what_a_round_computes_as_it_is_now(two_ranks: Callable[..., ServerArgs]) -> None:
    args = two_ranks(model="m", prefill_fill_tokens=512)
    args.validate()
    args.chunked_prefill_size = 256
    reason = "must be at most --chunked-prefill-size (256), as no round computes more; auto is that much"
    assert faults_of(args) == {F: reason}
    with pytest.raises(ValueError, match=r"--chunked-prefill-size \(256\)"):
        _ = args.fill
    args.prefill_fill_tokens = 0
    assert faults_of(args) == {F: "must be at least 1"}


def test_a_limit_on_open_rounds_goes_with_the_gate_that_a_fill_condition_makes(
    two_ranks: Callable[..., ServerArgs],
) -> None:
    two_ranks(model="m", prefill_fill_tokens="auto", prefill_max_open_rounds=4).validate()


# ---------------------------------------------------------------- changes in code


def test_a_role_given_later_brings_its_refusals_also_as_a_plain_word() -> None:
    for later in (Role.PREFILL, "prefill"):
        args = made("fused", {A: 4, N: 16})
        args.validate()
        args.role = later  # type: ignore[assignment]
        assert faults_of(args) == {A: NO_STREAM, N: NO_STREAM}
        with pytest.raises(ValueError, match="a prefill node runs without a prefill gate"):
            _ = args.prefill_delay
        args.role = "fused"  # type: ignore[assignment]
        args.validate()


def test_a_fallback_given_later_brings_its_refusals() -> None:
    args = made("decode", {INTERVAL: 4})
    args.prefill_peers = ("a:1",)
    args.validate()
    args.decode_fallback = "fail"  # type: ignore[assignment]
    assert faults_of(args) == {INTERVAL: NO_PROMPT}
    with pytest.raises(ValueError, match="--decode-fallback fail"):
        _ = args.cadence


def test_mixed_batches_leave_interleaving_nothing_to_do() -> None:
    args = made("fused", {EVERY: 8})
    args.enable_mixed_batch = True
    reason = "has nothing to do beside --enable-mixed-batch, which decodes in every round; give one of them"
    assert faults_of(args) == {EVERY: reason}
    with pytest.raises(ValueError, match="--enable-mixed-batch"):
        _ = args.cadence
    args.decode_interleave_every, args.prefill_decode_interval = None, 4
    args.validate()


@pytest.mark.parametrize("run", [fused.node.run, prefill_node.node.run, decode_node.node.run])
def test_a_node_started_from_code_refuses_before_it_looks_for_the_model(run) -> None:
    args = ServerArgs(model="/nowhere/at/all")
    args.prefill_attempt_interval = 4
    with pytest.raises(ConfigError, match=A):
        run(args)


def test_the_table_knows_every_policy_flag() -> None:
    assert tuple(field(flag) for flag in VALUES) == (*GATE_FIELDS, *FILL_FIELDS, *CADENCE_FIELDS)
