"""Decides what each round runs. Pure: no clock, no I/O, standard library only. Plan out, events in."""
