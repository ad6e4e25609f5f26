"""The API server, as the operator meets it: client, Lease, and what counts as drift.

resources    kinds and their paths
access       where the API server is and who we are there (kubeconfig, service account)
errors       refusals of the API server as types
transport    one request: deadline, retries, guard, count
client       the verbs
compare      pure: where a live object is not as a manifest says
drift        pure: does a live object still say what we want?
applying     makes one object as it is wanted, with the fewest requests
election     pure: may the Lease be taken?
lease        the thread that holds it
"""
