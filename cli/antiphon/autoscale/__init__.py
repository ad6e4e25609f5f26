"""`antiphon serve --autoscale`: the promise kept on one machine, by the law that a cluster's operator asks too.

    gateways' news in Valkey ──▶ merged ──▶ decide ──▶ moves ──▶ crew
          (loop)                     (antiphon_policy)  (moves)   roles change, processes start and end

The supervisor looks every two seconds, asks the law, and does what is cheapest: a running worker takes another role
(its cache stays), else a process is started, else the one whose loss costs least is drained and ended. What should be
is kept as a list of places with roles (`crew`); what is follows it, whatever was killed in between. So an action is
completed or undone, and never doubled.
"""
