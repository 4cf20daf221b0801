"""Use the policy without the engine: any server that can time a round can ask it for k.

python examples/policy_alone.py
"""

import random

from slipstream.policy.base import RoundOutcome, RoundView
from slipstream.policy.choose import MeasuredPolicy

policy = MeasuredPolicy()  # one for each pairing of target and drafter
rng = random.Random(0)
widths = []
for number in range(500):
    view = RoundView(remaining=1000, context_len=100 + number, proposed=0, ceiling=4)
    decision = policy.choose(view)
    k = decision.k  # draft k tokens, verify k + 1 rows, and time it all

    accepted = 0
    while accepted < k and rng.random() < 0.7:
        accepted += 1
    draft_s, verify_s = 0.001 * k, 0.020 + 0.002 * k
    policy.observe(
        RoundOutcome(
            k=k,
            accepted=accepted,
            emitted=accepted + 1,
            draft_s=draft_s,
            verify_s=verify_s,
            round_s=draft_s + verify_s + 0.001,
            context_len=view.context_len,
        )
    )
    widths.append(k)

print("last widths:", widths[-10:])
print(decision.reason)
