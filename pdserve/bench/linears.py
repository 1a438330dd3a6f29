"""All matrix products of a round of the embedded model, ms: through torch's F.linear, and as the engine has them.

packed        float32, in oneDNN's order
8 and 4 bits  quantised, activations in 8 bits; the last columns say how many times faster than packed

python -m pdserve.bench.linears [--threads 1 2] [--rows 1 2 4 8 16 32 128 512] [--repeats 5]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pdserve.config import cache_dir
from pdserve.model.linear import Linear
from pdserve.model.quantized_linear import Kernel, QuantizedLinear, load_kernel

# SmolLM2-135M: [out, in] of a layer's matrices, and the head's.
HIDDEN, INTERMEDIATE, NUM_LAYERS, VOCAB = 576, 1536, 30, 49152
LAYER = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))

Product = Callable[[Tensor], Tensor]


def main(argv: list[str] | None = None) -> int:
    """0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512], metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="the fastest counts (default: %(default)s)")
    arguments = parser.parse_args(argv)
    shapes = [*LAYER * NUM_LAYERS, (VOCAB, HIDDEN)]
    kinds = products_of([torch.randn(shape) for shape in shapes], load_kernel(cache_dir()))
    table = Table("threads", "rows", *kinds, "faster, 8", "faster, 4", box=SIMPLE)
    for num_threads in arguments.threads:
        torch.set_num_threads(num_threads)
        for rows in arguments.rows:
            inputs = [torch.randn(rows, num_in) for _, num_in in shapes]
            times_ms = {kind: fastest_ms(products, inputs, arguments.repeats) for kind, products in kinds.items()}
            factors = [times_ms["packed"] / times_ms[kind] for kind in ("8 bits", "4 bits")]
            cells = [f"{time_ms:.1f}" for time_ms in times_ms.values()] + [f"{factor:.2f}" for factor in factors]
            table.add_row(str(num_threads), str(rows), *cells)
    Console(highlight=False).print(table)
    return 0


def products_of(weights: Sequence[Tensor], kernel: Kernel | None) -> dict[str, list[Product]]:
    """Every kind's, in the order of the weights."""
    return {
        "F.linear": [functools.partial(F.linear, weight=weight) for weight in weights],
        "packed": [Linear(weight) for weight in weights],
        "8 bits": [QuantizedLinear(weight, 8, kernel=kernel) for weight in weights],
        "4 bits": [QuantizedLinear(weight, 4, kernel=kernel) for weight in weights],
    }


@torch.inference_mode()
def fastest_ms(products: Sequence[Product], inputs: Sequence[Tensor], repeats: int) -> float:
    """Of that many rounds, after one that warms up."""
    times_s = []
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        for product, x in zip(products, inputs, strict=True):
            product(x)
        times_s.append(time.perf_counter() - started_s)
    return min(times_s[1:]) * 1e3


if __name__ == "__main__":
    sys.exit(main())
