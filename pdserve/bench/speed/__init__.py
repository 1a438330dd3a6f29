"""How many tokens a second: of prompts by their length, of answers by their number and the length of their context."""
