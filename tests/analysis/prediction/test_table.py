"""Predictions of families whose parts are known, and the reasons of those that are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.analysis.prediction.collective_times import LINK_SHARES, Links, RingCost, fit_ring
from harness.analysis.prediction.observed import Exchange, Family, Size
from harness.analysis.prediction.predictions import Asked, predictions
from harness.analysis.prediction.step_model import DOUBLING_ERROR
from harness.config.sections import AssumedLink
from harness.errors import PredictionError
from harness.record.frames import records
from tests.analysis.prediction.world import BATCH, COST, LINKS, OWN_S, collectives, family, observed, row, step_s

SMALL = (Exchange("all_reduce", 2**14, 0.1, 0.1),)
ASKED = Asked(devices=(8, 16), nodes=(8, 16))


def rows(of: Family, asked: Asked = ASKED, links: Links | None = None, **excluded: str) -> list[dict[str, Any]]:
    return records(predictions([of], links or LINKS, excluded, asked))


def asked_row(of: Family, asked: Asked = ASKED, links: Links | None = None, **excluded: str) -> dict[str, Any]:
    return [found for found in rows(of, asked, links, **excluded) if found["kind"] == "asked"][-1]


def changed(**columns: Any) -> Family:
    return family({size: observed(size, **columns) for size in family().sizes})


def test_the_step_of_more_ranks_is_met_by_parts_that_add_up() -> None:
    found = {row["devices"]: row for row in rows(family())}
    assert [found[n]["kind"] for n in (1, 2, 4, 8, 16)] == ["measured", "measured", "held out", "asked", "asked"]
    for devices in (4, 8, 16):
        assert found[devices]["step_s"] == pytest.approx(step_s(devices), rel=0.02)
        assert found[devices]["low"] < step_s(devices) < found[devices]["high"]
    assert found[4]["error"] == pytest.approx(found[4]["step_s"] / found[4]["measured_s"] - 1)
    assert abs(found[4]["error"]) < 0.02
    assert pd.isna(found[8]["error"]) and pd.isna(found[8]["measured_s"])
    parts = sum(found[16][name] for name in ("own_s", "exposed_s", "data_s", "other_s"))
    assert found[16]["step_s"] == pytest.approx(parts)
    assert found[16]["own_s"] == pytest.approx(OWN_S, rel=0.01)


def test_links_are_fitted_once_for_all_sizes_that_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    name = "harness.analysis.prediction.collective_times.fit_ring"
    monkeypatch.setattr(name, lambda *given: made.append(given) or fit_ring(*given))
    found = rows(family(), Asked(devices=(8, 16, 32), nodes=(8, 16, 32)), Links(collectives()))
    assert [row["kind"] for row in found[-3:]] == ["asked"] * 3
    assert len(made) == 2  # for the size that is held out, from its smaller ones, and for all that are asked


def test_throughput_is_that_of_the_predicted_step() -> None:
    """The row of the largest size is its last block's, whose step is a third longer than the mean."""
    sizes = dict(family().sizes)
    mean = sizes[Size(4, 4)].mean_s
    last = row(Size(4, 4), throughput_per_s=4 * BATCH / (4 / 3 * mean))
    sizes[Size(4, 4)] = replace(sizes[Size(4, 4)], row=last, step_s=(2 / 3 * mean, mean, 4 / 3 * mean))
    found = asked_row(family(sizes))
    assert found["throughput_per_s"] == pytest.approx(16 * BATCH / found["step_s"])


def test_the_interval_widens_with_the_distance_and_with_ranks_that_differ() -> None:
    widths = [row["high"] / row["low"] for row in rows(family()) if row["kind"] == "asked"]
    assert widths[0] < widths[1]
    found = asked_row(family())  # two doublings beyond the largest measured size, each with its error of the exchange
    least = 2 * DOUBLING_ERROR["exposed"] * found["exposed_s"] / (found["step_s"] - found["data_s"])
    assert math.log(found["high"] / found["step_s"]) > 1.96 * least

    def of(spread: tuple[float, ...]) -> dict[str, Any]:
        sizes = {}
        for size in family().sizes:
            ranks = spread[: size.devices]
            step = step_s(size.devices, own_s=max(ranks), exchanges=SMALL)
            sizes[size] = replace(observed(size, ranks=ranks), step_s=(step,) * 3)
        return asked_row(family(sizes, exchanges=SMALL))

    differing, alike = of((0.1, 0.11, 0.095, 0.105)), of((0.1, 0.1, 0.1, 0.1))
    assert differing["high"] / differing["low"] > alike["high"] / alike["low"]
    assert differing["own_s"] > 0.11  # the slowest of those measured is among them


