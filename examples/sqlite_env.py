"""Two environments with a database.

    environment: "examples/sqlite_env.py:People"      # tools that write: a database per completion
    environment: "examples/sqlite_env.py:Questions"   # SQL of the model, on a file: read only

For `People`, rows have the columns `name` and `age`, and a prompt that asks to add this person. A
call is written <insert>{"name": "Ada", "age": 36}</insert>, or in the form of the model's chat
template. For `Questions`, rows have the column `database`, the path of a file, and an `answer` for
a reward such as accuracy.
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


class Questions:
    """Environment with the tool `query`. It has no reward: name one in reward.functions."""

    def reset(self, database: str, **row) -> None:
        """Open the file for reading alone."""
        self._database = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        # ATTACH would open other files, and this one again, for writing.
        self._database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        # One value of gigabytes would fill the memory.
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
        # A query without end would hang until its worker is killed, and with it the environments of
        # other completions. SQLite asks every 100,000 instructions whether to interrupt it. Counted
        # and not timed, so that a query ends alike on a slow machine.
        self._database.set_progress_handler(self._is_too_long, 100_000)

    def query(self, sql: str) -> str:
        """Run a query and return its first 20 rows.

        Args:
            sql: A SELECT in the language of SQLite.
        """
        self._num_asked = 0
        rows = self._database.execute(sql).fetchmany(20)
        return "\n".join(map(str, rows)) or "no rows"

    def _is_too_long(self) -> bool:
        self._num_asked += 1
        return self._num_asked > 100
