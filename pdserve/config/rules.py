"""Which settings go together. Every rule takes the settings and yields what is wrong with them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from pdserve.config import environment, flags
from pdserve.config.fields import FIELDS, DecodeFallback, Role, Settings, flag_name
from pdserve.config.peer_address import split_address, wrong_with_peer
from pdserve.config.policy_rules import POLICY_FIELDS, policy_faults
from pdserve.faults import Fault


def faults_of(settings: Settings) -> list[Fault]:
    """Everything wrong between fields that are each right on their own."""
    return [
        *_ignored_flags(settings),
        *policy_faults(settings),
        *_address_faults(settings),
        *_group_faults(settings),
        *_node_faults(settings),
        *_size_faults(settings),
        *_tier_faults(settings),
        *_peer_faults(settings),
        *_environment_faults(),
    ]


def _ignored_flags(settings: Settings) -> Iterable[Fault]:
    """A flag the role wouldn't look at is a misunderstanding; better said than ignored."""
    for name in FIELDS:
        only = flags.described(FIELDS[name]).only
        value = getattr(settings, name)
        if not only or settings.role in only or value is None or name not in settings.model_fields_set:
            continue
        if name not in POLICY_FIELDS:  # those have reasons of their own
            reason = f"a {settings.role} node doesn't use it, only {' and '.join(only)} nodes do; leave it out"
            yield Fault(flag_name(name), value, reason)


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


def _node_faults(settings: Settings) -> Iterable[Fault]:
    """Of a group on several machines."""
    address, nnodes = settings.dist_init_addr, settings.nnodes
    if settings.node_rank >= nnodes:
        reason = f"--nnodes is {nnodes}, so it is one of 0 to {nnodes - 1}"
        yield Fault(flag_name("node_rank"), settings.node_rank, reason)
    if settings.node_rank == 0 and settings.data_parallel_size % nnodes:  # the others are told how many there are
        reason = f"--nnodes {nnodes} share the data-parallel ranks evenly; give a multiple of {nnodes}"
        yield Fault(flag_name("data_parallel_size"), settings.data_parallel_size, reason)
    if nnodes > 1 and address is None:
        yield Fault(flag_name("dist_init_addr"), None, f"is needed with --nnodes {nnodes}: HOST:PORT of node 0")
    if address is not None:
        yield from _meeting_faults(settings, address)


def _meeting_faults(settings: Settings, address: str) -> Iterable[Fault]:
    split = split_address(address)
    if settings.nnodes == 1:
        yield Fault(flag_name("dist_init_addr"), address, "is for several machines; give --nnodes too, or leave it out")
    elif split is None:
        yield Fault(flag_name("dist_init_addr"), address, "must be HOST:PORT with a port of 1 to 65535")
    elif not settings.insecure and not is_loopback(split[0]):
        reason = "other machines could reach the group, and there is no TLS yet; add --insecure to allow that"
        yield Fault(flag_name("dist_init_addr"), address, reason)


def _group_faults(settings: Settings) -> Iterable[Fault]:
    if settings.max_num_seqs < settings.data_parallel_size:
        reason = (
            f"leaves a rank without a request to run, as --data-parallel-size is {settings.data_parallel_size}; "
            "give at least as many"
        )
        yield Fault(flag_name("max_num_seqs"), settings.max_num_seqs, reason)
    # Node 0 tells the others how many ranks there are.
    if settings.dense_mlp_split and settings.data_parallel_size == 1 and settings.node_rank == 0:
        reason = "splits dense MLPs over data-parallel ranks, and there is one; give more, or leave it out"
        yield Fault(flag_name("dense_mlp_split"), None, reason)


def _size_faults(settings: Settings) -> Iterable[Fault]:
    if settings.chunked_prefill_size < settings.block_size:
        reason = f"must be at least --block-size ({settings.block_size}), as chunks end on block boundaries"
        yield Fault(flag_name("chunked_prefill_size"), settings.chunked_prefill_size, reason)
    if settings.num_kv_blocks is not None and "kv_memory_fraction" in settings.model_fields_set:
        reason = f"--num-kv-blocks ({settings.num_kv_blocks}) sets the same size; give one of them"
        yield Fault(flag_name("kv_memory_fraction"), settings.kv_memory_fraction, reason)


def _tier_faults(settings: Settings) -> Iterable[Fault]:
    if settings.kv_dir is None:
        if settings.kv_dir_gb is not None:
            yield Fault(flag_name("kv_dir_gb"), settings.kv_dir_gb, "bounds --kv-dir; give that too")
        return
    if settings.host_kv_gb == 0:
        reason = "blocks go to files and come back through host memory; give some with --host-kv-gb"
        yield Fault(flag_name("kv_dir"), settings.kv_dir, reason)
    if not settings.prefix_caching:
        reason = "the files hold prefix blocks, and --no-prefix-caching leaves none; give one of them"
        yield Fault(flag_name("kv_dir"), settings.kv_dir, reason)


def _peer_faults(settings: Settings) -> Iterable[Fault]:
    for peer in settings.prefill_peers:
        if reason := wrong_with_peer(peer):
            yield Fault(flag_name("prefill_peers"), peer or "''", reason)
    fails = settings.decode_fallback == DecodeFallback.FAIL
    if settings.role == Role.DECODE and fails and not settings.prefill_peers:
        reason = "every request would fail without a prefill node; name one with --prefill-peers"
        yield Fault(flag_name("decode_fallback"), settings.decode_fallback, reason)


def _environment_faults() -> Iterable[Fault]:
    if (num_processes := environment.num_torchrun_processes()) > 1:
        reason = "a node is one process, which starts its ranks itself; give torchrun --nproc-per-node 1"
        yield Fault("LOCAL_WORLD_SIZE", num_processes, reason, "torchrun's environment")
    text = environment.omp_num_threads_text()
    if text and environment.omp_num_threads() is None:
        yield Fault("OMP_NUM_THREADS", text, "must be a whole number of at least 1", "the environment")
