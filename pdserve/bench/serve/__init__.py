"""Servers under load, as their clients see it: closed loops, open loops, recorded traffic, and a long prompt beside."""
