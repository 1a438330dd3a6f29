"""Every setting of a node, once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from pydantic_settings import NoDecode

from pdserve.config.flags import Flag, spelled


class Role(StrEnum):
    """What a node does: both phases, prompts only, or the front door that generates."""

    FUSED = "fused"
    PREFILL = "prefill"
    DECODE = "decode"


# What weights are kept as. fp32: as they are. int8, int4: codes of so many bits, and activations of 8.
Quantization = Literal["fp32", "int8", "int4"]
# auto: as published in 4 bits, else 8, where the machine is faster with them.
QuantizationSetting = Literal["auto", "fp32", "int8", "int4"]
# What KV is kept as; auto: bfloat16 beside quantised weights, float32 beside exact ones.
KvCacheDtype = Literal["auto", "float32", "bfloat16"]


class DecodeFallback(StrEnum):
    """What a decode node does with a prompt that no peer can prefill."""

    FUSED = "fused"
    FAIL = "fail"


class OnRankDeath(StrEnum):
    """What a node does when its rank process has died."""

    RESTART = "restart"
    EXIT = "exit"


class LoadBalanceMethod(StrEnum):
    """Which data-parallel rank a request goes to, where it names none."""

    SHORTEST_QUEUE = "shortest_queue"
    ROUND_ROBIN = "round_robin"
    LEAST_KV = "least_kv"
    PREFIX_AFFINITY = "prefix_affinity"


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
# Enumerations may be given by value in code too; numbers stay strict.
Lax = Field(strict=False)

MODEL, ADDRESS, GROUP, BATCH, MEMORY = "Model", "Address", "Group of ranks", "Batching", "KV memory"
POLICY, PEERS, RUNNING = "Prefill policy", "Prefill and decode on different nodes", "Running"

AUTO = "auto"


def _fill_tokens(value: object) -> object:
    """One check for both kinds of value: a union's own would report each kind it tried as a fault of its own."""
    if value is None or value == AUTO or type(value) is int:
        return value
    raise ValueError(f"must be a whole number or {AUTO}")


