"""Which settings go together. Every rule takes the settings and yields what is wrong with them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.config import environment, flags
from pdserve.config.faults import ConfigError, Fault
from pdserve.config.fields import FIELDS, DecodeFallback, Role, Settings, flag_name

GATE_FIELDS = ("prefill_attempt_interval", "prefill_any_attempt_interval")


@dataclass(frozen=True, slots=True)
class PrefillDelay:
    """The gate's two intervals in rounds: 1 <= attempt_interval <= any_interval."""

    attempt_interval: int
    any_interval: int


def faults_of(settings: Settings) -> list[Fault]:
    """Everything wrong between fields that are each right on their own."""
    return [
        *_ignored_flags(settings),
        *_gate_faults(settings),
        *_address_faults(settings),
        *_size_faults(settings),
        *_peer_faults(settings),
        *_thread_faults(),
    ]


def prefill_delay(attempt: object, any_rank: object) -> PrefillDelay | None:
    """The gate for the two intervals, None only when both are unset. Raises ConfigError for all else that's no pair."""
    if attempt is None and any_rank is None:
        return None
    if faults := _interval_faults(attempt, any_rank):
        raise ConfigError(faults)
    assert isinstance(attempt, int)
    assert isinstance(any_rank, int)
    return PrefillDelay(attempt, any_rank)


def _ignored_flags(settings: Settings) -> Iterable[Fault]:
    """A flag the role wouldn't look at is a misunderstanding; better said than ignored."""
    for name in FIELDS:
        only = flags.described(FIELDS[name]).only
        value = getattr(settings, name)
        if not only or settings.role in only or value is None or name not in settings.model_fields_set:
            continue
        if name not in GATE_FIELDS:
            reason = f"a {settings.role} node doesn't use it, only {' and '.join(only)} nodes do; leave it out"
            yield Fault(flag_name(name), value, reason)


def _gate_faults(settings: Settings) -> list[Fault]:
    attempt, any_rank = settings.prefill_attempt_interval, settings.prefill_any_attempt_interval
    if attempt is None and any_rank is None:
        return []
    given = [(flag_name(name), getattr(settings, name)) for name in GATE_FIELDS if getattr(settings, name) is not None]
    if settings.role is not Role.FUSED:
        reason = f"a {settings.role} node runs without a prefill gate; only a fused node's prompts wait for one"
        return [Fault(flag, value, reason) for flag, value in given]
    if faults := _interval_faults(attempt, any_rank):
        return faults
    reason = "the prefill gate is not available yet; leave the flag out"
    return [Fault(flag, value, reason) for flag, value in given]


def _interval_faults(attempt: object, any_rank: object) -> list[Fault]:
    """Half a pair, a value that is no whole number (True and 2.0 included), or numbers out of order."""
    attempt_flag, any_flag = (flag_name(name) for name in GATE_FIELDS)
    if attempt is None:
        return [Fault(any_flag, any_rank, f"needs {attempt_flag} beside it")]
    if any_rank is None:
        return [Fault(attempt_flag, attempt, f"needs {any_flag} beside it")]
    faults = [
        Fault(flag, repr(value), f"must be a whole number, not {type(value).__name__}")
        for flag, value in ((attempt_flag, attempt), (any_flag, any_rank))
        if type(value) is not int
    ]
    if not faults and isinstance(attempt, int) and isinstance(any_rank, int):
        if attempt < 1:
            faults.append(Fault(attempt_flag, attempt, "must be at least 1"))
        if any_rank < max(attempt, 1):
            faults.append(Fault(any_flag, any_rank, f"must be at least {attempt_flag} ({attempt}) and at least 1"))
    return faults


def _address_faults(settings: Settings) -> Iterable[Fault]:
    if not settings.insecure and not is_loopback(settings.host):
        reason = "other machines could reach this node, and there is no TLS yet; add --insecure to allow that"
        yield Fault(flag_name("host"), settings.host, reason)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _size_faults(settings: Settings) -> Iterable[Fault]:
    if settings.chunked_prefill_size < settings.block_size:
        reason = f"must be at least --block-size ({settings.block_size}), as chunks end on block boundaries"
        yield Fault(flag_name("chunked_prefill_size"), settings.chunked_prefill_size, reason)
    if settings.num_kv_blocks is not None and "kv_memory_fraction" in settings.model_fields_set:
        reason = f"--num-kv-blocks ({settings.num_kv_blocks}) sets the same size; give one of them"
        yield Fault(flag_name("kv_memory_fraction"), settings.kv_memory_fraction, reason)


def _peer_faults(settings: Settings) -> Iterable[Fault]:
    for peer in settings.prefill_peers:
        if reason := _wrong_with_address(peer):
            yield Fault(flag_name("prefill_peers"), peer, reason)
    fails = settings.decode_fallback is DecodeFallback.FAIL
    if settings.role is Role.DECODE and fails and not settings.prefill_peers:
        reason = "every request would fail without a prefill node; name one with --prefill-peers"
        yield Fault(flag_name("decode_fallback"), settings.decode_fallback, reason)


def _wrong_with_address(peer: str) -> str | None:
    if peer.startswith(("dns:", "file:")):
        return "only HOST:PORT is available yet, neither a name service nor a file"
    host, colon, port = peer.rpartition(":")
    if not (colon and host and port.isdecimal() and 1 <= int(port) <= 65535):
        return "must be HOST:PORT with a port of 1 to 65535"
    return None


def _thread_faults() -> Iterable[Fault]:
    text = environment.omp_num_threads_text()
    if text and environment.omp_num_threads() is None:
        yield Fault("OMP_NUM_THREADS", text, "must be a whole number of at least 1", "the environment")
