"""The scheduler's numbers, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import StartupError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Plain numbers; nothing here knows what kind of node it is for.

    max_batch_size: slots, and the most rows of a round. max_scheduled_tokens: the most tokens of a round.
    answer_headroom: tokens of the answer that admission reserves blocks for, beside the prompt.
    max_outstanding_transfers: how many requests may wait on peers at once; None = as many as there are slots.
    prefill_watermark: a share in tenths of the pool above which no new gated prompt is admitted; None = no check.
    """

    num_blocks: int
    block_size: int
    max_batch_size: int
    max_scheduled_tokens: int
    max_model_len: int
    enable_mixed_batch: bool = False
    prefix_caching: bool = True
    answer_headroom: int = 1024
    min_prefill_chunk_tokens: int | None = None
    max_outstanding_transfers: int | None = None
    prefill_watermark: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batch_size", "max_scheduled_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_scheduled_tokens < self.block_size:
            raise StartupError(
                f"--chunked-prefill-size {self.max_scheduled_tokens} is below --block-size {self.block_size}: "
                "a chunk has to fill a block; raise the one or lower the other"
            )
        if self.max_scheduled_tokens < self.max_batch_size:
            raise StartupError(
                f"--chunked-prefill-size {self.max_scheduled_tokens} is below --max-num-seqs {self.max_batch_size}: "
                "a round could not decode every stream; raise the one or lower the other"
            )

    @property
    def prefill_reserve(self) -> int:
        """Tokens a mixed round's decodes leave for a waiting prefill."""
        return self.block_size if self.min_prefill_chunk_tokens is None else self.min_prefill_chunk_tokens

    @property
    def transfer_limit(self) -> int:
        return self.max_batch_size if self.max_outstanding_transfers is None else self.max_outstanding_transfers
