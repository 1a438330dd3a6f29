"""What `pdserve demo` asks: short, middling, and one that takes several chunks to prefill."""

from __future__ import annotations

from dataclasses import dataclass

NUM_DIARY_DAYS = 64

WIND = ("a light south wind", "a fresh north-east wind", "hardly any wind", "a west gale", "wind from the north")
SEA = ("the sea calm", "a short swell", "long waves from the open sea", "white crests as far as one sees")
WORK = (
    "cleaned the lens and trimmed the wick",
    "painted the south railing",
    "counted the oil: enough until the boat comes",
    "mended the rain gutter over the store",
    "wound the clockwork and wrote letters",
    "dried the bedding and swept the stairs",
)
SIGHT = ("two fishing boats", "a coal steamer going east", "nothing but gulls", "a schooner under full sail", "seals")


@dataclass(frozen=True, slots=True)
class Prompt:
    """title: its name in tables. shown: what the demo prints of it."""

    title: str
    text: str
    shown: str


def diary() -> str:
    """A lighthouse keeper's diary, a few sentences a day, always the same; in one of its nights the lamp goes out."""
    days = []
    for day in range(1, NUM_DIARY_DAYS + 1):
        wind, sea = WIND[day * 7 % len(WIND)], SEA[day * 5 % len(SEA)]
        work, sight = WORK[day * 11 % len(WORK)], SIGHT[day * 3 % len(SIGHT)]
        line = f"Day {day}. We had {wind} and {sea}. In the morning I {work}. Passing by I saw {sight}."
        if day == NUM_DIARY_DAYS * 2 // 3:
            line += " At midnight the lamp went out; it burned again after ten minutes, and no ship was harmed."
        days.append(line)
    return "\n".join(days)


def _question(title: str, text: str) -> Prompt:
    return Prompt(title, text, text)


LETTER = (
    "Rewrite this message so that it is short and friendly: Dear Sir or Madam, I am writing to you with regard to the "
    "bicycle which I left at your workshop on Monday of last week for the repair of its rear brake. I was told that it "
    "would be ready by Thursday, and it is now Tuesday. I would be most grateful if you could inform me at your "
    "earliest convenience whether the repair has been carried out, what it will cost, and when I may collect it."
)

PROMPTS = (
    _question("sky", "Why is the sky blue?"),
    _question("sea", "Explain in two sentences why the sea is salty."),
    Prompt(
        "diary",
        f"Here is a lighthouse keeper's diary.\n\n{diary()}\n\nIn one sentence, what is this diary about?",
        f"a lighthouse keeper's diary of {NUM_DIARY_DAYS} days, and: In one sentence, what is this diary about?",
    ),
    _question("haiku", "Write a haiku about a patient engineer."),
    Prompt("letter", LETTER, f"{LETTER[:60]}..."),
    _question("python", "Write a Python function that returns the larger of two numbers."),
)
