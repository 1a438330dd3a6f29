"""Beside other engines: the same requests to theirs and to ours, in alternation, on the same cores."""
