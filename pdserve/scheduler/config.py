"""The scheduler's numbers, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import StartupError

# With a gate, tenths of the pool above which no new prompt is admitted.
GATE_WATERMARK = 9


@dataclass(frozen=True, slots=True)
class CadenceLimits:
    """See `cadence.py`; without prefill_rounds there is no cadence.

    hold_budget: rounds a prompt is held in all before it is held no more; None = no bound.
    """

    prefill_rounds: int | None = None
    decode_rounds: int = 1
    hold_budget: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Plain numbers; nothing here knows what kind of node it is for.

    max_batch_size: slots, and the most rows of a round. max_scheduled_tokens: the most tokens of a round.
    answer_headroom: tokens of the answer that admission reserves blocks for, beside the prompt.
    min_prefill_chunk_tokens: what a mixed round's decodes leave for a waiting prefill; None = one block.
    max_outstanding_transfers: how many requests may wait on peers at once; None = as many as there are slots.
    prefill_watermark: a share in tenths of the pool above which no new gated prompt is admitted; None = no check.
    cadence, fill_tokens: None = off. num_host_blocks: of the tier below the device; has_storage: there is one below it.
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
    cadence: CadenceLimits | None = None
    fill_tokens: int | None = None
    fill_max_holds: int = 30
    num_host_blocks: int = 0
    has_storage: bool = False

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batch_size", "max_scheduled_tokens", "max_model_len"):
            _at_least(name, getattr(self, name), 1)
        _at_least("answer_headroom", self.answer_headroom, 0)
        _at_least("max_outstanding_transfers", self.transfer_limit, 1)
        _at_least("num_host_blocks", self.num_host_blocks, 0)
        _at_least("fill_max_holds", self.fill_max_holds, 1)
        if self.fill_tokens is not None and not 1 <= self.fill_tokens <= self.max_scheduled_tokens:
            raise StartupError(
                f"--prefill-fill-tokens {self.fill_tokens} is not in [1, {self.max_scheduled_tokens}]: "
                "a round holds --chunked-prefill-size tokens, so no more than these can wait for one"
            )
        _at_least("min_prefill_chunk_tokens", self.prefill_reserve, self.block_size)
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
        if self.enable_mixed_batch and self.max_scheduled_tokens <= self.prefill_reserve:
            raise StartupError(
                f"--chunked-prefill-size {self.max_scheduled_tokens} leaves no token for a decode beside the "
                f"{self.prefill_reserve} kept for prefill in a mixed round; raise it or drop --enable-mixed-batch"
            )

    @property
    def prefill_reserve(self) -> int:
        """Tokens a mixed round's decodes leave for a waiting prefill."""
        return self.block_size if self.min_prefill_chunk_tokens is None else self.min_prefill_chunk_tokens

    @property
    def transfer_limit(self) -> int:
        return self.max_batch_size if self.max_outstanding_transfers is None else self.max_outstanding_transfers


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise StartupError(f"{name} is {value}, it must be at least {least}")
