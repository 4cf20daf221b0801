"""Decides how many tokens each round drafts. Pure Python: no torch, no engine, no clock.

    base            views, decisions, outcomes, and the Policy interface
    fixed           policies that measure nothing: the controls
    choose          MeasuredPolicy: what is known; request_policy is one request's view of it
    decide, terms   the decision; what was worked out for it and stands until more is learned
    cost            forwards by rows and context, built of level; round_cost adds draft and host
    acceptance      chances by draft position; request_state keeps them for each request
    estimate        the speedup S(k) and the choice among widths
    widths, plan    sharing rows out in a batch; what a step would do
    forecast        what would be decided now, for reports
    explore         trials, and when a proposal is only scored; scoring scores it
    ledger          the loss budget; accounts charges steps, quiet those that teach nothing
    profile         what outlives the process
    record          writes what rounds took, for replay
    replay, traces  recorded pairings; simulator runs a policy on a virtual clock

docs/policy.md has the model and the theorem, examples/policy_alone.py the shortest use.
"""
