"""Task groups that raise what went wrong as itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def plain_task_group() -> AsyncIterator[TaskGroup]:
    """An anyio task group for tasks whose first error ends all: it is raised as itself, not in an exception group.

    If several tasks failed at once, the group of their errors is the cause of the one that is raised.
    """
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as errors:
        first, *others = _leaves(errors)
        raise first from (errors if others else first.__cause__)


def _leaves(errors: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    nested = (_leaves(e) if isinstance(e, BaseExceptionGroup) else [e] for e in errors.exceptions)
    return [error for leaves in nested for error in leaves]
