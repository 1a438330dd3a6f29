"""Which part of a model one rank holds, and how sizes are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import StartupError


def part(total: int, num_parts: int, index: int) -> range:
    """The index-th of num_parts contiguous parts of `total` things, as equal as whole numbers allow."""
    return range(total * index // num_parts, total * (index + 1) // num_parts)


@dataclass(frozen=True, slots=True)
class Shard:
    """A place in the grid of ranks that compute one model.

    tp: the ranks of one data-parallel rank, each with a slice of every matrix (tensor parallel).
    ep: the ranks with the same tp_rank in every data-parallel rank, each with some of the experts (expert parallel).
    splits_dense_mlp: dense MLPs too are split over all of them, tp and ep; otherwise each data-parallel rank has them.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    splits_dense_mlp: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.tp_rank < self.tp_size, self
        assert 0 <= self.ep_rank < self.ep_size, self

    def slice_of(self, what: str, total: int) -> range:
        """This rank's slice of `total`. Raises StartupError, naming `what`, where the ranks cannot have equal ones."""
        if total % self.tp_size:
            raise StartupError(
                f"--tensor-parallel-size is {self.tp_size}, the model has {total} {what}: choose a divisor of {total}"
            )
        return part(total, self.tp_size, self.tp_rank)

    def neurons_of(self, total: int) -> range:
        """This rank's slice of the neurons of a dense MLP. Raises StartupError as slice_of does."""
        held = self.slice_of("MLP neurons (intermediate_size)", total)
        if not self.splits_dense_mlp:
            return held
        assert len(held) % self.ep_size == 0, (self, total)  # slices.check_dense_split
        own = part(len(held), self.ep_size, self.ep_rank)
        return held[own.start : own.stop]

    def experts_of(self, num_experts: int) -> range:
        """The experts this rank holds. Raises StartupError where a rank would have none."""
        if num_experts < self.ep_size:
            raise StartupError(
                f"--data-parallel-size is {self.ep_size}, the model has {num_experts} experts to split over its ranks: "
                f"lower it to {num_experts} or less"
            )
        return part(num_experts, self.ep_size, self.ep_rank)


WHOLE = Shard()
