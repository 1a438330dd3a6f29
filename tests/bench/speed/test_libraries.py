"""The model that ctranslate2 reads: made once by its converter, whose failure is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.bench.policy_runs import Model
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.engines import EngineFailed, Setting
from pdserve.bench.speed.libraries import convert, ctranslate2

CONVERTER = """#!/bin/sh
echo converted >> {calls}
while [ $# -gt 1 ]; do [ "$1" = --output_dir ] && mkdir "$2"; shift; done
"""


def setting(peers: Path, converter: str) -> Setting:
    program = peers / "ctranslate2" / "bin" / "ct2-transformers-converter"
    program.parent.mkdir(parents=True)
    program.write_text(converter)
    program.chmod(0o755)
    return Setting(Model(peers / "tiny", (1,)), [Cell("c", 1, 4, 1)], peers, peers, num_threads=1)


def test_it_is_converted_once_for_both_forms_of_weights(tmp_path: Path) -> None:
    given = setting(tmp_path, CONVERTER.format(calls=tmp_path / "calls"))
    for weights in ("fp32", "int8"):
        ctranslate2(given, weights).prepare()
    assert (tmp_path / "ctranslate2-model" / "tiny").is_dir()
    assert (tmp_path / "calls").read_text() == "converted\n"


def test_a_converter_that_fails_is_told_and_leaves_no_model(tmp_path: Path) -> None:
    given = setting(tmp_path, "#!/bin/sh\necho loading >&2\necho no config.json >&2\nexit 1\n")
    with pytest.raises(EngineFailed, match=r"^its converter failed: no config\.json$"):
        convert(given)
    assert not (tmp_path / "ctranslate2-model" / "tiny").exists()