class Settings(BaseModel):
    """The settings of one node: names, types, ranges, defaults, and how each reads on the command line."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Annotated[
        str,
        Field(min_length=1),
        Flag(MODEL, "what to serve: smollm2, smollm2-moe, a model directory, or a hub id", "MODEL"),
    ]
    served_model_name: Annotated[str | None, Flag(MODEL, "the name clients see (default: MODEL)", "NAME")] = None
    role: Annotated[Role, Lax, Flag(MODEL, "what this node does")] = Role.FUSED
    dtype: Annotated[Literal["float32"], Flag(MODEL, "type of arithmetic, and of weights that are not quantised")] = (
        "float32"
    )
    quantization: Annotated[
        QuantizationSetting,
        Flag(MODEL, "what weights are kept as: exact, or 8 or 4 bits; auto: 4 if published so, else 8"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Flag(MODEL, "what KV is kept as; auto: bfloat16 beside weights of 8 or 4 bits, else float32"),
    ] = "auto"
    max_model_len: Annotated[Count | None, Flag(MODEL, "longest prompt + answer in tokens (default: the model's)")] = (
        None
    )

    host: Annotated[str, Field(min_length=1), Flag(ADDRESS, "address to listen on", "HOST")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535), Flag(ADDRESS, "port of all gRPC services; 0 takes a free one")] = 50051
    insecure: Annotated[
        bool, Flag(ADDRESS, "allow a --host that other machines can reach, without TLS or credentials")
    ] = False
    max_message_mib: Annotated[Count, Field(le=2047), Flag(ADDRESS, "largest gRPC message in MiB")] = 16
    reflection: Annotated[bool, Flag(ADDRESS, "serve gRPC reflection")] = True

    data_parallel_size: Annotated[
        Count,
        Field(le=1024),
        Flag(GROUP, "ranks that each schedule requests of their own; experts are split over them", alias="dp"),
    ] = 1
    tensor_parallel_size: Annotated[
        Count, Field(le=64), Flag(GROUP, "processes that share each rank's matrices and KV heads", alias="tp")
    ] = 1
    dense_mlp_split: Annotated[
        bool, Flag(GROUP, "split dense MLPs over all ranks of the group, instead of one on each data-parallel rank")
    ] = False
    nnodes: Annotated[Count, Field(le=64), Flag(GROUP, "machines that the ranks are on, as many on each")] = 1
    node_rank: Annotated[
        int, Field(ge=0), Flag(GROUP, "which of them this is; 0 has the front, others serve through it")
    ] = 0
    dist_init_addr: Annotated[
        str | None, Flag(GROUP, "HOST:PORT of node 0 where the others come to (a port beside --port)", "ADDR")
    ] = None
    load_balance_method: Annotated[
        LoadBalanceMethod, Lax, Flag(GROUP, "which data-parallel rank a request goes to")
    ] = LoadBalanceMethod.SHORTEST_QUEUE

    max_num_seqs: Annotated[
        Count, Flag(BATCH, "requests that run at once, shared evenly by the data-parallel ranks")
    ] = 32
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

    host_kv_gb: Annotated[
        float, Field(ge=0), Flag(MEMORY, "host memory for KV that left the pool, in 10^9 bytes; 0 = no host tier", "GB")
    ] = 0.0
    kv_dir: Annotated[
        str | None,
        Field(min_length=1),
        Flag(MEMORY, "keep cold prefix blocks in this directory (needs a host tier)", "DIR"),
    ] = None
    kv_dir_gb: Annotated[
        float | None, Field(gt=0), Flag(MEMORY, "most the directory may hold, in 10^9 bytes (default: 10)", "GB")
    ] = None

    # The policies' numbers are judged by policy_rules, in the same words here and at the properties of ServerArgs.
    prefill_attempt_interval: Annotated[
        int | None, Flag(POLICY, "gate: rounds between openings where every rank wants prefill", only=(Role.FUSED,))
    ] = None
    prefill_any_attempt_interval: Annotated[
        int | None, Flag(POLICY, "gate: rounds between openings where one rank's want is enough", only=(Role.FUSED,))
    ] = None
    prefill_max_open_rounds: Annotated[
        int | None, Flag(POLICY, "gate: prefill rounds in a row before one is closed", only=(Role.FUSED,))
    ] = None
    prefill_fill_tokens: Annotated[
        int | Literal["auto"] | None,
        PlainValidator(_fill_tokens),
        Flag(POLICY, "vote for prefill when this many prompt tokens wait; auto = a full round", only=(Role.FUSED,)),
    ] = None
    prefill_fill_max_holds: Annotated[
        int | None, Flag(POLICY, "rounds a prompt is held to fill a round (default: 30)", only=(Role.FUSED,))
    ] = None
    decode_interleave_every: Annotated[
        int | None, Flag(POLICY, "one decode round after N prefill rounds", only=(Role.FUSED, Role.DECODE))
    ] = None
    prefill_decode_interval: Annotated[
        int | None,
        Flag(
            POLICY, "N decode rounds after each prefill round (decode node: 4 if unset)", only=(Role.FUSED, Role.DECODE)
        ),
    ] = None
    prefill_hold_budget: Annotated[
        int | None,
        Flag(POLICY, "rounds that interval may hold one prompt in all (default: 30)", only=(Role.FUSED, Role.DECODE)),
    ] = None

    prefill_peers: Annotated[
        tuple[str, ...],
        Lax,
        NoDecode,
        Flag(
            PEERS,
            "prefill nodes, comma separated or repeated: HOST:PORT, dns:///NAME:PORT, file:///PATH",
            "PEER",
            only=(Role.DECODE,),
        ),
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

    kv_checksum: Annotated[
        bool,
        Flag(PEERS, "send a hash with each KV block, and compare what was read", only=(Role.PREFILL, Role.DECODE)),
    ] = False

    num_threads: Annotated[
        Count | None, Flag(RUNNING, "compute threads (default: one a core; OMP_NUM_THREADS wins where set)")
    ] = None
    startup_timeout_s: Annotated[Seconds, Flag(RUNNING, "give up when not ready after this long", "S")] = 600.0
    on_rank_death: Annotated[
        OnRankDeath, Lax, Flag(RUNNING, "start another rank process when one died, or end with status 1")
    ] = OnRankDeath.RESTART
    drain_timeout_s: Annotated[Seconds, Flag(RUNNING, "how long SIGTERM lets requests finish", "S")] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Flag(RUNNING, "least severe line that is logged")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Flag(RUNNING, "how log lines are written")] = "text"
    stats_interval_s: Annotated[Seconds, Flag(RUNNING, "seconds between lines of statistics while busy", "S")] = 10.0
    config: Annotated[str | None, Flag(RUNNING, "YAML or TOML file with settings named as the flags", "FILE")] = None


FIELDS = Settings.model_fields


def flag_name(name: str) -> str:
    """What a person calls the field: its flag, or MODEL."""
    return "MODEL" if name == "model" else spelled(name)
