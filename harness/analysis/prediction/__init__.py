"""The step time of cells on more devices than were measured, from measured parts: with an interval, and graded."""
