"""One node's machinery: the rank's round loop, its processes, and the way between front and ranks."""
