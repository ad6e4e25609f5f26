"""What every Antiphon process does alike: logs, traces, metrics pages, and how it ends."""
