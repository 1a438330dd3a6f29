"""The simulator's cost model of this machine: controlled requests through real nodes, and a fit of their times."""
