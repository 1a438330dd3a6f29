"""Breaks one promise at a time in a copy of the tree, and shows that the test named for the promise fails.

A suite of mutants is a list of `Mutant` and a call of `run`: a table, and 1 if a mutant survives or if one of the named
tests fails on the tree as it is. `python -m tests.transfer.mutants WORD...` runs those with one of the words in their
name, their file or their test.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A mutant that makes its test hang has failed it.
TIMEOUT_S = 60
# Of pytest: all passed; some failed; a rank's transport thread gave up and took its process along, pytest's here.
PASSED, FAILED = 0, (1, 70)


@dataclass(frozen=True)
class Mutant:
    """edits: (text that occurs once in `path`, what takes its place). test: below the suite's folder of tests."""

    name: str
    path: str
    edits: tuple[tuple[str, str], ...]
    test: str


def run(mutants: Sequence[Mutant], *, copied: Sequence[str], folder: str) -> int:
    """copied: what the tests need of the tree. folder: that of the mutants' tests. 0 when every mutant is killed."""
    mutants = _named(mutants, sys.argv[1:])
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        _copy(copied, tree)
        tests = {mutant: f"{folder}/{mutant.test}" for mutant in mutants}
        if not _passes(tree, sorted(set(tests.values()))):
            print(f"a test named for a mutant fails on the tree as it is: look at `pytest {folder}`")
            return 1
        survivors = [mutant for mutant in mutants if not _is_killed(tree, mutant, tests[mutant])]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed, each by the test named for it")
    return int(bool(survivors))


def _named(mutants: Sequence[Mutant], words: Sequence[str]) -> Sequence[Mutant]:
    """Those with one of the words in their texts; all without words."""
    texts = {mutant: f"{mutant.name} {mutant.path} {mutant.test}" for mutant in mutants}
    found = [mutant for mutant, text in texts.items() if not words or any(word in text for word in words)]
    assert found, f"no mutant with any of {list(words)}"
    return found


def _copy(names: Sequence[str], tree: Path) -> None:
    for name in names:
        source, target = ROOT / name, tree / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def _is_killed(tree: Path, mutant: Mutant, test: str) -> bool:
    """Whether the mutant's test fails on it; it passes on the tree."""
    source = tree / mutant.path
    right = source.read_text()
    source.write_text(_mutated(right, mutant))
    is_killed = not _passes(tree, [test])
    source.write_text(right)
    print(f"{'killed' if is_killed else 'SURVIVES':9} {mutant.name:66} {mutant.test}", flush=True)
    return is_killed


def _mutated(right: str, mutant: Mutant) -> str:
    wrong = right
    for before, after in mutant.edits:
        assert wrong.count(before) == 1, f"{mutant.name}: {before!r} is {wrong.count(before)} times in {mutant.path}"
        wrong = wrong.replace(before, after)
    return wrong


def _passes(tree: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "--timeout", str(TIMEOUT_S), *tests]
    ran = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    told = (ran.stdout + ran.stderr)[-2000:]
    assert ran.returncode in (PASSED, *FAILED), f"{tests} were not run: pytest exits with {ran.returncode}\n{told}"
    return ran.returncode == PASSED
