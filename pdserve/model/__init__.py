"""Turns a round's plan into tokens: weights, layers, attention, sampling."""
