"""Those who decide about sizes: Antiphon's law, what others published as we read it, and what needs no deciding."""
