"""The API server: client, Lease, drift. See `antiphon_operator`."""
