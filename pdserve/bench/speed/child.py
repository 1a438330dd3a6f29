"""What runs where an engine is a library and no server: a process that loads it and answers by lines of JSON.

    to it     {"prompts": [[token, ...], ...], "num_tokens": n}     all prompts of one length
    from it   {"is_ready": true}, once; then a line a request:
              {"called_s": s, "arrivals_s": [[s, ...], ...]}        an arrival a token, on the kernel's monotonic clock
              {"error": "..."}                                      and the next request may come

Run as a file by the Python of another engine's environment, where there is no pdserve; so it imports the standard
library, and that engine's own where it is used.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]


class Library(Protocol):
    """A loaded model."""

    def answer(self, prompts: Prompts, num_tokens: int) -> list[list[float]]:
        """num_tokens greedy tokens for each prompt, whatever they are; when each came."""


def serve(load: Callable[[], Library]) -> None:
    """Until standard input ends."""
    with _own_output() as output:

        def say(**line: object) -> None:
            print(json.dumps(line), file=output, flush=True)

        # Of all processes this is the one to end where memory runs out: the measurement tells it and goes on.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        library = load()
        say(is_ready=True)
        for line in sys.stdin:
            asked = json.loads(line)
            called_s = time.monotonic()
            try:
                arrivals_s = library.answer(asked["prompts"], asked["num_tokens"])
            except (RuntimeError, MemoryError, ValueError) as error:
                say(error=str(error) or type(error).__name__)
            else:
                say(called_s=called_s, arrivals_s=arrivals_s)


def _own_output() -> Any:
    """Standard output for the lines alone: what libraries print goes where errors go."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


class Transformers:
    """transformers' own model class in a greedy loop, with its cache."""

    def __init__(self, model: str, num_threads: int) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(num_threads)
        kind = importlib.import_module("transformers").AutoModelForCausalLM
        self._model = kind.from_pretrained(model, dtype=self._torch.float32).eval()

    def answer(self, prompts: Prompts, num_tokens: int) -> list[list[float]]:
        arrivals_s: list[float] = []
        cache = None
        with self._torch.inference_mode():
            tokens = self._torch.tensor(prompts)  # [num_prompts, num_prompt_tokens] int64, then [num_prompts, 1]
            for _ in range(num_tokens):
                output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
                arrivals_s.append(time.monotonic())
        return [arrivals_s] * len(prompts)


class Ctranslate2:
    """ctranslate2's generator, on a model that its converter wrote."""

    def __init__(self, model: str, num_threads: int, compute_type: str) -> None:
        library = importlib.import_module("ctranslate2")
        self._tokens: list[str] = json.loads((Path(model) / "vocabulary.json").read_text(encoding="utf-8"))
        self._generator = library.Generator(
            model, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=num_threads
        )

    def answer(self, prompts: Prompts, num_tokens: int) -> list[list[float]]:
        arrivals_s: list[list[float]] = [[] for _ in prompts]

        def note(step: Any) -> bool:
            arrivals_s[step.batch_id].append(time.monotonic())
            return False

        # A least length: until then no end is generated.
        self._generator.generate_batch(
            [[self._tokens[token] for token in prompt] for prompt in prompts],
            min_length=num_tokens,
            max_length=num_tokens,
            include_prompt_in_result=False,
            callback=note,
        )
        return arrivals_s


def main(name: str, model: str, num_threads: str, *more: str) -> None:
    """more: of ctranslate2, its compute type."""
    if name == "transformers":
        serve(lambda: Transformers(model, int(num_threads)))
    else:
        serve(lambda: Ctranslate2(model, int(num_threads), *more))


if __name__ == "__main__":
    main(*sys.argv[1:])
