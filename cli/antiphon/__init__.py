"""The `antiphon` command: one entry for every process of the house, and `serve`, which runs them all on one machine.

Owns how options are read, how a process begins and ends, and the supervision of children. It knows all other packages
and none of them knows it. `python -m antiphon` and the installed script `antiphon` are the same.
"""
