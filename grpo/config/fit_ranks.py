"""Print the largest number of ranks on each machine that share the problems of a step evenly. ``launch.sh`` starts so many.

    python -m grpo.config.fit_ranks GPUS MACHINES [--config FILE] [section.key=value ...]

If some GPUs stay unused, a line on stderr says why. If no number works, or the configuration has a mistake, the number of GPUs is printed: the
ranks then stop with the error.
"""

import sys

from grpo.config.arguments import ConfigError, load_config
from grpo.config.config import shares_evenly


def main(argv: list[str]) -> int:
    gpus, machines, *arguments = argv
    print(fitting_ranks(int(gpus), int(machines), arguments))
    return 0


def fitting_ranks(gpus: int, num_machines: int, argv: list[str]) -> int:
    """The largest number of ranks on each machine, at most ``gpus``, with which the run can start; ``gpus`` if there is none."""
    try:
        config = load_config(argv, num_ranks=gpus * num_machines)
    except ConfigError:
        return gpus
    fits = [ranks for ranks in range(gpus, 0, -1) if shares_evenly(config, ranks * num_machines)]
    if not fits or fits[0] == gpus:
        return gpus
    prompts, unit = config.rollout.prompts_per_step, gpus * num_machines * config.algorithm.num_minibatches
    each = " of each machine" if num_machines > 1 else ""
    print(
        f"note: using {fits[0]} of {gpus} GPUs{each}, because rollout.prompts_per_step={prompts} is not a multiple of {unit}; "
        f"rollout.prompts_per_step={-(-prompts // unit) * unit} uses all",
        file=sys.stderr,
    )
    return fits[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
