"""Objects that a Model is made of, as pure functions of the effective Model. See `antiphon_operator`."""
