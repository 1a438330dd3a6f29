"""The prefill policies as the scheduler takes them, made from the settings as they stand, and told in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.config.fields import AUTO, DecodeFallback, Role, Settings
from pdserve.config.policy_rules import (
    FILL,
    INTERLEAVE,
    INTERVAL,
    cadence_faults,
    fill_faults,
    gate_faults,
    is_fill_off,
)
from pdserve.faults import ConfigError, Fault

DEFAULT_MAX_HOLDS = 30
DEFAULT_HOLD_BUDGET = 30
FALLBACK_DECODE_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class PrefillDelay:
    """The gate's two intervals in rounds: 1 <= attempt_interval <= any_interval."""

    attempt_interval: int
    any_interval: int


@dataclass(frozen=True, slots=True)
class FillSettings:
    """tokens: waiting prompt tokens at which a rank votes. max_holds: rounds it may be held for want of them."""

    tokens: int
    max_holds: int


@dataclass(frozen=True, slots=True)
class CadenceSettings:
    """At most prefill_rounds in a row, then decode_rounds while a decode can run; one of the two is 1.

    hold_budget: rounds a request may be held in all, after which it is held no more; None = no such bound.
    """

    prefill_rounds: int
    decode_rounds: int
    hold_budget: int | None


def prefill_delay(settings: Settings) -> PrefillDelay | None:
    """The gate's intervals; None only when both are unset. Raises ConfigError for what is refused."""
    _refuse(gate_faults(settings))
    attempt, any_rank = settings.prefill_attempt_interval, settings.prefill_any_attempt_interval
    return None if attempt is None or any_rank is None else PrefillDelay(attempt, any_rank)


def fill(settings: Settings) -> FillSettings | None:
    """The fill condition; None when it is unset, and for `auto` on one rank. Raises ConfigError for what is refused."""
    _refuse(fill_faults(settings))
    tokens = settings.prefill_fill_tokens
    if tokens is None or is_fill_off(settings):
        return None
    return FillSettings(
        settings.chunked_prefill_size if tokens == AUTO else int(tokens),
        settings.prefill_fill_max_holds or DEFAULT_MAX_HOLDS,
    )


def prefill_gate(settings: Settings) -> PrefillDelay | None:
    """The gate to run with: the given intervals, or those of a fill condition alone. Raises ConfigError."""
    delay, condition = prefill_delay(settings), fill(settings)
    if delay is None and condition is not None:
        # Every round is an ALL point, for votes to meet at once; one rank's want is enough after the longest hold.
        return PrefillDelay(1, condition.max_holds)
    return delay


def cadence(settings: Settings) -> CadenceSettings | None:
    """The rank's own rhythm, or None. Raises ConfigError for what is refused.

    A decode node has one by default, for the prompts it computes in a peer's place: with its peers gone, all prompts
    come to it at once. That one has no hold budget, past which a long prompt would freeze every stream after all.
    """
    _refuse(cadence_faults(settings))
    if settings.decode_interleave_every is not None:
        return CadenceSettings(settings.decode_interleave_every, 1, None)
    if settings.prefill_decode_interval is not None:
        budget = settings.prefill_hold_budget or DEFAULT_HOLD_BUDGET
        return CadenceSettings(1, settings.prefill_decode_interval, budget)
    if settings.role == Role.DECODE and settings.decode_fallback == DecodeFallback.FUSED:
        return CadenceSettings(1, FALLBACK_DECODE_ROUNDS, None)
    return None


def _refuse(faults: Iterable[Fault]) -> None:
    if found := list(faults):
        raise ConfigError(found)


def policy_line(settings: Settings) -> str:
    """What decides when prompts are computed, in one line of the log; without a policy, which flag protects streams."""
    off = f"{FILL} {AUTO} is off, as this node has one rank; " if is_fill_off(settings) else ""
    if gate := prefill_gate(settings):
        return off + _gate_line(gate, settings)
    if rhythm := cadence(settings):
        return _cadence_line(rhythm)
    if settings.enable_mixed_batch:
        return (
            f"{off}no prefill policy: every round decodes, beside chunks that make it longer; {INTERVAL} spaces those"
        )
    return f"{off}no prefill policy: a long prompt holds up every stream; {INTERLEAVE} 8 lets them on after 8 chunks"


def _gate_line(gate: PrefillDelay, settings: Settings) -> str:
    all_ranks, one_rank = _rounds(gate.attempt_interval), gate.any_interval
    parts = [
        f"prefill gate: opens for every rank's want at multiples of {all_ranks}, for one rank's at those of {one_rank}"
    ]
    if condition := fill(settings):
        parts.append(f"a vote needs {condition.tokens} waiting tokens or {_rounds(condition.max_holds)} held")
    if settings.prefill_max_open_rounds is not None:
        parts.append(f"closes after {_rounds(settings.prefill_max_open_rounds, 'prefill round')} in a row")
    return "; ".join(parts)


def _cadence_line(rhythm: CadenceSettings) -> str:
    prefill = _rounds(rhythm.prefill_rounds, "prefill round")
    line = f"prefill cadence: at most {prefill}, then at least {rhythm.decode_rounds} of decode"
    return line if rhythm.hold_budget is None else f"{line}; a prompt is held {_rounds(rhythm.hold_budget)} in all"


def _rounds(number: int, word: str = "round") -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
