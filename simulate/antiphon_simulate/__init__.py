"""The simulator: a discrete-event cluster that runs the real routing and index code on a trace.

    trace -> workload (seed, rate) -> Cluster(workers, policy) -> outcomes -> figures -> table, plots, JSON

Only compute and transfers are replaced, by what the latency model says they take. Deciding where a request goes is
`antiphon_policy`, knowing who holds what is `antiphon_kvtransfer.mirror`: the same code that gateways run.
"""
