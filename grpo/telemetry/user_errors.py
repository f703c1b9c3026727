"""What a user can mend is said once, however many ranks there are."""

from __future__ import annotations

import time

from grpo.distributed import World, launch_environment
from grpo.telemetry.console import print_mistake


def refuse(mistake: Exception, world: World | None) -> int:
    """Print a mistake and return the exit code 2; with several ranks this process ends here.

    Args:
        world: None before the ranks have met: then the first of each machine speaks, or the one that is wrong alone. Afterwards they
            have voted, so that rank 0 knows of it.
    """
    rank, _, local_rank, _ = launch_environment()
    if (local_rank if world is None else rank) == 0:
        print_mistake(mistake)
    else:
        time.sleep(2)  # torchrun ends all ranks when the first one goes: let that one speak
        if world is None:
            print_mistake(mistake)
    if world is not None and world.size > 1:
        world.exit_now(2)
    return 2
