"""Blocks, worker groups, order, skips."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

from harness.launch.protocol import process_variables
from harness.plan.cell import place
from harness.plan.inventory import Inventory, Node
from harness.plan.planner import Plan, by_placement, by_variant, filter_plan, is_base, make_plan, single_rank_only
from tests.conftest import experiment_of, gpu_cluster, laptop, plan_of, variants

GRID = {"strategy": ["single", "dp", "ddp"], "devices": [1, 2, 4], "per_device_batch_size": [8, 16]}
SMALL = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}


def test_every_cell_of_a_plan_runs_once_a_block_is_skipped_or_impossible() -> None:
    plan = plan_of(GRID, throughput={"blocks": 3})
    for block in range(3):
        groups = [group for group in plan.groups if group.block == block]
        cells = [trial.cell for group in groups for trial in group.trials]
        assert len(cells) == len(set(cells)) == 10
        assert [str(group.placement) for group in groups] == ["2 workers with 1 device each"]
    assert plan.blocks == 3
    too_few = "too few devices: needs 4 on one node, has 2 CPU slots"
    assert Counter(skip.text for skip in plan.skips.values()) == {too_few: 12}
    assert Counter(each.text for each in plan.impossible.values()) == {"single runs on at most one device": 4}
    assert not {*plan.impossible} & {trial.cell for trial in (*plan.trials, *plan.skips)}


def test_only_narrows_the_cells_that_no_machine_can_run() -> None:
    plan = plan_of(GRID)
    part = filter_plan(plan, {"strategy": "single", "devices": 4})
    assert not part.trials and not part.skips
    assert {(cell.strategy, cell.devices) for cell in part.impossible} == {("single", 4)}
    assert not filter_plan(plan, {"strategy": "ddp"}).impossible


def test_the_order_is_random_but_the_seed_decides_it() -> None:
    def order(seed: int) -> list[str]:
        experiment = experiment_of(GRID, seed=seed, throughput={"blocks": 4})
        return [trial.id for trial in make_plan(experiment, gpu_cluster()).trials]

    assert order(1) == order(1)
    assert order(1) != order(2) and sorted(order(1)) == sorted(order(2))
    plan = plan_of(GRID, gpu_cluster())
    one, two = ([t.cell for t in plan.trials if t.block == block] for block in (0, 1))
    assert one != two and set(one) == set(two)


def test_each_second_block_reverses_the_order_so_that_no_cell_is_first_more_often_than_another() -> None:
    twins = {"blocks": 4, "twin": True}
    plan = plan_of(GRID, throughput=twins, preflight=True, convergence={"epochs": 1, "seeds": 1})

    def order(block: int, purpose: str) -> list[str]:
        of = [trial for trial in plan.trials if trial.block == block and trial.kind != "convergence"]
        return [trial.cell.id for trial in of if trial.purpose == purpose]

    for purpose in ("", "twin"):
        assert order(0, purpose) == order(1, purpose)[::-1] and order(2, purpose) == order(3, purpose)[::-1]
        assert len(order(0, purpose)) > 1
    assert order(0, "") not in (order(2, ""), order(3, ""))


def test_convergence_takes_the_most_devices_at_one_batch_size_and_a_block_a_seed() -> None:
    plan = plan_of(GRID, throughput=None, convergence={"epochs": 1, "seeds": 0})
    chosen = {(t.cell.strategy, t.cell.devices, t.cell.per_device_batch_size) for t in plan.trials}
    assert chosen == {("single", 1, 8), ("dp", 2, 8), ("ddp", 2, 8)}
    plan = plan_of(GRID, throughput={"blocks": 2}, convergence={"epochs": 1, "seeds": [7, 8, 9]})
    seeds = {(t.block, t.seed) for t in plan.trials if t.kind == "convergence"}
    assert seeds == {(0, 7), (1, 8), (2, 9)}


@pytest.mark.parametrize("only", [{}, {"devices": 8}])
def test_convergence_that_this_machine_cannot_hold_is_skipped_with_the_reason(only: dict[str, int]) -> None:
    grid = {"strategy": "ddp", "devices": 8, "per_device_batch_size": 8}
    settings = {"epochs": 1, "seeds": 0, "only": only}
    plan = plan_of(grid, throughput=None, convergence=settings)
    assert [(trial.cell.devices, skip.code) for trial, skip in plan.skips.items()] == [(8, "too_few_devices")]


def test_convergence_at_a_stated_global_batch_compares_like_with_like() -> None:
    settings = {"epochs": 1, "seeds": 0, "global_batch_size": 32, "only": {"strategy": "ddp", "devices": [1, 2]}}
    plan = plan_of(GRID, throughput=None, convergence=settings)
    chosen = {(t.cell.strategy, t.cell.devices, t.cell.per_device_batch_size, t.added) for t in plan.trials}
    assert chosen == {("ddp", 1, 32, False), ("ddp", 2, 16, False), ("single", 1, 32, True)}
    assert {t.cell.global_batch_size for t in plan.trials} == {32}


def test_the_least_time_of_a_trial_counts_its_windows() -> None:
    settings = {"blocks": 1, "windows": 2, "window_seconds": 3.0}
    plan = plan_of({"per_device_batch_size": 8}, throughput=settings)
    assert len(plan.groups) == 1 and [plan.least_trial_seconds(trial) for trial in plan.trials] == [6.0]


def test_planning_does_not_collect_garbage_so_that_it_stays_linear() -> None:
    seen: list[str] = []
    experiment = experiment_of(GRID, throughput={"blocks": 200})
    gc.collect()
    gc.callbacks.append(lambda phase, _: seen.append(phase))
    try:
        make_plan(experiment, laptop())
    finally:
        gc.callbacks.pop()
    assert seen.count("start") <= 1  # the one that was held back


def test_cells_of_another_backend_have_worker_groups_of_their_own() -> None:
    grid = {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8, "ddp.backend": ["auto", "nccl", "gloo"]}
    plan = plan_of(grid, gpu_cluster())
    backends = {(t.cell.backend, group.backend) for group in plan.groups for t in group.trials if t.cell.devices == 2}
    assert backends == {("auto", "cpu:gloo,cuda:nccl"), ("nccl", "cpu:gloo,cuda:nccl"), ("gloo", "gloo")}
    on_cpu = plan_of(grid)
    assert {skip.code for skip in on_cpu.skips.values()} == {"needs_cuda"}
    assert {group.backend for group in on_cpu.groups} == {"gloo"}


def test_cells_of_other_variables_have_worker_groups_of_their_own() -> None:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = plan_of({**grid, "env.NCCL_ALGO": ["Ring", None, "Tree"]}, env={"OWN": 3}, throughput={"explain": True})
    found = {(trial.cell.env["NCCL_ALGO"], group.variables) for group in plan.groups for trial in group.trials}
    own = ("OWN", "3")
    named = {name: (("NCCL_ALGO", name), own) for name in ("Ring", "Tree")}
    assert found == {(None, (own,)), *named.items()}
    without = plan_of(grid)
    assert {group.variables for group in without.groups} == {()}
    assert {trial.cell.id for trial in without.trials}.isdisjoint(trial.cell.id for trial in plan.trials)
    (links,) = [trial for trial in plan.trials if trial.purpose == "links"]
    assert links.cell.env["OWN"] == 3 and links.cell.env["NCCL_ALGO"] == "Ring", "the first: all have variables"
    some = plan_of({**grid, "env.NCCL_ALGO": "Tree"}, cells=[grid], throughput={"explain": True})
    (links,) = [trial for trial in some.trials if trial.purpose == "links"]
    assert links.cell.env == {}
    variables = process_variables(next(group for group in plan.groups if group.variables == named["Ring"]), 2)
    assert variables.items() >= {("NCCL_ALGO", "Ring"), own, ("OMP_NUM_THREADS", "2")}


def test_a_process_that_runs_already_has_no_other_variables() -> None:
    plan = single_rank_only(plan_of({"per_device_batch_size": 8, "env.B": [None, 1], "env.A": [None, 1]}))
    assert {skip.text.partition("needs ")[2] for skip in plan.skips.values()} == {"a process that starts with A B"}
    assert {tuple(trial.cell.env.values()) for trial in plan.trials} == {(None, None)}


def sizes(plan: Plan) -> list[list[tuple[str, int, str]]]:
    """The strategy, workers and purpose of the trials of each worker group."""
    return sorted(sorted((t.cell.strategy, place(t.cell).workers, t.purpose) for t in g.trials) for g in plan.groups)


def test_smaller_placements_share_the_group_of_a_larger_one() -> None:
    grid: dict[str, Any] = {"strategy": ["single", "dp", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    one = plan_of(grid, throughput={"blocks": 1})
    assert sizes(one) == [[("ddp", 1, ""), ("ddp", 2, ""), ("dp", 1, ""), ("dp", 1, ""), ("single", 1, "")]]
    assert [group.is_shared for group in one.groups] == [True]
    assert len(plan_of(grid, gpu_cluster(), throughput={"blocks": 1}).groups) == 3  # NCCL
    by_both = plan_of(grid, launcher=["ray", "torchrun"], throughput={"blocks": 1})
    assert Counter(group.launcher for group in by_both.groups) == {"ray": 1, "torchrun": 1}
    grid["devices"] = [1, 2, 4]
    more = plan_of(grid, oversubscribe=True, throughput={"blocks": 1})
    assert Counter(group.oversubscribe for group in more.groups) == {False: 1, True: 1}
    two_nodes = Inventory(tuple(Node(f"n{i}", f"10.0.0.{i}", "node", 2) for i in range(2)))
    apart = plan_of(grid, two_nodes, throughput={"blocks": 1})
    shared = {str(group.placement): group.is_shared for group in apart.groups}
    assert shared == {"2 workers with 1 device each": True, "4 workers with 1 device each on 2 nodes": False}


def test_one_worker_with_all_devices_holds_no_placement_of_several_workers() -> None:
    grid = {"strategy": ["single", "dp", "ddp"], "devices": [1, 2, 4], "per_device_batch_size": 8}
    exclude = [{"strategy": "ddp", "devices": 4}]
    plan = plan_of(grid, laptop(4), exclude=exclude, throughput={"blocks": 1})
    placements = {str(group.placement) for group in plan.groups}
    assert placements == {"1 worker with 4 devices", "2 workers with 1 device each"}
    assert all(group.placement.holds(place(trial.cell)) for group in plan.groups for trial in group.trials)


def test_ranks_rotate_by_block_and_a_twin_runs_beside_its_base() -> None:
    plan = plan_of({**SMALL, "devices": [1, 2, 4]}, laptop(4), throughput={"blocks": 5, "explain": False, "twin": True})
    ranks: dict[tuple[int, str], set[tuple[int, ...]]] = {}
    for group in plan.groups:
        for trial in group.trials:
            ranks.setdefault((trial.cell.devices, trial.purpose), set()).add(tuple(group.ranks_of(trial)))
        (base,) = [trial for trial in group.trials if is_base(trial)]
        (twin,) = [trial for trial in group.trials if trial.purpose == "twin"]
        assert group.ranks_of(base) != group.ranks_of(twin)
    each = {(rank,) for rank in range(4)}
    assert ranks == {
        (1, ""): each,
        (1, "twin"): each,
        (1, "threads"): each,
        (2, ""): {(0, 1), (2, 3)},
        (4, ""): {(0, 1, 2, 3)},
    }


def test_a_group_shrinks_to_the_workers_that_its_trials_need() -> None:
    (group,) = plan_of(SMALL, throughput={"blocks": 1, "explain": False, "twin": True}).groups
    alone = group.keeping(lambda trial: trial.purpose == "twin")
    assert (alone.placement.workers, alone.is_shared, list(alone.ranks_of(alone.trials[0]))) == (1, False, [0])
    assert group.keeping(lambda trial: trial.cell.devices == 1).placement.workers == 2  # base and twin, beside it
    assert group.keeping(lambda trial: trial.cell.strategy == "ddp" and not trial.purpose).placement.workers == 2
    assert not group.keeping(lambda trial: False).trials


VARIANTS = {"workload": "own:Own", "variants": {"before": "/code/before", "after": "/code/after"}}


def variants_plan(**sections: Any) -> Plan:
    return make_plan(experiment_of(SMALL, **VARIANTS, **sections), laptop(), variants=variants("before", "after"))


def test_of_several_variants_each_second_block_reverses_the_order_of_cells_and_of_versions() -> None:
    plan = variants_plan(throughput={"blocks": 6, "explain": False, "twin": False})
    timed = [[trial.cell for trial in group.trials if trial.kind == "throughput"] for group in plan.groups]
    assert len({*timed[0]}) > 2 and all(
        before == after[::-1] for before, after in zip(timed[::2], timed[1::2], strict=True)
    )


def test_the_variants_of_a_block_are_in_one_group_each_on_ranks_of_its_own_and_timed_at_once() -> None:
    plan = variants_plan(diagnostics=True, throughput={"blocks": 8, "twin": True})
    assert [group.block for group in plan.groups] == list(range(8))
    orders = set()
    for group in plan.groups:
        assert set(group.variants) == {"before", "after"} and (group.placement.workers, group.workers) == (2, 4)
        assert sum(map(len, group.turns())) == len(group.trials) and group.is_shared
        for turn in group.turns():
            names = [trial.cell.variant for trial in turn]
            assert sorted(names) == (["after", "before"] if turn[0].timed else names)
            ranks = [(rank, trial.cell.variant) for trial in turn for rank in group.ranks_of(trial)]
            assert all(group.variant_of(rank) == name for rank, name in ranks)
            orders.add((turn[0].timed, *names))
    assert {(True, "before", "after"), (True, "after", "before")} <= orders
    assert str(plan.groups[0]) == "2 workers with 1 device each for each of after, before"


def test_variants_on_gpus_and_what_is_left_of_one_are_groups_of_one_variant() -> None:
    experiment = experiment_of(SMALL, **VARIANTS, throughput={"blocks": 2})
    plan = make_plan(experiment, gpu_cluster(), variants=variants("before", "after"))
    assert all(len(group.variants) == 1 and not group.is_shared for group in plan.groups)
    pairs = [*zip(plan.groups[::2], plan.groups[1::2], strict=True)]  # that follow each other, in either order
    assert all(one.placement == other.placement and one.block == other.block for one, other in pairs)
    assert all({*one.variants, *other.variants} == {"before", "after"} for one, other in pairs)
    (group,) = variants_plan(throughput={"blocks": 1}).groups
    for one in by_variant(group):
        (name,) = one.variants
        assert {trial.cell.variant for trial in one.trials} == {name} and one.workers == 2
        assert {one.variant_of(rank) for trial in one.trials for rank in one.ranks_of(trial)} == {name}
    assert all(len(part.variants) == 1 for part in by_placement(group))
    (loading,) = variants_plan(throughput={"blocks": 1}, loader={"workers": 1}).groups
    assert all(len(turn) == 1 for turn in loading.turns())  # its workers would compute in another's windows


def test_each_variant_is_examined_and_checked_and_has_bases_and_twins_of_its_own() -> None:
    plan = variants_plan(diagnostics=True)
    for purpose in ("twin", "equivalence", "doctor"):
        cells = [trial.cell for trial in plan.trials if trial.purpose == purpose]
        before, after = ({(c.strategy, c.devices) for c in cells if c.variant == each} for each in ("before", "after"))
        assert before == after != set(), purpose
    by_id = {trial.cell.id: trial.cell for trial in plan.trials}
    checked = [trial for trial in plan.trials if trial.check_id]
    assert checked and all(by_id[str(trial.check_id)].variant == trial.cell.variant for trial in checked)


def test_a_part_of_the_plan_or_its_trainings_are_of_one_variant() -> None:
    plan = variants_plan(diagnostics=True)
    part = filter_plan(plan, {"variant": "after", "devices": 2})
    assert {trial.cell.variant for trial in part.trials if trial.purpose != "links"} == {"after"}
    assert {trial.cell.devices for trial in part.trials if trial.kind == "throughput"} == {1, 2}
    before = plan.keeping(lambda trial: trial.cell.variant == "before")
    assert {trial.cell.variant for trial in before.trials} == {"before"}
    both, one = (
        variants_plan(convergence={"epochs": 1, "seeds": [0], "only": only}) for only in ({}, {"variant": "after"})
    )
    assert {t.cell.variant for t in both.trials if t.kind == "convergence"} == {"before", "after"}
    assert {t.cell.variant for t in one.trials if t.kind == "convergence"} == {"after"}
