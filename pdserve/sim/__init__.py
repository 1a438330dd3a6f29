"""The production scheduler under a virtual clock: what a policy or a topology would do, before there are machines."""
