"""pdserve: language models served with prefill and decode on different nodes, or on one fused node."""

__version__ = "0.1.0"
