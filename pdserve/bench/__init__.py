"""Measurements of pdserve on the machine at hand."""
