import io
import json
import sys

import pytest

from pdserve import cli
from pdserve.client import Client
from pdserve.commands import generate
from pdserve.commands.measured import measure
from pdserve.rpc.fake import EchoGenerator


def test_generate_streams_the_answer_and_says_where_it_was_prefilled(
    target: str, generator: EchoGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "Hi", "--target", target, "--max-new-tokens", "8", "--temperature", "0", "--stop", "x"]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert shown.out == "user: Hi\n"
    assert "8 tokens, length; prefill local;reason=fused; TTFT" in shown.err
    asked = generator.requests[0]
    assert (asked.sampling.temperature, asked.stop) == (0.0, ("x",))


def test_generate_takes_a_raw_prompt_from_standard_input(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert generate.main(["-", "--raw", "--target", target, "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == "abc\n"


def test_generate_writes_figures_as_json_to_standard_output_alone(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["Hi", "--target", target, "--max-new-tokens", "3", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["text"], told["num_completion_tokens"], told["finish_reason"]) == ("use", 3, "length")
    assert told["ttft_s"] > 0
    assert told["itl_max_s"] >= told["itl_p50_s"]


def test_a_refused_request_is_one_line_and_status_1(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "Hi", "--target", target, "--top-p", "7"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("pdserve generate: ")
    assert "top_p" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("words", [["generate", "x"], ["chat"]])
def test_where_no_node_answers_the_remedy_is_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--target", "127.0.0.1:1"]) == 1
    assert "no node answers at 127.0.0.1:1; start one with `pdserve up smollm2`" in capsys.readouterr().err


def test_gaps_are_between_arrivals_of_tokens(target: str) -> None:
    times = iter(range(100))
    with Client(target) as client, client.stream("abc", max_new_tokens=4) as stream:
        answer = measure(stream, lambda text: None, clock=lambda: float(next(times)))
    assert (answer.ttft_s, answer.gaps_s, answer.itl_p50_s, answer.itl_max_s) == (1.0, (1.0, 1.0, 1.0), 1.0, 1.0)
