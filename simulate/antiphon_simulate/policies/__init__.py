"""Who chooses: Antiphon's own routing, and our reading of what others published, for comparison."""
