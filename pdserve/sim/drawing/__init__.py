"""Pictures of what was simulated. matplotlib is imported here and nowhere else, when the first one is drawn."""
