"""What a stream suffers from a long prompt that comes beside it, under each policy and with the two nodes apart."""
