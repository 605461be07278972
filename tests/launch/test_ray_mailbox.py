"""The mailbox of worker groups, without Ray: the order in which a held trial starts."""

from __future__ import annotations

import asyncio

from harness.launch.protocol import GroupStarted, TrialStarted
from harness.launch.ray.mailbox import Mailbox
from harness.plan.trial import TrialResult

RESULT, NEXT = TrialResult("a", "ok"), TrialStarted("b")


async def _started(mailbox: Mailbox) -> asyncio.Task[bool]:
    task = asyncio.create_task(mailbox.put(0, NEXT))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def test_a_held_trial_starts_once_the_driver_has_handled_the_last_result() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        await mailbox.open(0, None, True)
        assert await mailbox.put(0, GroupStarted((), ()))
        assert await mailbox.put(0, RESULT)
        task = await _started(mailbox)
        assert not task.done()
        assert await mailbox.take(0.0) == [GroupStarted((), ()), RESULT]
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()  # the driver has the result, and may still record it
        assert await mailbox.take(1.0) == [NEXT] and await task

    asyncio.run(work())


def test_a_held_trial_of_a_group_that_was_given_up_is_refused() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        await mailbox.open(0, None, True)
        await mailbox.put(0, RESULT)
        task = await _started(mailbox)
        await mailbox.open(1, None, True)
        assert await task is False and await mailbox.take(0.0) == []

    asyncio.run(work())


def test_without_a_mirror_nothing_is_held() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        await mailbox.open(0, None)
        await mailbox.put(0, RESULT)
        assert await (await _started(mailbox))

    asyncio.run(work())