@pytest.mark.parametrize(("blocks", "factor"), [(2, None), (3, 2.19), (5, 1.42), (100, 1.01)])
def test_few_blocks_that_differ_widen_the_interval_as_t_does_and_below_three_there_is_none(
    blocks: int, factor: float | None
) -> None:
    """The spread of blocks is far larger here than all other errors."""
    mean = step_s(4)
    steps = tuple(mean * (1 + side * 0.4) for side in np.linspace(-1, 1, blocks))
    seen = {**family().sizes, Size(4, 4): replace(observed(Size(4, 4)), step_s=steps)}
    found = asked_row(family(seen))
    if factor is None:
        assert found["low"] is None and found["high"] is None and found["step_s"] > 0
    else:
        error = float(np.std(steps, ddof=1)) / math.sqrt(blocks)
        half = math.log(found["high"] / found["step_s"])
        assert half >= 0.9 * 1.96 * factor * error / mean * (found["step_s"] - found["data_s"]) / found["step_s"]


def test_a_systematic_error_of_the_replay_is_corrected() -> None:
    """Measured steps wait a tenth longer for exchanges than links alone say: so do predicted ones."""
    slower = RingCost(COST.start_s, COST.hop_s, COST.bytes_per_s / 1.1, COST.hidden)
    steps = {size: (step_s(size.devices, cost=slower),) * 3 for size in family().sizes if size.devices > 1}
    measured = {size: replace(observed(size), step_s=seconds) for size, seconds in steps.items()}
    found = asked_row(family({**family().sizes, **measured}))
    assert found["step_s"] == pytest.approx(step_s(16, cost=slower), rel=0.03)


def test_jitter_makes_more_ranks_slower_and_a_stall_of_one_device_is_none() -> None:
    """The slowest of n lognormal steps, as known from order statistics; without exchanges in the way."""
    jitter = np.exp(0.1 * np.random.default_rng(3).standard_normal(4000))

    def step(n: int) -> float:
        steps = np.exp(0.1 * np.random.default_rng(4).standard_normal((n, 20000))).max(0).mean()
        return OWN_S * float(steps) / float(jitter.mean()) + step_s(n, exchanges=SMALL) - OWN_S

    sizes = {size: replace(observed(size), step_s=(step(size.devices),)) for size in family().sizes}
    found = asked_row(family(sizes, jitter=jitter, exchanges=SMALL))
    assert found["step_s"] == pytest.approx(step(16), rel=0.03)
    steady = np.tile([1.01, 1.0], 20)
    stalled = np.where(np.arange(40) == 7, 9.0, steady)
    plain, with_stall = (asked_row(family(jitter=values))["step_s"] for values in (steady, stalled))
    assert with_stall == pytest.approx(plain, rel=0.02)


def test_strong_scaling_takes_the_own_time_from_its_batches() -> None:
    def own(batch: int) -> float:
        return 0.02 + 0.005 * batch

    sizes = {}
    for size in family().sizes:
        batch, strong = 64 // size.devices, {"scaling": "strong", "global_batch_size": 64}
        sizes[size] = observed(size, ranks=(own(batch),) * size.devices, batch=batch, **strong)
    found = asked_row(family(sizes, alone={64: own(64), 32: own(32), 16: own(16)}))
    assert found["per_device_batch_size"] == 4
    assert found["own_s"] == pytest.approx(own(4), rel=0.02)
    refused = asked_row(family(sizes), Asked(devices=(24,), nodes=(24,)))
    assert "64 does not divide by 24" in refused["refusal"]


@pytest.mark.parametrize(("workers", "expected"), [(0, 0.02), (2, None)])
def test_waiting_for_data_is_the_fetch_or_what_the_loader_lacks(workers: int, expected: float | None) -> None:
    of = changed(wait_s=0.02, options={"loader.workers": workers})
    found = asked_row(of)
    if expected is None:  # the loader's step is that of 4 ranks; that of 16 is longer by less
        net = found["own_s"] + found["exposed_s"] + found["other_s"]
        expected = max(0.0, of.sizes[Size(4, 4)].mean_s - net)
    assert found["data_s"] == pytest.approx(expected)


