"""Step times by laws that know nothing of a step's parts: what a prediction is compared with.

With T1 on one device and b(n) the ideal step of n devices (T1 under weak scaling, T1 / n under strong scaling):

    ideal      b(n)
    Amdahl     b(n) (1 + s (n-1))                    speedup n / (1 + s (n-1)): Amdahl 1967, AFIPS 30
    ring line  b(n) + T1 (a (n-1)/n + c (n-1))       a cost as that of a ring's transfers, and one that grows with n

s, a and c are fitted by least squares, none below 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

LAWS = ("ideal", "amdahl", "ring_line")


def by_laws(steps: Mapping[int, float], devices: int, *, strong: bool) -> dict[str, float]:
    """Return the step time by each law; ``steps``: measured seconds by number of devices. Empty without one device."""
    if 1 not in steps:
        return {}
    from scipy.optimize import nnls  # its import takes half a second

    one = steps[1]
    several = [n for n in steps if n > 1]

    def base(n: int) -> float:
        return one / n if strong else one

    found = {"ideal": base(devices)}
    if several:
        lost = np.array([steps[n] - base(n) for n in several])
        (slope,), _ = nnls(np.array([[base(n) * (n - 1)] for n in several]), lost)
        (ring, growing), _ = nnls(np.array([[one * (n - 1) / n, one * (n - 1)] for n in several]), lost)
        found["amdahl"] = base(devices) * (1 + float(slope) * (devices - 1))
        lost_s = one * (float(ring) / devices + float(growing)) * (devices - 1)
        found["ring_line"] = base(devices) + lost_s
    return found
