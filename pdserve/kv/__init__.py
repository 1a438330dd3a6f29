"""The KV cache as memory: its layout and the slab that holds it."""
