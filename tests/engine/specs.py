"""What a rank is told, for tests in which none starts."""

from __future__ import annotations

from pdserve.engine.launch import GridSpec, RankSpec


def spec_of(rank: int) -> RankSpec:
    return RankSpec(
        *("model", "r0", "cache", "ipc:///nowhere", "rank"),
        num_threads=1,
        block_size=16,
        num_kv_blocks=8,
        kv_memory_fraction=0.5,
        max_num_seqs=1,
        chunked_prefill_size=16,
        max_model_len=None,
        enable_mixed_batch=False,
        prefix_caching=True,
        max_outstanding_transfers=None,
        log_level="info",
        log_format="text",
        startup_timeout_s=1.0,
        grid=GridSpec(data_parallel_size=2, rank=rank),
    )
