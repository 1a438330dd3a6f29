"""Keys of the metadata that nodes and callers read."""

PLACEMENT_KEY = "pdserve-prefill"  # one value a sample: where its prompt was prefilled, and why
ERROR_KEY = "pdserve-error"  # the name of the class in pdserve.errors
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
