"""Scaling on a trace: pools that grow, shrink and switch roles, and what each scaling law would have cost and kept.

    trace or generated load -> calls -> Cluster(start delays, drains, failures) <- law, every few seconds
                                     -> figures beside the oracle's -> table, plots, JSON

Days of trace have to pass in seconds, so this cluster knows requests and not steps: prompts wait in one line for a free
prefill worker, answers share a decode worker as the step model says. `tests/simulate/autoscale/test_fidelity.py` holds
it to the step-level cluster. The law is `antiphon_policy.scaling`, the code that the operator runs.
"""
