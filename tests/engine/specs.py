"""What a rank is told, for tests in which none starts or a small one does."""

from __future__ import annotations

from msgspec.structs import replace

from pdserve.engine.launch import GridSpec, RankSpec

SMALL = RankSpec(
    model_directory="/nowhere",
    model_revision="r0",
    cache_directory="/nowhere",
    endpoint="ipc:///nowhere",
    source="test",
    num_threads=1,
    block_size=64,
    num_kv_blocks=16,
    kv_memory_fraction=0.5,
    max_num_seqs=4,
    chunked_prefill_size=128,
    quantization="fp32",
    kv_cache_dtype="auto",
    max_model_len=None,
    enable_mixed_batch=False,
    prefix_caching=True,
    max_outstanding_transfers=None,
    log_level="info",
    log_format="text",
    startup_timeout_s=60.0,
)


def spec_of(rank: int) -> RankSpec:
    """Of one of two data-parallel ranks."""
    return replace(SMALL, grid=GridSpec(data_parallel_size=2, rank=rank))
