"""pdserve's engine without a front, in a process of its own: see child.py for what it is asked and says."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdserve.bench.listening import Call
from pdserve.bench.speed.arguments import FORMS
from pdserve.bench.speed.child import Prompts, serve
from pdserve.bench.speed.in_process import Engine


class Alone:
    """The engine as a library."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answer(self, prompts: Prompts, num_tokens: int) -> list[list[float]]:
        calls = [Call(number, tuple(prompt), num_tokens) for number, prompt in enumerate(prompts)]
        return [list(heard.arrivals_s) for heard in self._engine.hear_all(calls)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", choices=FORMS, required=True)
    for flag in ("--max-tokens", "--max-num-seqs", "--threads"):
        parser.add_argument(flag, type=int, required=True)
    given = parser.parse_args()

    def load() -> Alone:
        sizes = {"max_tokens": given.max_tokens, "max_num_seqs": given.max_num_seqs, "num_threads": given.threads}
        return Alone(Engine(given.model, given.quantization, **sizes))

    serve(load)


if __name__ == "__main__":
    main()
