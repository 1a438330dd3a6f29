"""How far the simulator is from real nodes under the same requests."""
