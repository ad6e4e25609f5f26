"""The typed resources. See `antiphon_operator`."""
