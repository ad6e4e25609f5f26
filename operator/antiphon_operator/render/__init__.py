"""Objects that a Model is made of, as pure functions of the effective Model. See `antiphon_operator`.

    metadata     names, labels and owner references that every child has
    weights      where the weights lie in a pod, and how large they are
    command      the worker's arguments
    environment  variables of worker and fetch containers
    security     the two profiles: Restricted, and RDMA
    volumes      shared memory, scratch space, weights, secrets
    probes       when a pod counts as started, ready, alive
    placement    tolerations, closeness
    merge        `podTemplate` laid over what was rendered
    templates    all of the above: the pod template of one pool
    revision     the ControllerRevision that keeps the templates
    replica      the StatefulSet of one replica, made of what a revision keeps
    pool, common, network, source    the objects beside

A manifest holds exactly the fields that the operator owns: what it leaves out, others may set.
"""
