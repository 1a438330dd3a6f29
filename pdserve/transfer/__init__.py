"""Moves KV blocks between nodes, and keeps the rules that make it safe."""
