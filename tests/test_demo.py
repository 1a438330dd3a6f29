import io

from rich.console import Console

from pdserve import demo
from pdserve.client import Usage
from pdserve.commands.measured import MeasuredAnswer
from pdserve.demo_prompts import PROMPTS, Prompt, diary
from pdserve.request import FinishReason


def answer(token_ids: tuple[int, ...], placement: str = "remote;peer=127.0.0.1:1") -> demo.Asked:
    told = MeasuredAnswer("text", token_ids, FinishReason.LENGTH, Usage(70, len(token_ids), 0), placement, 0.1, (0.02,))
    return demo.Asked(Prompt("title", "text", "text"), told, 2 * demo.MIB, 1)


def test_the_demo_names_the_first_token_that_differs() -> None:
    assert demo.differences([answer((1, 2))], [answer((1, 2))]) == []
    assert demo.differences([answer((1, 2))], [answer((1, 3))]) == ["title: token 1 differs: (2,) and, fused, (3,)"]
    assert demo.differences([answer((1,))], [answer((1, 3))]) == ["title: token 1 differs: () and, fused, (3,)"]


def test_the_demo_fails_where_the_decode_node_prefilled() -> None:
    assert demo.not_remote([answer((1,))]) == []
    assert demo.not_remote([answer((1,), "local;reason=no_peer")]) == [
        "title: prefilled by the decode node itself (local;reason=no_peer)"
    ]


def test_the_demo_s_table_shows_where_and_what_was_moved() -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(demo.table([answer((1, 2)), answer((1,), "local;reason=fused")], True))
    first, second = (line.split() for line in text.getvalue().splitlines() if "title" in line)
    assert first == ["title", "70", "2", "prefill", "2.0", "1", "100", "ms", "20", "ms", "20", "ms"]
    assert second[3] == "fused"
    assert demo.where("local;reason=no_peer") == "decode (no_peer)"


def test_the_demo_asks_six_prompts_one_of_them_long() -> None:
    assert len(PROMPTS) == 6
    assert max(len(prompt.text) for prompt in PROMPTS) > 8000
    assert diary() == diary()
