"""The mailbox of worker groups, without Ray: the order in which a held trial starts."""

from __future__ import annotations

import asyncio

from harness.launch.protocol import GroupStarted, TrialStarted
from harness.launch.ray.mailbox import Mailbox
from harness.plan.trial import TrialResult

RESULT, NEXT = TrialResult("a", "ok"), TrialStarted("b")


async def _held(mailbox: Mailbox, *, mirrored: bool = True) -> asyncio.Task[bool]:
    """A trial that asks to start once a result is there."""
    await mailbox.open(0, None, mirrored)
    assert await mailbox.put(0, GroupStarted((), ())) and await mailbox.put(0, RESULT)
    task = asyncio.create_task(mailbox.put(0, NEXT))
    await _others_run()
    return task


async def _others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_held_trial_starts_once_the_driver_has_handled_the_last_result() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        task = await _held(mailbox)
        assert not task.done()
        assert await mailbox.take(0.0) == [GroupStarted((), ()), RESULT]
        await _others_run()
        assert not task.done()  # the driver has the result, and may still record it
        assert await mailbox.take(1.0) == [NEXT] and await task

    asyncio.run(work())


def test_a_held_trial_of_a_group_that_was_given_up_is_refused_and_without_a_mirror_nothing_is_held() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        task = await _held(mailbox)
        await mailbox.open(1, None, True)
        assert await task is False and await mailbox.take(0.0) == []
        assert await (await _held(Mailbox(), mirrored=False))

    asyncio.run(work())