def test_fsdp_is_replayed_with_its_own_collectives_and_a_sharded_optimizer() -> None:
    units = (Exchange("all_gather", 2**20, 0.0, 0.0), Exchange("reduce_scatter", 2**20, 0.1, 0.1))
    sizes = {}
    for size, seen in changed(strategy="fsdp").sizes.items():
        sharded_s = 0.08 / size.devices
        steps = (step_s(size.devices, exchanges=units) + sharded_s,) * 3
        sizes[size] = replace(seen, step_s=steps, optimizer_s=sharded_s)
    found = asked_row(family(sizes, exchanges=units))
    assert found["step_s"] == pytest.approx(step_s(16, exchanges=units) + 0.08 / 16, rel=0.03)


def test_sizes_are_asked_for_where_a_larger_one_was_held_out() -> None:
    found = [(row["devices"], row["nodes"]) for row in rows(family(), Asked()) if row["kind"] == "asked"]
    assert found == [(8, 8), (16, 16), (32, 32)]
    two = {size: seen for size, seen in family().sizes.items() if size.devices < 4}
    assert [row["kind"] for row in rows(family(two), Asked())] == ["measured", "measured"]


@pytest.mark.parametrize(("per_node", "devices", "nodes"), [(8, 8, 1), (8, 16, 2), (2, 16, 8), (None, 16, 1)])
def test_by_default_a_size_has_as_few_nodes_as_hold_it(per_node: int | None, devices: int, nodes: int) -> None:
    asked = Asked(devices=(devices,), per_node=per_node)
    assert asked.sizes(Size(4, 1), is_graded=False) == [Size(devices, nodes)]
    assert asked.sizes(Size(8, 2), is_graded=False) == [Size(devices, devices // 4)]


def test_nodes_must_be_those_of_the_devices() -> None:
    with pytest.raises(PredictionError, match="got 1 numbers for 2 of --devices"):
        Asked(devices=(8, 16), nodes=(2,)).check()
    with pytest.raises(PredictionError, match="9 devices do not divide over 2 nodes"):
        Asked(devices=(9,), nodes=(2,)).check()


WITHOUT_OWN_STEPS = family({size: replace(seen, own_s=()) for size, seen in family().sizes.items()})


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (changed(strategy="dp"), "dp is not predicted"),
        (changed(strategy="mine"), "mine is not predicted"),
        (changed(oversubscribed=True), "share devices"),
        (family(exchanges=()), "recorded no exchanges"),
        (family(exchanges=(Exchange("all_gather", 2**20, 0.01, 0.01),)), "sparse gradients"),
        (changed(exchange_s={"own collectives": 0.1}), "the user's own code exchanges values in each step"),
        (family({Size(2, 2): observed(Size(2, 2))}), "needs two numbers of devices, measured: 2 on 2 nodes"),
        (WITHOUT_OWN_STEPS, "no step without exchange was measured"),
    ],
)
def test_a_family_without_ground_is_refused_with_the_reason(of: Family, reason: str) -> None:
    found = asked_row(of)
    assert reason in found["refusal"]
    assert pd.isna(found["step_s"]) and pd.isna(found["throughput_per_s"])


def test_beyond_eight_times_the_largest_fitted_size_far_is_needed() -> None:
    at_64 = {"devices": (64,), "nodes": (64,)}
    refused = asked_row(family(), Asked(**at_64))
    assert "more than 8 times the largest measured size (4); measure at least 8 devices" in refused["refusal"]
    allowed = asked_row(family(), Asked(**at_64, far=True))
    assert allowed["marks"] == ("far",) and allowed["step_s"] == pytest.approx(step_s(64), rel=0.03)
    assert pd.isna(asked_row(family(), Asked(devices=(32,), nodes=(32,)))["refusal"])
    sizes = {**family().sizes, Size(4, 4): replace(observed(Size(4, 4)), own_s=())}
    found = asked_row(family(sizes), Asked(devices=(32,), nodes=(32,)))
    assert "more than 8 times the largest measured size (2)" in found["refusal"]


