"""The Kubernetes operator: a `Model` resource becomes a prefill pool, a decode pool and a name behind the gateway.

The only package that knows Kubernetes. Its parts, each importing only those before it:

    names      words of the API: group, labels, annotations, ports, names of children
    resource   the typed `Model` and `Pool`, their CRDs, effective defaults, checks that a schema cannot make
    render     pure: an effective Model -> the objects it is made of
    plan       pure: what is observed -> what should be, the status that says so, and when to look again
    kube       the API client, the Lease, what counts as drift
    runtime    the process: kopf wakes it, it reads, plans and applies

The one idea: *level-triggered*. `plan(observed, now)` knows no history but what the cluster itself keeps, so the
operator may be killed between any two requests and the next one goes on.
"""
