"""Which doubts are a run's usual state, and which cells are marked."""

from __future__ import annotations

import pytest

from harness.analysis import ratios
from harness.analysis.doubts import CountedDoubt, tail, unusual, usual_doubts
from harness.analysis.trials import trials
from harness.record.schema import TRIALS
from tests.records import line, steps_of


def test_a_doubt_of_most_timed_trials_is_usual_whichever_rank_it_names() -> None:
    names = [("foreign load", "slow rank 0"), ("foreign load", "slow rank 1"), ("slow rank 1",), ("foreign load",), ()]
    rows = [{"throughput_per_s": 1.0, "outcome": "ok", "doubts": doubts} for doubts in names]
    others = [{"outcome": "ok", "doubts": ()}, {"throughput_per_s": 1.0, "outcome": "error", "doubts": ()}]
    found = TRIALS.frame([*rows, *others])
    assert usual_doubts(found) == {"foreign load": (3, 5), "slow rank": (3, 5)}
    half = TRIALS.frame([*rows[:2], *rows[-1:], *rows[-1:]])
    assert usual_doubts(half) == {}  # two of four are not most
    assert usual_doubts(TRIALS.frame([])) == {}


def test_the_tail_of_the_binomial_by_hand() -> None:
    assert tail(0, 3, 0.5) == pytest.approx(1.0)
    assert tail(3, 3, 0.6) == pytest.approx(0.216)
    assert tail(2, 3, 0.5) == pytest.approx(0.5)


def test_clearly_more_of_a_usual_doubt_is_unusual() -> None:
    usual = {"foreign load": (60, 100)}
    three, six = CountedDoubt("foreign load", 3, 3), CountedDoubt("foreign load", 6, 6)
    assert unusual([three], usual) == ()  # 0.6 ** 3 = 0.22
    assert unusual([six], usual) == (six,)  # 0.6 ** 6 = 0.047
    other = CountedDoubt("slow rank 1", 1, 6)
    assert unusual([three, other], usual) == (other,)


def test_a_cell_is_marked_only_for_what_is_not_usual() -> None:
    lines = [
        one
        for block in range(3)
        for one in (line("single", block=block), *(line(f"ddp{n}", block=block, rates=(80.0,) * n) for n in (2, 4)))
    ]
    doubts = [("foreign load", "wide spread") if one["cell_id"] == "ddp4" else ("foreign load",) for one in lines]
    found = ratios.scaling(trials(lines, steps_of(lines)).assign(doubts=doubts)).set_index("cell_id")
    assert "foreign load (3 of 3)" in [str(doubt) for doubt in found.loc["ddp2", "doubts"]]
    assert [str(doubt) for doubt in found.loc["ddp2", "unusual"]] == []
    assert [str(doubt) for doubt in found.loc["ddp4", "unusual"]] == ["wide spread (3 of 3)"]
