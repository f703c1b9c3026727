"""An environment class in the form that TRL's ``GRPOTrainer(environment_factory=Pantry)`` takes."""


class Pantry:
    """Food to take; the reward is the number of pieces taken, less a tenth for each look."""

    def __init__(self):
        self.stock = {}
        self.taken = self.looks = 0

    def reset(self, **row) -> str | None:
        self.stock = {"eggs": row["eggs"], "figs": 2}
        self.taken = self.looks = 0
        return f"\nHint: {row['hint']}" if row["hint"] else None

    def take(self, item: str, amount: int) -> str:
        """Take food.

        Args:
            item: What to take.
            amount: How many pieces.

        Returns:
            What is left.
        """
        if item not in self.stock:
            raise ValueError(f"there is no {item}")
        self.stock[item] -= amount
        self.taken += amount
        return f"{self.stock[item]} {item} left"

    def look(self) -> str:
        """See what is there."""
        self.looks += 1
        return ", ".join(f"{number} {item}" for item, number in self.stock.items())

    def get_reward(self) -> float:
        return self.taken - 0.1 * self.looks
