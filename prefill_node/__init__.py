"""The prefill node: computes prompts for decode nodes and lends them the KV until they have it."""
