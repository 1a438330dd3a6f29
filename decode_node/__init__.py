"""The decode node: the front door of a P/D pair; prompts are prefilled by peers, answers are generated here."""
