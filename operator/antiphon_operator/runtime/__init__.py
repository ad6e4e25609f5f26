"""The operator's process. See `antiphon_operator`."""
