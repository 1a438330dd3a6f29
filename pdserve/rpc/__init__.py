"""The gRPC services and what they are made of."""
