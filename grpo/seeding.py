"""All randomness of a run as a pure function of ``seed`` and an address.

Nothing in a training step reads a global random state. A draw is addressed by what it is for and where it belongs
(step, problem, sample), so it does not depend on the world size, on batch composition, or on how often a run was resumed.
"""

import hashlib

import torch


def derive_seed(seed: int, purpose: str, *coordinates: int) -> int:
    """Map ``(seed, purpose, *coordinates)`` to a seed in ``[0, 2**63)``.

    Stable over processes, platforms and Python versions (BLAKE2b over a canonical text, not ``hash``).
    Different purposes or coordinates give independent streams.

    Raises:
        ValueError: if the seed or a coordinate is not an integer.
    """
    for value in (seed, *coordinates):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"derive_seed takes integers, got {value!r} for purpose {purpose!r}")
    # repr() of the purpose keeps the fields apart whatever characters a purpose contains.
    address = ",".join([str(seed), repr(purpose), *map(str, coordinates)])
    return int.from_bytes(hashlib.blake2b(address.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """A CPU ``torch.Generator`` seeded by :func:`derive_seed` (CPU, so that the numbers are the same on every device)."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *coordinates))
