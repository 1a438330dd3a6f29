"""The fused node: prefill and decode on one node."""