def test_a_tier_that_was_not_measured_is_refused_until_its_links_are_given() -> None:
    one_node = family({Size(n, 1): observed(Size(n, 1)) for n in (1, 2, 4)})
    inside = collectives(tier="inside a node", nodes=1)
    refused = asked_row(one_node, ASKED, Links(inside))
    assert "not every collective of its step was measured between nodes (gloo)" in refused["refusal"]
    assert "harness doctor FILE --links" in refused["refusal"] and refused["refusal"].endswith("say so with --nodes")
    given = asked_row(one_node, ASKED, Links(inside, collectives(ranks=(2, 4, 8))))
    assert given["step_s"] == pytest.approx(step_s(16), rel=0.05)


def test_links_are_joined_to_those_of_the_run_in_the_same_tier() -> None:
    """The run's own, of 2 ranks, say nothing of a tier whose steps wait twice as long: those of 4 and 8 do."""
    slower = RingCost(COST.start_s, 2 * COST.hop_s, COST.bytes_per_s, COST.hidden)
    own, further = collectives(ranks=(2,)), collectives(ranks=(2, 4, 8), cost=slower)

    def cost(of_others: pd.DataFrame | None) -> RingCost:
        return Links(own, of_others).fits("gloo", "between nodes", {"all_reduce": [2**20]}, 4, 2)["all_reduce"].cost

    assert cost(further).hop_s > 1.4 * cost(None).hop_s
    assert cost(further[further["devices"] == 2]) == cost(None)  # the run's own measurement of a placement counts


def measured_sizes(*powers: int, **given: Any) -> pd.DataFrame:
    """The collectives of these sizes, powers of two, of 2 ranks."""
    of_all = collectives(ranks=(2,), **given)
    return of_all[of_all["size_bytes"].isin([2**power for power in powers])]


FOUR = Asked(devices=(4,), nodes=(4,))
ONE_AND_TWO = {size: observed(size) for size in (Size(1, 1), Size(2, 2))}
SLOW_LINK = measured_sizes(*range(10, 20))
"""Sizes that a slow link left: of those within a factor of 4 of 524,288 and 1,048,576 bytes 3."""


@pytest.mark.parametrize(
    ("own", "exchanged", "reason"),
    [
        (SLOW_LINK, (2**19, 2**20), ": 3 of the 4 times that a fit needs within a factor of 4 of the exchanged "
         "524,288 to 1,048,576 bytes were measured; raise throughput.links_seconds, or give --links"),
        (SLOW_LINK, (2**20,), ": 2 of the 4 times that a fit needs within a factor of 4 of the exchanged 1,048,576 b"),
        (SLOW_LINK, (2**25,), ": 0 of the 4 times that a fit needs"),
        (SLOW_LINK, (2**12, 2**22), ": measured up to 524,288 bytes, of 4,096 to 4,194,304 that are exchanged; raise"),
        (SLOW_LINK[:0], (2**20,), "not every collective of its step was measured between nodes (gloo); measure a"),
    ],
    ids=["three sizes", "two", "none of that size", "largest missing", "none at all"],
)  # fmt: skip
def test_too_few_measured_sizes_are_counted_and_further_links_of_the_same_placement_help(
    own: pd.DataFrame, exchanged: tuple[int, ...], reason: str
) -> None:
    of = family(ONE_AND_TWO, exchanges=tuple(Exchange("all_reduce", size, 0.05, 0.1) for size in exchanged))
    refusal = asked_row(of, FOUR, Links(own))["refusal"]
    assert reason in refusal and (own.empty or "all-reduce between nodes (gloo): " in refusal)
    given = asked_row(of, FOUR, Links(own, measured_sizes(*range(10, 28), powers=range(10, 28))))
    assert pd.isna(given["refusal"]) and given["step_s"] > OWN_S


def test_enough_measured_sizes_are_predicted_and_further_or_smaller_ones_change_nothing() -> None:
    own = measured_sizes(*range(12, 22))
    found = asked_row(family(ONE_AND_TWO), FOUR, Links(own))
    assert pd.isna(found["refusal"])
    slower = own.assign(time_s=5 * own["time_s"])
    assert asked_row(family(ONE_AND_TWO), FOUR, Links(own, slower))["step_s"] == found["step_s"]
    small = family(ONE_AND_TWO, exchanges=(Exchange("all_reduce", 200, 0.1, 0.1),))
    assert pd.isna(asked_row(small, FOUR, Links(own))["refusal"])


