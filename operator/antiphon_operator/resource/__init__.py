"""The typed resources `Model` and `Pool`: what a person may write, what it means, and what the status says.

    base                        the struct they all are, rules with sentences, scalars
    durations, quantities       times and amounts, read exactly
    source, serving, promise    the parts of a Model's spec; `model` has them all
    pool                        the spec of a `Pool`
    reasons, status             what the operator says of them
    effective                   every default worked out
    changes                     what a change of each field does; what a revision is named by
    problems, parse             from an object to an effective Model, or to sentences
    checks, pod_template,       what the CRD's rules cannot check
      worker_flags
    schema, crd                 the CRDs, made from the types
    reference                   the pages in `docs/`, made from the types

All of it is pure. The types are the one source: CRDs, pages, defaults and the operator's own parsing come from them.
"""
