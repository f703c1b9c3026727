"""An environment with one tool, for the task builtin:guess_number: the model guesses a hidden
number and gets hints.

The class has the form of TRL's environments. Each completion of a step has its own object. `reset`
gets the columns of a row. Every public method except `reset` and `get_reward` is a tool.
`get_reward` is called when the conversation has ended.
"""


class GuessNumber:
    """Environment with the tool `guess`. The reward for the right number is 1, less 0.05 for each
    wrong guess."""

    # Methods whose names begin with _ are no tools, and the model never sees them.

    def reset(self, secret: int, **row) -> None:
        """Hide a number. Nothing is added to the prompt, so nothing is returned."""
        # One object serves many completions, so all that a conversation changes is set here.
        self._secret = int(secret)
        self._num_guesses = 0
        self._solved = False

    # The model reads the docstring and the type hints of a tool.
    def guess(self, number: int) -> str:
        """Guess the hidden number.

        Args:
            number: The guess.

        Returns:
            Whether the hidden number is higher or lower than the guess, or that the guess is right.
        """
        # The model may write another type than the hint says. It would read an error raised here.
        number = int(number)
        if self._solved:
            return "right"
        self._num_guesses += 1
        self._solved = number == self._secret
        if self._solved:
            return "right"
        return "higher" if self._secret > number else "lower"

    def get_reward(self) -> float:
        """Return the reward. The trainer calls this method once, at the end of the conversation."""
        if not self._solved:
            return 0.0
        return 1.0 - 0.05 * (self._num_guesses - 1)
