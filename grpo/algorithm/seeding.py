"""Random streams that are functions of the run's seed, a purpose, and integer coordinates.

Nothing in a training step reads a global random state. A sampled token therefore does not depend on
the number of ranks, on the other rows of its batch, or on whether the run was resumed.
"""

import hashlib

import torch


def derive_seed(
    seed: int,
    purpose: str,
    *coordinates: int,
) -> int:
    """Return the seed of one random stream, the same on every machine and Python version.

    Streams that differ in purpose or coordinates are independent.

    Args:
        seed: the seed of the run.
        purpose: a name for the use of the random numbers, such as ``"rollout"``.
        coordinates: integers that identify the use, such as step, dataset row and sample.

    Returns:
        An integer in ``[0, 2**63)``.

    Raises:
        ValueError: if the seed or a coordinate is not an integer.
    """
    for value in (seed, *coordinates):
        # True is an int, too, but as a coordinate it is a mistake. A float would name another
        # stream than the integer that it equals.
        if type(value) is not int:
            raise ValueError(f"derive_seed takes integers, got {value!r} for purpose {purpose!r}")

    # repr() quotes the purpose, so that no purpose can look like a purpose followed by coordinates.
    parts = [str(seed), repr(purpose), *map(str, coordinates)]
    address = ",".join(parts)

    # A cryptographic hash gives neighbouring steps and samples unrelated streams. Python's hash()
    # of text differs from process to process.
    hashed = hashlib.blake2b(address.encode(), digest_size=8)
    number = int.from_bytes(hashed.digest(), "big")
    # One of the 64 bits is dropped, because torch's seeds are signed.
    return number >> 1


def generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """Return a generator seeded by :func:`derive_seed`."""
    # The generator is on the CPU, since other devices draw other numbers from the same seed.
    rng = torch.Generator(device="cpu")
    rng.manual_seed(derive_seed(seed, purpose, *coordinates))
    return rng
