"""Which prefill policies a node may run, and what their flags must be: every refusal, each with its own reason.

Values may be anything here, as fields are assignable in code: the properties of ServerArgs ask these rules too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdserve.config.fields import AUTO, DecodeFallback, Role, Settings, flag_name
from pdserve.faults import Fault

INTERVAL_FIELDS = ("prefill_attempt_interval", "prefill_any_attempt_interval")
GATE_FIELDS = (*INTERVAL_FIELDS, "prefill_max_open_rounds")
FILL_FIELDS = ("prefill_fill_tokens", "prefill_fill_max_holds")
CADENCE_FIELDS = ("decode_interleave_every", "prefill_decode_interval", "prefill_hold_budget")
POLICY_FIELDS = (*GATE_FIELDS, *FILL_FIELDS, *CADENCE_FIELDS)

ATTEMPT, ANY, MAX_OPEN = map(flag_name, GATE_FIELDS)
FILL, MAX_HOLDS = map(flag_name, FILL_FIELDS)
INTERLEAVE, INTERVAL, HOLD_BUDGET = map(flag_name, CADENCE_FIELDS)

GATE_ROLES = {
    Role.PREFILL: "a prefill node runs without a prefill gate, as it has no stream that a prompt could hold up",
    Role.DECODE: "a decode node runs without a prefill gate, as its prompts are its peers' work",
}
FILL_ROLES = {
    Role.PREFILL: "a prefill node runs without a fill condition, as it computes whatever waits in every round",
    Role.DECODE: "a decode node runs without a fill condition, as its prompts gather on its peers",
}
# What each kind of cadence and the gate would do to each other on one rank.
AGAINST_GATE = {
    "decode_interleave_every": "a decode that is due on one rank would keep it out of a window the group opened",
    "prefill_decode_interval": (
        "the interval would keep a rank out of a window the group opened, "
        "and the gate would hold a prompt whose hold budget is spent"
    ),
}


def policy_faults(settings: Settings) -> list[Fault]:
    """Everything wrong with the policies, once."""
    found = [*gate_faults(settings), *fill_faults(settings), *cadence_faults(settings)]
    return list({str(fault): fault for fault in found}.values())


def gate_faults(settings: Settings) -> list[Fault]:
    """The gate's intervals and its limit: role, values, and what they can't go with."""
    if refused := _refused_by_role(settings, GATE_FIELDS, GATE_ROLES):
        return refused
    return [*_interval_faults(settings), *_max_open_faults(settings), *_gate_beside_cadence(settings)]


def fill_faults(settings: Settings) -> list[Fault]:
    """The fill condition. It makes a gate of its own where no intervals are given, so it is refused as they are."""
    if refused := _refused_by_role(settings, FILL_FIELDS, FILL_ROLES):
        return refused
    faults = _count_faults(settings, FILL_FIELDS[1:])
    if settings.prefill_fill_tokens is not None:
        return [*_fill_tokens_faults(settings), *faults, *_gate_beside_cadence(settings)]
    if settings.prefill_fill_max_holds is not None:
        faults.append(Fault(MAX_HOLDS, settings.prefill_fill_max_holds, f"bounds {FILL}; give that too"))
    return faults


def cadence_faults(settings: Settings) -> list[Fault]:
    """The rank's own rhythm: role, values, and what it can't go with."""
    if refused := _cadence_refused_by_role(settings):
        return refused
    every, interval = settings.decode_interleave_every, settings.prefill_decode_interval
    faults = _count_faults(settings, CADENCE_FIELDS)
    if every is not None and interval is not None:
        reason = f"sets the other side of the cadence that {INTERLEAVE} ({every}) sets; give one of them"
        faults.append(Fault(INTERVAL, interval, reason))
    if every is not None and settings.enable_mixed_batch:
        reason = "has nothing to do beside --enable-mixed-batch, which decodes in every round; give one of them"
        faults.append(Fault(INTERLEAVE, every, reason))
    if interval is None and settings.prefill_hold_budget is not None:
        faults.append(Fault(HOLD_BUDGET, settings.prefill_hold_budget, f"bounds {INTERVAL}; give that too"))
    return [*faults, *_gate_beside_cadence(settings)]


def _given(settings: Settings, fields: Sequence[str]) -> list[str]:
    return [name for name in fields if getattr(settings, name) is not None]


def _refused(settings: Settings, fields: Sequence[str], reason: str) -> list[Fault]:
    return [
        Fault(flag_name(name), getattr(settings, name), f"{reason}; leave it out") for name in _given(settings, fields)
    ]


def _refused_by_role(settings: Settings, fields: Sequence[str], reasons: dict[Role, str]) -> list[Fault]:
    # By value, as a role may be assigned as a plain word.
    reason = reasons.get(settings.role)
    return _refused(settings, fields, reason) if reason else []


def _cadence_refused_by_role(settings: Settings) -> list[Fault]:
    if settings.role == Role.PREFILL:
        return _refused(settings, CADENCE_FIELDS, "a prefill node has no decode rounds to make room for")
    if settings.role == Role.DECODE and settings.decode_fallback == DecodeFallback.FAIL:
        reason = "with --decode-fallback fail no prompt of a peer is computed here, so none has to leave room"
        return _refused(settings, CADENCE_FIELDS, reason)
    return []


def _count_faults(settings: Settings, fields: Iterable[str]) -> list[Fault]:
    """What is given and no whole number of at least 1; True and 2.0 are none."""
    faults = []
    for name in fields:
        value = getattr(settings, name)
        if value is None:
            continue
        if type(value) is not int:
            kind = type(value).__name__
            faults.append(Fault(flag_name(name), repr(value), f"must be a whole number, not {kind}"))
        elif value < 1:
            faults.append(Fault(flag_name(name), value, "must be at least 1"))
    return faults


def _interval_faults(settings: Settings) -> list[Fault]:
    """Half a pair, values that are no counts, or numbers out of order."""
    attempt, any_rank = settings.prefill_attempt_interval, settings.prefill_any_attempt_interval
    faults = _count_faults(settings, INTERVAL_FIELDS)
    if faults:
        return faults
    if attempt is None and any_rank is not None:
        return [Fault(ANY, any_rank, f"needs {ATTEMPT} beside it")]
    if attempt is not None and any_rank is None:
        return [Fault(ATTEMPT, attempt, f"needs {ANY} beside it")]
    if attempt is not None and any_rank is not None and any_rank < attempt:
        reason = f"must be at least {ATTEMPT} ({attempt}), as one rank's want is to open fewer rounds than everyone's"
        return [Fault(ANY, any_rank, reason)]
    return []


def _max_open_faults(settings: Settings) -> list[Fault]:
    value = settings.prefill_max_open_rounds
    faults = _count_faults(settings, GATE_FIELDS[2:])
    if value is None or faults or _given(settings, INTERVAL_FIELDS):
        return faults
    fill = settings.prefill_fill_tokens
    if fill is None:
        return [Fault(MAX_OPEN, value, f"limits a gate, and there is none; give {ATTEMPT} and {ANY} too")]
    if is_fill_off(settings):
        reason = f"limits a gate, and {FILL} {AUTO} makes none for one rank; give {ATTEMPT} and {ANY} too"
        return [Fault(MAX_OPEN, value, reason)]
    return []


def is_fill_off(settings: Settings) -> bool:
    """Whether `auto` means no fill condition: one rank has no others to fill a round together with."""
    return settings.prefill_fill_tokens == AUTO and settings.data_parallel_size == 1


def _fill_tokens_faults(settings: Settings) -> list[Fault]:
    tokens, most = settings.prefill_fill_tokens, settings.chunked_prefill_size
    if tokens == AUTO:
        return []
    if type(tokens) is not int:
        reason = f"must be a whole number or {AUTO}, not {type(tokens).__name__}"
        return [Fault(FILL, repr(tokens), reason)]
    faults = _count_faults(settings, FILL_FIELDS[:1])
    if type(most) is int and tokens > most:
        reason = f"must be at most --chunked-prefill-size ({most}), as no round computes more; {AUTO} is that much"
        faults.append(Fault(FILL, tokens, reason))
    if settings.data_parallel_size == 1:
        reason = f"on one rank this only delays first tokens, as no other rank's prompts join the round; give {AUTO}"
        faults.append(Fault(FILL, tokens, reason))
    return faults


def _gate_beside_cadence(settings: Settings) -> list[Fault]:
    """One policy decides when prompts are computed: the group's, or the rank's own."""
    if settings.role != Role.FUSED:
        return []
    makes_gate = _given(settings, INTERVAL_FIELDS) or _given(settings, FILL_FIELDS[:1])
    if not makes_gate:
        return []
    gate = " and ".join(flag_name(name) for name in makes_gate)
    return [
        Fault(flag_name(name), getattr(settings, name), f"can't go with {gate}: {reason}; keep one of the policies")
        for name, reason in AGAINST_GATE.items()
        if getattr(settings, name) is not None
    ]