def test_a_size_without_its_links_is_named_with_its_own_remedy() -> None:
    sizes = {size: observed(size) for size in (Size(1, 1), Size(2, 1), Size(4, 2))}
    inside = collectives(ranks=(2,), tier="inside a node", nodes=1)
    links = pd.concat([inside, collectives(ranks=(4,), nodes=2)])  # of 4 devices, from which 4 are not predicted
    (found,) = [row for row in rows(family(sizes), ASKED, Links(links)) if row["kind"] == "held out"]
    assert "was measured between nodes (gloo, up to 2 devices); measure a placement" in found["refusal"]
    sizes = {size: observed(size) for size in (Size(1, 1), Size(2, 1))}
    inside = SLOW_LINK.assign(tier="inside a node", nodes=1)
    found = asked_row(family(sizes), ASKED, Links(pd.concat([inside, collectives()])))
    known = "whose parts are known, which are: 1; of 2 devices, all-reduce inside a node (gloo): 3 of the 4"
    assert known in found["refusal"]
    assert "raise throughput.links_seconds" in found["refusal"] and "explain" not in found["refusal"]


def test_collectives_of_another_backend_are_left_out() -> None:
    others = collectives(backend="nccl", cost=RingCost(1e-6, 1e-6, 1e12, 0.0))
    both = asked_row(family(), ASKED, Links(pd.concat([others, collectives()])))
    assert both["step_s"] == asked_row(family())["step_s"]
    on_gpus = changed(device="cuda")
    assert "was measured between nodes (nccl); measure" in asked_row(on_gpus, ASKED, LINKS)["refusal"]
    asked_for = changed(device="cuda", options={"loader.workers": 0, "ddp.backend": "gloo"})
    assert asked_row(asked_for)["step_s"] == both["step_s"]


@pytest.mark.parametrize("known", [(1,), (4,), (1, 4)])
def test_sizes_whose_parts_are_not_known_predict_nothing(known: tuple[int, ...]) -> None:
    sizes = {s: seen if s.devices in known else replace(seen, own_s=()) for s, seen in family().sizes.items()}
    found = {row["devices"]: row for row in rows(family(sizes))}
    if known == (1, 4):
        assert found[16]["fitted"] == ("1", "4 on 4 nodes") and pd.isna(found[16]["refusal"])
    else:
        assert "step" in found[16]["refusal"] and pd.isna(found[16]["step_s"])
    assert "steps without exchange" in found[4]["refusal"] or "no step without exchange" in found[4]["refusal"]


def test_a_family_that_was_predicted_badly_or_collectives_that_follow_no_ring_are_refused() -> None:
    odd = collectives(ranks=(2, 3, 4))
    odd["time_s"] = [1e-3 * (1 + (number % 3) * 4) for number in range(len(odd))]
    assert "is not that of a ring" in asked_row(family(), ASKED, Links(odd))["refusal"]
    sizes = {**family().sizes, Size(4, 4): replace(observed(Size(4, 4)), step_s=(3 * step_s(4),) * 3)}
    held_out, asked = [row for row in rows(family(sizes)) if row["kind"] != "measured"][:2]
    assert held_out["error"] < -0.2 and pd.isna(held_out["refusal"])
    assert "predicted from smaller sizes, 4 devices on 4 nodes were" in asked["refusal"]


def test_held_out_sizes_take_nothing_from_their_own_placement_and_can_be_held_out_together() -> None:
    """Links of 4 ranks that are ten times slower than those of 2 do not change what 2 ranks predict of 4."""
    fast, slow = (collectives(ranks=(ranks,)) for ranks in (2, 4))
    slow["time_s"] *= 10
    both, alone = (rows(family(), ASKED, Links(links)) for links in (pd.concat([fast, slow]), fast))
    found, same = (row["step_s"] for of in (both, alone) for row in of if row["kind"] == "held out")
    assert found == same
    sizes = {**family().sizes, Size(8, 8): observed(Size(8, 8))}
    found = {row["devices"]: row for row in rows(family(sizes), replace(ASKED, most_fitted=2), LINKS)}
    assert found[8]["fitted"] == ("1", "2 on 2 nodes") and found[16]["fitted"] == ("1", "2 on 2 nodes")


