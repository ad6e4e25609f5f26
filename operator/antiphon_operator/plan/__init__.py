"""The planner: pure, from what is observed to what should be. See `antiphon_operator`."""
