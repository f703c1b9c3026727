"""An environment whose tools read and write a database of their own: one for each completion.

    environment: "examples/sqlite_env.py:People"

Rows have the columns `name` and `age`, and a prompt that asks to add this person. A call is written
<insert>{"name": "Ada", "age": 36}</insert>, or in the form of the model's chat template.
"""

import sqlite3


class People:
    """Environment with the tools `insert` and `count`. The reward is 1 if the table holds the
    person of the row and nobody else."""

    def reset(self, name: str, age: int, **row) -> None:
        """Open an empty database in memory. Completions share nothing, so that none reads what
        another wrote."""
        self._person = (name, int(age))
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE TABLE people (name TEXT, age INTEGER)")

    def insert(self, name: str, age: int) -> str:
        """Add a person.

        Args:
            name: The name.
            age: The age in years.
        """
        self._database.execute("INSERT INTO people VALUES (?, ?)", (name, int(age)))
        return "ok"

    def count(self) -> str:
        """Count the people."""
        ((number,),) = self._database.execute("SELECT count(*) FROM people")
        return str(number)

    def get_reward(self) -> float:
        """Return 1 or 0. It takes no arguments: what it needs of a row is kept in `reset`."""
        rows = self._database.execute("SELECT * FROM people").fetchall()
        return float(rows == [self._person])
