"""Every random number of a run is a pure function of the run's seed, what the number is for, and
where it is used.

Nothing in a training step reads a global random state. A sampled token therefore does not depend on
the number of ranks, on the other rows of its batch, or on whether the run was resumed.
"""

import hashlib

import torch


def derive_seed(seed: int, purpose: str, *coordinates: int) -> int:
    """The seed of one random stream, in ``[0, 2**63)``, the same on every machine and in every
    Python version.

    ``purpose`` says what the random numbers are for, such as ``"rollout"``, and ``coordinates``
    where they are used, such as step, dataset row and sample. Streams that differ in either are
    independent. ValueError for coordinates or a seed that are not integers.
    """
    for value in (seed, *coordinates):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"derive_seed takes integers, got {value!r} for purpose {purpose!r}")
    # repr() quotes the purpose, so that no purpose can look like a purpose followed by coordinates.
    parts = [str(seed), repr(purpose)]
    for coordinate in coordinates:
        parts.append(str(coordinate))
    text = ",".join(parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # 63 of its 64 bits: torch's seeds are signed.
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """A generator seeded by :func:`derive_seed`; on the CPU: other devices draw other numbers from
    the same seed."""
    derived = derive_seed(seed, purpose, *coordinates)
    return torch.Generator().manual_seed(derived)