def test_rows_that_are_no_claim_are_marked_or_refused() -> None:
    assert asked_row(changed(emulated=True, faulty=True))["marks"] == ("emulated", "faulty")
    assert asked_row(changed(oversubscribed=True))["marks"] == ("oversubscribed",)
    assert asked_row(family(), cell2="not equivalent to one device")["refusal"] == "not equivalent to one device"


def test_the_same_run_gives_the_same_numbers_and_no_family_no_rows() -> None:
    first, second = (asked_row(family()) for _ in range(2))
    assert first == {**second} and not math.isnan(first["step_s"])
    assert predictions([], LINKS, {}, ASKED).empty


INSIDE = family({size: observed(size) for size in (Size(1, 1), Size(2, 1), Size(4, 1))})
"""Sizes of one node, of whose network nothing was measured."""


def test_links_between_nodes_that_were_not_measured_may_be_assumed_with_a_mark_and_a_wide_interval() -> None:
    asked, measured = Asked(devices=(8,), nodes=(2,)), collectives(tier="inside a node", nodes=1)
    refused = asked_row(INSIDE, asked, Links(measured))
    assert "--between-nodes" in refused["refusal"] and pd.isna(refused["step_s"])

    def over(gb_per_s: float) -> dict[str, Any]:
        link = AssumedLink(gb_per_s=gb_per_s, latency_us=1, name="test")
        return asked_row(INSIDE, asked, Links(measured, None, {"between nodes": link}))

    speed = COST.bytes_per_s / 1e9
    found = over(speed / LINK_SHARES[1])  # whose expected share is the speed of the measured links
    expected = step_s(8, cost=RingCost(0.0, 1e-6, COST.bytes_per_s, 0.0))
    assert found["step_s"] == pytest.approx(expected, rel=0.02) and "assumed link: test" in found["marks"]
    assert found["low"] < step_s(8, cost=RingCost(0.0, 5e-7, COST.bytes_per_s * 0.95 / 0.8, 0.0))
    assert found["high"] > step_s(8, cost=RingCost(0.0, 2e-6, COST.bytes_per_s * 0.55 / 0.8, 0.0))
    assert over(speed / 4)["step_s"] > found["step_s"]


def test_an_assumed_link_has_a_port_for_each_device_and_is_no_faster_than_the_inside_of_a_node() -> None:
    measured, most = collectives(tier="inside a node", nodes=1), COST.bytes_per_s / 1e9

    def step_over(nodes: int, gb_per_s: float, ports: int) -> float:
        link = AssumedLink(gb_per_s=gb_per_s, latency_us=1, ports=ports)
        found: float = asked_row(INSIDE, Asked((8,), (nodes,)), Links(measured, None, {"between nodes": link}))[
            "step_s"
        ]
        return found

    assert step_over(2, most, 8) == pytest.approx(step_over(2, most / 2, 4))  # four devices of a node, four ports
    assert step_over(8, most, 8) > 1.5 * step_over(2, most, 8)
    inside = AssumedLink(gb_per_s=most / 4, latency_us=1, ports=2)  # whose figure is that of a device
    needed: Any = {"all_reduce": [2**20]}
    for link in (inside, AssumedLink(gb_per_s=most / 4, latency_us=1)):
        fit = Links(measured[:0], None, {"inside a node": link}).fits("gloo", "inside a node", needed, 8, 10)[
            "all_reduce"
        ]
        assert not isinstance(fit, str) and fit.cost.bytes_per_s == pytest.approx(0.8 * COST.bytes_per_s / 4)
    slow = step_s(8, cost=RingCost(0.0, 1e-6, COST.bytes_per_s, 0.0))
    assert step_over(2, 1000 * most, 1) == pytest.approx(slow, rel=0.02)


def test_measured_links_are_used_rather_than_an_assumed_one() -> None:
    link = AssumedLink(gb_per_s=1000, latency_us=1)
    plain = asked_row(family(), links=Links(collectives()))
    found = asked_row(family(), links=Links(collectives(), None, {"between nodes": link}))
    assert found == plain and found["marks"] == ()
